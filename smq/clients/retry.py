"""Whether, when and where to retry: pure decisions, without a clock, a random source or I/O of their own.

Owns the back-off and a client's two decisions: about a failed call, and about a refused batch of an idempotent
producer. It must never sleep or send. Everything in `smq.clients` may import it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.raft_state.errors import ErrorCode, SmqError

RandomFn: TypeAlias = Callable[[], float]  # uniform in [0, 1), injected

# A lagging leader may refuse a valid batch (it has not applied the newest election or topic). So a refusal that would
# be final counts only after this many, with a refresh and a pause in between.
REFUSALS_UNTIL_FINAL: Final = 5

_STALE_LEADER: Final = frozenset(
    {
        ErrorCode.NOT_LEADER,
        ErrorCode.NOT_REPLICA,
        ErrorCode.LEADER_UNAVAILABLE,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.TIMED_OUT,
        ErrorCode.UNREACHABLE,
        ErrorCode.NO_QUORUM,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.NODE_NOT_READY,
        ErrorCode.UPGRADE_NEEDED,
        ErrorCode.APPEND_LOST,
        ErrorCode.DATA_DAMAGED,
    }
)

_NAMES_THE_NODE: Final = frozenset({ErrorCode.NOT_LEADER, ErrorCode.NOT_COORDINATOR})
_POSSIBLE_FROM_LAGGING_NODE: Final = frozenset({ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential pauses with jitter. The maximum is low, so that a client comes soon after an election."""

    first_ms: float = 20.0
    max_ms: float = 250.0
    factor: float = 2.0
    jitter: float = 0.2  # the pause varies by +- this share, so that clients do not retry in step

    def delay_ms(self, attempt: int, random: RandomFn, retry_after_ms: int | None = None) -> float:
        """The pause after failure number `attempt` (from 1); never shorter than the server asked for."""
        grown = min(self.max_ms, self.first_ms * self.factor ** min(max(attempt, 1) - 1, 30))
        spread = grown * (1.0 + self.jitter * (2.0 * random() - 1.0))
        return max(spread, float(retry_after_ms or 0))


class Step(enum.Enum):
    RETRY = "retry"  # at the same node, or at the next one in the caller's order
    REFRESH = "refresh"  # ask the cluster for the leader first
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    step: Step
    wait_ms: float = 0.0


_GIVE_UP: Final = Decision(step=Step.GIVE_UP)


def decide_call(
    error: SmqError,
    *,
    attempt: int,
    elapsed_ms: float,
    timeout_ms: float,
    is_repeatable: bool,
    backoff: Backoff,
    random: RandomFn,
) -> Decision:
    """What to do after failure number `attempt` of a call.

    `is_repeatable`: running it twice is the same as running it once (a read, or a request id). Otherwise only a
    definite error may be retried, because after an indefinite one the call may have taken effect.
    """
    if not error.code.is_retriable or not (error.code.is_definite or is_repeatable):
        return _GIVE_UP
    step = Step.REFRESH if error.code in _STALE_LEADER else Step.RETRY
    if error.code in _NAMES_THE_NODE and error.details.leader_address and attempt == 1:
        return Decision(step=Step.RETRY)  # follow the hint immediately
    wait_ms = backoff.delay_ms(attempt, random, error.details.retry_after_ms)
    if elapsed_ms + wait_ms >= timeout_ms:
        return _GIVE_UP
    return Decision(step=step, wait_ms=wait_ms)


class Verdict(enum.Enum):
    """What becomes of a batch that the leader refused."""

    RETRY = "retry"  # send the same bytes and sequence again, after all earlier batches
    RESTAMP = "restamp"  # earlier records were lost, as acks=leader allows: continue under a new producer id
    FAIL = "fail"  # report it; later batches of the partition continue under a new producer id
    FENCED = "fenced"  # another producer owns the id now: this producer is finished


def judge_batch(error: SmqError, *, is_head: bool, refusals: int, acks_all: bool) -> Verdict:
    """`is_head`: every earlier batch of the partition has been answered. `refusals`: how often this batch has been
    refused as head with an error that a lagging node might return, this time included."""
    code = error.code
    if code is ErrorCode.PRODUCER_FENCED:
        return Verdict.FENCED
    if code is ErrorCode.OUT_OF_ORDER_SEQUENCE:
        if not is_head or refusals < REFUSALS_UNTIL_FINAL:
            return Verdict.RETRY  # an earlier batch failed, or the leader lags
        return Verdict.FAIL if acks_all else Verdict.RESTAMP
    if code in _POSSIBLE_FROM_LAGGING_NODE:
        return Verdict.RETRY if refusals < REFUSALS_UNTIL_FINAL else Verdict.FAIL
    return Verdict.RETRY if code.is_retriable else Verdict.FAIL


def of_partition(error: SmqError) -> SmqError:
    """The error for the user of a partition whose nodes do not answer. UNREACHABLE would say to look for the
    cluster, and the cluster has been found."""
    if error.code is not ErrorCode.UNREACHABLE:
        return error
    return SmqError(ErrorCode.LEADER_UNAVAILABLE, error.message, error.details)


def needs_refresh(error: SmqError) -> bool:
    """True if the error says that the client's metadata may be out of date."""
    return error.code in _STALE_LEADER or error.code in _POSSIBLE_FROM_LAGGING_NODE
