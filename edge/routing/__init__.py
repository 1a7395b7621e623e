"""Which region gets a request: the ring of regions, the live view of them, and the pure choice.

`regions` listens to status streams and hands out immutable views; `placement.choose` decides from
a view, a walk of the `ring` and what the request is like. Nothing here sends a request.
"""
