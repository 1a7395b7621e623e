"""The region's queue of requests that nobody waits for.

`rules` decide (pure), `store` keeps (SQLite), `worker` runs what there is room for, `http` is how
edges hand in and ask.
"""
