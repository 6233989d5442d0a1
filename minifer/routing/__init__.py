"""Which replica answers a request: policies and their index, shared by router and simulator.

===================  ==============================================================
`policy.py`          what a policy knows and decides
`policies.py`        all of them by name; each has a page of its own
`index.py`           which blocks each replica holds, as far as the router knows
`kv_events.py`       what a replica says about them, and `publisher.py`, how it does
`tracker.py`         how loaded each replica is
`router.py`          the three in one: what a front end asks for every request
===================  ==============================================================
"""
