"""Build what runs from what an app declares: connectors, databases, inbox, dead letters, tasks."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward._environment import NO_CONTRACT, names_production
from onceward._secrets import mask_url, remember
from onceward._sync import run_blocking
from onceward.app.app import Consumer, Onceward, consumers_of
from onceward.app.checks import check_connections
from onceward.app.lifespan import open_services, open_services_async, taken_by
from onceward.app.services import Service, Services
from onceward.connectors.owners import set_owner
from onceward.errors import ConfigurationError
from onceward.failures.middleware import FailureRules
from onceward.middleware import Middleware
from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import URL

    from onceward.inbox import Contract
    from onceward.inbox.evidence.file import EvidenceSettings
    from onceward.limits.source import LimitedSource
    from onceward.order import OrderRule


Layer = Middleware | type[Middleware]


def task_class(consumer: Consumer) -> type[Any]:
    """Return the task class of a consumer, with its name. Evidence is bound to the function's module, and to those of
    the app's middleware and of the services that the function takes."""
    function = consumer.function
    services, taken = consumer.signature.injection
    owner = in_an_app(consumer)
    middleware = () if owner is None else tuple(owner[0].middleware)
    body = {
        "process_transaction": consumer.signature.method(function, asynchronous=consumer.asynchronous),
        "contract": consumer.contract,
        "commit": consumer.commit,
        "order_rule": consumer.order,
        "limit_keys": consumer.limit_keys,
        "takes_batches": consumer.takes_batches,
        "verification": consumer.verification,
        "outbox": consumer.outbox,
        "middleware": middleware,
        "injection": consumer.signature.injection,
        "factories": tuple(each.function for each in services.in_order(taken.values())),
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
    }
    return type(consumer.name, (AsyncConsumerTask if consumer.asynchronous else ConsumerTask,), body)


def in_an_app(thing: Any) -> tuple[Onceward, Consumer] | None:
    """The app and consumer of a decorated function or a `Consumer`; None if it has none."""
    found = consumers_of(thing.function if isinstance(thing, Consumer) else thing)
    if isinstance(thing, Consumer):
        found = [(app, each) for app, each in found if each is thing]
    if len(found) > 1:
        names = " or ".join(f"app.consumers.{each.name}" for _, each in found)
        raise ConfigurationError(
            f"{thing.__name__} is {len(found)} consumers; name one of them: MODULE:{names}"
        )
    return found[0] if found else None


def as_task(thing: Any) -> Any:
    """The task class of a decorated function or a `Consumer`; anything else unchanged."""
    found = in_an_app(thing)
    return thing if found is None else task_class(found[1])


@contextmanager
def open_task(
    app: Onceward, consumer: Consumer, *middleware: Middleware, services: Mapping[Any, Any] | None = None
) -> Iterator[ConsumerTask]:
    """A task in threads, ready to consume, with extra middleware between the inbox and the source.

    `services` replaces services of the app, by name or type: a function or a class is a factory, else it is the object.
    """
    with ExitStack() as open_things:
        given = open_things.enter_context(open_services(*_services(app, consumer, services)))
        yield run_blocking(
            _build_task(app, consumer, middleware, given, open_things.callback, asynchronous=False)
        )


@asynccontextmanager
async def open_task_async(
    app: Onceward, consumer: Consumer, *middleware: Middleware, services: Mapping[Any, Any] | None = None
) -> AsyncIterator[AsyncConsumerTask]:
    """`open_task` for `async def` consumers."""
    async with AsyncExitStack() as open_things:
        opening = open_services_async(*_services(app, consumer, services))
        given = await open_things.enter_async_context(opening)
        yield await _build_task(
            app, consumer, middleware, given, open_things.push_async_callback, asynchronous=True
        )


def _services(
    app: Onceward, consumer: Consumer, fakes: Mapping[Any, Any] | None
) -> tuple[Services, list[Service], dict[str, Any]]:
    """What to open for a consumer: with the fakes, and without what is open in this process already."""
    replaced = app.services.replace(fakes or {})
    given = {name: each for name, each in app.opened.items() if name not in replaced.names}
    return replaced.services, taken_by([consumer]), {**given, **replaced.objects}


