"""A link: the receiving zone pulls facts from another, appends them here, and only then confirms them there.

    FetchFacts(consumer, 500)                at the source, under the durable name of this link
    the artifacts that they refer to         copied if they are missing here, verified
    AppendFacts …                            here, in the order of the source, durable
    ConfirmReceipt(consumer, last offset)    at the source

Killed anywhere in between, it begins with the same page again, and facts already here are recognized by their id. Facts
from the receiving zone itself are ignored, so none returns home; ids keep all others from going in circles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress

from onceward.backoff import Backoff
from onceward.boundary.boundary import Boundary
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.errors import BoundaryError, InvalidArgument, Unavailable
from onceward.boundary.links.receiver import Receiver, append_until_refused, artifact_of, receiver_of
from onceward.boundary.links.report import LinkReport, LinkStopped
from onceward.boundary.links.skips import find_skip
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.model import LARGEST_PAGE, ObjectRef, Page, StoredFact, check_consumer
from onceward.errors import ConfigurationError, OncewardError

PAGE = 500
"""Facts at once: enough to be fast, and few enough not to hold up a server in the same process."""
EMPTY_WAIT = 0.1
FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0
"""Seconds between two tries, at most: how long it may take until a restored link continues."""
LONGEST_NAP = 0.1
LONGEST_SILENCE = 30.0
"""Seconds without a piece of an artifact, after which the source counts as lost."""

Sleep = Callable[[float], Awaitable[object]]
Connect = Callable[[], AbstractAsyncContextManager[AsyncBoundaryClient]]


def consumer_of(zone: str) -> str:
    """Return the default name under which a zone pulls."""
    return f"zone:{zone}"


class ZoneLink:
    """Pulls from one source into one receiving side, which is a boundary in this process or a client of one.

    `connect` makes a client of the source. It is called again after every failure, for a new connection with the
    current certificate. `from_zones` are the origins that this source may send facts from; any other stops the link.
    `to_zones`: only facts for these are taken; others are ignored. Empty means all.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        side: Boundary | AsyncBoundaryClient,
        zone: str,
        *,
        consumer: str = "",
        from_zones: Sequence[str] = (),
        to_zones: Sequence[str] = (),
        longest_wait: float = LONGEST_WAIT,
        page: int = PAGE,
        metrics: BoundaryMetrics | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if not zone:
            raise ConfigurationError(f"link {name!r} needs the zone that it pulls for")
        if not longest_wait > 0:
            raise ConfigurationError(f"longest_wait of link {name!r} must be above 0, not {longest_wait}")
        if not 1 <= page <= LARGEST_PAGE:
            raise ConfigurationError(f"page of link {name!r} must be 1 to {LARGEST_PAGE}, not {page}")
        try:
            check_consumer(consumer or consumer_of(zone))
        except InvalidArgument as error:
            raise ConfigurationError(f"link {name!r} cannot pull under this name: {error}") from None
        self.name = name
        self.zone = zone
        self.consumer = consumer or consumer_of(zone)
        self._connect = connect
        self._receiver: Receiver = receiver_of(side)
        self._from_zones = frozenset(from_zones)
        self._to_zones = frozenset(to_zones)
        # With jitter, so the links of a zone do not all retry at the same moment.
        self._backoff = Backoff(FIRST_WAIT, cap=longest_wait, jitter=0.5)
        self._page = page
        self._sleep = sleep
        self._is_ending = False
        self._fetching: asyncio.Future[Page] | None = None
        self.report = LinkReport(name, self.consumer, metrics or BoundaryMetrics())

    async def run(self) -> None:
        """Run until `end()`. Failures are reported and retried after a while; it never gives up."""
        tries = 0
        while not self._is_ending:
            try:
                async with self._connect() as source:
                    while not self._is_ending:
                        is_empty = not await self._forward_page(source)
                        self.report.mark_up()
                        tries = 0
                        if is_empty:
                            await self._wait(EMPTY_WAIT)
            except _Ended:
                return
            except Exception as error:  # noqa: BLE001  a link must survive any failure
                self.report.failed(error)
                await self._wait(self._backoff.delay(tries))
                tries += 1

    def end(self) -> None:
        """Make `run` and `drain` return after the current page; at once while the source has not answered."""
        self._is_ending = True
        if self._fetching is not None:
            self._fetching.cancel()

    async def _wait(self, seconds: float) -> None:
        """Wait in naps, so it ends soon after `end()`."""
        while seconds > 0 and not self._is_ending:
            await self._sleep(min(seconds, LONGEST_NAP))
            seconds -= LONGEST_NAP

    async def drain(self) -> None:
        """Run until `end()`, or until the source has nothing more. Failures are raised: `LinkStopped` if a fact cannot
        be taken, when everything before it is here and confirmed."""
        with suppress(_Ended):
            async with self._connect() as source:
                while not self._is_ending and await self._forward_page(source):
                    pass

    async def _forward_page(self, source: AsyncBoundaryClient) -> bool:
        """Return whether there were facts."""
        # While a fact blocks the link, only that one matters.
        page = await self._fetch(source, 1 if self.report.is_stopped else self._page)
        held = self.report.fetched(page)
        if held is not None:
            self.report.skipped(held, await find_skip(source, self.consumer, held.offset))
        if page.facts:
            outcomes, trouble = await self._take(source, page.facts)
            if outcomes:
                last = page.facts[len(outcomes) - 1]
                self.report.confirmed(await source.confirm(self.consumer, last.offset), outcomes)
            if trouble is not None:
                raise trouble
        elif page.gap is not None:  # no facts follow it: it would be reported forever
            self.report.confirmed(await source.confirm(self.consumer, page.gap.last_missing))
        return bool(page.facts)

    async def _fetch(self, source: AsyncBoundaryClient, limit: int) -> Page:
        self._fetching = asyncio.ensure_future(source.fetch(self.consumer, limit))
        try:
            return await self._fetching
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_ending and task is not None and not task.cancelling():
                raise _Ended from None
            raise
        finally:
            self._fetching = None

    async def _take(
        self, source: AsyncBoundaryClient, facts: Sequence[StoredFact]
    ) -> tuple[list[str], OncewardError | None]:
        """Return the outcome of each fact up to one that could not be taken, and why it could not."""
        ignored: list[str] = []
        wanted: list[StoredFact] = []
        trouble: OncewardError | None = None
        for fact in facts:
            try:
                why = self._why_not(fact)
                if not why:
                    await self._bring_artifact(source, fact)
                    wanted.append(fact)
                ignored.append(why)
            except OncewardError as error:
                trouble = _retry_or_stop(fact, error)
                break
        appended, refused = await append_until_refused(self._receiver, wanted)
        found = iter(appended)
        outcomes: list[str] = []
        for why in ignored:
            if why:
                outcomes.append(why)
            elif (one := next(found, None)) is not None:
                outcomes.append("duplicate" if one.duplicate else "appended")
            else:
                return outcomes, None if refused is None else LinkStopped(*refused)
        return outcomes, trouble

    def _why_not(self, fact: StoredFact) -> str:
        """Return why to ignore a fact; nothing if it is to be taken. Raise `LinkStopped` if it must not come here."""
        origin = fact.envelope.from_zone
        if origin == self.zone:
            return "own"
        if self._from_zones and origin not in self._from_zones:
            raise LinkStopped(
                fact,
                f"it claims to be from zone {origin!r}, which is not in the link's from_zones",
            )
        return "not_for_us" if self._to_zones and fact.envelope.to_zone not in self._to_zones else ""

    async def _bring_artifact(self, source: AsyncBoundaryClient, fact: StoredFact) -> None:
        ref = artifact_of(fact.fact)
        if ref is not None and await self._receiver.lacks(ref):
            async with aclosing(_pieces(source, ref)) as pieces:
                await self._receiver.keep(ref, pieces)


class _Ended(Exception):
    """`end()` while the source had not answered."""


async def _pieces(source: AsyncBoundaryClient, ref: ObjectRef) -> AsyncGenerator[bytes]:
    """Yield the pieces of an object. A transfer may take any time while it makes progress."""
    async with aclosing(source.get_pieces(ref.bucket, ref.key)) as pieces:
        while True:
            try:
                async with asyncio.timeout(LONGEST_SILENCE):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise Unavailable(
                    f"no piece of object {ref.bucket}/{ref.key} arrived for {LONGEST_SILENCE:g} s; the link will retry"
                ) from None
            if piece is None:
                return
            yield piece


def _retry_or_stop(fact: StoredFact, error: OncewardError) -> OncewardError:
    """Return a transient error as it is, to be retried. Any other stops the link here until an operator acts."""
    if isinstance(error, LinkStopped) or (isinstance(error, BoundaryError) and error.retryable):
        return error
    return LinkStopped(fact, str(error))
