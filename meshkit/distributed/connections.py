"""Connections to process 0's port during the roll call: those that say a line, and those that say nothing.

    port -> accept, shake hands, read -> (line, connection) -> roll_call

Anybody who reaches the port may connect to it. So nothing here waits for one of them, and those that stay silent make
room for those that come.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

_LINE_BYTES = 1024
# Silent connections at a time, beyond the job's own; a process says its line as soon as it is connected.
SPARE, _SILENT_S = 128, 20.0


class Callers:
    """The connections of a listening socket; a context manager.

    Args:
        server: listens.
        context: of TLS; None reads what is sent as it is.
        keep: connections that may be silent at the same time, beyond some spare ones.
    """

    def __init__(self, server: socket.socket, context: ssl.SSLContext | None, *, keep: int):
        self._server, self._context, self._most = server, context, keep + SPARE
        self._selector = selectors.DefaultSelector()
        self._silent: dict[Any, tuple[float, bytes]] = {}

    def __enter__(self) -> Callers:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._silent):
            self._drop(connection)
        self._selector.close()

    def lines(self, timeout_s: float) -> Iterator[tuple[bytes, Any]]:
        """Whole first lines, each with its connection, which is then the caller's; waits for the first of them.

        Args:
            timeout_s: to wait.
        """
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj in self._silent and (line := self._read(key.fileobj)) is not None:
                yield line, key.fileobj
        before = time.monotonic() - _SILENT_S
        for connection in [c for c, (since, _) in self._silent.items() if since < before]:
            self._drop(connection)

    def _accept(self) -> None:
        if len(self._silent) >= self._most:
            self._drop(next(iter(self._silent)))  # the one that has been silent longest
        try:
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError:  # it has hung up already, or this process has too many files open
            time.sleep(0.01)
            return
        self._silent[connection] = time.monotonic(), b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: Any) -> bytes | None:
        """The line once it is whole; a connection that ends, says too much or fails the handshake is dropped."""
        since, data = self._silent[connection]
        try:
            piece = connection.recv(_LINE_BYTES)  # of TLS, this goes on with the handshake
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return None
        except OSError:
            piece = b""
        data += piece
        if b"\n" in data:
            self._selector.unregister(connection)
            del self._silent[connection]
            return data.split(b"\n", 1)[0]
        if not piece or len(data) > _LINE_BYTES:
            self._drop(connection)
        else:
            self._silent[connection] = since, data
        return None

    def _drop(self, connection: Any) -> None:
        self._selector.unregister(connection)
        del self._silent[connection]
        connection.close()
