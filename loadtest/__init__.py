"""Load from outside: a black box over HTTP, asked as its users ask.

Nothing imports this package, and it imports nothing of ours but the pure decision modules that a
simulation replays.
"""
