"""Before several engines, however they are reached: one address, and a single server's routes.

::

    client ─▶ RequireKey ─▶ route ─▶ seat, body ─▶ PromptReader ─▶ Errand ─▶ a replica
           ◀─ its answer, byte for byte, and `x-minifer-replica` ◀──────────────┘

=================  ===========================================================================
`routes.py`        the routes, and what a way to the replicas must offer them
`prompt.py`        a request's token ids, and what its blocks are called
`errand.py`        a request on its way: which replica is asked, and what if that one dies
`forward.py`       the answer on its way back: the first token is the point of no return
`sse.py`           streams, cut after whole events
`metrics.py`       what is counted, and all replicas' numbers on one page
=================  ===========================================================================

There are two ways: `minifer/serving/replicas`, processes on this machine that are spoken to over
HTTP, and `minifer/serving/ray_serve`, actors on a Ray cluster's nodes.
"""
