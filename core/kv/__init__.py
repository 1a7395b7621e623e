"""The KV cache: who holds which block, and how blocks travel between nodes.

`block_manager` and `prefix_cache` decide (no torch, no I/O); `pool` gives tensors over the shared
memory of `memory`; `handoff` is the state machine of one transfer and `transports` move its bytes.
"""
