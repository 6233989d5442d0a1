"""The simulator against real engines: where its step times come from, and how far off it is.

====================  ===========================================================================
`record.py`           a workload served by a real engine, with its log
`step_log.py`         what is read from a log
`fit.py`              prices of steps from it
`validate.py`         its requests simulated, and the errors
`routing_bench.py`    routing policies on real replicas, with the simulator's word beside it
`routing_report.py`   and how that is shown
====================  ===========================================================================
"""
