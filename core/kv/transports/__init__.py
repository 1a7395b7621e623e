"""How the blocks of a hand-off travel: `choose` says which way, a node builds them in `ways`.

===============  ===========================================  ====================================
way              who moves the bytes                          verified by
===============  ===========================================  ====================================
`shared`         receiver, pool to pool, on one host          the source's word, after each copy
`tcp`            sender, over one socket or several, or TLS   xxh3 of each piece
`mooncake`       receiver, by the engine, into a buffer       the source's word, and xxh3
`memory`         within one process: the twin for tests       –
===============  ===========================================  ====================================

Both sides are seams of `base`: a `Landing` has pieces written into reserved blocks under an
`Incoming` machine, a `Carrier` opens a `Shipment` for a ticket. The transports move bytes; whether
a byte may be written is decided by `core.kv.handoff` alone. Where the receiver reads, a source that
has taken its blocks back is noticed by its word (`words`), whoever was stopped in between. Control
(tickets, start, abort) travels over gRPC and never through here.
"""
