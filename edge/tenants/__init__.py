"""Who asks, how much they may, and what they used.

`door` turns a key into a tenant (`keyring` keeps the key book fresh). `meter` decides, purely,
whether a request fits its tenant's limits; `ledger` reserves and settles on the `board`, the counts
that all processes of a state folder map; `share` leases parts of a limit from Redis where several
folders share it, `streams` places of those in flight; `budget` holds these together for the life of
a request and writes its usage record.

It refuses to know what a prompt says: it sees sizes, never text.
"""
