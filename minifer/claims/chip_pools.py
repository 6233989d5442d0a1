"""Pools of chips that serve Llama 8B: one kind for both phases, or one kind for each.

Steps take what the data sheets allow at best; how chips talk to each other costs nothing, which
flatters the pool with more chips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minifer.claims.shapes import LLAMA_8B
from minifer.config import EngineConfig
from minifer.perf.costs import kv_bytes_per_token, num_parameters
from minifer.perf.devices import DEVICES, Device
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, Link, NodeSpec
from minifer.simulation.steps.roofline import RooflineSteps

A100, H100, H200 = DEVICES["A100-80GB-SXM"], DEVICES["H100-SXM"], DEVICES["H200-SXM"]
LPU = DEVICES["Groq-LPU-v1"]
COMPUTE, MEMORY = 0.5, 0.7  # of each data sheet's rates, of every chip
NUM_LPUS = 128  # hold 16 GB of weights and 100,000 tokens of KV
TOGETHER = 8  # H100s that prefill one prompt together
LINK = 50e9  # bytes/s
OVERHEAD = 0.5e-3  # s a step, for the setting that breaks it: chips that talk to each other
KV_BYTES = kv_bytes_per_token(LLAMA_8B)
_BLOCK = 64


@dataclass(frozen=True)
class Pool:
    """watts: of all chips at full power. count: requests of a run, more where more are served."""

    cluster: Cluster
    watts: float
    count: int = 600


def _node(
    name: str, device: Device, role: Role, *, chips: int = 1, budget: int = 512, fixed: float = 0.0
) -> NodeSpec:
    free = chips * device.memory_bytes - 2 * num_parameters(LLAMA_8B)
    config = EngineConfig(
        block_size=_BLOCK,
        num_kv_blocks=int(0.95 * free / KV_BYTES) // _BLOCK,
        max_num_seqs=512,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=role is not Role.PREFILL,
        enable_prefix_caching=False,
    )
    steps = RooflineSteps(LLAMA_8B, device, COMPUTE, MEMORY, chips, fixed)
    return NodeSpec(name, steps, config, role)


def _pool(*nodes: NodeSpec, watts: float, count: int = 600) -> Pool:
    cluster = Cluster(nodes, router="least_work", link=Link(LINK), kv_bytes=KV_BYTES)
    return Pool(cluster, watts, count)


def _with_lpus(fixed: float = 0.0) -> Pool:
    prefill = [
        _node(f"prefill{i}", H100, Role.PREFILL, chips=TOGETHER, budget=2048) for i in range(10)
    ]
    lpus = _node("decode", LPU, Role.DECODE, chips=NUM_LPUS, fixed=fixed)
    watts = len(prefill) * TOGETHER * H100.power_watts + NUM_LPUS * LPU.power_watts
    return _pool(*prefill, lpus, watts=watts, count=2_000)


WITH_LPUS, WITH_OVERHEAD = "80 H100 prefill, 128 LPUs decode", "the same, 0.5 ms more a step"
GPUS: Mapping[str, Pool] = {
    "H100 does both": _pool(_node("gpu", H100, Role.MIXED), watts=H100.power_watts),
    "8 H100 as one do both": _pool(
        _node("gpus", H100, Role.MIXED, chips=8), watts=8 * H100.power_watts
    ),
    "H100 prefill, 2 A100 decode": _pool(
        _node("prefill", H100, Role.PREFILL),
        *(_node(f"decode{i}", A100, Role.DECODE) for i in range(2)),
        watts=H100.power_watts + 2 * A100.power_watts,
    ),
    "H100 prefill, H200 decode": _pool(
        _node("prefill", H100, Role.PREFILL),
        _node("decode", H200, Role.DECODE),
        watts=H100.power_watts + H200.power_watts,
    ),
}
POOLS: Mapping[str, Pool] = {**GPUS, WITH_LPUS: _with_lpus()}
SLOWER: Mapping[str, Pool] = {WITH_OVERHEAD: _with_lpus(OVERHEAD)}
