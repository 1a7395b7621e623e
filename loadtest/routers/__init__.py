"""Other people's routers on the same requests: real processes in front of scripted backends.

A backend is the simulator's own region (its LRU cache, its reader, its rates) behind an
OpenAI-speaking HTTP server; time runs `SPEED` times as fast. `text` turns a trace's block hashes
into prompts and back, `doubles` are the backends, `peers` starts a router in front of them,
`replay` sends the requests, `bench` plays the same ones in the simulator and compares.

The prompts go as raw completions: of chat messages, vllm-router's cache-aware policy looks at a
session id alone (vllm-project/router, issue 219).

A router in one process sees every request at the moment it comes and goes; the edges that it is
compared with are sixteen, and hear of each other by a status that is one second old.
"""
