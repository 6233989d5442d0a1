"""Several engines behind one address: `minifer serve --replicas N`.

::

    client ─▶ router process ─┬─▶ replica-0   a `minifer serve` of its own, on this machine
                              ├─▶ replica-1
                              └─▶ …
              ◀─ answers, byte for byte; KV events; health ─┘

==================  ============================================================================
`process.py`        one replica's process: started, asked for its address, ended
`replica.py`        what is known of a replica
`supervisor.py`     keeps them running: health checks, replacement, restarts that lose nothing
`fleet.py`          a request on its way: which replica, and what if that one is full or dies
`front.py`          what the routes ask of the fleet; they are in `serving/front`
`kv_feed.py`        what each replica holds, as it says itself
`watching.py`       `/events`, before several replicas
`metrics.py`        what the router shows of its replicas
`run.py`            all of it in one process
`settings.py`       what whoever runs it decides
==================  ============================================================================

Who is chosen is decided in `minifer/routing`. On several machines, or as many replicas as the load
asks for: `minifer/serving/ray_serve`.
"""
