"""A driver of NATS whose messages cross the wire to a model of the server.

Requests may overtake each other, as in a cluster, where streams and consumers have different leaders. Answers keep
their order. A message that is lost may take its connection with it, or nobody notices. A request may arrive after its
sender has given up on it, or is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, Protocol

from nats.aio.client import ServerVersion
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from onceward._nats.connection import CALL_WAIT
from tests.simulation.brokers.jetstream import Answer
from tests.simulation.loop import Process, here
from tests.simulation.wire import Wire, WireLost


class NatsServer(Protocol):
    """What the driver speaks to."""

    name: str
    wire: Wire
    root: Process
    late: float
    """How often a message arrives after its sender has given up."""
    is_down: bool

    def serve(
        self,
        client: SimulatedNats,
        sent: float,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        answer: Answer,
    ) -> None: ...

    def join(self, client: SimulatedNats) -> None: ...

    def leave(self, client: SimulatedNats) -> None:
        """Its connection is gone, and the server knows."""
        ...


class Subscription:
    def __init__(self, client: SimulatedNats, subject: str) -> None:
        self._client = client
        self._subject = subject

    async def unsubscribe(self) -> None:
        self._client.listeners.pop(self._subject, None)

    drain = unsubscribe


class SimulatedNats:
    """As `nats.aio.client.Client`."""

    max_payload = 1 << 20
    connected_server_version = ServerVersion("2.12.0")
    last_error = None

    def __init__(self, source: Any) -> None:
        self.process = here()
        self._source: NatsServer = source
        self._numbers = count()
        self.listeners: dict[str, Callable[[Msg], Any]] = {}
        self._last: asyncio.Task[None] | None = None
        """Receives the last answer so far."""
        self.is_connected = False
        self._on_disconnect: Callable[[], Any] = lambda: None
        self._on_reconnect: Callable[[], Any] = lambda: None

    async def connect(
        self, servers: Any, *, disconnected_cb: Any = None, reconnected_cb: Any = None, **_: Any
    ) -> None:
        self._on_disconnect, self._on_reconnect = disconnected_cb, reconnected_cb
        try:
            await self._source.wire.send(self.process, self._source.name, "connect")
        except WireLost as lost:
            raise OSError(str(lost)) from None
        if self._source.is_down:
            raise ConnectionRefusedError("nats is down")
        self.is_connected = True
        self._source.join(self)
        self.process.last_wishes.append(self._die)

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._numbers)}"

    async def subscribe(self, subject: str, cb: Any, **_: Any) -> Subscription:
        self.listeners[subject.removesuffix(".*")] = cb
        return Subscription(self, subject)

    async def publish(
        self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.process.start(self._send(subject, data, headers or {}, reply))

    async def request(
        self, subject: str, data: bytes, timeout: Any = None, headers: Mapping[str, str] | None = None
    ) -> Msg:
        answered: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        async def take(message: Msg) -> None:
            if not answered.done():
                answered.set_result(message)

        inbox = self.new_inbox()
        subscription = await self.subscribe(inbox, cb=take)
        self.process.start(self._send(subject, data, headers or {}, inbox))
        try:
            message = await answered
        finally:
            await subscription.unsubscribe()
        if message.headers and message.headers.get("Status") == "503":
            raise NoRespondersError
        return message

    async def close(self) -> None:
        self.is_connected = False
        self._source.leave(self)

    # ── the wire ────────────────────────────────────────────────────────────────────────────────────────

    async def _send(self, subject: str, data: bytes, headers: Mapping[str, str], inbox: str) -> None:
        source, wire, process = self._source, self._source.wire, self.process
        what, sent = _name(subject, data), wire.loop.time()

        def answer(reply: str, body: bytes, more: Mapping[str, str]) -> None:
            if process.alive:
                message = Msg(self, inbox, reply, body, dict(more))  # type: ignore[arg-type]
                self._last = process.start(self._receive(message, what, self._last))

        deliver = partial(source.serve, self, sent, subject, data, headers, answer)
        if wire.random.random() < source.late:
            delay = wire.random.choice((CALL_WAIT + 0.1, 12.0, 33.0))
            wire.history.note(process, "%s: %s arrives in %g s", source.name, what, delay)
            wire.loop.call_later(delay, deliver, context=source.root.context)
            return
        try:
            await wire.send(process, source.name, what)
        except WireLost:
            self._break_perhaps()
        else:
            source.root.context.copy().run(deliver)

    async def _receive(self, message: Msg, what: str, before: asyncio.Task[None] | None) -> None:
        try:
            await self._source.wire.receive(self.process, self._source.name, what)
        except WireLost:
            self._break_perhaps()
            return
        if before is not None:
            await before
        listen = self._listener(message.subject)
        if listen is not None and self.is_connected:
            await listen(message)

    def _listener(self, inbox: str) -> Callable[[Msg], Any] | None:
        return self.listeners.get(inbox) or self.listeners.get(inbox.rpartition(".")[0])

    def _break_perhaps(self) -> None:
        """Nobody notices a message that is lost, unless the connection is."""
        if self._source.wire.random.random() < 0.5:
            self.lose_connection()

    def lose_connection(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self._source.leave(self)
            self.process.start(self._reconnect())

    async def _reconnect(self) -> None:
        await self._on_disconnect()
        await asyncio.sleep(self._source.wire.random.choice((0.1, 2.0)))
        while self._source.is_down or self._source.name in self.process.cut_off:
            await asyncio.sleep(0.5)
        self.is_connected = True
        self._source.join(self)
        await self._on_reconnect()

    def _die(self) -> None:
        # The server notices at once if the machine is still there to close the connection.
        if self._source.wire.random.random() < 0.5:
            self._source.leave(self)


def _name(subject: str, data: bytes) -> str:
    """Name what a message asks for."""
    if subject.startswith("$JS.ACK."):
        return f"{data.partition(b' ')[0].decode()} of message {subject.split('.')[5]}"
    return subject.removeprefix("$JS.API.")
