"""The life of services: opened before the first message, closed after the last, in reverse order."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from onceward._functions import ENTERED, ENTERED_ASYNC, check_result
from onceward._process.forks import UserCode
from onceward._sync import run_blocking
from onceward.app.services import Service, Services
from onceward.errors import OncewardError
from onceward.task.lifecycle import text_of
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from onceward.app.app import Consumer, Onceward

_log = OwnLogger(logging.getLogger("onceward.app"))

Close = Callable[[], Awaitable[None]]


class ServiceError(OncewardError):
    """A service could not be opened. The message names its factory and the reason."""


@contextmanager
def shared_services(app: Onceward, consumers: Sequence[Consumer]) -> Iterator[None]:
    """Open what these consumers of a process share. What needs an event loop is left to `shared_services_async`."""
    services, taken = app.services, taken_by(consumers)
    plain = [each for each in services.in_order(taken) if not services.need_a_loop([each])]
    with open_services(services, plain, {}) as app.opened:
        yield


@asynccontextmanager
async def shared_services_async(app: Onceward, consumers: Sequence[Consumer]) -> AsyncIterator[None]:
    """Open the rest, in the event loop of the process."""
    async with open_services_async(app.services, taken_by(consumers), app.opened) as app.opened:
        yield


def taken_by(consumers: Iterable[Consumer]) -> list[Service]:
    return [each for consumer in consumers for each in consumer.signature.injection.parameters.values()]


@contextmanager
def open_services(
    services: Services, wanted: Iterable[Service], given: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Open services and what they need, and close them at the end. `given` are objects that exist already."""
    with ExitStack() as stack:
        yield run_blocking(_open(services, wanted, given, lambda close: stack.callback(_run, close)))


@asynccontextmanager
async def open_services_async(
    services: Services, wanted: Iterable[Service], given: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """`open_services` for asyncio."""
    async with AsyncExitStack() as stack:
        yield await _open(services, wanted, given, stack.push_async_callback)


def _run(close: Callable[[], Any]) -> None:
    run_blocking(close())


async def _open(
    services: Services,
    wanted: Iterable[Service],
    given: Mapping[str, Any],
    at_the_end: Callable[[Close], object],
) -> dict[str, Any]:
    """Written for both modes: in threads there is nothing to await, because async services are refused before."""
    opened = dict(given)
    for service in services.in_order(wanted, opened):
        arguments = {name: opened[needed.name] for name, needed in services.needs(service).items()}
        try:
            with UserCode(f"service {service}"):
                opened[service.name] = await _make(service, arguments, at_the_end)
        except Exception as error:
            raise ServiceError(f"service {service} cannot be opened: {text_of(error)}") from error
    return opened


async def _make(service: Service, arguments: dict[str, Any], at_the_end: Callable[[Close], object]) -> Any:
    made: Any = service.function(**arguments)
    yielding = made
    if inspect.isgenerator(made):
        made = contextmanager(lambda: yielding)()
    elif inspect.isasyncgen(made):
        made = asynccontextmanager(lambda: yielding)()
    if isinstance(made, (ENTERED, ENTERED_ASYNC)):
        manager: Any = made
        is_async = isinstance(made, ENTERED_ASYNC)
        made = await manager.__aenter__() if is_async else manager.__enter__()
        leave = manager.__aexit__ if is_async else manager.__exit__

        async def close() -> None:
            try:
                with UserCode(f"service {service}"):
                    left = leave(None, None, None)
                    if inspect.isawaitable(left):
                        await left
            except Exception:  # noqa: BLE001  the others are closed all the same
                _log.error("service %s failed to close", service, exc_info=True)

        at_the_end(close)
    elif service.is_async:
        made = await made
    else:
        made = check_result(made, service.function)
    if made is None and service.promised:
        raise TypeError(f"it made None instead of {service.promised}; return or yield the object")
    return made
