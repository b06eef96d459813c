"""`smq health` and `smq first-start`: what the node of this machine or container says, and a request for a cluster.

Owns the questions, and that the answers are that node's own. Address and certificates are those that `smq serve`
reads. It must never load the server, because containers ask every few seconds. `cli.root` loads it when it is used.
"""

import http.client
import json
import os
import ssl
import time
from pathlib import Path
from typing import Any, Final

import click

from smq.coordinator.cli.common import done, json_option
from smq.coordinator.cli.starting import config_option
from smq.coordinator.config.addresses import format_address, is_wildcard
from smq.coordinator.config.node_toml import ServerConfig, load_config
from smq.coordinator.tls.loading import TlsError, client_context
from smq.coordinator.user_errors import ConfigError, NoAnswer, UserError
from smq.replication.net.peer_tls import node_uri, uris_of
from smq.replication.storage.directory import FILE_MODE, FIRST_START_FILE

_ANSWER_BYTES_MAX: Final = 1 << 16  # /readyz writes some 300, and warnings
_POLL_S: Final = 0.2
_HERE: Final = "127.0.0.1"  # a port on 0.0.0.0 or [::] answers there


@click.command()
@config_option
@click.option("--ready", is_flag=True, help="Ask whether the node serves requests, not only whether its process runs.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Seconds to wait for each step of the answer.",
)
@json_option
def health(config_path: Path | None, ready: bool, timeout_s: float, as_json: bool) -> None:
    """Asks the node of this machine or container whether it runs. The exit code is 0 if so, and 1 if not.

    It finds the node by the settings that `smq serve` reads, from the file and the environment, and asks its HTTP port,
    over TLS if that has it. Health checks of containers call it.

    Example: smq health --ready --config /etc/smq/node.toml
    """
    # Whether a node may listen without protection is for `smq serve` to judge, which may have had --insecure.
    config = load_config(config_path, insecure=True, environment=os.environ)
    node, word = config.node_id, "ready" if ready else "running"
    status, answer = _ask(config, "/readyz" if ready else "/healthz", timeout_s)
    if answer.get("node", node) != node:
        raise UserError(f"node {answer['node']} answers at {_shown(config)}, and this is node {node}")
    if status != http.client.OK:
        raise UserError(f"node {node} is not {word}: {answer.get('reason') or f'it answers {status}'}")
    done(f"node {node} is {word}", as_json=as_json, node=node, state=word)


@click.command("first-start")
@config_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds to wait until the cluster has begun.",
)
@json_option
def first_start(config_path: Path | None, timeout_s: float, as_json: bool) -> None:
    """Begins a new cluster. Run it once, on the machine or in the container of one node, while all nodes run.

    All of them must have empty data directories. If one has data, the others join its cluster instead.

    Example: smq first-start --config /etc/smq/node.toml
    """
    config = load_config(config_path, insecure=True, environment=os.environ)
    node, until_s = config.node_id, time.monotonic() + timeout_s
    status, answer = _ask_until(config, until_s)
    is_new = not _is_born(status, answer)
    if is_new:
        try:
            (config.data_dir / FIRST_START_FILE).touch(mode=FILE_MODE)
        except OSError as e:
            raise UserError(f"{config.data_dir}: {_reason(e)}; run this as the user of the node, on its machine") from e
    while not _is_born(status, answer):
        if time.monotonic() > until_s:
            raise UserError(f"{answer.get('reason') or 'no answer'}. The request stays: node {node} begins when it can")
        time.sleep(_POLL_S)
        status, answer = _ask_until(config, until_s)
    what = "belongs to a cluster now" if is_new else "belonged to a cluster already"
    birth = answer.get("birth", "")
    done(
        f"node {node} {what}{f': birth {birth}' if birth else ''}", as_json=as_json, node=node, birth=birth, new=is_new
    )


def _ask_until(config: ServerConfig, until_s: float) -> tuple[int, dict[str, Any]]:
    """A node that has just been started answers soon."""
    while True:
        try:
            return _ask(config, "/readyz", max(until_s - time.monotonic(), _POLL_S))
        except NoAnswer:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)


def _is_born(status: int, answer: dict[str, Any]) -> bool:
    """A node that shows no details says no more than that it is ready."""
    return bool(answer.get("birth")) or status == http.client.OK


def _ask(config: ServerConfig, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """The status, and the answer's JSON; empty if it has none. UserError if no answer of this node comes."""
    connection = _connection(config, timeout_s)
    try:
        connection.connect()
        _check_name(config, connection)
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        text = response.read(_ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as e:
        reason = f"nothing within {timeout_s:g} s" if isinstance(e, TimeoutError) else _reason(e)
        raise NoAnswer(f"node {config.node_id} does not answer at {_shown(config)}: {reason}") from e
    finally:
        connection.close()
    try:
        found = json.loads(text)
    except ValueError:
        found = {}
    return response.status, found if isinstance(found, dict) else {}


def _connection(config: ServerConfig, timeout_s: float) -> http.client.HTTPConnection:
    host, port = config.http_address
    if port == 0:
        raise ConfigError("http_address has port 0, so the node takes any free one: give it a port of its own")
    host = _HERE if is_wildcard(host) else host
    if config.http_tls is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        context = client_context(config.http_tls, is_host_checked=False)
    except TlsError as e:
        raise UserError(f"[tls]: {e}") from e
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


def _check_name(config: ServerConfig, connection: http.client.HTTPConnection) -> None:
    """UserError if another node's certificate is shown. Its host name says nothing here, where the address is one that
    is listened to."""
    if isinstance(connection.sock, ssl.SSLSocket):
        names, own = uris_of(connection.sock.getpeercert()), node_uri(config.cluster_id, config.node_id)
        if own not in names:
            raise UserError(f"{', '.join(names) or 'no node'} answers at {_shown(config)}, and this is {own}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _shown(config: ServerConfig) -> str:
    return format_address(config.http_address)
