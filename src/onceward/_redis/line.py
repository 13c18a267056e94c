"""One connection to Redis from a thread, whose every wait a stop can end, also in the middle of a reply.

The driver connects and logs in. After that this reads and writes the socket itself: the driver's own calls wait for the
socket alone.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Sequence
from time import monotonic
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, InvalidResponse, TimeoutError

from onceward._process.aside import Stopped, call_aside
from onceward._process.stop import LAST_WAIT, BlockingStop
from onceward._redis.connections import RedisCommand, pack

READ_SIZE = 65536
MORE = object()
"""Stands for a reply that is not complete yet."""
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class RedisLine:
    """One connection. A reply may take `patience` seconds; None is forever."""

    __slots__ = (
        "_connection",
        "_either",
        "_patience",
        "_pid",
        "_reader",
        "_sock",
        "_stop",
        "_this",
        "_until",
    )

    def __init__(self, connection: Any, patience: float | None, stop: BlockingStop | None) -> None:
        self._connection = connection
        self._patience = patience
        self._stop = stop
        self._pid = os.getpid()
        self._until: float | None = None
        """When to give up on the current exchange, since a stop was requested."""
        try:
            call_aside(
                connection.connect, stop=stop, grace=LAST_WAIT
            )  # may look up a name, which no signal ends
        except Stopped:
            raise TimeoutError(_out_of_time()) from None
        self._sock: socket.socket = connection._sock
        self._sock.setblocking(False)
        self._reader = reader_of(connection)
        self._this = select.poll()
        self._this.register(self._sock, select.POLLIN)
        self._either = self._poll_for(select.POLLIN)
        if isinstance(self._sock, ssl.SSLSocket):
            # After the handshake TLS sends its own messages, which must not be mistaken for a broken connection.
            self.send([("PING",)])
            self.reply()

    def is_usable(self) -> bool:
        """Whether Redis has left it open since its last use, and it was not inherited in a fork."""
        return self._pid == os.getpid() and not self._this.poll(0)

    def heed(self, stop: BlockingStop | None) -> None:
        """Let this stop end the waits of the next exchange."""
        if stop is not self._stop:
            self._stop = stop
            self._either = self._poll_for(select.POLLIN)

    def _poll_for(self, events: int) -> Any:
        poll = select.poll()
        poll.register(self._sock, events)
        if self._stop is not None:
            poll.register(self._stop.fd(), select.POLLIN)
        return poll

    def send(self, commands: Sequence[RedisCommand]) -> None:
        self._until = None
        left = memoryview(pack(commands))
        while left:
            try:
                left = left[self._sock.send(left) :]
            except _NOT_NOW:
                self._wait(self._poll_for(select.POLLOUT))
            except OSError as error:
                raise lost(error) from error

    def reply(self) -> Any:
        """Return the next reply, error replies as values, except those that say that the connection is of no use."""
        while (reply := self._reader.gets()) is MORE:
            if not self._is_buffered():
                self._wait(self._either)
            self._receive()
        if isinstance(reply, ConnectionError):
            raise reply
        return reply

    def wait(self, seconds: float | None) -> bool:
        """Wait for the reply to a command that blocks in Redis. Return False if a stop came first."""
        if self._reader.has_data() or self._is_buffered():
            return True  # it arrived together with the replies before it
        ready = self._either.poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise TimeoutError(f"no reply in {seconds:g} s")
        if self._stop is not None and self._stop.requested:
            return False
        self._receive()
        return True

    def close(self) -> None:
        self._connection.disconnect()

    def _is_buffered(self) -> bool:
        """Whether TLS has decrypted more than was read."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_SIZE)
        except _NOT_NOW:  # a message of TLS itself
            return
        except OSError as error:
            raise lost(error) from error
        if not data:
            raise ConnectionError("Connection closed by server.")
        self._reader.feed(data)

    def _wait(self, either: Any) -> None:
        """Wait until the socket is ready, but not for long after a stop."""
        ready = either.poll(None if self._patience is None else self._patience * 1000)
        if not ready:
            raise TimeoutError(f"no reply in {self._patience:g} s")
        if self._stop is None or self._sock.fileno() in dict(ready):
            return
        self._until = self._until or monotonic() + LAST_WAIT
        either.unregister(self._stop.fd())
        try:
            if not either.poll(max(self._until - monotonic(), 0.0) * 1000):
                raise TimeoutError(_out_of_time())
        finally:
            either.register(self._stop.fd(), select.POLLIN)


def reader_of(connection: Any) -> hiredis.Reader:
    """What takes replies apart. It makes the driver's exceptions of error replies, and `MORE` of half a reply."""
    return hiredis.Reader(
        protocolError=InvalidResponse, replyError=connection._parser.parse_error, notEnoughData=MORE
    )


def lost(error: OSError) -> ConnectionError:
    """As the driver: callers need to know one exception for a lost connection, whichever way it was lost."""
    return ConnectionError(f"the connection was lost: {error}")


def _out_of_time() -> str:
    return f"no reply within {LAST_WAIT:g} s of stop()"
