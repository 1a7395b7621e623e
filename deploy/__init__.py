"""The composition root: what a person runs. Nothing imports this package.

A world comes up as `doctor` (is this machine fit?) → `setup_env` (the `.venv`) → `ports` (concrete
addresses) → `launcher` (one process per edge, router and node, watched until the end). `cli` is
the `skerry` command, `demo` the first thing a newcomer sees; both speak to the world over HTTP
through `client`, like anybody else.

`doctor` and `setup_env` run before anything is installed: they import the standard library only,
and this file imports nothing.
"""
