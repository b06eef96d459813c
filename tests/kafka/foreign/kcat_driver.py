"""kcat behind the drivers' protocol, one kcat process per operation. See driver.py for the operations.

kcat writes a file as a record and cannot give it a timestamp. It creates topics by naming them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.kafka.client_adapters import READ_S, Item
from tests.kafka.foreign.driver import packed, serve, unpacked

SERVERS = sys.argv[1]
_LACKS = {"is_timed": False, "is_transactional": False}


def _kcat(*arguments: str, stdin: str | None = None) -> str:
    command = ["kcat", "-b", SERVERS, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=stdin, timeout=3 * READ_S)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def _version() -> str:
    return (
        subprocess.run(["kcat", "-V"], check=True, capture_output=True, text=True)
        .stdout.split("Version ")[1]
        .split()[0]
    )


def _hello(_request: dict[str, Any]) -> dict[str, Any]:
    return {"version": _version(), "codecs": ["none", "gzip", "snappy", "lz4", "zstd"], **_LACKS}


def _create(request: dict[str, Any]) -> dict[str, Any]:
    _kcat("-L", "-t", request["topic"], "-X", "allow.auto.create.topics=true")
    return {}


def _produce(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        for number, record in enumerate(request["records"]):
            item = unpacked(record)
            file = Path(directory) / str(number)
            file.write_bytes(item.value or b"")
            arguments = ["-P", "-t", request["topic"], "-p", "0", "-z", request["codec"]]
            for name, value in item.headers:
                arguments += ["-H", f"{name}={value.decode()}"]
            if item.value is None:  # kcat makes no record of an empty file, but one of nothing after a delimiter
                _kcat(*arguments, "-Z", "-K", ":", stdin=f"{(item.key or b'').decode()}:\n")
            else:
                _kcat(*arguments, *(["-k", item.key.decode()] if item.key is not None else []), str(file))
    return {}


def _records(output: str) -> dict[str, Any]:
    return {"records": [_record(json.loads(line)) for line in output.splitlines() if line.startswith("{")]}


def _record(found: dict[str, Any]) -> dict[str, Any]:
    headers = found.get("headers", [])
    pairs = tuple((name, value.encode()) for name, value in zip(headers[::2], headers[1::2], strict=True))
    key, value = (None if found[name] is None else found[name].encode() for name in ("key", "payload"))
    return packed(Item(key, value, found["ts"], pairs), found["offset"])


def _read(request: dict[str, Any], isolation: str = "read_uncommitted") -> dict[str, Any]:
    place = ("-t", request["topic"], "-p", "0", "-o", "beginning", "-c", str(request["count"]))
    return _records(_kcat("-C", "-J", *place, "-X", f"isolation.level={isolation}"))


def _committed(request: dict[str, Any]) -> dict[str, Any]:
    return _read(request, "read_committed")


def _group(request: dict[str, Any]) -> dict[str, Any]:
    group = ("-G", request["group"], "-X", "auto.offset.reset=earliest")
    return _records(_kcat("-J", "-c", str(request["count"]), *group, request["topic"]))


def _time(request: dict[str, Any]) -> dict[str, Any]:
    at = f"s@{request['timestamp']}"
    return _records(_kcat("-C", "-J", "-t", request["topic"], "-p", "0", "-o", at, "-c", "1"))


if __name__ == "__main__":
    serve(
        {
            "hello": _hello,
            "create": _create,
            "produce": _produce,
            "read": _read,
            "committed": _committed,
            "group": _group,
            "time": _time,
        }
    )
