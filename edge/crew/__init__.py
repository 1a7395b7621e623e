"""Several worker processes that are one edge to everybody else.

`supervisor` starts them on one address and starts those again that end; `siblings` lets whichever
answers a scrape speak for all; `merge` adds their pages up. Each worker listens to its regions,
routes and holds requests by itself: nothing of a request crosses between them.
"""
