"""Our engine beside others: one run, one machine, one model, contestants taking turns.

`__main__` puts a run together. `peers` finds the other engines in a venv of their own, `workers`
starts each as a process that answers JSON lines and stops it while another has its turn, `rounds`
asks them for the same work (`workload`), and `timing` makes rates out of the times of tokens, alike
for all. `figures` compares with targets and floors, `report` and `chart` write what came out.

Nothing here imports an engine: ours is `python -m core.engine.drive`, a process like the others.
"""
