"""One region: a router process and node processes.

The router takes a `GenerateRequest` from an edge, makes token ids of it, decides which nodes read
and answer it (`placement`, pure, over the views of `cluster` and `kv_index`), and passes the event
frames that the decode node's front writes back to the edge, unopened.

A node is one front process (`node/`: the session with the router, KV hand-off, text) and one
process per rank, which `core.engine.rank` runs. Neither router nor front ever imports torch.
"""
