"""The engine of one node: who computes what in the next step.

`rank` is the process: it takes commands from the node front (`messages`), keeps `sequence`s,
asks the pure `scheduler` for a `plan`, gives it to a `runner` and reports what came out.
No torch outside `batch`, `runner_torch` and `sampler`; `scripted` is a runner without a model that
plays token ids back out of real KV blocks. No asyncio in a rank process.
"""
