"""The faces of an edge: HTTP in, events out. The only home of wire-shaped bodies.

`body` reads with a limit; `openai` parses into a `GenerateRequest`; `openai_render` writes events
in the same dialect; `exchange` runs one request from body to last byte and notices who leaves;
`pages` answers everything that is not a generation.

It decides nothing: no route, no retry, no limit but that of the body.
"""
