"""The bug clinic: faults of production engines, each one a switch on the real engine.

| file | what is in it |
|---|---|
| `registry.py` | what a fault is, and how a patch is put on and taken off |
| `numerics.py` … `tiers.py` | the faults, by the part of the engine that they break |
| `detectors.py`, `probes.py` | who notices: what watches an engine while it serves |
| `watch.py` | an engine with detectors on it |
| `workload.py` | a day at the office, on which every detector is tried |
| `matrix.py` | faults × detectors |

`minifer faults` is the door. To watch an engine of your own::

    watch = Watch(engine, DETECTORS)
    watch.add_request(...)
    while engine.has_unfinished_requests:
        watch.step()
    watch.idle()                                  # canaries and replays, when nobody is served
    for detector in watch.detectors:
        print(detector.name, detector.alarms)
"""
