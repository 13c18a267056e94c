"""A connection to NATS JetStream. Every call is answered, or raises `NatsUnavailable` and may be repeated.

It does three things with a stream: append a message, or many atomically, only if the last one of its subject is the one
that the caller has seen; read the last message of a subject; and read a page of messages in order. The stream's leader
answers the first two; a page comes from any replica, which may be a moment behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Self
from urllib.parse import ParseResult

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from onceward._nats.answers import (
    NO_STORAGE,
    Answer,
    Configured,
    FoundMessage,
    Info,
    KeptMessage,
    Removed,
    StreamConfig,
    StreamState,
    T,
    Taken,
    is_full,
)
from onceward._nats.page import NatsPage, NatsReplies
from onceward._secrets import mask, mask_url
from onceward.errors import ConfigurationError, OncewardError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.nats"))

CALL_WAIT = 5.0
"""Seconds until an unanswered call is given up."""
NO_OTHER_WAIT: Any = None
"""Disables the client's own timer, which would only cost time."""
OLDEST_NATS = (2, 12)
OPEN_WAIT = 30.0
"""Seconds that a cluster which has just started may take to elect its leaders."""
RECONNECT_WAIT = 0.1
ON_ITS_WAY = 0.002
"""Seconds until the next check for a message that the cluster is agreeing on."""

LIMITED = "onceward-limited"
"""In the metadata of a stream whose limit is from here."""
NO_MESSAGE = 10037
NOT_THERE = 10043
NO_STREAM = 10059
NO_JETSTREAM = (10039, 10076)
"""Not enabled for the account, or not at all."""
NO_CLUSTER = 10074
"""More than one replica needs a cluster."""
ANOTHER_LAST = (10071, 10164)
"""The subject has another last message; or one is in flight in the cluster."""

Message = tuple[str, bytes, Mapping[str, str]]
"""Subject, data, headers."""


def token(text: str) -> str:
    """Hash any text to a part of a subject, which cannot have spaces, dots and stars."""
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:24]).decode()


class NatsUnavailable(OncewardError):
    """NATS does not answer now, or could not do it; try again."""


class NatsFull(NatsUnavailable):
    """JetStream has no room."""


