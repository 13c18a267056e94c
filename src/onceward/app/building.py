"""From what an app says to what runs: connectors, databases, inbox, dead letters, tasks."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from onceward.app.app import Consumer, Onceward, Producer
from onceward.task.exceptions import ConfigurationError
from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask
from onceward.task.mixins.producer import AsyncProducerTask, ProducerTask
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onceward.task.report import Report


def task_class(consumer: Consumer) -> type[Any]:
    """The task that a consumer's function stands for, with its name; `onceward verify` takes it, too."""
    function, signature = consumer.function, consumer.signature

    if consumer.asynchronous:

        async def process_async(self: Any, transaction: Transaction, /, *session: Any, **_: Any) -> Any:
            return await function(**signature.arguments(transaction, *session))

        return type(consumer.name, (AsyncConsumerTask,), _body(consumer, process_async))

    def process(self: Any, transaction: Transaction, /, *session: Any, **_: Any) -> Any:
        return function(**signature.arguments(transaction, *session))

    return type(consumer.name, (ConsumerTask,), _body(consumer, process))


def _body(consumer: Consumer, process: Callable[..., Any]) -> dict[str, Any]:
    process.__wrapped__ = consumer.function  # type: ignore[attr-defined]  # whose code is what evidence is bound to
    return {
        "process_transaction": process,
        "contract": consumer.contract,
        "__module__": consumer.function.__module__,
        "__doc__": consumer.function.__doc__,
    }


@contextmanager
def built(app: Onceward, consumer: Consumer) -> Iterator[ConsumerTask]:
    """A task in threads, ready to consume."""
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
                connector, letters, consumer=consumer_id(consumer), origin=str(consumer.source)
            )
            if consumer.contract is not None:
                from onceward.inbox import Inbox

                inbox = Inbox(engine, env=app.settings.env)
                inbox.migrate()
                inbox.register(consumer.contract)
                services["inbox"] = inbox
        yield task_class(consumer)({"source": connector}, services)


@asynccontextmanager
async def built_async(app: Onceward, consumer: Consumer) -> AsyncIterator[AsyncConsumerTask]:
    """A task in asyncio, ready to consume."""
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
                connector, letters, consumer=consumer_id(consumer), origin=str(consumer.source)
            )
            if consumer.contract is not None:
                from onceward.inbox import AsyncInbox

                inbox = AsyncInbox(engine, env=app.settings.env)
                await inbox.migrate()
                await inbox.register(consumer.contract)
                services["inbox"] = inbox
        yield task_class(consumer)({"source": connector}, services)


def consumer_id(consumer: Consumer) -> str:
    return consumer.name if consumer.contract is None else consumer.contract.consumer_id


def database_url(url: str, *, asynchronous: bool) -> Any:
    """With the driver that the mode needs, unless the URL names one."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigurationError(f"database: {url!r} is no URL of a database: {error}") from None
    driver = {"sqlite": "sqlite+aiosqlite" if asynchronous else "sqlite", "postgresql": "postgresql+psycopg"}
    return parsed.set(drivername=driver.get(parsed.drivername, parsed.drivername))


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
            (_transaction(each) for each in given), producer.policy
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
                    yield _transaction(each)
            else:
                yield _transaction(await result)

        return await _AsyncSend({"sink": connector}).produce_transactions(given(), producer.policy)
    finally:
        await connector.close_async()


def _transaction(value: Any) -> Transaction:
    if isinstance(value, Transaction):
        return value
    if hasattr(value, "model_dump"):
        return Transaction(payload=value.model_dump(mode="json"))
    import msgspec

    return Transaction(payload=msgspec.to_builtins(value))
