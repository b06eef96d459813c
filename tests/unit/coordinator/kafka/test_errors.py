"""The table from smq's error codes to Kafka's."""

import pytest
from kio.schema.errors import ErrorCode as KioErrorCode

from smq.coordinator.groups.member_requests import Outcome
from smq.coordinator.kafka.errors import (
    CODES,
    OUTCOME_CODES,
    KafkaError,
    code_of,
    fetch_code_of,
    list_offsets_code_of,
    producer_id_code_of,
    staging_code_of,
    topic_error_fields,
)
from smq.raft_state.errors import ErrorCode, SmqError

# Of these Kafka's clients think that the batch was not stored; of a time-out they do not.
_NOT_STORED = {KafkaError.NOT_LEADER_OR_FOLLOWER, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.KAFKA_STORAGE_ERROR}


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_has_one_of_kafka(code: ErrorCode) -> None:
    assert code_of(SmqError(code, "x")) is CODES[code]
    for version in (4, 11, 18):
        assert fetch_code_of(SmqError(code, "x"), version) is not KafkaError.NONE


def test_a_client_that_does_not_know_offset_not_available_gets_what_it_retries() -> None:
    error = SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, "x")
    codes = [list_offsets_code_of(error, version) for version in (4, 5)]
    assert codes == [KafkaError.LEADER_NOT_AVAILABLE, KafkaError.OFFSET_NOT_AVAILABLE]
    codes = [fetch_code_of(error, version) for version in (10, 11)]
    assert codes == [KafkaError.NOT_LEADER_OR_FOLLOWER, KafkaError.OFFSET_NOT_AVAILABLE]


def test_every_outcome_of_a_group_has_one_of_kafka() -> None:
    assert set(OUTCOME_CODES) == set(Outcome)
    assert [outcome for outcome, code in OUTCOME_CODES.items() if code is KafkaError.NONE] == [Outcome.OK]


@pytest.mark.parametrize("code", [c for c in ErrorCode if not c.is_definite])
def test_a_write_of_unknown_outcome_is_never_reported_as_not_stored(code: ErrorCode) -> None:
    assert CODES[code] not in _NOT_STORED


@pytest.mark.parametrize("code", KafkaError)
def test_names_and_numbers_are_kafkas(code: KafkaError) -> None:
    assert KioErrorCode(code.value).name == code.name.lower()


@pytest.mark.parametrize(
    "code", [ErrorCode.NOT_LEADER, ErrorCode.LEADER_UNAVAILABLE, ErrorCode.NO_QUORUM, ErrorCode.TIMED_OUT]
)
def test_errors_that_a_retry_may_cure_are_retriable_for_kafka_clients(code: ErrorCode) -> None:
    assert KioErrorCode(CODES[code].value).retriable


# Others are an IllegalStateException of Java's consumer, after which its poll loop ends.
_RETRIED_FETCHES = {
    KafkaError.NOT_LEADER_OR_FOLLOWER,
    KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.OFFSET_NOT_AVAILABLE,
}


_OF_ANY_REQUEST = (
    ErrorCode.SHUTTING_DOWN,
    ErrorCode.NODE_NOT_READY,
    ErrorCode.LEADER_UNAVAILABLE,
    ErrorCode.OVERLOADED,
    ErrorCode.TIMED_OUT,
    ErrorCode.NO_QUORUM,
    ErrorCode.UPGRADE_NEEDED,
)


@pytest.mark.parametrize("code", [*_OF_ANY_REQUEST, ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.DATA_DAMAGED])
def test_a_consumer_goes_on_after_an_error_that_passes(code: ErrorCode) -> None:
    assert fetch_code_of(SmqError(code, "x"), 18) in _RETRIED_FETCHES


@pytest.mark.parametrize("code", _OF_ANY_REQUEST)
def test_a_producer_asks_for_its_id_again_after_an_error_that_passes(code: ErrorCode) -> None:
    """Sarama and older Java clients give up after most codes that others retry."""
    assert producer_id_code_of(SmqError(code, "x"), 4) is KafkaError.COORDINATOR_LOAD_IN_PROGRESS


# Java's producer ends after any other code that it does not know as an error of the transaction alone.
_RETRIED_STAGINGS = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}


@pytest.mark.parametrize("version", [0, 3, 5])
@pytest.mark.parametrize(
    "code", [*_OF_ANY_REQUEST, ErrorCode.TRANSACTION_ENDING, ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.NOT_COORDINATOR]
)
def test_a_producer_stages_offsets_again_after_an_error_that_passes(code: ErrorCode, version: int) -> None:
    assert staging_code_of(SmqError(code, "x"), version) in _RETRIED_STAGINGS


def test_an_admin_client_asks_another_node_if_this_one_stops() -> None:
    stopping, full = (SmqError(code, "x") for code in (ErrorCode.SHUTTING_DOWN, ErrorCode.OVERLOADED))
    assert topic_error_fields(stopping) == {"error_code": KafkaError.NOT_CONTROLLER, "error_message": str(stopping)}
    assert topic_error_fields(full)["error_code"] is code_of(full)
