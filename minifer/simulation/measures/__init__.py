"""What a simulated run was worth.

=================  ==============================================================================
`metrics.py`       latencies, goodput, hit rate, starvation; and `intervals.py`, how sure they are
`saturation.py`    when a run is no result
`search.py`        the highest rate that holds; its questions and answers are in `capacity.py`
`pool.py`          processes for runs that have nothing to do with each other
`plot.py`          a run as a picture
=================  ==============================================================================
"""
