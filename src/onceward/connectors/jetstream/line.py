"""The connection of a queue to NATS: it also pulls messages from a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from onceward._nats.answers import T
from onceward._nats.connection import NO_STREAM, NatsConnection, NatsUnavailable
from onceward.connectors.codec import PayloadError

NANOSECONDS = 1_000_000_000
NO_RESPONDERS = "503"
ENDS = ("404", "408", "409")
"""Statuses that end a pull: no messages, no more within the time, or what the description says."""
HARMLESS = ("Leadership Change", "Server Shutdown", "Interest Expired", "Batch Completed")
"""Descriptions of the last one after which the next pull works."""


TOO_LARGE = (10054, 10097)
"""The stream takes no message of this size, or none with such headers."""
LAST_MOMENT = 0.1
"""Seconds that a request which was ended has for its answer."""


class PulledMessage(msgspec.Struct, frozen=True):
    """A message that JetStream has delivered, as its reply subject describes it."""

    body: bytes
    reply: str
    seq: int
    number: int
    """How often JetStream has delivered it, including this time."""
    enqueued_at: float

    @classmethod
    def of(cls, message: Msg) -> PulledMessage:
        tokens = message.reply.split(".")
        # $JS.ACK.stream.consumer.number.seq.consumer_seq.time.pending; newer servers put domain and account first
        number, seq, _, time = tokens[4:8] if len(tokens) == 9 else tokens[6:10]
        return cls(message.data, message.reply, int(seq), int(number), int(time) / NANOSECONDS)


class Pull:
    """One request for messages. `end` ends its wait; what has been delivered until then is kept."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []
        self.status = self.description = ""
        self._size = 0
        self._over: asyncio.Event | None = None
        self._ended = False

    def begin(self, size: int) -> None:
        self.messages.clear()
        self.status = self.description = ""
        self._size = size
        self._over = asyncio.Event()

    @property
    def is_answered(self) -> bool:
        return bool(self.status) or len(self.messages) >= self._size

    @property
    def is_ended(self) -> bool:
        return self._ended

    def end(self) -> None:
        self._ended = True
        if self._over is not None:
            self._over.set()

    async def take(self, message: Msg) -> None:
        if not message.data and message.headers and "Status" in message.headers:
            self.status = message.headers["Status"]
            self.description = message.headers.get("Description", "")
        else:
            self.messages.append(message)
        if self.is_answered and self._over is not None:
            self._over.set()

    async def wait(self) -> None:
        """Wait for the answer, or the end."""
        assert self._over is not None
        if not self._ended:
            await self._over.wait()

    async def finish(self) -> None:
        """Wait a moment for the answer after the end: what JetStream sends to nobody waits for its lease to expire."""
        self._over = asyncio.Event()
        if not self.is_answered:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), LAST_MOMENT)


class QueueLine(NatsConnection):
    user = "onceward queue"
    is_astray = False
    """Whether a stream was not where it had been, so its user must look again."""

    async def pull(
        self, stream: str, consumer: str, size: int, wait: float, pull: Pull
    ) -> list[PulledMessage]:
        """Take up to `size` messages: those that there are, or the first that comes within `wait` seconds.

        Whatever JetStream has delivered for this request when it returns is in the result, so nothing waits for a lease
        to expire. The status of an answer without messages is in `pull`.
        """
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        request: dict[str, int | bool] = {"batch": size, "no_wait": True}
        if wait:
            request["expires"] = int(wait * NANOSECONDS)
        pull.begin(size)
        inbox = self._nats.new_inbox()
        received: Subscription | None = None
        try:
            async with self._calling(subject, wait):
                received = await self._nats.subscribe(inbox, cb=pull.take, pending_bytes_limit=0)
                await self._nats.publish(subject, msgspec.json.encode(request), reply=inbox)
                await pull.wait()
                if not pull.is_answered:  # ended by a stop: take what was sent for the request meanwhile
                    await pull.finish()
                    await received.drain()  # type: ignore[no-untyped-call]
        except self.unavailable:
            if not pull.messages:
                raise
        finally:
            if received is not None:
                with suppress(NatsError):  # the connection is closed
                    await received.unsubscribe()
        return [PulledMessage.of(message) for message in pull.messages]

    @asynccontextmanager
    async def _calling(self, subject: str, wait: float = 0.0) -> AsyncIterator[None]:
        try:
            async with super()._calling(subject, wait):
                yield
        except NatsUnavailable as error:
            self.is_astray |= isinstance(error.__cause__, NoRespondersError)
            raise

    def _check(self, answer: T, problems: tuple[int, ...]) -> T:
        if answer.error is not None and answer.error.err_code in TOO_LARGE:
            raise PayloadError(f"a transaction cannot be sent: {answer.error.description} of the stream")
        self.is_astray |= answer.problem == NO_STREAM and NO_STREAM not in problems
        return super()._check(answer, problems)
