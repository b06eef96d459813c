"""A Kafka proxy in front of a cluster that can keep a node's acknowledgements from producers: the batch is stored, and
its sender does not learn it.

Owns one port per node. Answers name these ports, so clients talk to the nodes through it alone.
"""

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from smq.coordinator.kafka.api_keys import ApiKey, is_header_flexible, response_message
from smq.coordinator.kafka.codec import compile_decoder, compile_encoder
from smq.testing.cluster import Cluster

# What names nodes to producers, and where: a refused Produce says who leads (KIP-951).
_WITH_ADDRESSES: Final = {ApiKey.METADATA: "brokers", ApiKey.PRODUCE: "node_endpoints"}


class WithholdingProxy:
    """From `withhold()` on, no answer of the first node that says "stored" is passed on, nor what follows it
    on its connection. The node is not told beforehand: leaderships move. These connections end when the node dies, or
    with `pass_on`."""

    def __init__(self, cluster: Cluster) -> None:
        self._is_withholding = False
        self._withheld: queue.Queue[int] = queue.Queue()  # the node, once there is one
        self._node: int | None = None
        self._choosing = threading.Lock()
        self._mute: list[socket.socket] = []
        self._listeners: dict[int, socket.socket] = {}
        self._ports: dict[int, int] = {}  # by the node's own port
        for number, node in cluster.nodes.items():
            listener = self._listeners[number] = socket.create_server(("127.0.0.1", 0))
            self._ports[int(node.kafka.rpartition(":")[2])] = listener.getsockname()[1]
        for number, listener in self._listeners.items():
            host, _, port = cluster.nodes[number].kafka.rpartition(":")
            threading.Thread(target=self._accept, args=(number, listener, (host, int(port))), daemon=True).start()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners.values())

    def withhold(self) -> None:
        self._node = None
        self._is_withholding = True

    def wait_withheld(self, timeout_s: float) -> int:
        """The node that has stored a batch whose acknowledgement is withheld. Raises queue.Empty if there is none."""
        return self._withheld.get(timeout=timeout_s)

    def pass_on(self) -> None:
        """Ends the connections with answers that were withheld; new ones pass everything on."""
        self._is_withholding = False
        for sock in self._mute:
            with suppress(OSError):  # the client has given up by itself
                sock.shutdown(socket.SHUT_RDWR)
        self._mute.clear()

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()

    def _accept(self, number: int, listener: socket.socket, address: tuple[str, int]) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                try:
                    node = socket.create_connection(address)
                except OSError:  # the node is down: so is its port here
                    client.close()
                    continue
                asked: dict[int, tuple[ApiKey, int]] = {}  # by correlation id: key and version
                for work in (self._forward_requests, self._forward_answers):
                    threading.Thread(target=work, args=(number, client, node, asked), daemon=True).start()

    def _forward_requests(
        self, _number: int, client: socket.socket, node: socket.socket, asked: dict[int, tuple[ApiKey, int]]
    ) -> None:
        with suppress(OSError), _both_closed(client, node):
            while (frame := _read_frame(client)) is not None:
                key, version, correlation = struct.unpack_from(">hhi", frame)
                asked[correlation] = ApiKey(key), version
                _send_frame(node, frame)

    def _forward_answers(
        self, number: int, client: socket.socket, node: socket.socket, asked: dict[int, tuple[ApiKey, int]]
    ) -> None:
        is_mute = False
        with suppress(OSError), _both_closed(client, node):
            while (frame := _read_frame(node)) is not None:
                key, version = asked.pop(struct.unpack_from(">i", frame)[0])
                if key is ApiKey.PRODUCE and _says_stored(frame, version) and self._is_withheld(number):
                    is_mute = True
                    self._mute.append(client)
                if not is_mute:
                    _send_frame(client, self._rewritten(frame, key, version) if key in _WITH_ADDRESSES else frame)

    def _is_withheld(self, number: int) -> bool:
        with self._choosing:
            if self._is_withholding and self._node is None:
                self._node = number
                self._withheld.put(number)
            return self._is_withholding and self._node == number

    def _rewritten(self, frame: bytes, key: ApiKey, version: int) -> bytes:
        """With our ports instead of the nodes'."""
        start = 5 if is_header_flexible(key, version) else 4
        message = response_message(key)
        body = compile_decoder(message, version)(memoryview(frame), start)
        for broker in body.get(_WITH_ADDRESSES[key]) or ():
            broker["port"] = self._ports[broker["port"]]
        return frame[:start] + b"".join(compile_encoder(message, version)(body))


def _says_stored(frame: bytes, version: int) -> bool:
    start = 5 if is_header_flexible(ApiKey.PRODUCE, version) else 4
    body = compile_decoder(response_message(ApiKey.PRODUCE), version)(memoryview(frame), start)
    return any(not p["error_code"] for topic in body["responses"] for p in topic["partition_responses"])


@contextmanager
def _both_closed(one: socket.socket, other: socket.socket) -> Iterator[None]:
    """At the end of either direction the whole connection ends."""
    try:
        yield
    finally:
        for sock in (one, other):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread of the other direction, which close() does not
            sock.close()


def _send_frame(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(struct.pack(">i", len(frame)) + frame)


def _read_frame(sock: socket.socket) -> bytes | None:
    """None at the end of the connection."""
    size = _read(sock, 4)
    return None if size is None else _read(sock, struct.unpack(">i", size)[0])


def _read(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return data