async def _build_task(
    app: Onceward,
    consumer: Consumer,
    middleware: Sequence[Middleware],
    services: dict[str, Any],
    at_the_end: Callable[[Callable[[], Any]], object],
    *,
    asynchronous: bool,
) -> Any:
    """Written for both modes: see `onceward._sync`."""
    app.check()
    check_contract(app, consumer)
    source = consumer.source
    connector = await source.open_async() if asynchronous else source.open(asynchronous=False)
    set_owner(connector, app.owner)
    at_the_end(connector.close_async if asynchronous else connector.close)
    chain = [*middleware]
    limit: LimitedSource | None = None
    records: Any = app.records
    if app.settings.database is not None:
        engine = app.engines.take(asynchronous=asynchronous)
        at_the_end(app.engines.give_back_async if asynchronous else app.engines.give_back)
        letters = await _dead_letters(engine, app, consumer, asynchronous)
        limit = _limit(engine, app, consumer, asynchronous)
        chain += [letters] if limit is None else [limit, letters]
        records = _records(engine, app, asynchronous)
        if consumer.contract is not None:
            check_connections(consumer, app.database)
            inbox = await _inbox(engine, app, consumer.contract, asynchronous)
            if consumer.order is not None:
                chain.insert(0, _order(engine, consumer, consumer.order, asynchronous))
            chain.insert(0, inbox.middleware())
    if limit is not None:
        from onceward.limits.limiter import LimitedSteps

        chain.insert(0, LimitedSteps(app.limiters[consumer.name]))
    let_go = None if limit is None else limit.let_go
    chain.insert(0, FailureRules(consumer.failures, app.board, records, app.name, consumer.identity, let_go))
    task = task_class(consumer)({"source": connector}, services, settings=app.settings.engine)
    task.destination = consumer.source.destination
    task.middleware = (*app.middleware, *chain)
    return task


def middleware_of(app: Onceward, consumer: Consumer, *more: Layer) -> list[Layer]:
    """The middleware around a consumer, outermost first, without opening anything. `more` is what the runner adds."""
    from onceward.deadletters.source.middleware import DeadLetterMiddleware
    from onceward.inbox.middleware import InboxMiddleware
    from onceward.limits.limiter import LimitedSteps
    from onceward.limits.source import LimitedSource

    inbox: list[Layer] = [] if consumer.contract is None else [InboxMiddleware]
    if consumer.order is not None:
        from onceward.order.middleware import KeepOrder

        inbox.append(KeepOrder)
    letters = [] if app.settings.database is None else [DeadLetterMiddleware]
    limits: list[list[Layer]] = [[], []] if consumer.limit is None else [[LimitedSteps], [LimitedSource]]
    return [*app.middleware, FailureRules, *limits[0], *inbox, *more, *limits[1], *letters]


def _records(engine: Any, app: Onceward, asynchronous: bool) -> Any:
    """Where outages and pauses are noted."""
    from onceward.failures.records import FleetRecords
    from onceward.storage.database import AsyncStoragePorts, BlockingStoragePorts

    return FleetRecords(
        (AsyncStoragePorts if asynchronous else BlockingStoragePorts)(engine), owner=app.owner
    )


def limit_scope(app: Onceward, consumer: Consumer) -> str:
    """Under which the limit of a consumer is counted: apps that share a database may have some of the same name."""
    return json.dumps([app.name, *consumer.identity])


def _limit(engine: Any, app: Onceward, consumer: Consumer, asynchronous: bool) -> LimitedSource | None:
    """What keeps the limit of a consumer; None if it has none."""
    if consumer.limit is None or consumer.limit_keys is None:
        return None
    from onceward.limits.limiter import Limiter
    from onceward.limits.records import LimitRecords
    from onceward.limits.source import LimitedSource
    from onceward.storage.database import AsyncStoragePorts, BlockingStoragePorts

    ports = (AsyncStoragePorts if asynchronous else BlockingStoragePorts)(engine)
    records = LimitRecords(ports, limit_scope(app, consumer), consumer.limit, app.owner)
    app.limiters[consumer.name] = Limiter(consumer.limit_keys, records)
    return LimitedSource(app.limiters[consumer.name])


def _order(engine: Any, consumer: Consumer, rule: OrderRule, asynchronous: bool) -> Middleware:
    from onceward.order.holds import HoldReader
    from onceward.order.middleware import KeepOrder
    from onceward.storage.database import AsyncStoragePorts, BlockingStoragePorts

    ports = (AsyncStoragePorts if asynchronous else BlockingStoragePorts)(engine)
    name = consumer_id(consumer)
    return KeepOrder(rule, HoldReader(ports, name, rule.most_held), name)


