"""Whether, when and where to try again: pure decisions, without a clock, a random source or I/O of their own.

Owns the back-off and the two judgements of a client: over a failed call, and over a refused batch of an
idempotent producer. It must never sleep or send. Everything in `smq.clients` may import it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.raft_state.errors import ErrorCode, SmqError

RandomFn: TypeAlias = Callable[[], float]  # uniform in [0, 1), injected

# A leader that lags may refuse what is right (it has not applied the newest election or topic). So a refusal
# that would be final is believed only when it has been given this often, with a refresh and a pause in between.
REFUSALS_BELIEVED_AFTER: Final = 5

_ELSEWHERE: Final = frozenset(
    {
        ErrorCode.NOT_LEADER,
        ErrorCode.NOT_REPLICA,
        ErrorCode.LEADER_UNAVAILABLE,
        ErrorCode.TIMED_OUT,
        ErrorCode.NO_QUORUM,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.NODE_NOT_READY,
        ErrorCode.APPEND_LOST,
        ErrorCode.DATA_DAMAGED,
    }
)

_LAGGING_NODE_MAY_SAY: Final = frozenset({ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential pauses with jitter. The top is low, because an election takes well under a second."""

    first_ms: float = 20.0
    max_ms: float = 250.0
    factor: float = 2.0
    jitter: float = 0.2  # the pause is spread over +- this share, so that clients do not return in step

    def delay_ms(self, attempt: int, random: RandomFn, retry_after_ms: int | None = None) -> float:
        """The pause after the `attempt`-th failure (from 1); never shorter than what the server asked for."""
        grown = min(self.max_ms, self.first_ms * self.factor ** min(max(attempt, 1) - 1, 30))
        spread = grown * (1.0 + self.jitter * (2.0 * random() - 1.0))
        return max(spread, float(retry_after_ms or 0))


class Step(enum.Enum):
    RETRY = "retry"  # at the same place, or wherever the caller's order of nodes leads next
    REFRESH = "refresh"  # ask the cluster first who leads now
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
    """What to do after the `attempt`-th failure of a call.

    `is_repeatable`: running it twice is the same as once (a read, or a request id). Otherwise only a definite
    error may be retried, as an indefinite one may have taken effect.
    """
    if not error.code.is_retriable or not (error.code.is_definite or is_repeatable):
        return _GIVE_UP
    step = Step.REFRESH if error.code in _ELSEWHERE else Step.RETRY
    if error.code is ErrorCode.NOT_LEADER and error.details.leader_address and attempt == 1:
        return Decision(step=Step.RETRY)  # the hint says where: go there at once
    wait_ms = backoff.delay_ms(attempt, random, error.details.retry_after_ms)
    if elapsed_ms + wait_ms >= timeout_ms:
        return _GIVE_UP
    return Decision(step=step, wait_ms=wait_ms)


class Verdict(enum.Enum):
    """Over a batch that the leader refused."""

    RETRY = "retry"  # the same bytes and sequence again, after all before it
    RESTAMP = "restamp"  # earlier records were lost as acks=leader allows: go on under a new producer id
    FAIL = "fail"  # report it; later batches of the partition go on under a new producer id
    FENCED = "fenced"  # another producer owns the id now: this producer is finished


def judge_batch(error: SmqError, *, is_head: bool, refusals: int, acks_all: bool) -> Verdict:
    """`is_head`: every earlier batch of the partition has been answered. `refusals`: how often this batch has
    been refused as head by a verdict that a lagging node might give, this time included."""
    code = error.code
    if code is ErrorCode.PRODUCER_FENCED:
        return Verdict.FENCED
    if code is ErrorCode.OUT_OF_ORDER_SEQUENCE:
        if not is_head or refusals < REFUSALS_BELIEVED_AFTER:
            return Verdict.RETRY  # the consequence of an earlier batch's failure, or a leader that lags
        return Verdict.FAIL if acks_all else Verdict.RESTAMP
    if code in _LAGGING_NODE_MAY_SAY:
        return Verdict.RETRY if refusals < REFUSALS_BELIEVED_AFTER else Verdict.FAIL
    return Verdict.RETRY if code.is_retriable else Verdict.FAIL


def wants_refresh(error: SmqError) -> bool:
    """True where the error says that the client's picture of the cluster may be old."""
    return error.code in _ELSEWHERE or error.code in _LAGGING_NODE_MAY_SAY
