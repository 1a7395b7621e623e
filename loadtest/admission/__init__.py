"""Does the guard count right? Edges with several processes and Redis between them, under kills.

`cast` starts them on loopback, `traffic` asks and leaves and kills, `judge` (pure) compares what
callers were told with what the ledgers say, `timing` measures what admission adds to a request.
"""
