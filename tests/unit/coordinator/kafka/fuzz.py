"""Coverage-guided fuzzing of input from clients.

    python -m tests.unit.coordinator.kafka.fuzz request|batch|sasl|token|jwks CORPUS [options]

Owns the targets; the options are libFuzzer's, and its exit code reports the result. A request may raise only
CodecError; a batch only BatchError, BatchCorrupt or LIMIT_EXCEEDED; a login nothing, and it never succeeds; a token
TokenRefused, its issuer's included; a set of keys ValueError. Run by test_fuzz.py.
"""

import asyncio
import struct
import sys

import atheris
from crc32c import crc32c

with atheris.instrument_imports(include=["smq"]):
    from smq.coordinator.kafka import codec
    from smq.coordinator.kafka.api_keys import SERVED
    from smq.coordinator.kafka.codec import CodecError
    from smq.coordinator.kafka.connection import parse_request
    from smq.coordinator.kafka.sasl import Login, SaslMisuse
    from smq.coordinator.service.tokens import TokenRefused, read_keys
    from smq.raft_state.errors import ErrorCode, SmqError
    from smq.records import CRC_START, HEADER_BYTES, LENGTH_OVERHEAD, BatchCorrupt, BatchError, validate_produced
    from smq.replication.log.decoding import decode_bounded

from tests.unit.coordinator.kafka.test_sasl import ALL, tokens, without_passwords
from tests.unit.coordinator.service.test_tokens import own

DECODED_BYTES_MAX = 1 << 20
_KEYS = sorted(SERVED)
_loop = asyncio.new_event_loop()
_world = without_passwords()
_compiled = codec._Source.compiled


def _instrumented(source: codec._Source, head: str, file: str) -> object:
    """The compiled decoders are made at run time: the import hook does not see them."""
    return atheris.instrument_func(_compiled(source, head, file))


def fuzz_request(data: bytes) -> None:
    """The first two bytes choose among the keys and versions that are served; what follows is the request's own."""
    if len(data) < 2:
        return
    key = _KEYS[data[0] % len(_KEYS)]
    versions = SERVED[key].versions
    version = versions.lo + data[1] % (versions.hi - versions.lo + 1)
    frame = struct.pack(">hhi", key, version, 1) + data[2:]
    try:
        parse_request(memoryview(frame))
    except CodecError:
        pass


def fuzz_batch(data: bytes) -> None:
    """As it came, then with its length and CRC corrected, so that the code after these checks is reached too."""
    _judge(data)
    if len(data) >= HEADER_BYTES:
        fixed = bytearray(data)
        struct.pack_into(">i", fixed, 8, len(data) - LENGTH_OVERHEAD)
        fixed[16] = 2
        struct.pack_into(">I", fixed, 17, crc32c(bytes(fixed[CRC_START:])))
        _judge(bytes(fixed))


def _judge(data: bytes) -> None:
    try:
        validate_produced(memoryview(data))
        for _ in decode_bounded(memoryview(data), DECODED_BYTES_MAX):
            pass
    except (BatchError, BatchCorrupt):
        pass
    except SmqError as e:
        if e.code is not ErrorCode.LIMIT_EXCEEDED:
            raise


def fuzz_sasl(data: bytes) -> None:
    """The first byte chooses the mechanism, and the next one ends each message. No generator knows a password here."""
    if len(data) < 2:
        return
    login = Login(_world.users, ALL, 0, _world.tokens)
    login.handshake({"mechanism": ALL[data[0] % len(ALL)]})
    for message in data[2:].split(data[1:2])[:3]:
        try:
            _loop.run_until_complete(login.authenticate({"auth_bytes": message}, 0))
        except SaslMisuse:
            break
    assert login.identity is None


def fuzz_token(data: bytes) -> None:
    """As it came, then as the claims of a token that the issuer has signed."""
    for token in (data.decode("latin-1"), own(data)):
        try:
            _loop.run_until_complete(tokens().check(token))
        except TokenRefused:
            pass


def fuzz_jwks(data: bytes) -> None:
    try:
        read_keys(data)
    except ValueError:
        pass


if __name__ == "__main__":
    target = {
        "request": fuzz_request,
        "batch": fuzz_batch,
        "sasl": fuzz_sasl,
        "token": fuzz_token,
        "jwks": fuzz_jwks,
    }[sys.argv.pop(1)]
    codec._Source.compiled = _instrumented  # type: ignore[assignment,method-assign] # for this process alone
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
