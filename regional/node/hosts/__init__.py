"""Nodes whose ranks are on several hosts.

The first host has the node's front, as every node does. Each other one runs an *outpost*: a process
that starts the ranks there, receives KV into their memory, and does what the front says.
"""
