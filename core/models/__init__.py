"""Model families as plain modules, and where their weights come from.

`source` resolves what the topology names to a path; `gguf` and `safetensors` read the containers;
`config` says in one form what the model is, read by `config_json` and `config_gguf`; `weights*`
give stored tensors under canonical names, rows in canonical order; `quantised` turns stored bytes
into numbers; `builder` makes the one `decoder` skeleton of them, for `latent` and `experts` as for
plain heads and MLPs. A model knows tokens, positions and the operations of `kernels`; it knows
nothing of ranks, requests or how blocks are found. `parallel`, `shard` and `stage` stand beside it.
No unknown architecture is guessed at.
"""
