"""Transactional producers of other projects: each learns soon that there are no transactions, and does not hang."""

import asyncio

import aiokafka.errors
import confluent_kafka
import kafka
import kafka.errors
import pytest
from aiokafka import AIOKafkaProducer

PATIENCE_S = 60  # of a client that would retry for ever


def test_librdkafka_fails_fatally(bootstrap: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": "tx"})
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        producer.init_transactions(PATIENCE_S)
    error = raised.value.args[0]
    assert (error.code(), error.fatal(), error.retriable()) == (
        confluent_kafka.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        True,
        False,
    )


def test_kafka_python_fails(bootstrap: str) -> None:
    producer = kafka.KafkaProducer(
        bootstrap_servers=bootstrap.split(","), transactional_id="tx", max_block_ms=PATIENCE_S * 1_000
    )
    try:
        with pytest.raises(kafka.errors.TransactionalIdAuthorizationFailedError):
            producer.init_transactions()
    finally:
        producer.close(timeout=0)


def test_aiokafka_fails(bootstrap: str) -> None:
    async def start() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id="tx")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await producer.start()
        finally:
            await producer.stop()

    with pytest.raises(aiokafka.errors.TransactionalIdAuthorizationFailed):
        asyncio.run(start())
