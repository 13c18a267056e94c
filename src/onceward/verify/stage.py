"""The stage inside a child: an inbox on a database, instances of the consumer, and deliveries to them.

Each delivery goes through the engine as one transaction. In asyncio, each call runs to its end on the stage's own event
loop, so scenarios read the same in both modes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec
from sqlalchemy import URL, text

from onceward._sync import as_coroutine, run_blocking
from onceward.app.lifespan import open_services_async
from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector
from onceward.inbox import AsyncInbox, Inbox
from onceward.inbox.effects import Claim, key_of
from onceward.inbox.stores.types import Key
from onceward.outbox.outbox import Place
from onceward.task.groups import pace, together
from onceward.task.lifecycle import text_of
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.task.work import Outcome, OutcomeStatus
from onceward.transaction import Settlement, Transaction, Verdict
from onceward.verify.children import Watchdog
from onceward.verify.databases import async_engine_at, engine_at
from onceward.verify.fakes import names_of, outside_services, replace_services
from onceward.verify.faults import DeliveryBoundary, Fault, Probe
from onceward.verify.plan import VerificationPlan
from onceward.verify.rows import schema, tables
from onceward.verify.watch import background, blockade, intrusions
from onceward.verify.watch.calls import OutsideCall
from onceward.verify.watch.intrusions import Phase, during
from onceward.verify.watch.service import outside

AGAIN = {name: {"retry": {"max_attempts": 2}} for name in ("process", "success")}
TRY_AGAIN = ConsumerPolicy.model_validate({"steps": AGAIN})
POSTPONED_FOR = 0.02
"""Seconds until a postponed event is delivered again."""


Keys = Mapping[str, str | None]
"""Those by which a consumer keeps order and is limited."""


class Delivery(msgspec.Struct, frozen=True):
    """The outcome of one delivery of an event."""

    event: str
    status: OutcomeStatus
    duplicate: bool = False
    called: bool = False
    """Whether the handler was called."""
    writes: int = 0
    queries: int = 0
    locks: int = 0
    """Statements that wait for a lock."""
    effects: int = 0
    touched: bool = False
    """Whether a write of the handler affected a row, even if it left it as it was."""
    error: str = ""
    swallowed: bool = False
    """The handler returned although a call it made had raised."""
    returned: str = ""
    """The handler's return value, if that was an exception."""
    calls: tuple[OutsideCall, ...] = ()
    """Calls of outside services in effects."""
    keyless: tuple[str, ...] = ()
    """Effects whose call does not read its key."""
    misjudged: tuple[str, ...] = ()
    """Effects that were called refused, although the provider gave no answer."""
    rekeyed: tuple[OutsideCall, ...] = ()
    """Calls that were made again with another key, although the provider gave no answer."""
    unheard: tuple[str, ...] = ()
    """Effects that returned, although the provider gave no answer to their only call."""
    said: tuple[str, ...] = ()
    """The statements of the writes."""
    assumed: tuple[str, ...] = ()
    """Effects that reconcile called done or refused, although the provider gave no answer."""
    unsent: str = ""
    """Why a message was not sent, although the handler returned."""
    keys: tuple[Keys, Keys] = ({}, {})
    """Those of the event, before its delivery: each is computed twice."""

    @property
    def succeeded(self) -> bool:
        return self.status is OutcomeStatus.SUCCEEDED


