"""`make demo`: what Skerry is for, shown on one machine with a real model.

`rounds` says what is asked and judges what came back (pure), `table` draws it, `__main__` starts
the world, asks over HTTP like any client, and stops everything again.
"""
