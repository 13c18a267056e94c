"""The life of services: opened before the first message, closed after the last, in reverse order."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from onceward._process.forks import UserCode
from onceward._sync import run_blocking
from onceward.app.injection.scope import PerMessage, make
from onceward.app.services import Service, Services
from onceward.errors import ConfigurationError, OncewardError
from onceward.task.lifecycle import text_of
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from onceward.app.app import Consumer, Onceward

_log = OwnLogger(logging.getLogger("onceward.app"))

RELAY = "outbox-relay"
"""The name of the consumer that relays the outbox."""
Close = Callable[[], Awaitable[None]]


class ServiceError(OncewardError):
    """A service could not be opened. The message names its factory and the reason."""


@contextmanager
def shared_services(app: Onceward, consumers: Sequence[Consumer]) -> Iterator[None]:
    """Open what these consumers of a process share. What needs an event loop is left to `shared_services_async`."""
    services, taken = app.services, [*lifespans_of(app, consumers), *taken_by(consumers)]
    plain = [each for each in services.in_order(taken) if not services.need_a_loop([each])]
    with open_services(services, plain, {}) as app.opened:
        yield


@asynccontextmanager
async def shared_services_async(app: Onceward, consumers: Sequence[Consumer]) -> AsyncIterator[None]:
    """Open the rest, in the event loop of the process."""
    wanted = [*lifespans_of(app, consumers), *taken_by(consumers)]
    async with open_services_async(app.services, wanted, app.opened) as app.opened:
        yield


def lifespans_of(app: Onceward, consumers: Sequence[Consumer]) -> list[Service]:
    """The lifespans of a process with these consumers: none if it only relays."""
    found = app.services.lifespans
    if all(each.name == RELAY for each in consumers):
        return []
    in_loop = app.services.need_a_loop(found)
    if in_loop and not any(each.asynchronous for each in consumers):
        raise ConfigurationError(
            f"the lifespan {in_loop[0]} is `async def`, but no consumer of this process runs in asyncio; make it a "
            "plain `def`"
        )
    return found


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
        if service.per == "message":
            opened[service.name] = PerMessage(service, services)
            continue
        arguments = {name: opened[needed.name] for name, needed in services.needs(service).items()}
        try:
            with UserCode(f"service {service}"):
                opened[service.name] = await _make(service, arguments, at_the_end)
        except Exception as error:
            raise ServiceError(f"service {service} cannot be opened: {text_of(error)}") from error
    return opened


async def _make(service: Service, arguments: dict[str, Any], at_the_end: Callable[[Close], object]) -> Any:
    made, leave = await make(service, arguments)
    if leave is not None:

        async def close() -> None:
            try:
                with UserCode(f"service {service}"):
                    await leave(None)
            except Exception:  # noqa: BLE001  the others are closed all the same
                _log.error("service %s failed to close", service, exc_info=True)

        at_the_end(close)
    return made