class Stage:
    """What one process uses to run the consumer on one database."""

    def __init__(self, plan: VerificationPlan, url: URL, watchdog: Watchdog) -> None:
        self.plan = plan
        self.watchdog = watchdog
        self._runner = asyncio.Runner() if plan.asynchronous else None
        make_engine: Any = async_engine_at if plan.asynchronous else engine_at
        self.engine = make_engine(url)
        # The production gate would refuse a consumer that is not proven yet.
        self.inbox: Any = (AsyncInbox if plan.asynchronous else Inbox)(self.engine)
        self.inbox.set_gate(production=False)
        self._fix_keys()
        outbox = getattr(plan.consumer, "outbox", None)
        if outbox is not None:
            outbox.move(Place(url.get_backend_name(), url.database))
        self._open_services = AsyncExitStack()
        with blockade.lifted():
            given, outer = self._services()
        reads = plan.options.reads if plan.injection is None else names_of(plan.injection, plan.options.reads)
        self._reads = [given[name] for name in reads if name in given]
        intrusions.allow(self._reads)
        for name in outer:
            given[name] = outside(name, given[name])
        self.services = {**given, "inbox": self.inbox}
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with blockade.lifted():
            self._run(self._open_services.aclose())
        self.disconnect()
        if self._runner is not None:
            self._runner.close()

    def disconnect(self) -> None:
        """Close the connections to the database; the next use opens new ones."""
        disposing = self.engine.dispose()
        if self._runner is not None:
            self._run(disposing)

    def _services(self) -> tuple[dict[Any, Any], Iterable[str]]:
        """The consumer's services by name, and which of them stand for the outside world."""
        options, injection = self.plan.options, self.plan.injection
        given = self.plan.services(self.engine)
        if injection is None:
            return given, options.outside
        replaced = replace_services(self.plan.consumer.__name__, injection, given, options.reads)
        wanted = injection.parameters.values()
        opening = open_services_async(replaced.services, wanted, replaced.objects)
        opened = self._run(self._open_services.enter_async_context(opening))
        return opened, {*options.outside, *outside_services(injection, replaced, options.reads)}

    # ── the consumer ────────────────────────────────────────────────────────────────────────────────────

    def instance(self) -> Any:
        """A new instance of the consumer, with a probe."""
        connector = AsyncMemoryConnector() if self.plan.asynchronous else MemoryConnector()
        self.watchdog.pet("the consumer's __init__")
        self._block()
        with during(Phase.EARLY):
            task = self.plan.make({"source": connector}, dict(self.services))
        task.probe_of_verification = probe = Probe(self.watchdog)
        probe.attach(task)
        return task

    def adopt(self, task: Any) -> None:
        """Move an instance from another stage to this one."""
        task.services = dict(self.services)
        self._block()

    def _block(self) -> None:
        """Make no outside calls from now on: user code runs next."""
        blockade.install(self.url, self.plan.options.allow, self._reads)

    # ── deliveries ──────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, task: Any, event: Transaction, fault: Fault | None = None) -> Delivery:
        """Deliver an event once."""
        delivery: Delivery = self._run(self._deliver(task, event, fault))
        return delivery

    def settle(self, task: Any, event: Transaction, fault: Fault | None = None) -> list[Delivery]:
        """Deliver an event until it succeeds, as a source does, or until it fails without an injected fault."""
        deliveries: list[Delivery] = self._run(self._settle(task, event, fault))
        return deliveries

    def settle_in_place(self, task: Any, event: Transaction, fault: Fault) -> list[Delivery]:
        """Deliver an event with a policy that tries it again at once: in the same thread, task and context."""
        return [self._run(self._deliver(task, event, fault, TRY_AGAIN))]

    def settle_together(
        self, task: Any, events: Sequence[Transaction], fault: Fault | None, at_once: int = 1
    ) -> list[str]:
        """Deliver the events in one batch, until all are done. Returns what is wrong with those that are not."""
        found: list[str] = self._run(self._settle_together(task, events, fault, at_once))
        return found

    async def _settle_together(
        self, task: Any, events: Sequence[Transaction], fault: Fault | None, at_once: int
    ) -> list[str]:
        consume = (
            task.consume_transactions if self.plan.asynchronous else as_coroutine(task.consume_transactions)
        )
        task.connectors = {"source": (feed := EventFeed(events))}
        task.probe_of_verification.begin(fault)
        self.watchdog.pet(f"{len(events)} events together")
        loop = {"batch": {"size": len(events)}, "concurrency": {"value": at_once}}
        policy = ConsumerPolicy.model_validate({"loop": loop, "steps": AGAIN})
        for module, limit in ((together, "LONGEST"), (pace, "QUICK")):
            setattr(module, limit, self.plan.options.timeout)  # no machine is too slow for a group
        until = time.monotonic() + self.plan.options.timeout
        while feed.left and time.monotonic() < until:
            try:
                with during(Phase.EARLY, processor=self.inbox.processor):
                    await consume(policy)
            except SystemExit as error:
                return [f"a handler ended its process: {_text(error)}"]
            if feed.left:
                await self.sleep(POSTPONED_FOR)
        failed = [f"event {each.transaction.id!r} failed: {each.error}" for each in feed.failed]
        return failed + [f"event {each.id!r} was not done in time" for each in feed.left]

    def settle_at_once(self, events: Sequence[Transaction], copies: int) -> list[Delivery]:
        """Deliver copies of each event at the same time, each to its own instance."""
        found: list[Delivery] = []
        instances = [self.instance() for _ in range(copies)]
        for event in events:
            self.watchdog.pet(f"{copies} copies of {event.id!r} at once")
            for deliveries in self._at_once([self._settle(task, event, None) for task in instances]):
                found += deliveries
        return found

    def settle_side_by_side(
        self,
        task: Any,
        pair: tuple[Transaction, Transaction],
        lead: Callable[[], None],
        *,
        may_begin: Callable[[], bool],
        at_the_end: Callable[[int], None],
    ) -> None:
        """Deliver two events to one instance at the same time. The second waits until it may begin; `lead` is called
        where the first runs."""
        self.watchdog.pet(f"{pair[0].id!r} and {pair[1].id!r} side by side")

        async def settle(number: int) -> list[Delivery]:
            try:
                if number == 0:
                    lead()
                while number == 1 and not may_begin():
                    await self.sleep(0.002)
                return await self._settle(task, pair[number], None)
            finally:
                at_the_end(number)

        self._at_once([settle(0), settle(1)])

    def _at_once(self, works: list[Coroutine[Any, Any, list[Delivery]]]) -> list[list[Delivery]]:
        if self._runner is not None:

            async def gather() -> list[list[Delivery]]:
                return list(await asyncio.gather(*works))

            return self._runner.run(gather())
        together = threading.Barrier(len(works))

        def run(work: Coroutine[Any, Any, list[Delivery]]) -> list[Delivery]:
            together.wait()
            return run_blocking(work)

        with ThreadPoolExecutor(len(works)) as threads:
            return list(threads.map(run, works))

    async def _settle(self, task: Any, event: Transaction, fault: Fault | None) -> list[Delivery]:
        found: list[Delivery] = []
        until = time.monotonic() + self.plan.options.timeout
        while True:
            found.append(await self._deliver(task, event, fault))
            if found[-1].succeeded or time.monotonic() > until:
                return found
            if found[-1].status is OutcomeStatus.POSTPONED:
                await self.sleep(POSTPONED_FOR)
                fault = None if task.probe_of_verification.has_struck else fault
            elif fault is None:
                return found
            else:
                fault = None

    async def _deliver(
        self, task: Any, event: Transaction, fault: Fault | None, policy: ConsumerPolicy | None = None
    ) -> Delivery:
        start = task.start_processing if self.plan.asynchronous else as_coroutine(task.start_processing)
        probe: Probe = task.probe_of_verification
        probe.begin(fault)
        if fault is not None and fault.boundary is DeliveryBoundary.BEFORE_DEDUP:
            self._arm_store(probe)
        self.watchdog.pet(f"the keys of event {event.id!r}")
        with during(Phase.EARLY):
            keys = self.plan.keys_of(event), self.plan.keys_of(event)
        self.watchdog.pet(f"the handler with event {event.id!r}")
        try:
            with during(Phase.EARLY, processor=self.inbox.processor):
                outcome = await start(event, policy)
        except (Exception, SystemExit) as error:  # noqa: BLE001  user code may exit; the kit goes on
            return Delivery(event.id, OutcomeStatus.ABANDONED, error=_text(error), keys=keys)
        finally:
            await self._linger(probe)
        return _delivery(event, outcome, probe, keys)

    async def _linger(self, probe: Probe) -> None:
        """Wait a little for what the consumer left running, to see what it does."""
        until = time.monotonic() + background.LINGER
        for scope in probe.scopes:
            is_running = background.still_running(scope)
            while is_running is not None and is_running() and time.monotonic() < until:
                await self.sleep(0.01)

    async def sleep(self, seconds: float) -> None:
        await (asyncio.sleep if self.plan.asynchronous else as_coroutine(time.sleep))(seconds)

    def _fix_keys(self) -> None:
        """Give an effect the same key whichever start of its event calls it first, so what a handler or a fake makes of
        the key, such as a digest, can be compared."""
        store = self.inbox.processor.store
        intend = store.intend

        def intend_with_fixed_key(
            transaction: Any, key: Key, name: str, token: int, _: str, valid_for: float | None
        ) -> Any:
            return intend(transaction, key, name, token, key_of(Claim(key, 1), name), valid_for)

        store.intend = intend_with_fixed_key

    def _arm_store(self, probe: Probe) -> None:
        """Inject the fault when the store is first asked whether the event is new."""
        store = self.inbox.processor.store
        for name in ("admit", "admit_only", "look_up"):
            real = getattr(store, name)

            def reach_and_call(*args: Any, real: Callable[..., Any] = real) -> Any:
                probe.reach(DeliveryBoundary.BEFORE_DEDUP)
                return real(*args)

            setattr(store, name, reach_and_call)

    def expire_leases(self) -> None:
        """As if time had passed since a crash, and an operator had cleared the failed starts."""
        self.execute("UPDATE onceward_attempts SET locked_until = NULL, ends = starts")

    # ── the database ────────────────────────────────────────────────────────────────────────────────────

    def rows(self, found: list[schema.Table], *, all_columns: bool = False) -> tables.Rows:
        """The rows of the tables; adds tables that the handler has created to them."""
        exclude = () if all_columns else self.plan.options.exclude

        def read(connection: Any) -> tables.Rows:
            found.extend(schema.discover(connection, found))
            return tables.read(connection, found, exclude)

        rows: tables.Rows = self._on_connection(read)
        return rows

    def execute(self, sql: str) -> None:
        self._on_connection(lambda connection: connection.execute(text(sql)))

    def _on_connection(self, act: Callable[[Any], Any]) -> Any:
        if self._runner is None:
            with self.engine.begin() as connection:
                return act(connection)

        async def connect_and_act() -> Any:
            async with self.engine.begin() as connection:
                return await connection.run_sync(act)

        return self._runner.run(connect_and_act())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return run_blocking(work) if self._runner is None else self._runner.run(work)


