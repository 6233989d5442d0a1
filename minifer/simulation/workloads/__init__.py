"""Traffic: who comes when, with how many tokens, and which blocks prompts have in common.

=================  ==============================================================================
`arrivals.py`      what a workload is made of
`lengths.py`       prompt and answer lengths from a distribution
`generator.py`     traffic from a seed: single requests, chats, tenants
`traces.py`        traffic as it was recorded, in four public formats
`published.py`     statistics of public traces, and `trace_like.py`, traffic that has them
`statistics.py`    what a workload is like
`named.py`         all of it by name
=================  ==============================================================================
"""
