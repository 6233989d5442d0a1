"""A load generator for any OpenAI-compatible server: who sends what when, and what came back.

`workload.py` and `traces.py` say what is sent, `arrivals.py` when, `client.py` sends one request
and notes when each piece of the answer arrives, `generator.py` sends them all, `metrics.py` says
what the times mean, `plot.py` draws them; `benchmark.py` puts it together.
"""
