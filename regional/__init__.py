"""One region: a router process and node processes.

A request crosses the router so. `http` takes a `GenerateRequest` from an edge; `reading` makes
token ids and block hashes of it; in `dispatch` it waits until `placement` (pure, over the views of
`cluster` and `kv_index`) finds nodes for it; `life` plays it there as an `attempt`, again elsewhere
if that fails before the first delta, and passes the event frames that the decode node's front
writes back to the edge, unopened. `router` holds all of that together, `rpc` carries the sessions
with the nodes, `status` tells the edges how the region fares, `app` is the process.

A node is one front process (`node/`: the session with the router, KV hand-off, text) and one
process per rank, which `core.engine.rank` runs. Neither router nor front ever imports torch.
"""
