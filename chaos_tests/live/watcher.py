"""Watches the nodes during a run: which node leads Raft, and whose process has ended without a fault.

Owns the observations `lead` and `died` of a live history. It must never change anything.
"""

import threading
from typing import Final

from chaos_tests.live.fleet import Fleet
from chaos_tests.live.load.grpc import SharedRecorder
from smq.testing.node_process import tail

_EVERY_S: Final = 0.25


class Watcher:
    """A thread. While `expect_deaths` is set, a fault is under way and a process may end."""

    def __init__(self, fleet: Fleet, recorder: SharedRecorder) -> None:
        self.expect_deaths = False
        self._fleet = fleet
        self._recorder = recorder
        self._leads: set[tuple[int, int]] = set()
        self._dead: set[tuple[int, int]] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            for node, member in self._fleet.nodes.items():
                if not member.is_alive():
                    self._died(node)
                    continue
                status = self._fleet.status(node)
                if status is not None and status.raft_leader == node and (node, status.raft_term) not in self._leads:
                    self._leads.add((node, status.raft_term))
                    self._recorder.note("lead", n=node, term=status.raft_term)

    def _died(self, node: int) -> None:
        member = self._fleet.nodes[node]
        if self.expect_deaths or member.process is None or (node, member.starts) in self._dead:
            return
        self._dead.add((node, member.starts))
        last = tail(member.log).splitlines()[-1:]
        self._recorder.note("died", n=node, err=f"ended with {member.process.poll()}: {' '.join(last)}")
