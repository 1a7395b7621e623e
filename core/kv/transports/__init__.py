"""How the blocks of a hand-off travel: `tcp` between nodes, `memory` within one process.

Both sides are seams of `base`: a `Landing` writes pieces into reserved blocks under an
`Incoming` machine, a `Carrier` opens a `Shipment` for a ticket. The transports move bytes; whether
a byte may be written is decided by `core.kv.handoff` alone. Control (tickets, start, abort)
travels over gRPC and never through here.
"""
