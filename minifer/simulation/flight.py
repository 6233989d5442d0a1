"""A request under way: what it looks like to each node, to the router and to those who reject."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from minifer.kv.prefix_key import PrefixKey
from minifer.routing.policy import Role
from minifer.simulation.cluster import NodeSpec
from minifer.simulation.comings import Coming
from minifer.simulation.keys import KeyTree
from minifer.simulation.rejection import Outlook
from minifer.simulation.replica import Replica
from minifer.simulation.result import RequestRecord
from minifer.simulation.sim_request import SimRequest


class Flight:
    """One request from its coming at `now` to its end. expected: when its first token should come,
    as it was predicted."""

    def __init__(self, coming: Coming, now: float) -> None:
        arrival = coming.arrival
        self.coming = coming
        self.expected = now
        self.record = RequestRecord(
            arrival.request_id,
            now,
            arrival.prompt_len,
            arrival.output_len,
            arrival.tenant,
            arrival.session,
            arrival.turn,
        )
        self._keys: dict[int, list[PrefixKey]] = {}  # by block size
        self._requests: dict[tuple[int, bool], SimRequest] = {}

    def _keys_for(self, spec: NodeSpec, tree: KeyTree) -> list[PrefixKey]:
        if not spec.engine.enable_prefix_caching:
            return []
        P = spec.engine.block_size
        if P not in self._keys:
            total = self.record.prompt_len + self.record.output_len
            self._keys[P] = tree.keys(P, self.coming.names, total)
        return self._keys[P]

    def on(self, spec: NodeSpec, tree: KeyTree) -> SimRequest:
        """The request for a node that prefills; the same object for all nodes of one kind."""
        whole = spec.role is Role.MIXED
        kind = (spec.engine.block_size * spec.engine.enable_prefix_caching, whole)
        if kind not in self._requests:
            self._requests[kind] = SimRequest(
                self.record,
                self._keys_for(spec, tree),
                goal=self.record.prompt_len + (self.record.output_len if whole else 1),
                stored_len=self.coming.arrival.stored_len,
            )
        return self._requests[kind]

    def arriving(self, spec: NodeSpec, tree: KeyTree) -> SimRequest:
        """The request for a node that decodes: its first token is out, its KV came with it."""
        prompt_len = self.record.prompt_len
        keys = self._keys_for(spec, tree)
        return SimRequest(self.record, keys, num_tokens=prompt_len + 1, received=prompt_len)


class Matched(Mapping[str, int]):
    """replica → leading tokens that it need not compute; looked up when a policy asks."""

    def __init__(self, flight: Flight, replicas: Sequence[Replica], tree: KeyTree) -> None:
        self._flight, self._tree = flight, tree
        self._replicas = {replica.spec.name: replica for replica in replicas}
        self._found: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        if name not in self._found:
            replica = self._replicas[name]
            request = self._flight.on(replica.spec, self._tree)
            self._found[name] = replica.reusable(request)[0]
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)


def outlook(
    replica: Replica,
    request: SimRequest,
    flights: Iterable[Flight],
    num_decode_nodes: int,
    now: float,
) -> Outlook:
    """What can be foreseen of a request that would go to `replica`."""
    ttft = replica.look(now).prefill_seconds + replica.alone(request)
    paths, decoding = [], 0
    for flight in flights:
        first = flight.record.first_token
        if first is None:
            paths.append((max(0.0, flight.expected - now), 0.0))
        else:
            decoding += 1
            paths.append((0.0, now - first))
    return Outlook(ttft, decoding, paths, num_decode_nodes)
