"""A discrete-event simulator of serving, over the engine's own scheduler and KV manager.

Nothing is decided here that an engine or a router decides: a simulated node runs `Scheduler` and
`KVCacheManager`, a simulated cluster the policies of `minifer.routing`. What is made up is time
(`StepTimes`) and traffic (`Arrival`s with lengths, and with names where a prompt has blocks).

======================================  ===========================================================
`cluster.py`, `result.py`               what is simulated, and what comes out
`simulator.py`, `replica.py`            the clock and what happens on it; one node
`comings.py`, `flight.py`, `keys.py`    requests on their way, and the names of their blocks
`sim_request.py`, `backlog.py`          what stands for one at a node, and what is left to prefill
`store.py`, `rejection.py`              KV below the device; turning requests away
`workloads/`                            traffic: from a seed, as it was recorded, or like it
`steps/`                                seconds of a step: fixed, fitted, from a data sheet
`measures/`                             what a run was worth, and the rate that is too high
`calibration/`                          prices from an engine's log, and how right they are
======================================  ===========================================================

Cold prompts on a node of their own, against two nodes for everybody: prompts of 84,000 tokens, of
which one in ten has not been seen before; whole, one at a time, one request a second.

>>> from minifer.config import EngineConfig
>>> from minifer.routing.policy import Role
>>> from minifer.simulation.cluster import Cluster, NodeSpec, StoreLevel
>>> from minifer.simulation.workloads.generator import cold_warm
>>> from minifer.simulation.steps.named import find_steps
>>> from minifer.simulation.simulator import simulate
>>> one_by_one = EngineConfig(
...     block_size=4096, num_kv_blocks=60, enable_prefix_caching=False,
...     enable_chunked_prefill=False, max_num_batched_tokens=1, max_num_seqs=1)
>>> steps, store = find_steps("cold-warm"), (StoreLevel("cluster", 0, bandwidth=50e9),)
>>> def late(router, *roles):
...     nodes = [NodeSpec(role.value + str(i), steps, one_by_one, role, store)
...              for i, role in enumerate(roles)]
...     cluster = Cluster(tuple(nodes), router=router, kv_bytes=70_272)
...     result = simulate(cold_warm(1.0, 600, seed=1), cluster)
...     warm = [record.ttft > 1 for record in result.requests if record.turn]
...     cold = [record.ttft > 10 for record in result.requests if not record.turn]
...     return f"late: {sum(warm) / len(warm):.0%} of warm, {sum(cold) / len(cold):.0%} of cold"
>>> late("least_work", Role.PREFILL, Role.PREFILL)
'late: 11% of warm, 5% of cold'
>>> late("cold_warm", Role.PRE_PREFILL, Role.PREFILL)
'late: 5% of warm, 22% of cold'

Warm prompts gain, cold ones pay.
"""
