"""The queue in PostgreSQL: the real logic of leases, in threads, on a model of its tables, statement by statement.

A statement that is lost ends its transaction. A commit whose reply is lost has happened. The locks of a process that
dies stay until the server notices.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy.exc import OperationalError

from onceward.connectors.codec import decode
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import AsyncLeasingConnector, AvailableRow, LeasingConnector
from onceward.transaction import Transaction
from tests.simulation.brokers.postgresql import Locked, ModelQueue, QueueTransaction
from tests.simulation.loop import Process
from tests.simulation.sources.source import Source, Watcher
from tests.simulation.threads import block, run_thread
from tests.simulation.wire import Wire, WireLost

T = TypeVar("T")


class ModelLeaseStore:
    """As `PostgreSqlLeaseStore`."""

    def __init__(self, source: RowSource, process: Process) -> None:
        self._source = source
        self._process = process
        self._current = source.model.begin()
        self._wait = 0.0
        process.last_wishes.append(self._die)

    @contextmanager
    def transaction(self, wait: float) -> Iterator[None]:
        model, self._wait = self._source.model, wait
        self._current = current = self._ask("BEGIN", model.begin)
        try:
            yield
        except BaseException:
            model.roll_back(current)
            raise
        self._ask("COMMIT", lambda: model.commit(current))

    def _ask(self, what: str, action: Callable[[], T]) -> T:
        """Send a statement. It waits for locks in the server."""
        source, current = self._source, self._current
        try:
            return block(source.ask(self._process, what, action, self._wait))
        except WireLost as lost:
            source.model.roll_back(current)  # unless it has committed
            raise OperationalError(what, None, Exception(str(lost))) from None

    def _die(self) -> None:
        self._source.notice_later(self._current)

    def close(self) -> None:
        return

    # ── LeaseStore

    def now(self) -> float:
        return 0.0

    def append(self, bodies: Sequence[bytes], now: float) -> None:
        self._ask("append", lambda: self._source.model.append(self._current, bodies))

    def available(self, now: float, limit: int) -> Sequence[AvailableRow]:
        model = self._source.model
        self._ask("move due", lambda: model.move_due(self._current, limit))
        return self._ask("ready", lambda: model.ready(self._current, -1, limit))

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        if not rows:
            return
        current, source = self._current, self._source
        self._ask("lease", lambda: source.model.lease(current, rows, token, until))
        for row in rows:
            current.seen.append(lambda key=row[0]: source.watcher.delivered(self._process, key, token))  # type: ignore[misc]

    def extend(self, deliveries: Sequence[Held], until: float) -> Sequence[Held]:
        model, current = self._source.model, self._current
        return [
            held
            for held in sorted(deliveries)
            if not self._ask("extend", lambda held=held: model.extend(current, held, until))  # type: ignore[misc]
        ]

    def remove(self, deliveries: Sequence[Held], transactions: Sequence[Transaction]) -> Sequence[Held]:
        model, current = self._source.model, self._current
        missed = []
        for held, transaction in sorted(zip(deliveries, transactions, strict=True), key=lambda each: each[0]):
            if self._ask("remove", lambda held=held: model.remove(current, held)):  # type: ignore[misc]
                self._ended(held, "done", transaction.id)
            else:
                missed.append(held)
        return missed

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        model, current = self._source.model, self._current
        if visible_at <= 0:
            changed = self._ask("give back", lambda: model.give_back(current, (key, token)))
        else:
            changed = self._ask("delay", lambda: model.delay(current, (key, token), visible_at, 1))
        if changed:
            self._ended((key, token), "returned")
        return changed

    def delay(self, key: int, token: int, until: float, *_: Any) -> bool:
        changed = self._ask("delay", lambda: self._source.model.delay(self._current, (key, token), until, 0))
        if changed:
            self._ended((key, token), "delayed")
        return changed

    def bury(self, key: int, token: int | None, *_: Any) -> bool:
        changed = self._ask("bury", lambda: self._source.model.bury(self._current, key, token))
        if changed and token is not None:
            self._ended((key, token), "buried")
        return changed

    def _ended(self, held: Held, how: str, id_: str | None = None) -> None:
        watcher = self._source.watcher
        self._current.seen.append(lambda: watcher.ended(self._process, *held, how, id_))


class RowQueue(AsyncLeasingConnector):
    """In asyncio: its calls are made one after another, in a simulated thread."""

    extend_from_thread = None  # type: ignore[assignment]

    def __init__(self, source: RowSource, process: Process, rules: LeaseRules) -> None:
        store: Any = ModelLeaseStore(source, process)
        super().__init__(LeasingConnector(store, rules))
        self._turn = asyncio.Lock()

    async def _call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        async with self._turn:
            return await run_thread(lambda: function(*args, **kwargs))


class RowSource(Source):
    name = "postgresql"

    def __init__(self, wire: Wire, watcher: Watcher, rules: LeaseRules, root: Process) -> None:
        self.watcher = watcher
        self._wire = wire
        self._rules = rules
        self._root = root
        self.model = ModelQueue(wire.loop.time)

    def open(self, process: Process) -> RowQueue:
        return RowQueue(self, process, self._rules)

    async def ask(self, process: Process, what: str, action: Callable[[], T], patience: float) -> T:
        wire = self._wire
        await wire.send(process, self.name, what)
        until = wire.loop.time() + patience
        while True:
            try:
                result = action()
                break
            except Locked as locked:
                if wire.loop.time() >= until:
                    raise OperationalError(what, None, Exception(f"lock timeout: {locked}")) from None
            await asyncio.sleep(0.05)
        await wire.receive(process, self.name, what)
        return result

    def notice_later(self, transaction: QueueTransaction) -> None:
        """That the process of this transaction is gone."""
        delay = self._wire.random.choice((0.0, 1.0, 8.0))
        self._wire.loop.call_later(delay, self.model.roll_back, transaction, context=self._root.context)

    def left(self) -> list[Any]:
        return [*self.model.rows.items(), *self.model.locked]

    def totals(self) -> tuple[int, int, int]:
        done = sum(how == "done" for how in self.watcher.ends.values())
        return len(self.watcher.ends) + len(self.model.rows), done, len(self.model.dead)

    def buried(self) -> Counter[str]:
        return Counter(decode(body).id for body in self.model.dead.values())
