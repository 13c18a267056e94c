"""Build what runs from what an app declares: connectors, databases, inbox, dead letters, tasks."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward._sync import run_blocking
from onceward.app.app import Consumer, Onceward, consumers_of
from onceward.connectors.owners import set_owner
from onceward.errors import ConfigurationError
from onceward.middleware import Middleware
from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import URL

    from onceward.inbox import Contract


Layer = Middleware | type[Middleware]


def task_class(consumer: Consumer) -> type[Any]:
    """Return the task class of a consumer, with its name. Evidence is bound to the function's module."""
    function = consumer.function
    body = {
        "process_transaction": consumer.signature.method(function, asynchronous=consumer.asynchronous),
        "contract": consumer.contract,
        "verification": consumer.verification,
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
def open_task(app: Onceward, consumer: Consumer, *middleware: Middleware) -> Iterator[ConsumerTask]:
    """A task in threads, ready to consume, with extra middleware between the inbox and the source."""
    with ExitStack() as open_things:
        yield run_blocking(_build_task(app, consumer, middleware, open_things.callback, asynchronous=False))


@asynccontextmanager
async def open_task_async(
    app: Onceward, consumer: Consumer, *middleware: Middleware
) -> AsyncIterator[AsyncConsumerTask]:
    """A task in asyncio, ready to consume."""
    async with AsyncExitStack() as open_things:
        yield await _build_task(app, consumer, middleware, open_things.push_async_callback, asynchronous=True)


async def _build_task(
    app: Onceward,
    consumer: Consumer,
    middleware: Sequence[Middleware],
    at_the_end: Callable[[Callable[[], Any]], object],
    *,
    asynchronous: bool,
) -> Any:
    """Written for both modes: see `onceward._sync`."""
    app.check()
    connector = consumer.source.open(asynchronous=asynchronous)
    set_owner(connector, app.owner)
    at_the_end(connector.close_async if asynchronous else connector.close)
    chain = [*middleware]
    if app.settings.database is not None:
        engine = app.engines.take(asynchronous=asynchronous)
        at_the_end(app.engines.give_back_async if asynchronous else app.engines.give_back)
        chain.append(await _dead_letters(engine, app, consumer, asynchronous))
        if consumer.contract is not None:
            inbox = await _inbox(engine, app, consumer.contract, asynchronous)
            chain.insert(0, inbox.middleware())
    task = task_class(consumer)({"source": connector}, settings=app.settings.engine)
    task.middleware = (*app.middleware, *chain)
    return task


def middleware_of(app: Onceward, consumer: Consumer, *more: Layer) -> list[Layer]:
    """The middleware around a consumer, outermost first, without opening anything. `more` is what the runner adds."""
    from onceward.deadletters.source.middleware import DeadLetterMiddleware
    from onceward.inbox.middleware import InboxMiddleware

    inbox = [] if consumer.contract is None else [InboxMiddleware]
    letters = [] if app.settings.database is None else [DeadLetterMiddleware]
    return [*app.middleware, *inbox, *more, *letters]


async def _dead_letters(engine: Any, app: Onceward, consumer: Consumer, asynchronous: bool) -> Middleware:
    from onceward.deadletters import AsyncDeadLetters, DeadLetters
    from onceward.deadletters.source.middleware import DeadLetterMiddleware

    letters = AsyncDeadLetters(engine) if asynchronous else DeadLetters(engine)
    letters.operations.owner = app.owner
    await _await_if_needed(letters.migrate())
    return DeadLetterMiddleware(letters, consumer=consumer_id(consumer), origin=consumer.source.origin)


async def _inbox(engine: Any, app: Onceward, contract: Contract, asynchronous: bool) -> Any:
    from onceward.inbox import AsyncInbox, Inbox

    inbox = (AsyncInbox if asynchronous else Inbox)(engine, env=app.settings.env)
    inbox.processor.store.owner = app.owner
    await _await_if_needed(inbox.migrate())
    await _await_if_needed(inbox.register(contract))
    return inbox


async def _await_if_needed(result: Any) -> None:
    """The same method returns an awaitable in one mode and has already finished in the other."""
    if inspect.isawaitable(result):
        await result


def consumer_id(consumer: Consumer) -> str:
    return consumer.name if consumer.contract is None else consumer.contract.consumer_id


def database_url(url: str, *, asynchronous: bool) -> URL:
    """Parse a database URL, with the driver that the mode needs, whichever driver the URL names."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

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
    if (
        name == "sqlite"
        and parsed.database
        and not (parent := Path(parsed.database).absolute().parent).is_dir()
    ):
        raise ConfigurationError(f"the directory of the database does not exist: {parent}")
    return parsed.set(drivername=drivers[name])
