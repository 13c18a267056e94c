"""From what an app says to what runs: connectors, databases, inbox, dead letters, tasks."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward.app.app import Consumer, Onceward, Producer, consumers_of
from onceward.task.exceptions import ConfigurationError
from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask
from onceward.task.mixins.producer import AsyncProducerTask, ProducerTask
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import URL

    from onceward.task.report import Report


Around = Callable[[Any], Any]


def _as_it_is(connector: Any) -> Any:
    return connector


def task_class(consumer: Consumer) -> type[Any]:
    """The task that a consumer's function stands for, with its name. Evidence is bound to the function's module."""
    function, signature = consumer.function, consumer.signature

    if consumer.asynchronous:

        async def process_async(self: Any, transaction: Transaction, /, *session: Any, **_: Any) -> Any:
            return await function(**signature.arguments(transaction, *session))

        return type(consumer.name, (AsyncConsumerTask,), _body(consumer, process_async))

    def process(self: Any, transaction: Transaction, /, *session: Any, **_: Any) -> Any:
        return function(**signature.arguments(transaction, *session))

    return type(consumer.name, (ConsumerTask,), _body(consumer, process))


def _body(consumer: Consumer, process: Callable[..., Any]) -> dict[str, Any]:
    process.__wrapped__ = consumer.function  # type: ignore[attr-defined]
    return {
        "process_transaction": process,
        "contract": consumer.contract,
        "verification": consumer.verification,
        "__module__": consumer.function.__module__,
        "__qualname__": consumer.function.__qualname__,
        "__doc__": consumer.function.__doc__,
    }


def in_an_app(thing: Any) -> tuple[Onceward, Consumer] | None:
    """Where a decorated function, or a `Consumer`, is at home."""
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
    """The task that a decorated function, or a `Consumer`, stands for; anything else as it is."""
    found = in_an_app(thing)
    return thing if found is None else task_class(found[1])


@contextmanager
def built(app: Onceward, consumer: Consumer, around: Around = _as_it_is) -> Iterator[ConsumerTask]:
    """A task in threads, ready to consume. `around` may put something around its source."""
    app.check()
    with ExitStack() as open_things:
        connector: Any = consumer.source.open(asynchronous=False)
        open_things.callback(connector.close)
        services: dict[str, Any] = {}
        if app.settings.database is not None:
            from sqlalchemy import create_engine

            from onceward.connectors.dead_letters import WithDeadLetters
            from onceward.deadletters import DeadLetters

            engine = create_engine(database_url(app.settings.database, asynchronous=False))
            open_things.callback(engine.dispose)
            letters = DeadLetters(engine)
            letters.migrate()
            connector = WithDeadLetters(
                connector, letters, consumer=consumer_id(consumer), origin=consumer.source.origin
            )
            if consumer.contract is not None:
                from onceward.inbox import Inbox

                inbox = Inbox(engine, env=app.settings.env)
                inbox.migrate()
                inbox.register(consumer.contract)
                services["inbox"] = inbox
        yield task_class(consumer)({"source": around(connector)}, services)


@asynccontextmanager
async def built_async(
    app: Onceward, consumer: Consumer, around: Around = _as_it_is
) -> AsyncIterator[AsyncConsumerTask]:
    """A task in asyncio, ready to consume."""
    app.check()
    async with AsyncExitStack() as open_things:
        connector: Any = consumer.source.open(asynchronous=True)
        open_things.push_async_callback(connector.close_async)
        services: dict[str, Any] = {}
        if app.settings.database is not None:
            from sqlalchemy.ext.asyncio import create_async_engine

            from onceward.connectors.dead_letters import AsyncWithDeadLetters
            from onceward.deadletters import AsyncDeadLetters

            engine = create_async_engine(database_url(app.settings.database, asynchronous=True))
            open_things.push_async_callback(engine.dispose)
            letters = AsyncDeadLetters(engine)
            await letters.migrate()
            connector = AsyncWithDeadLetters(
                connector, letters, consumer=consumer_id(consumer), origin=consumer.source.origin
            )
            if consumer.contract is not None:
                from onceward.inbox import AsyncInbox

                inbox = AsyncInbox(engine, env=app.settings.env)
                await inbox.migrate()
                await inbox.register(consumer.contract)
                services["inbox"] = inbox
        yield task_class(consumer)({"source": around(connector)}, services)


def consumer_id(consumer: Consumer) -> str:
    return consumer.name if consumer.contract is None else consumer.contract.consumer_id


def database_url(url: str, *, asynchronous: bool) -> URL:
    """With the driver that the mode needs, whichever the URL names."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whose text may quote a password
        raise ConfigurationError(
            "the database is no URL; write sqlite:///shop.db or postgresql://user@host/name; / ? # @ of a password are "
            "written %2F %3F %23 %40"
        ) from None
    sqlite = "sqlite+aiosqlite" if asynchronous else "sqlite"
    drivers = {"sqlite": sqlite, "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    name = parsed.drivername.partition("+")[0]
    if name not in drivers:
        raise ConfigurationError(f"the database of an app is sqlite or postgresql, not {name}")
    if (
        name == "sqlite"
        and parsed.database
        and not (parent := Path(parsed.database).absolute().parent).is_dir()
    ):
        raise ConfigurationError(f"the directory of the database does not exist: {parent}")
    return parsed.set(drivername=drivers[name])


# ── producing ───────────────────────────────────────────────────────────────────────────────────────────


class _Send(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None:
        self.connectors["sink"].dispatch_transactions([transaction])


class _AsyncSend(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction) -> None:
        await self.connectors["sink"].dispatch_transactions_async([transaction])


def produce(producer: Producer, args: Iterable[Any], kwargs: dict[str, Any]) -> Report:
    connector = producer.sink.open(asynchronous=False)
    try:
        result = producer.function(*args, **kwargs)
        given = result if inspect.isgenerator(result) else [result]
        return _Send({"sink": connector}).produce_transactions(
            (_transaction(each) for each in given if each is not None), producer.policy
        )
    finally:
        connector.close()


async def produce_async(producer: Producer, args: Iterable[Any], kwargs: dict[str, Any]) -> Report:
    connector = producer.sink.open(asynchronous=True)
    try:
        result = producer.function(*args, **kwargs)

        async def given() -> AsyncIterator[Transaction]:
            if inspect.isasyncgen(result):
                async for each in result:
                    if each is not None:
                        yield _transaction(each)
            elif (value := await result) is not None:
                yield _transaction(value)

        return await _AsyncSend({"sink": connector}).produce_transactions(given(), producer.policy)
    finally:
        await connector.close_async()


def _transaction(value: Any) -> Transaction:
    """A payload in plain data: models are for the functions at both ends."""
    import msgspec

    return (
        value
        if isinstance(value, Transaction)
        else Transaction(payload=msgspec.to_builtins(value, enc_hook=_dumped))
    )


def _dumped(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__qualname__} cannot be sent; a payload is plain data, or a model of it")
