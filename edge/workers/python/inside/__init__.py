"""What runs inside the process of a Python Worker: standard library and h11, nothing else of ours.

The modules that a Worker imports by their Cloudflare names (`workers`, `js`, `pyodide.ffi`) are
`api`, `js` and `ffi` here; `main` makes them known under those names before it imports the Worker.
"""
