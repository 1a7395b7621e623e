"""Model families as plain modules, and where their weights come from.

`source` resolves what the topology names to a path; `gguf` and `safetensors` read the containers;
`config` says in one form what the model is; `weights*` give stored tensors under canonical names,
rows in canonical order; `quantised` turns stored bytes into numbers; `llama` builds the one
`decoder` skeleton from them. A model knows tokens, positions and the operations of `kernels`;
it knows nothing of ranks, requests or how blocks are found. No unknown architecture is guessed at.
"""