def _delivery(event: Transaction, outcome: Outcome, probe: Probe, keys: tuple[Keys, Keys]) -> Delivery:
    error = outcome.error
    return Delivery(
        event.id,
        outcome.status,
        outcome.duplicate,
        probe.called,
        probe.writes,
        probe.queries,
        probe.locks,
        probe.effects,
        probe.touched,
        "" if error is None else _text(error.__cause__ or error),
        probe.swallowed,
        _text(probe.result) if isinstance(probe.result, BaseException) else "",
        tuple(probe.calls),
        tuple(probe.keyless),
        tuple(probe.misjudged),
        tuple(probe.rekeyed),
        tuple(probe.unheard),
        tuple(probe.said),
        tuple(probe.assumed),
        "" if probe.unsent is None or not probe.returned else _text(probe.unsent),
        keys,
    )


def _text(error: BaseException) -> str:
    return text_of(error)[:500]


class EventFeed:
    """Delivers a few events, and again what was not done. Nothing is sent to it or taken from elsewhere."""

    def __init__(self, events: Sequence[Transaction]) -> None:
        self.left = list(events)
        self.failed: list[Settlement] = []

    def fetch_transactions(self, size: int) -> list[Transaction]:
        batch, self.left = self.left[:size], self.left[size:]
        return batch

    def settle_transactions(self, settlements: Sequence[Settlement]) -> None:
        self.left += [each.transaction for each in settlements if each.verdict is Verdict.RETURNED]
        self.failed += [each for each in settlements if each.verdict is Verdict.FAILED]

    async def fetch_transactions_async(self, size: int) -> list[Transaction]:
        return self.fetch_transactions(size)

    async def settle_transactions_async(self, settlements: Sequence[Settlement]) -> None:
        self.settle_transactions(settlements)
