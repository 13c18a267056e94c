"""A boundary as source and sink of the engine: processes facts concurrently, and moves the cursor only past a gapless
run of facts that are done.

A fact that fails is redelivered after a while, and holds the cursor meanwhile, as the boundary's rules require. Under
`WithDeadLetters`, one that fails permanently is first buried in the store, and then the cursor passes it. Leases and
delivery counts are in memory: after a crash the boundary redelivers what was not confirmed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack

from onceward._process.aside import Stopped
from onceward._process.stop import pause
from onceward.boundary.client.client import BoundaryClient
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.errors import BoundaryError, InvalidArgument
from onceward.boundary.model import LARGEST_PAGE, Envelope, Fact, Page, StoredFact, check_consumer
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.boundary.facts import as_body, as_fact
from onceward.connectors.boundary.window import WindowQueue
from onceward.connectors.codec import current_trace_context
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.connectors.lines import KeyOf, LineBehind
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction

_log = OwnLogger(logging.getLogger("onceward.connectors.boundary"))

PAGE_BYTES = 8 * 1024 * 1024
"""More than the default, because a page repeats the held facts."""
MOST_HELD = LARGEST_PAGE
"""Facts beyond the cursor: pages begin at the cursor, and the boundary serves no larger ones."""
WORTH_FETCHING = 100
"""Fetch a page only with room for this many facts: each page repeats those that are held."""
PAUSE_PER_REPEAT = 0.0002
"""Seconds to wait per held fact, after a page that brought fewer new facts than old ones."""
LONGEST_POLL = 5.0
"""Seconds that one call waits for a fact."""
POLL = 0.1
"""Seconds between two calls to a boundary that does not wait."""

Facts = list[tuple[Envelope, Fact]]
C = TypeVar("C", BoundaryClient, AsyncBoundaryClient)


class FactConnector(Generic[C]):
    """The connector of both modes: `_call` and `_sleep` block in one and await in the other."""

    _needs: type[C]
    await_transactions: Any
    await_transactions_async: Any
    _call: Callable[..., Awaitable[Any]]
    _sleep: Callable[[float], Awaitable[None]]

    def __init__(
        self,
        client: C,
        consumer_name: str | None = None,
        *,
        from_zone: str | None = None,
        to_zone: str | None = None,
        clock: Callable[[], float] | None = None,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        self._check_client(client)
        rules = LeaseRules(**settings)
        _check_settings(consumer_name, from_zone, to_zone)
        self._client: C = client
        self._consumer = consumer_name
        self._zones = (from_zone, to_zone) if from_zone and to_zone else None
        self._queue = WindowQueue(rules, clock)
        self._window = self._queue.window
        self._fetch_at = 0.0
        self._early_at = -1
        """The last fact when the boundary last said that there is another one."""
        self._reported_gap = self._reported_obstacle = 0
        self._closed = False
        if clock is not None:  # how long a test's clock takes is not known, so nothing can wait for it
            self.await_transactions = self.await_transactions_async = None
        self.rules = rules
        self.lease = rules.lease

    def _check_client(self, client: C) -> None:
        if not isinstance(client, self._needs):
            raise ConfigurationError(
                f"{type(self).__name__} needs a {self._needs.__name__}, not {type(client).__name__}; use "
                "BoundaryConnector with BoundaryClient, AsyncBoundaryConnector with AsyncBoundaryClient"
            )

    def is_suspect(self, transaction: Transaction, /) -> bool:
        """See `onceward.connectors.base`."""
        return self._queue.is_suspect(transaction)

    # ── facts in ────────────────────────────────────────────────────────────────────────────────────────

    async def _fetch(self, size: int, extra: dict[str, Any]) -> Sequence[Transaction]:
        self._check_open()
        if self._consumer is None:
            raise ConfigurationError(
                "to fetch facts, a boundary connector needs a consumer_name: it identifies the cursor"
            )
        await self._confirm()  # in case it failed before
        await self._fetch_page(max(size, 1))
        return self._queue.fetch_transactions(size, **extra)

    async def _fetch_page(self, size: int) -> None:
        """Fetch a page, unless enough facts are ready. Never in a hot loop, however often it is called."""
        ready = self._queue.ready(size)
        wait = self._fetch_at - time.monotonic()
        if ready >= size or (ready and wait > 0):
            return
        if wait > 0:
            await self._sleep(wait)
        held = len(self._window)
        full = held > MOST_HELD - WORTH_FETCHING
        # Each page repeats the held facts. At twice their number, the old never outnumber the new for long.
        limit = 1 if full else min(2 * held + size, MOST_HELD)
        page: Page = await self._call("fetch", self._consumer, limit, PAGE_BYTES)
        fresh = [fact for fact in page.facts if fact.offset > self._window.last and not full]
        self._queue.add([(fact.offset, self._body_of(fact)) for fact in fresh])
        if page.facts:  # those before it were confirmed by another connector, or expired
            self._window.forget_up_to(page.facts[0].offset - 1)
        if full or (len(fresh) < held and len(page.facts) < limit):
            self._fetch_at = time.monotonic() + held * PAUSE_PER_REPEAT
        self._report(page, full)

    async def _await(self, seconds: float) -> bool:
        """Let the boundary wait for a fact that is not here yet, unless one that is here comes back before that."""
        self._check_open()
        due = self._queue.seconds_until_due()
        if due <= 0:
            return True
        last, wait = self._window.last, min(due, seconds, LONGEST_POLL)
        until = time.monotonic() + wait
        try:
            await self._call("fetch", self._consumer, 1, 0, wait=wait, wait_after=last)
        except Stopped:
            return False
        left = until - time.monotonic()
        is_early = left > wait / 10
        if is_early and self._early_at == last:  # in vain: an older boundary does not wait
            await pause(min(POLL, left))
        self._early_at = last if is_early else -1
        return is_early or due <= seconds

    def _body_of(self, stored: StoredFact) -> bytes:
        return as_body(stored)

    def _report(self, page: Page, full: bool) -> None:
        if page.gap is not None and page.gap.last_missing > self._reported_gap:
            self._reported_gap = page.gap.last_missing
            _log.error(
                "consumer %s missed facts %d to %d: they have expired",
                self._consumer,
                page.gap.first_missing,
                page.gap.last_missing,
            )
        obstacle = self._window.obstacle() if full else None
        if obstacle is not None and obstacle > self._reported_obstacle:
            self._reported_obstacle = obstacle
            _log.warning(
                "consumer %s fetches no further: the fact at offset %d fails, and at most %d facts beyond the cursor "
                "are held; fix what fails, or let WithDeadLetters bury it",
                self._consumer,
                obstacle,
                MOST_HELD,
            )

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        self._check_open()
        self._queue.settle_transactions(settlements)
        await self._confirm()

    async def _forget_dead(self, keys: Sequence[Any]) -> None:
        self._check_open()
        self._queue.forget_dead(keys)
        await self._confirm()

    async def _confirm(self) -> None:
        """Confirm the offset up to which everything is done. If that fails, the next settlement or fetch does it."""
        offset = self._window.finished()
        if offset is not None:
            self._window.forget_up_to(await self._call("confirm", self._consumer, offset))

    # ── facts out ───────────────────────────────────────────────────────────────────────────────────────

    async def _dispatch(self, transactions: Sequence[Transaction]) -> None:
        self._check_open()
        facts = self._facts_of(transactions)
        if len(facts) == 1:
            await self._call("append", *facts[0])  # with those of others that are sent at the same time
            return
        outcomes = await self._call("append_all", facts, in_order=True)
        for outcome in outcomes:
            if isinstance(outcome, BoundaryError):
                raise outcome

    def _facts_of(self, transactions: Sequence[Transaction]) -> Facts:
        if self._zones is None:
            raise ConfigurationError("to append facts, a boundary connector needs from_zone and to_zone")
        trace_context = current_trace_context()
        return [as_fact(transaction, self._zones, trace_context) for transaction in transactions]

    # ── the rest ────────────────────────────────────────────────────────────────────────────────────────

    def bury_failures(self) -> None:
        """From now on facts that fail permanently become dead letters, and wait for `forget_dead`.

        `WithDeadLetters` calls this; without it, a fact is redelivered until it succeeds.
        """
        self._queue.bury_failures()

    def keep_order(self, key_of: KeyOf, *, hold_dead: bool) -> None:
        """As `LeasingConnector.keep_order`, for the facts that are held here. Every process with this cursor holds all
        of them, and goes past one only when it is done."""
        self._queue.keep_order(key_of, hold_dead=hold_dead)

    def lines_behind(self, keys: Sequence[str], limit: int) -> dict[str, LineBehind]:
        """As `LeasingConnector.lines_behind`, of the facts that are held here."""
        return self._queue.lines_behind(keys, limit)

    async def lines_behind_async(self, keys: Sequence[str], limit: int) -> dict[str, LineBehind]:
        """As `LeasingConnector.lines_behind`, of the facts that are held here."""
        return self._queue.lines_behind(keys, limit)

    @property
    def in_lines(self) -> bool:
        """As `LeasingConnector.in_lines`."""
        return self._queue.in_lines

    def _extend(self, transactions: Sequence[Transaction]) -> None:
        self._check_open()
        self._queue.extend_transactions(transactions)

    def _close(self) -> None:
        self._closed = True
        self._queue.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError("this boundary connector is closed; create a new one")


def _check_settings(consumer_name: str | None, from_zone: str | None, to_zone: str | None) -> None:
    if consumer_name is None and not from_zone and not to_zone:
        raise ConfigurationError(
            "a boundary connector needs a consumer_name to consume, from_zone and to_zone to produce, or all of them"
        )
    if bool(from_zone) is not bool(to_zone):
        raise ConfigurationError(
            "a fact goes from one zone to another: pass both from_zone and to_zone, or neither"
        )
    if consumer_name is not None:
        try:
            check_consumer(consumer_name)
        except InvalidArgument as error:
            raise ConfigurationError(str(error)) from None
