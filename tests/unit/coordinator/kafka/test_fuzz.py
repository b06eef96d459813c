"""Coverage-guided fuzzing by atheris, beside hypothesis in test_codec.py: crashes, slow inputs, large ones."""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.coordinator.kafka.api_keys import SERVED, is_header_flexible, request_message
from smq.coordinator.kafka.codec import compile_encoder
from smq.records import CODECS, NewRecord, encode_batch
from tests.unit.coordinator.kafka.test_codec import random_struct
from tests.unit.coordinator.kafka.test_sasl import ALL, MALFORMED, bearer
from tests.unit.coordinator.service.test_tokens import GOOD, ISSUER_KEYS, NOW, REFUSED

ROOT = Path(__file__).resolve().parents[4]
SECONDS = 60
INPUT_BYTES_MAX = 1 << 16
INPUT_S_MAX = 10  # for one input of 64 KiB, which takes milliseconds: a hundred times what a busy machine adds
RSS_MIB_MAX = 1024  # Python, every decoder of every version, and room for no more than a few requests


def _requests() -> Iterator[bytes]:
    """A valid request of every key and version, as the target reads it."""
    for number, key in enumerate(sorted(SERVED)):
        versions = SERVED[key].versions
        for version in range(versions.lo, versions.hi + 1):
            message = request_message(key)
            value = random_struct(random.Random(f"{key} {version}"), message.fields, version)
            body = b"".join(compile_encoder(message, version)(value))
            tags = b"\0" if is_header_flexible(key, version) else b""
            yield bytes((number, version - versions.lo)) + b"\xff\xff" + tags + body


def _batches() -> Iterator[bytes]:
    records = [NewRecord(key=b"k", value=b"v" * 20, timestamp_ms=1, headers=(("h", b"1"),)) for _ in range(3)]
    for codec in CODECS:
        yield encode_batch(records, codec=codec)


def _logins() -> Iterator[bytes]:
    others = (b"n,,n=user,r=abc\nc=biws,r=abc,p=AAAA", b"\0user\0wrong", bearer("e30.e30.e30") + b"\n\1")
    for message in (*MALFORMED, *others):
        for mechanism in range(len(ALL)):
            yield bytes((mechanism,)) + b"\n" + message


def _tokens() -> Iterator[bytes]:
    for token, _ in REFUSED.values():
        yield token.encode()
    yield json.dumps(GOOD | {"nbf": NOW, "scp": ["read"]}).encode()


def _keys() -> Iterator[bytes]:
    yield json.dumps(ISSUER_KEYS.jwks()).encode()
    yield json.dumps(ISSUER_KEYS.jwks(use="sig", alg="RS256", d="AQAB")).encode()


SEEDS = {"request": _requests, "batch": _batches, "sasl": _logins, "token": _tokens, "jwks": _keys}


@pytest.mark.full
@pytest.mark.timeout(SECONDS * 3)
@pytest.mark.parametrize("target", SEEDS)
def test_fuzzing_finds_no_crash_and_no_input_that_costs_much(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris has no wheel for this Python and platform: only hypothesis fuzzes here")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[target]()):
        (corpus / f"seed-{number}").write_bytes(seed[:INPUT_BYTES_MAX])
    limits = {
        "max_total_time": SECONDS,
        "max_len": INPUT_BYTES_MAX,
        "timeout": INPUT_S_MAX,
        "rss_limit_mb": RSS_MIB_MAX,
        "artifact_prefix": f"{tmp_path}/found-",
    }
    command = [sys.executable, "-m", "tests.unit.coordinator.kafka.fuzz", target, str(corpus)]
    command += [f"-{name}={value}" for name, value in limits.items()]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    found = {path.name: path.read_bytes()[:500].hex() for path in tmp_path.glob("found-*")}
    assert done.returncode == 0, f"{found}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "DONE" in done.stderr  # by the time, not because there was nothing to do
