"""What Python allocates in a block of a test, counted: the same each time, whatever ran before it in the process."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeAlias

from tests.unit.replication.hot_path import LARGE_BYTES, is_of_smq

TraceFunction: TypeAlias = Callable[[FrameType, str, object], Any]


class Allocations:
    """A context, whose figures are complete when it ends. It looks between any two instructions of smq: so it meets
    large objects that are given back soon, and knows whose code made them."""

    def __init__(self) -> None:
        self.large = self.large_bytes = 0  # objects of LARGE_BYTES or more that smq made, kept or not
        self.large_kept = 0
        self.bytes_kept = self.bytes_peak = 0
        self.blocks_kept = self.blocks_peak = 0
        self._is_of_smq = False  # the code that runs since the last look
        self._bytes = self._blocks = 0  # at the last look; when the context began
        self._trace = sys.gettrace()  # a debugger's

    def __enter__(self) -> "Allocations":
        assert not tracemalloc.is_tracing()
        gc.collect()  # nothing that other tests left is given back meanwhile
        gc.disable()
        self._blocks = sys.getallocatedblocks()
        tracemalloc.start()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        sys.settrace(self._trace)
        gc.collect()  # what Python holds back for the next object of a type counts as well
        sizes = [trace.size for trace in tracemalloc.take_snapshot().traces]
        tracemalloc.stop()
        gc.enable()
        self.blocks_kept, self.bytes_kept = len(sizes), sum(sizes)
        self.large_kept = sum(size >= LARGE_BYTES for size in sizes)

    def _on_call(self, frame: FrameType, _event: str, _argument: object) -> TraceFunction | None:
        self.blocks_peak = max(self.blocks_peak, sys.getallocatedblocks() - self._blocks)
        self._look(is_of_smq(frame.f_code))
        if not self._is_of_smq:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> TraceFunction:
        runs_next = frame.f_back if event == "return" else frame
        self._look(runs_next is not None and is_of_smq(runs_next.f_code))
        return self._on_event

    def _look(self, is_of_smq_next: bool) -> None:
        _, peak = tracemalloc.get_traced_memory()  # since the last look
        self.bytes_peak = max(self.bytes_peak, peak)
        if self._is_of_smq and peak - self._bytes >= LARGE_BYTES:
            self.large += 1
            self.large_bytes += peak - self._bytes
        self._is_of_smq = is_of_smq_next
        tracemalloc.reset_peak()
        self._bytes, _ = tracemalloc.get_traced_memory()
