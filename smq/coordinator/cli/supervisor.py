"""A cluster of processes on this machine: starts them, waits until they are ready, reports deaths, stops them all.

Owns the child processes of `smq cluster`. It must never restart a child: the operator (or a test)
does, with `smq serve --config`. `commands.cluster` and `commands.serve` import it.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import aiohttp

from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ServerConfig, load_config
from smq.coordinator.tls.loading import client_context
from smq.coordinator.user_errors import EXIT_PORT_TAKEN, PortTaken, StartError

READY_POLL_S: Final = 0.05
READY_TIMEOUT_S: Final = 60.0  # enough to recover a long journal; if a cluster needs more, read its log
STOP_TIMEOUT_S: Final = 15.0  # draining takes up to 5 s, closing a few more
LOG_BYTES_MAX: Final = 16 << 20  # of one node.log; at the next start a larger one becomes node.log.1
LOG_TAIL_LINES: Final = 5


@dataclass(slots=True, kw_only=True)
class Child:
    """One node's process. `pid` is the node's own: there is no shell in between."""

    config: ServerConfig
    log_path: Path
    process: asyncio.subprocess.Process
    watcher: "asyncio.Task[None] | None" = field(default=None)

    @property
    def pid(self) -> int:
        return self.process.pid

    def describe(self) -> dict[str, object]:
        """This node's entry in the ready file."""
        return describe_node(self.config, self.pid)


def describe_node(config: ServerConfig, pid: int) -> dict[str, object]:
    """One entry of the ready file's "nodes"."""
    return {
        "id": config.node_id,
        "pid": pid,
        "grpc": format_address(config.grpc_address),
        "http": format_address(config.http_address),
        "kafka": format_address(config.kafka_address) if config.kafka_address is not None else None,
        "data_dir": str(config.data_dir.resolve()),
    }


class Supervisor:
    """`report` takes one line for the operator."""

    def __init__(self, config_paths: list[Path], report: Callable[[str], None]) -> None:
        self._paths = config_paths
        self._report = report
        self._is_stopping = False
        self.children: list[Child] = []

    async def start(self) -> None:
        """Starts all and waits until every node is ready. If that fails: StartError, and nothing is left running."""
        try:
            for path in self._paths:
                self.children.append(await self._spawn(path))
            await self._wait_ready()
        except BaseException:  # cancelled, too: no process is left running
            await self.stop()
            raise
        for child in self.children:
            child.watcher = asyncio.create_task(self._watch(child))

    async def wait_all_dead(self) -> None:
        """Returns when every child has died without a stop."""
        for child in self.children:
            await child.process.wait()

    async def stop(self) -> None:
        """Sends SIGTERM to all, and SIGKILL to those that do not end in time."""
        self._is_stopping = True
        for child in self.children:
            _signal(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                for child in self.children:
                    await child.process.wait()
        except TimeoutError:
            for child in self.children:
                _signal(child, signal.SIGKILL)
                await child.process.wait()

    # ----------------------------------------------------------------------------------------------- children
    async def _spawn(self, path: Path) -> Child:
        log_path = path.parent / "node.log"
        with _open_log(log_path) as log_file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "smq.coordinator.cli.main",
                "serve",
                "--config",
                str(path),
                "--first-start",
                "--child",
                stdin=asyncio.subprocess.PIPE,  # held open: when it ends, the child knows that we are gone
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C reaches only us, and we stop the children in order
            )
        return Child(config=load_config(path), log_path=log_path, process=process)

    async def _wait_ready(self) -> None:
        waiting = list(self.children)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
                while waiting:
                    for child in self.children:
                        if child.process.returncode is not None:
                            raise _start_failure(child)
                    if await _is_ready(session, waiting[0]):
                        waiting.pop(0)
                    else:
                        await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            names = ", ".join(f"node {c.config.node_id} ({c.log_path})" for c in waiting)
            raise StartError(f"not ready within {READY_TIMEOUT_S:.0f} s: {names}; see the log named there") from None

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        if not self._is_stopping:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            how += _ADVICE.get(code, "")
            self._report(
                f"node {child.config.node_id} (pid {child.pid}) {how}; its log is {child.log_path}. Restart it with: "
                f"smq serve --config {child.log_path.parent / 'node.toml'}"
            )


# LMDB reads its file through a memory map: an unreadable or missing page ends the process without a message.
_MAP_UNREADABLE: Final = (
    ", as happens if a data file is damaged or truncated: look for disk errors (dmesg). If it ends so again, move its "
    "data directory away before the next restart, and it rejoins with an empty one"
)
_ADVICE: Final = {-signal.SIGBUS: _MAP_UNREADABLE, -signal.SIGSEGV: _MAP_UNREADABLE}


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _open_log(path: Path) -> IO[bytes]:
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def _start_failure(child: Child) -> StartError:
    lines = child.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    last_line = lines[-1] if lines else "nothing"
    kind = PortTaken if child.process.returncode == EXIT_PORT_TAKEN else StartError
    return kind(
        f"node {child.config.node_id} ended with exit code {child.process.returncode} while starting; "
        f"its last line is: {last_line} (log: {child.log_path})"
    )


async def _is_ready(session: aiohttp.ClientSession, child: Child) -> bool:
    """Whether this very process is ready: another may hold its port, and this one is about to find out."""
    tls = child.config.http_tls
    url = f"{'http' if tls is None else 'https'}://{format_address(child.config.http_address)}/readyz"
    try:
        context = client_context(tls) if tls is not None else True
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=2), ssl=context) as response:
            return response.status == 200 and (await response.json())["pid"] == child.pid
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
        return False
