"""How long the parts of a batch's way take, from its append to its answer.

Owns one sample at a time: the batch that is timed now, of one partition. The next batch after its end that is to be
timed is the next sample, so few batches are timed when many come. A batch that is traced has stages of its own. It
decides nothing. Only `waiters` uses it.
"""

from smq.raft_state.ids import Offset
from smq.replication.measures import StageSink
from smq.replication.ports import Clock


class Stages:
    """`is_timing` and `end` are read on the hot path: they must not be calls."""

    def __init__(self, clock: Clock, stage: StageSink) -> None:
        self._clock = clock
        self._stage = stage
        self.is_timing = False
        self.end = Offset(-1)  # of the sample; -1: there is none
        self._began_ns = 0  # when it was appended
        self._is_on_disk = self._is_answered = False
        self._majority_ns = 0  # 0: no majority has it yet

    def begin(self, end: Offset) -> None:
        """A batch that ends here has just been appended."""
        self.is_timing, self.end, self._began_ns = True, end, self._clock.monotonic_ns()
        self._is_on_disk = self._is_answered = False
        self._majority_ns = 0

    def note(self, durable_end: Offset, majority_end: Offset) -> None:
        """What this disk has, and what a majority's disks have."""
        now_ns = self._clock.monotonic_ns()
        if not self._is_on_disk and durable_end >= self.end:
            self._is_on_disk = True
            self._stage.observe(now_ns - self._began_ns, "fsync")
        if not self._majority_ns and majority_end >= self.end:
            self._majority_ns = now_ns
            self._stage.observe(now_ns - self._began_ns, "replicate")
        if self._is_answered and self._is_on_disk and self._majority_ns:
            self.drop()

    def answered(self) -> int:
        """The sample is being answered with success: the time, or 0 if it has been before. Give it to `left` when the
        answer leaves. A disk that is slower than the others' is timed until it has the batch, too."""
        if self._is_answered:
            return 0
        now_ns = self._clock.monotonic_ns()
        if self._majority_ns:  # otherwise acks=1: no majority was waited for
            self._stage.observe(now_ns - self._majority_ns, "commit")
        self._is_answered = True
        if self._is_on_disk and self._majority_ns:
            self.drop()
        return now_ns

    def left(self, answered_ns: int) -> None:
        self._stage.observe(self._clock.monotonic_ns() - answered_ns, "answer")

    def drop(self) -> None:
        """Nothing more of the sample is timed: it is over, was answered with an error, or the leadership has ended and
        an election would be measured."""
        self.is_timing, self.end = False, Offset(-1)
