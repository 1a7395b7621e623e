"""The judge of routing: public traces replayed in virtual time through the product's own choice.

`traces` turns a trace into requests with chains, `geography` gives cities and round trips,
`site` is a region with a cache and a reader, `world` plays edges and sites against each other,
`policies` are what the product is compared with, `bench` makes the tables.

It imports the pure decision modules (edge.routing, core.prefix, regional.prefixes) and nothing
else of the product; it opens no socket and reads no clock. Same seed, same figures.
"""