async def _dead_letters(engine: Any, app: Onceward, consumer: Consumer, asynchronous: bool) -> Middleware:
    from onceward.deadletters import AsyncDeadLetters, DeadLetters
    from onceward.deadletters.source.middleware import DeadLetterMiddleware

    letters = AsyncDeadLetters(engine) if asynchronous else DeadLetters(engine)
    letters.operations.owner = app.owner
    await _await_if_needed(letters.migrate())
    order = consumer.order
    return DeadLetterMiddleware(
        letters,
        consumer=consumer_id(consumer),
        origin=consumer.source.origin,
        key_of=order.key_of if order is not None and order.holds else None,
    )


async def _inbox(engine: Any, app: Onceward, contract: Contract, asynchronous: bool) -> Any:
    from onceward.inbox import AsyncInbox, Inbox

    inbox = (AsyncInbox if asynchronous else Inbox)(engine)
    set_gate(inbox, app)
    inbox.processor.store.owner = app.owner
    await _await_if_needed(inbox.migrate())
    await _await_if_needed(inbox.register(contract))
    return inbox


def set_gate(inbox: Any, app: Onceward) -> None:
    """Have an inbox go by the app's settings, not by the environment alone."""
    inbox.set_gate(production=names_production(app.settings.env), evidence=evidence_settings(app))


def evidence_settings(app: Onceward) -> EvidenceSettings:
    from onceward.inbox.evidence.file import EvidenceSettings

    settings = app.settings
    return EvidenceSettings(settings.evidence, settings.evidence_keys, settings.evidence_unsigned)


def check_contract(app: Onceward, consumer: Consumer) -> None:
    """Raise if this is production and nobody has said whether the consumer has a contract."""
    if not consumer.says_contract and names_production(app.settings.env):
        from onceward.inbox.errors import UnprovenConsumerError

        raise UnprovenConsumerError(refusal_without_contract(consumer))


def refusal_without_contract(consumer: Consumer) -> str:
    return f"consumer {consumer.name!r} does not run in production: {NO_CONTRACT}"


async def _await_if_needed(result: Any) -> None:
    """The same method returns an awaitable in one mode and has already finished in the other."""
    if inspect.isawaitable(result):
        await result


def consumer_id(consumer: Consumer) -> str:
    return consumer.identity[0]


def _check_options(url: str, parsed: URL) -> None:
    from onceward.db.engines import unknown_sqlite_options

    if unknown := unknown_sqlite_options(parsed):
        raise ConfigurationError(
            f"the database {mask_url(url)!r} has an unknown setting {unknown[0]}; remove it: an app's database always "
            "runs with SQLite's defaults, synchronous=FULL among them"
        )


def database_url(url: str, *, asynchronous: bool) -> URL:
    """Parse a database URL, with the driver that the mode needs, whichever driver the URL names."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    from onceward.db.engines import check_sqlite_options

    remember(url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # its text may quote a password
        raise ConfigurationError(
            "the database is not a valid URL; write sqlite:///shop.db or postgresql://user@host/name, and escape / ? # "
            "@ in a password as %2F %3F %23 %40"
        ) from None
    sqlite = "sqlite+aiosqlite" if asynchronous else "sqlite"
    drivers = {"sqlite": sqlite, "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    name = parsed.drivername.partition("+")[0]
    if name not in drivers:
        raise ConfigurationError(f"the database of an app must be sqlite or postgresql, not {name}")
    if name == "sqlite" and (parsed.host or parsed.username):
        raise ConfigurationError(
            f"the database {mask_url(url)!r} names a host, which SQLite has none of; write sqlite:///shop.db, or "
            "sqlite:////var/lib/shop.db for an absolute path"
        )
    if name == "sqlite":
        _check_options(url, parsed)
        check_sqlite_options(parsed.set(drivername=sqlite))
    if (
        name == "sqlite"
        and parsed.database
        and not (parent := Path(parsed.database).absolute().parent).is_dir()
    ):
        raise ConfigurationError(f"the directory of the database does not exist: {parent}")
    return parsed.set(drivername=drivers[name])
