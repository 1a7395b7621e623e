"""What an edge adds to a stream: measured over doubles that answer at once, beside vLLM's router.

`doubles` are the two places behind a gateway (a region that speaks our frames, an engine that
speaks OpenAI's dialect), `clients` reads streams from raw sockets, `cast` starts the processes,
`rounds` measures, `python -m loadtest.edge` is the benchmark.
"""
