"""KV blocks that outlive the pool: in host memory and on disk, under what makes them worth it.

A `catalogue` decides (pure), a `slots.Slots` holds the bytes (`host` in memory, `slab` in one
encrypted file), and a `shelf` is both for an event loop. No torch here.
"""
