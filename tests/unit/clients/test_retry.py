"""Decisions about retries, without waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.clients.retry import REFUSALS_UNTIL_FINAL, Backoff, Decision, Step, Verdict, decide_call, judge_batch
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError


def middle() -> float:
    return 0.5


def decide(error: SmqError, *, attempt: int = 1, elapsed_ms: float = 0.0, is_repeatable: bool = True) -> Decision:
    return decide_call(
        error,
        attempt=attempt,
        elapsed_ms=elapsed_ms,
        timeout_ms=1_000.0,
        is_repeatable=is_repeatable,
        backoff=Backoff(),
        random=middle,
    )


def test_pauses_double_up_to_the_maximum() -> None:
    backoff = Backoff(first_ms=10, max_ms=70, jitter=0)
    assert [backoff.delay_ms(n, middle) for n in range(1, 6)] == [10, 20, 40, 70, 70]


@given(
    attempt=st.integers(0, 10_000),
    random=st.floats(0, 1, exclude_max=True),
    requested=st.none() | st.integers(0, 5_000),
)
def test_pause_stays_within_its_jitter_and_never_undercuts_the_server(
    attempt: int, random: float, requested: int | None
) -> None:
    delay = Backoff().delay_ms(attempt, lambda: random, requested)
    assert 0 < delay <= max(Backoff().max_ms * 1.2, requested or 0)
    assert delay >= (requested or 0)


@pytest.mark.parametrize("code", [c for c in ErrorCode if not c.is_retriable])
def test_error_that_a_retry_cannot_help_ends_the_call(code: ErrorCode) -> None:
    assert decide(SmqError(code, "")).step is Step.GIVE_UP


@pytest.mark.parametrize("code", [c for c in ErrorCode if c.is_retriable])
def test_retriable_error_is_retried_while_there_is_time(code: ErrorCode) -> None:
    assert decide(SmqError(code, "")).step is not Step.GIVE_UP
    assert decide(SmqError(code, ""), elapsed_ms=990.0).step is Step.GIVE_UP


@pytest.mark.parametrize("code", [c for c in ErrorCode if c.is_retriable])
def test_call_that_must_not_run_twice_is_retried_after_definite_errors_only(code: ErrorCode) -> None:
    is_retried = decide(SmqError(code, ""), is_repeatable=False).step is not Step.GIVE_UP
    assert is_retried == code.is_definite


@pytest.mark.parametrize(
    ("code", "step"), [(ErrorCode.NOT_LEADER, Step.REFRESH), (ErrorCode.NOT_COORDINATOR, Step.RETRY)]
)
def test_node_that_is_named_is_asked_immediately_the_first_time(code: ErrorCode, step: Step) -> None:
    hinted = SmqError(code, "", ErrorDetails(leader_address="a:1"))
    assert decide(hinted) == Decision(step=Step.RETRY, wait_ms=0.0)
    later = decide(hinted, attempt=2)
    assert (later.step, later.wait_ms > 0) == (step, True)


def test_pause_beyond_the_deadline_is_not_begun() -> None:
    error = SmqError(ErrorCode.OVERLOADED, "", ErrorDetails(retry_after_ms=2_000))
    assert decide(error).step is Step.GIVE_UP


@pytest.mark.parametrize(
    ("code", "is_head", "refusals", "acks_all", "verdict"),
    [
        (ErrorCode.PRODUCER_FENCED, True, 1, True, Verdict.FENCED),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE, False, 99, True, Verdict.RETRY),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE, True, 1, True, Verdict.RETRY),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE, True, REFUSALS_UNTIL_FINAL, True, Verdict.FAIL),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE, True, REFUSALS_UNTIL_FINAL, False, Verdict.RESTAMP),
        (ErrorCode.UNKNOWN_TOPIC, True, 1, True, Verdict.RETRY),
        (ErrorCode.UNKNOWN_TOPIC, True, REFUSALS_UNTIL_FINAL, True, Verdict.FAIL),
        (ErrorCode.BATCH_TOO_LARGE, True, 1, True, Verdict.FAIL),
        (ErrorCode.CORRUPT_BATCH, False, 0, True, Verdict.FAIL),
        (ErrorCode.INTERNAL, True, 1, True, Verdict.FAIL),
        (ErrorCode.APPEND_LOST, True, 0, True, Verdict.RETRY),
        (ErrorCode.TIMED_OUT, True, 0, True, Verdict.RETRY),
        (ErrorCode.STORAGE_FULL, True, 0, True, Verdict.RETRY),
    ],
)
def test_verdicts_on_a_refused_batch(
    code: ErrorCode, is_head: bool, refusals: int, acks_all: bool, verdict: Verdict
) -> None:
    assert judge_batch(SmqError(code, ""), is_head=is_head, refusals=refusals, acks_all=acks_all) is verdict
