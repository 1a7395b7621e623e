"""The operations a decoder is made of, one file each, from PyTorch reference to fast path.

A model is made of the products, vectors and layers of an `Ops` (`ops.py`), which is chosen once per
device by `ops.select`; nothing is probed on import. `rms_norm`, `rotary`, `gated`, `kv_write`,
`paged_attention`, `linear` and `layers` hold the PyTorch references, which run on any device and
are what the other implementations are tested against; `cpu/` holds native code for the CPU, where
a token's numbers depend on its own sequence alone, bit for bit.

KV is always a strided view [block, k/v, kv_head, token, dim] of one layer; who owns the pool,
what a sequence is and how blocks are found is not known here. Imports nothing of this project.
"""
