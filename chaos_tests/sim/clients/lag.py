"""An operator who asks how far a group is behind: by the calculation behind gRPC, CLI and console, and as the metrics
measure it.

Owns both questions. What the node answers is judged against the history by `checkers.lag`.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from chaos_tests.sim.clients.base import Known, PartitionClient, World, is_unknown
from chaos_tests.sim.clients.services import DELETED
from chaos_tests.sim.observer import WatchedNode
from chaos_tests.sim.rpc import Call, Script, Sleep
from smq.coordinator.service.group_lag import age_ms, lags_of, positions
from smq.coordinator.service.name_lookup import find_group
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId

ATTEMPT_MS: Final = 900
STEPS_MS: Final = 6_000.0  # a barrier, the exact ends and a look into the log, one after the other
METRICS: Final = 0.3  # of the questions
ALL_ATTEMPTS: Final = 50
RETRY_MS: Final = 100

Answer = dict[str, Any]
Work = Callable[[WatchedNode, str, Known], Coroutine[Any, Any, Answer]]


class LagWatcher(PartitionClient):
    def __init__(self, world: World, name: str, group: str, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.group = group

    def use(self, partition: Known) -> Script:
        group = DELETED if self.rng.random() < 0.2 else self.group
        if self.rng.random() < METRICS:
            yield from self._ask("gauge", partition, group, self.any_node(), _in_metrics)
        else:
            yield from self._ask("lag", partition, group, self._node(partition), _calculated)

    def _node(self, partition: Known) -> NodeId:
        """Usually one with a copy: others know no sizes."""
        replicas = [node for node in partition.replicas if node in self.world.nodes]
        return self.rng.choice(replicas) if replicas and self.rng.random() < 0.9 else self.any_node()

    def _ask(self, function: str, partition: Known, group: str, node: NodeId, work: Work) -> Any:
        """A Script that returns the answer; None if there was none."""

        def request(api: Any, done: Callable[[Any], None]) -> None:
            def told(result: object) -> None:
                if isinstance(result, BaseException) and not isinstance(result, SmqError):
                    raise result  # which ends the process
                done(result)

            api.loop.run(work(api, group, partition), told)

        self.world.recorder.invoke(self.process, function, g=group, k=partition.key, n=node)
        result = yield Call(node, request, STEPS_MS, STEPS_MS)
        answer = result if isinstance(result, dict) else {}
        unknown = not isinstance(result, dict) and is_unknown(result)
        return answer if self.conclude(function, result, unknown=unknown, **answer) else None

    def probe(self, partition: Known) -> Script:
        """After the heal, each replica must know every figure: its log soon reaches the end that the leader tells."""
        for node in partition.replicas:
            if node not in self.world.nodes:
                continue
            for _ in range(ALL_ATTEMPTS):
                found = yield from self._ask("lag", partition, self.group, node, _calculated)
                if found is not None and found.get("age") is not None:
                    break
                yield Sleep(RETRY_MS)
            else:
                why = f"node {node} does not know how far {self.group!r} is behind in {partition.key}"
                self.world.recorder.note("settled", ok=False, why=why)


async def _calculated(api: WatchedNode, name: str, partition: Known) -> Answer:
    """As DescribeGroup and the console do it."""
    try:
        group = await find_group(api.calls, name, ATTEMPT_MS)
    except SmqError as e:
        if e.code is not ErrorCode.UNKNOWN_GROUP:
            raise
        return {"o": -1, "tag": ""}
    places = list(positions(api.state, group))
    now_ns = api.clock.wall_ns()
    lags = await lags_of(api.calls, places, ATTEMPT_MS, with_sizes=True, now_ns=now_ns)
    for at, lag in zip(places, lags, strict=True):
        if at.part.pid == partition.pid and at.committed is not None and at.position is not None:
            return {
                "o": at.position,
                "tag": at.committed.metadata,
                "lo": lag.log_start,
                "hwm": lag.end,
                "known": lag.is_end_known,
                "offsets": lag.offsets,
                "records": lag.records,
                "bytes": lag.size_bytes,
                "age": lag.age_ms,
                "at": now_ns,
            }
    return {"o": -1, "tag": ""}


async def _in_metrics(api: WatchedNode, name: str, partition: Known) -> Answer:
    """What a scrape after a pass over all groups has; nothing if the pass could not measure it."""
    part, group = api.state.partition(partition.pid), api.state.groups.get(name)
    log_start = part.log_start if part is not None else 0
    before = group.offsets.get(partition.pid) if group is not None else None
    await api.lag_monitor.measure_all()
    group = api.state.groups.get(name)
    after = group.offsets.get(partition.pid) if group is not None else None
    measured = api.lag_monitor._known.get((name, partition.pid))
    if measured is None or before is None or before != after:
        return {}
    _, end, backlog = measured
    now_ns = api.clock.wall_ns()
    return {
        "o": before.offset,
        "lo": log_start,
        "hwm": end,
        "bytes": backlog.size_bytes,
        "age": age_ms(backlog.ts_ns, now_ns),
        "at": now_ns,
    }
