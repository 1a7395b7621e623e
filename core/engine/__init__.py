"""The engine of one node: who computes what in the next step.

`rank` is the process: it takes commands from the node front (`messages`), keeps `sequence`s,
asks the pure `scheduler` for a `plan`, gives it to a `runner` and reports what came out. With a
parallel plan one rank of a pool does that (`runner_split`) and says each plan to the others
(`follow`); all compute their part of it (`split_rank`, `shard_stepper`).
No torch outside the runners, `batch`, the steppers and samplers, and what joins ranks; `scripted`
is a runner without a model that plays token ids back out of real KV blocks. No asyncio in a rank
process.
"""