class NatsConnection:
    """One connection, which reconnects by itself. Calls in flight when it breaks have an unknown outcome."""

    user = "onceward"
    """Names the connection in the lists of the server, and its owner in messages."""
    unavailable: type[OncewardError] = NatsUnavailable
    full: type[OncewardError] = NatsFull
    refused: type[OncewardError] = ConfigurationError
    """What it raises; a subclass has the errors of its own room."""

    def __init__(self, url: str, **options: Any) -> None:
        self._servers = url.split(",")
        self._options = options
        self._address = mask_url(url)
        self._nats = Client()
        self._opening = asyncio.timeout(CALL_WAIT)
        self._renewing: asyncio.Task[None] | None = None
        self._closed = self._ended = False
        self.generation = 0
        """How often it was lost and made again: what NATS knew before, a server that was killed may have forgotten."""
        self._calls: dict[asyncio.Timeout, str] = {}
        """Calls that wait for an answer, and their subjects."""
        self._refusals: dict[asyncio.Timeout, str] = {}
        self._inbox = self._nats.new_inbox()
        self._expected: dict[str, NatsPage | NatsReplies] = {}
        """What is being received, by the subject that it is sent to."""
        self._numbers = count()

    @classmethod
    async def connect(cls, url: str, **options: Any) -> Self:
        """`url` names one or more servers of a cluster, separated by commas; the others are discovered. `options` are
        more arguments of `nats.connect`, such as credentials."""
        link = cls(url, **options)
        try:
            await link._connect()
            link._check_version()
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def largest_message(self) -> int:
        """Bytes, including headers."""
        return self._nats.max_payload

    @property
    def servers(self) -> list[ParseResult]:
        """Those in the URL, and those of the cluster that were discovered."""
        return self._nats.servers

    async def stream(self, name: str, config: Mapping[str, Any]) -> int:
        """Create the stream, or use it as it is. Return how many replicas it has."""
        deadline = time.monotonic() + OPEN_WAIT
        while True:
            try:
                return await self._stream(name, config)
            except self.unavailable as error:  # a cluster that has just started has no leader yet
                if time.monotonic() > deadline:
                    raise self.unavailable(
                        f"cannot open the JetStream stream {name}: {error}; NATS needs JetStream enabled "
                        "(nats-server --jetstream) and as many servers running as there are replicas"
                    ) from error
                await asyncio.sleep(RECONNECT_WAIT)

    async def publish(self, subject: str, data: bytes) -> None:
        """Append a message. Durable when this returns."""
        await self._publish(subject, data, None)

    async def put(
        self, subject: str, data: bytes, *, last: int, headers: Mapping[str, str] | None = None
    ) -> int | None:
        """Append a message. Return its sequence; None if the subject's last message is not `last` (0 is none)."""
        expected = {"Nats-Expected-Last-Subject-Sequence": str(last)}
        taken = await self._publish(subject, data, expected if headers is None else {**headers, **expected})
        return None if taken.problem else taken.seq

    async def put_if_absent(
        self, stream: str, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> int | KeptMessage:
        """Append a message. Return its sequence, or the message that this subject has already."""
        deadline = time.monotonic() + CALL_WAIT
        while True:
            full: OncewardError | None = None
            try:
                taken = await self.put(subject, data, last=0, headers=headers)
                if taken is not None:
                    return taken
            except self.full as error:
                full = error
            known = await self.last(stream, subject)
            if known is not None:
                return known
            if full is not None:
                raise full
            if time.monotonic() > deadline:
                raise self.unavailable(
                    f"the cluster has not agreed on the first message of {subject}; try again"
                )
            await asyncio.sleep(ON_ITS_WAY)  # another client's message: it will be stored, or fail

    async def put_all_if_absent(self, messages: Sequence[Message]) -> int | None:
        """Append all or none, consecutively. Return the sequence of the first; None if a subject has a message."""
        return await self.put_all(messages, {"Nats-Expected-Last-Subject-Sequence": "0"})

    async def put_all(self, messages: Sequence[Message], condition: Mapping[str, str]) -> int | None:
        """As `put_all_if_absent`, on another condition that these headers express."""
        first = {"Nats-Batch-Id": secrets.token_hex(8), **condition}
        async with self._calling(messages[-1][0]):
            for number, (subject, data, headers) in enumerate(messages[:-1], 1):
                more = {**headers, **first, "Nats-Batch-Sequence": str(number)}
                await self._nats.publish(subject, data, headers=more)
            subject, data, headers = messages[-1]
            more = {**headers, **first, "Nats-Batch-Sequence": str(len(messages)), "Nats-Batch-Commit": "1"}
            message = await self._nats.request(subject, data, timeout=NO_OTHER_WAIT, headers=more)
        taken = self._check(msgspec.json.decode(message.data, type=Taken), ANOTHER_LAST)
        return None if taken.problem else taken.seq - len(messages) + 1

    async def last(self, stream: str, subject: str) -> KeptMessage | None:
        return await self._get(stream, {"last_by_subj": subject})

    async def next(self, stream: str, after: int, subject: str = ">") -> KeptMessage | None:
        return await self._get(stream, {"seq": after + 1, "next_by_subj": subject})

    async def page(
        self, stream: str, after: int, limit: int, *, largest: int, subject: str | None = None
    ) -> list[Msg]:
        """Return messages above this sequence, ascending; at most a little more than `largest` bytes, but at least
        one."""
        inbox = f"{self._inbox}.{next(self._numbers)}"
        page = self._expected[inbox] = NatsPage(self.unavailable)
        request: dict[str, str | int] = {"seq": after + 1, "batch": limit, "max_bytes": largest}
        if subject is not None:
            request["next_by_subj"] = subject
        try:
            async with self._calling(f"$JS.API.DIRECT.GET.{stream}"):
                await self._nats.publish(
                    f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), reply=inbox
                )
                return await page.whole
        finally:
            del self._expected[inbox]

    async def tell(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Send these in order, each to its subject, and wait until every one has been answered."""
        inbox = f"{self._inbox}.{next(self._numbers)}"
        replies = self._expected[inbox] = NatsReplies(len(messages), self.unavailable)
        try:
            async with self._calling(messages[0][0]):
                for subject, data in messages:
                    await self._nats.publish(subject, data, reply=inbox)
                await replies.all
        finally:
            del self._expected[inbox]

    async def info(self, stream: str, **details: bool) -> StreamState:
        state = (await self.ask(f"STREAM.INFO.{stream}", details, Info)).state
        assert state is not None
        return state

    async def limit(self, stream: str, most: int) -> None:
        """Let the stream refuse messages beyond this many bytes, from every client. A stricter limit that an operator
        has set stays."""
        config = (await self.ask(f"STREAM.INFO.{stream}", {}, Configured)).config
        limit, metadata = config.get("max_bytes", -1), config.get("metadata") or {}
        if limit == most or (0 < limit < most and LIMITED not in metadata):
            return
        config |= {"max_bytes": most, "metadata": {**metadata, LIMITED: "true"}}
        if (await self.ask(f"STREAM.UPDATE.{stream}", config, Answer, NO_STORAGE)).problem:
            raise self.unavailable(
                f"JetStream cannot reserve {most:,} bytes for the stream {stream}; lower the capacity in the "
                "boundary's configuration, or raise max_file_store in that of NATS"
            )

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """Return all subjects that have a message."""
        found: list[str] = []
        while True:
            request = {"subjects_filter": pattern, "offset": len(found)}
            state = (await self.ask(f"STREAM.INFO.{stream}", request, Info)).state
            if state is None or not state.subjects:
                return found
            found += state.subjects

    async def purge(self, stream: str, **which: str | int) -> int:
        return (await self.ask(f"STREAM.PURGE.{stream}", which, Removed)).purged

    async def delete(self, stream: str, seq: int) -> int:
        """Return how many were removed: 0 if it no longer exists."""
        request = {"seq": seq, "no_erase": True}
        answer = await self.ask(f"STREAM.MSG.DELETE.{stream}", request, Answer, NO_MESSAGE, NOT_THERE)
        return 0 if answer.problem else 1

    async def ask(self, what: str, request: Mapping[str, Any], answer: type[T], *problems: int) -> T:
        """Call JetStream's API. The caller handles these `problems`; others raise `Unavailable`."""
        async with self._calling(f"$JS.API.{what}"):
            message = await self._nats.request(
                f"$JS.API.{what}", msgspec.json.encode(request), timeout=NO_OTHER_WAIT
            )
        return self._check(msgspec.json.decode(message.data, type=answer), problems)

    async def close(self) -> None:
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
        while self._calls:  # each is answered, or times out
            await asyncio.sleep(0.005)
        await self._nats.close()
        self._ended = True

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────

    async def _connect(self) -> None:
        self._opening = asyncio.timeout(CALL_WAIT)
        try:
            async with self._opening:
                await self._nats.connect(
                    self._servers,
                    name=self.user,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT,  # type: ignore[arg-type]  # fractions are fine
                    ping_interval=10,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                    closed_cb=self._on_closed,
                    **self._options,
                )
                await self._nats.subscribe(f"{self._inbox}.*", cb=self._on_answer, pending_bytes_limit=0)
        except (NatsError, OSError, TimeoutError) as error:
            reason = str(self._nats.last_error or error) or "no answer"
            raise self.unavailable(
                f"NATS at {self._address} cannot be reached: {reason}; check its URL, and that it is running"
            ) from error

    def _check_version(self) -> None:
        version = self._nats.connected_server_version
        if (version.major, version.minor) < OLDEST_NATS:
            raise ConfigurationError(
                f"NATS at {self._address} is version {version.major}.{version.minor}; {self.user} needs "
                f"{'.'.join(map(str, OLDEST_NATS))} or newer, for atomic batches"
            )

    async def _stream(self, name: str, config: Mapping[str, Any]) -> int:
        answer = await self.ask(f"STREAM.INFO.{name}", {}, Info, NO_STREAM, *NO_JETSTREAM)
        if answer.problem in NO_JETSTREAM:
            raise ConfigurationError(
                f"NATS at {self._address} has no JetStream; start it with --jetstream, or enable it for this account"
            )
        if answer.problem == NO_STREAM:
            # If another server creates it at the same moment, this one gets the same answer, or finds it next time.
            answer = await self.ask(f"STREAM.CREATE.{name}", {"name": name, **config}, Info, NO_CLUSTER)
        if answer.problem == NO_CLUSTER:
            raise ConfigurationError(
                f"NATS at {self._address} is a single server, but {config['num_replicas']} replicas need a cluster"
            )
        found = answer.config
        assert found is not None
        asked = msgspec.convert(config, StreamConfig)
        if msgspec.structs.replace(found, num_replicas=asked.num_replicas) != asked:
            raise ConfigurationError(
                f"the JetStream stream {name} exists, but was not created by onceward; choose another name"
            )
        if found.num_replicas < asked.num_replicas:
            raise ConfigurationError(
                f"the JetStream stream {name} has {found.num_replicas} replicas, not {asked.num_replicas}; change it "
                f"with `nats stream edit {name} --replicas {asked.num_replicas}`, or configure fewer"
            )
        return found.num_replicas

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str] | None) -> Taken:
        async with self._calling(subject):
            message = await self._nats.request(subject, data, timeout=NO_OTHER_WAIT, headers=headers)
        return self._check(msgspec.json.decode(message.data, type=Taken), ANOTHER_LAST)

    async def _get(self, stream: str, which: Mapping[str, Any]) -> KeptMessage | None:
        return (await self.ask(f"STREAM.MSG.GET.{stream}", which, FoundMessage, NO_MESSAGE)).message

    @asynccontextmanager
    async def _calling(self, subject: str, wait: float = 0.0) -> AsyncIterator[None]:
        """Wait for the answer to a call with this subject, which NATS may give `wait` seconds later than others."""
        if self._closed:
            raise self.unavailable(f"this connection of {self.user} is closing")
        if not self._nats.is_connected:
            raise self.unavailable(f"NATS at {self._address} cannot be reached; try again")
        try:
            async with asyncio.timeout(CALL_WAIT + wait) as call:
                self._calls[call] = subject
                try:
                    yield
                finally:
                    self._calls.pop(call)
        except TimeoutError as error:
            refusal = self._refusals.pop(call, None)
            if refusal is not None:
                raise self.refused(
                    f"NATS at {self._address} refuses this user: {refusal}; allow it in the configuration of NATS"
                ) from error
            raise self.unavailable(
                f"NATS at {self._address} did not answer, so the outcome is unknown; try again"
            ) from error
        except NoRespondersError as error:
            raise self.unavailable(
                f"NATS at {self._address} has nobody who answers: it is starting, or has no JetStream (nats-server "
                "--jetstream); try again"
            ) from error
        except NatsError as error:
            raise self.unavailable(
                f"NATS at {self._address} failed: {mask(str(error))}; try again"
            ) from error

    async def _on_answer(self, message: Msg) -> None:
        expected = self._expected.get(message.subject)
        if expected is not None:  # otherwise the call has ended
            expected.take(message)

    async def _on_disconnect(self) -> None:
        if not self._closed:
            _log.warning("lost the connection to NATS at %s; reconnecting", self._address)
        # Their answers were lost with the connection: time them out now, not later.
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)

    async def _on_reconnect(self) -> None:
        self.generation += 1
        _log.info("connected to NATS at %s again", self._address)

    async def _on_closed(self) -> None:
        if not self._closed:  # some errors make the client give up permanently
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            self._nats = Client()
            with suppress(self.unavailable):
                await self._connect()
                self.generation += 1
                return
            await asyncio.sleep(RECONNECT_WAIT)

    def _check(self, answer: T, problems: tuple[int, ...]) -> T:
        """Raise an error for a problem that is not among these."""
        if answer.error is not None and answer.error.err_code not in problems:
            if is_full(answer.error):
                raise self.full(
                    f"JetStream is full: {answer.error.description}; try again later, with the same id"
                )
            raise self.unavailable(f"JetStream failed: {answer.error.description}; try again")
        return answer

    def _refuse(self, problem: str) -> None:
        """End the calls that NATS does not permit: it does not answer them. The driver has lowered its words."""
        now = asyncio.get_running_loop().time()
        for call, subject in self._calls.items():
            if f'"{subject.lower()}"' in problem:
                self._refusals[call] = f"it may not publish to {subject}"
            elif "subscription to" in problem:
                self._refusals[call] = "it may not subscribe to _INBOX.>, where answers arrive"
            else:
                continue
            call.reschedule(now)

    async def _on_error(self, error: Exception) -> None:
        if self._ended or (self._opening.expired() and not self._closed):
            # The client's reconnect loop misses a cancellation that arrives together with a refused connection. While
            # it closes, an error must not hide the one that closes it.
            raise asyncio.CancelledError
        if "permissions violation" in str(error).lower():
            self._refuse(str(error).lower())
        _log.debug("NATS at %s: %s", self._address, error)
