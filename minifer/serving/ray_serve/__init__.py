"""The engine under Ray Serve: replicas on several machines, as many as the load asks for.

When to use it
    `minifer serve --replicas N` runs engines on one machine, starts in the time of one, needs no
    other software, and knows from KV events what each replica holds. Take Ray when one machine is
    not enough, or when the number of replicas should follow the load. What Ray adds: placement of
    replicas on nodes by the CPUs and GPUs they need, autoscaling, replicas that are started again
    elsewhere when a node dies, and a dashboard. What it costs: each piece of a stream is an object
    that travels through Ray (1.3 ms of a CPU more a token, measured with minifer-tiny on two
    cores), 0.8 GB of memory for Ray's own processes on the first node (measured there, too), a
    start that takes some seconds longer, and an index of prefixes that is guessed from what was
    sent where.

=================  ===========================================================================
`deployment.py`    a replica, a cluster, and all of it in one call
`front.py`         what the routes ask of the replicas; they are in `serving/front`
`call.py`          a request on its way through Ray, and the application at the other end
`errand.py`        which replica takes it, and what if that one is full or dies
`router.py`        our routing policies as Ray's request router
`metrics.py`       what the front door counts
`settings.py`      what whoever runs it decides
=================  ===========================================================================

The front door is the process that runs `minifer serve --ray`. It is one, and with it ends the
service; the replicas' nodes may come and go. minifer and the model must be installed on every node.
Only `settings.py` can be imported where Ray is not.
"""
