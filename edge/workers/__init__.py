"""Workers: applications' scripts that an edge runs beside itself.

A *host* (`python -m edge.workers`, one for each edge, started by it) keeps versions, starts a
process for each Worker and watches over it, and answers the admin interface. The edge's own
processes read the host's table and pass requests on (`front`, `proxy`); what a Worker asks of a
model comes back to the edge as any caller's request, in the name of the tenant that deployed it.
`runtime` is the seam between the host and a language.
"""
