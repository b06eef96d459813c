"""A relay between a client and a node that stops reading from the node on request.

Client libraries read by themselves, whatever their user does. Through this relay, a node sees a client that does not.
"""

import contextlib
import socket
import threading


class SlowReader:
    """One connection at a time to `target`; the client's bytes always pass."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._reads = threading.Event()
        self._reads.set()
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def stop_reading(self) -> None:
        self._reads.clear()

    def close(self) -> None:
        self._reads.set()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                node = socket.create_connection(self._target)
                self._open += (client, node)
                for source, to, may_read in ((client, node, None), (node, client, self._reads)):
                    threading.Thread(target=_pump, args=(source, to, may_read), daemon=True).start()


def _pump(source: socket.socket, to: socket.socket, may_read: threading.Event | None) -> None:
    with contextlib.suppress(OSError):
        while True:
            if may_read is not None:
                may_read.wait()
            data = source.recv(1 << 16)
            if not data:
                return
            to.sendall(data)
