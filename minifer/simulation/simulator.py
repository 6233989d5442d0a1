"""The simulator: requests, nodes and links on a virtual clock.

Two engines behind a router that sends each request to where the least prefill waits; a step takes
half a second, whatever is in it:

>>> from minifer.config import EngineConfig
>>> from minifer.simulation.workloads.arrivals import Arrival
>>> from minifer.simulation.cluster import Cluster, identical
>>> from minifer.simulation.steps.times import FixedSteps
>>> engine = EngineConfig(block_size=512, num_kv_blocks=100)
>>> cluster = Cluster(identical(2, FixedSteps(0.5), engine), router="least_work")
>>> result = simulate([Arrival("a", 0.25, prompt_len=1000, output_len=3)], cluster)
>>> result.requests[0].token_times
array('d', [0.75, 1.25, 1.75])
>>> result.requests[0].ttft, result.requests[0].max_gap
(0.5, 0.5)

What happens, in the order of a request's life::

    comes ─▶ router ─▶ prefill node ──▶ first token ─┬─▶ the last one ─▶ its user's next turn
               ▲       or mixed node                 └─▶ link ─▶ decode node ─▶ the last one ─▶ …
               └─ ReplicaState of every node, and what of the prompt each one holds

Nobody draws a random number here: a run is a function of its workload and its cluster, whose
router has a seed. Of things that happen at one moment, whoever comes is before a step that ends,
and apart from that the order is the one in which they were known.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from minifer.routing.policy import Role, RoutingRequest
from minifer.routing.pools import pool
from minifer.simulation.cluster import Cluster
from minifer.simulation.comings import Coming, check, comings
from minifer.simulation.flight import Flight, Matched, outlook
from minifer.simulation.keys import KeyTree, check_block_size
from minifer.simulation.replica import Replica
from minifer.simulation.result import RequestRecord, SimulationResult
from minifer.simulation.sim_request import SimRequest
from minifer.simulation.store import LevelState
from minifer.simulation.workloads.arrivals import BLOCK, Workload

Stop = Callable[[RequestRecord], bool]
_COMES, _STEP_ENDS = 0, 1  # who goes first at one moment


def simulate(
    workload: Workload,
    cluster: Cluster,
    *,
    until: float | None = None,
    stop: Stop | None = None,
    name_tokens: int = BLOCK,
    keys: KeyTree | None = None,
    coast: bool = True,
) -> SimulationResult:
    """Serve a workload to its end, or to the horizon `until` (seconds).

    stop: called with each record when its first token is out, when it ends and when it is refused;
    True ends the run, so that a search need not see a hopeless one through. name_tokens: tokens
    that one of `Arrival.block_names` stands for. keys: the names' keys, kept from run to run; None
    makes them anew. coast: see `Replica`.

    The same arguments give the same result. Raises `ValueError` for a request that no node could
    ever serve, and for two with one id.
    """
    tree = KeyTree(name_tokens) if keys is None else keys
    if tree.name_tokens != name_tokens:
        raise ValueError(f"keys must be of names of {name_tokens} tokens, got {tree.name_tokens}")
    check_run(workload, cluster, name_tokens=name_tokens)
    run = _Run(workload, cluster, tree, math.inf if until is None else until, stop, coast)
    return run.to_the_end()


def check_run(workload: Workload, cluster: Cluster, *, name_tokens: int = BLOCK) -> None:
    """Raise the `ValueError` with which `simulate` would refuse the two together."""
    for node in cluster.nodes:
        check_block_size(node.engine.block_size, name_tokens)
    check(workload, cluster)


class _Run:
    """One simulation, from an empty cluster to the end."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        keys: KeyTree,
        until: float,
        stop: Stop | None,
        coast: bool,
    ) -> None:
        self.cluster, self.keys = cluster, keys
        self.now, self._until, self._stop, self._stopped = 0.0, until, stop, False
        self._records: list[RequestRecord] = []
        self._flights: dict[str, Flight] = {}
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._comings = comings(workload)
        self.replicas = self._build(coast)
        self.front = self._pool(Role.PREFILL)
        self._decoders = self._pool(Role.DECODE)
        self._router = cluster.make_router("router")
        self._decode_router = cluster.make_router("decode_router")
        self._next_coming()

    def _build(self, coast: bool) -> dict[str, Replica]:
        shared: dict[tuple[str, int], LevelState] = {}
        replicas = {}
        for spec in self.cluster.nodes:
            P, levels = spec.engine.block_size, []
            for level in spec.store:
                state = LevelState(level, P)
                levels.append(shared.setdefault((level.name, P), state) if level.shared else state)
            load = partial(self._start_load, spec.name) if spec.prefetch else None
            replicas[spec.name] = Replica(spec, levels, self.cluster.kv_bytes, load, coast=coast)
        return replicas

    def _pool(self, role: Role) -> list[Replica]:
        states = [replica.look(0.0) for replica in self.replicas.values()]
        return [self.replicas[state.name] for state in pool(states, role)]

    def to_the_end(self) -> SimulationResult:
        while self._heap and not self._stopped:
            time, _, _, do, what = heapq.heappop(self._heap)
            if time > self._until:
                self._settle()
                break
            self.now = time
            do(what)
        if self._flights and not self._stopped:
            raise RuntimeError(
                f"{len(self._flights)} requests wait for ever, the simulator is wrong"
            )
        nodes = [replica.close(self.now) for replica in self.replicas.values()]
        return SimulationResult(self._records, nodes, self.now, self._stopped)

    def _settle(self) -> None:
        """The horizon: steps that are over by then count, those that run do not."""
        self.now, self._stopped = self._until, True
        for replica in self.replicas.values():
            last = replica.cut_before(self._until)
            if last is not None:
                self._end_step(replica, last)

    def _at(self, time: float, order: int, do: Callable[[Any], None], what: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, order, self._count, do, what))

    # -- requests come, and are over

    def _next_coming(self) -> None:
        coming = next(self._comings, None)
        if coming is not None:
            self._at(coming.time, _COMES, self._comes, coming)

    def _comes(self, coming: Coming) -> None:
        if not coming.follows:
            self._next_coming()
        flight = Flight(coming, self.now)
        record = flight.record
        self._records.append(record)
        replica = self._route(flight)
        request = flight.on(replica.spec, self.keys)
        if self.cluster.rejection is not None:
            ahead = outlook(replica, request, self._flights.values(), len(self._decoders), self.now)
            record.rejected = self.cluster.rejection.reason(ahead)
            flight.expected = self.now + ahead.ttft
        if record.rejected:
            record.end = self.now
            self._tell(record)
            return
        self._flights[record.request_id] = flight
        replica.add(request)
        self._wake(replica)

    def _route(self, flight: Flight) -> Replica:
        if len(self.front) == 1:
            return self.front[0]
        arrival = flight.coming.arrival
        asked = RoutingRequest(
            arrival.request_id,
            arrival.prompt_len,
            arrival.block_names,
            self.keys.name_tokens,
            arrival.tenant,
        )
        states = [replica.look(self.now) for replica in self.front]
        decision = self._router.choose(asked, states, Matched(flight, self.front, self.keys))
        return self.replicas[decision.replica]

    def _over(self, record: RequestRecord, now: float) -> None:
        record.end = now
        following = self._flights.pop(record.request_id).coming.next_turn(now)
        if following is not None:
            self._at(following.time, _COMES, self._comes, following)
        self._tell(record)

    def _tell(self, record: RequestRecord) -> None:
        if self._stop is not None and not self._stopped:
            self._stopped = bool(self._stop(record))

    # -- steps

    def _wake(self, replica: Replica) -> None:
        """Something changed for this node: it begins, or plans anew after the step that runs."""
        end = replica.begin(self.now) if replica.plan is None else replica.cut(self.now)
        if end is not None:
            self._at(end, _STEP_ENDS, self._step_ends, replica)

    def _step_ends(self, replica: Replica) -> None:
        if replica.plan is not None and replica.ends_at == self.now:  # else it was cut before
            self._end_step(replica, self.now)
            self._wake(replica)

    def _end_step(self, replica: Replica, now: float) -> None:
        done = replica.end(now)
        for record in replica.first_tokens:
            self._tell(record)
        for request in done:
            if self._goes_on_elsewhere(replica, request):
                self._send(replica, request)
            else:
                replica.finish(request)
                self._over(request.record, now)

    def _goes_on_elsewhere(self, replica: Replica, request: SimRequest) -> bool:
        prefills = replica.spec.role in (Role.PREFILL, Role.PRE_PREFILL)
        return prefills and bool(self._decoders) and request.record.output_len > 1

    # -- KV moves

    def _send(self, source: Replica, request: SimRequest) -> None:
        """A prompt is computed: its KV goes to a decode node, and its blocks are kept meanwhile."""
        held = source.finish(request, hold=True)
        record, link = request.record, self.cluster.link
        asked = RoutingRequest(record.request_id, record.prompt_len, tenant=record.tenant)
        states = [replica.look(self.now) for replica in self._decoders]
        target = self.replicas[self._decode_router.choose(asked, states, {}).replica]
        target.expect()
        begun = max(self.now, source.sending_until) if link.queued else self.now
        sent = begun + record.prompt_len * self.cluster.kv_bytes / link.bandwidth
        source.sending_until = sent
        self._at(sent + link.latency, _COMES, self._received, (source, held, target, request))

    def _received(self, what: tuple[Replica, list[int], Replica, SimRequest]) -> None:
        source, held, target, request = what
        source.let_go(held)
        self._wake(source)
        target.add(self._flights[request.request_id].arriving(target.spec, self.keys))
        self._wake(target)

    def _start_load(self, name: str, request: SimRequest, seconds: float) -> None:
        """One request's KV after the other comes from the store."""
        replica = self.replicas[name]
        replica.loading_until = max(replica.loading_until, self.now) + seconds
        self._at(replica.loading_until, _COMES, self._loaded, (replica, request))

    def _loaded(self, what: tuple[Replica, SimRequest]) -> None:
        replica, request = what
        replica.store.arrived(request)
        self._wake(replica)
