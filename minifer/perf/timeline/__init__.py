"""What a decode step looks like in time: as launches and as a megakernel, modelled or measured.

`model.py` is the event model and the format of spans, `launches.py` the step as separate kernels,
`decode.py` the seven ways that are compared, `gantt.py` the picture, `tables.py` the committed
tables. `loop_resident.py` and `loop_tables.py` are the same for a loop model, whose core may stay
in the L2 cache.
"""
