"""What a handler gets for one message alone: sessions of libraries, and services that are made for each message.

They are opened before the handler and closed after it, in reverse order, all before the commit: a cleanup that raises
fails the attempt, and what it writes through a session belongs to the message.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from onceward._functions import ENTERED, ENTERED_ASYNC, check_result
from onceward._process.forks import UserCode
from onceward._sync import run_blocking
from onceward.app.injection.parameters import check_guests, shared_kinds
from onceward.app.services import Injection, Service, Services
from onceward.errors import ConfigurationError
from onceward.task.lifecycle import text_of

if TYPE_CHECKING:
    from onceward.db.guests import Kind

Leave = Callable[[BaseException | None], Awaitable[None]]


class PerMessage(NamedTuple):
    """Stands for a service among the open ones: each message makes its own object."""

    service: Service
    services: Services


class MessageScope:
    """What one consumer takes for each message."""

    def __init__(self, taker: str, injection: Injection, guests: Mapping[str, Kind]) -> None:
        self._taker = taker
        self._injection = injection
        self._guests = guests
        services = injection.services
        self.services = [
            each for each in services.in_order(injection.parameters.values()) if each.per == "message"
        ]
        taken = [each for service in self.services for each in services.of_message(service).values()]
        kinds = [each for each in taken if not isinstance(each, str)]
        self.kinds = shared_kinds(taker, [*guests.values(), *kinds])

    def __bool__(self) -> bool:
        """Whether there is anything to open."""
        return bool(self.services or self.kinds)

    def check(self, *, contract: bool, asynchronous: bool, batches: bool) -> None:
        """Refuse services that need what this consumer does not have."""
        services = self._injection.services
        for service in self.services:
            taken = services.of_message(service)
            kinds = {name: each for name, each in taken.items() if not isinstance(each, str)}
            where = f"{self._taker} takes the service {service}, which"
            check_guests(where, kinds, contract=contract, asynchronous=asynchronous)
            if "session" in taken.values() and not contract:
                raise ConfigurationError(f"{where} takes `session`; pass contract=Contract(…)")
            if "transaction" in taken.values() and batches:
                raise ConfigurationError(
                    f"{where} takes a Transaction, but the handler gets a list of events; take one event"
                )

    @contextmanager
    def open(
        self, given: Mapping[str, Any], transaction: Any, session: Any = None
    ) -> Iterator[dict[str, Any]]:
        """The arguments for services, sessions and connections. `given` are the services of the process."""
        if not self.kinds:
            with self._opened(given, transaction, session, {}) as arguments:
                yield arguments
            return
        from onceward.db.guests import Lending

        with (
            Lending(self.kinds, session) as lent,
            self._opened(given, transaction, session, lent.given) as arguments,
        ):
            yield arguments

    @asynccontextmanager
    async def open_async(
        self, given: Mapping[str, Any], transaction: Any, session: Any = None
    ) -> AsyncIterator[dict[str, Any]]:
        """`open` for asyncio."""
        if not self.kinds:
            async with self._opened_async(given, transaction, session, {}) as arguments:
                yield arguments
            return
        from onceward.db.guests import Lending

        async with (
            Lending(self.kinds, session) as lent,
            self._opened_async(given, transaction, session, lent.given) as arguments,
        ):
            yield arguments

    @contextmanager
    def _opened(self, *message: Any) -> Iterator[dict[str, Any]]:
        call = ScopedCall(self._injection, self._taker, *message)
        error: BaseException | None = None
        try:
            run_blocking(call.open(self.services))
            yield self._arguments(call)
        except BaseException as raised:
            error = raised
            raise
        finally:
            run_blocking(call.close(error))

    @asynccontextmanager
    async def _opened_async(self, *message: Any) -> AsyncIterator[dict[str, Any]]:
        call = ScopedCall(self._injection, self._taker, *message)
        error: BaseException | None = None
        try:
            await call.open(self.services)
            yield self._arguments(call)
        except BaseException as raised:
            error = raised
            raise
        finally:
            await call.close(error)

    def of_process(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, where there is nothing to open."""
        find = self._injection.object
        return {name: find(each, given, self._taker) for name, each in self._injection.parameters.items()}

    def _arguments(self, call: ScopedCall) -> dict[str, Any]:
        objects = {name: call.object(each) for name, each in self._injection.parameters.items()}
        return objects | {name: call.lent[kind.family] for name, kind in self._guests.items()}


class ScopedCall:
    """One call of a handler. Written for both modes: in threads there is nothing to await."""

    def __init__(
        self,
        injection: Injection,
        taker: str,
        given: Mapping[str, Any],
        transaction: Any,
        session: Any,
        lent: Mapping[str, Any],
    ) -> None:
        self.lent = lent
        self._injection = injection
        self._taker = taker
        self._given = given
        self._message = {"transaction": transaction, "session": session}
        self._made: dict[str, Any] = {}
        self._leave: list[tuple[Service, Leave]] = []

    async def open(self, wanted: list[Service]) -> None:
        for each in wanted:
            recipe = self._given.get(each.name)
            if not isinstance(recipe, PerMessage):
                continue  # a fake serves all messages
            service, services = recipe
            arguments = {name: self.object(needed) for name, needed in services.needs(service).items()}
            for name, taken in services.of_message(service).items():
                arguments[name] = self._message[taken] if isinstance(taken, str) else self.lent[taken.family]
            try:
                with UserCode(f"service {service}"):
                    self._made[service.name], leave = await make(service, arguments)
            except Exception as error:
                error.add_note(f"while service {service} was made for {self._taker}")
                raise
            if leave is not None:
                self._leave.append((service, leave))

    def object(self, service: Service) -> Any:
        if service.name in self._made:
            return self._made[service.name]
        return self._injection.object(service, self._given, self._taker)

    async def close(self, error: BaseException | None) -> None:
        """Close them in reverse order. The first error counts: the handler's, or that of a cleanup. Others are its
        notes, unless they end the process or the task."""
        failure: BaseException | None = None
        while self._leave:
            service, leave = self._leave.pop()
            try:
                with UserCode(f"service {service}"):
                    await leave(error or failure)
            except BaseException as raised:  # noqa: BLE001  the others are closed all the same
                first = error or failure
                if raised is first:
                    continue
                if first is not None and isinstance(raised, Exception):
                    first.add_note(f"Then service {service} could not be closed: {text_of(raised)}")
                else:
                    raised.add_note(f"while service {service} was closed for {self._taker}")
                    failure = raised
        if failure is not None:
            raise failure


async def make(service: Service, arguments: dict[str, Any]) -> tuple[Any, Leave | None]:
    """Call the factory. Returns its object, and how to clean up after it."""
    made: Any = service.function(**arguments)
    yielding = made
    leave: Leave | None = None
    if inspect.isgenerator(made):
        made = contextmanager(lambda: yielding)()
    elif inspect.isasyncgen(made):
        made = asynccontextmanager(lambda: yielding)()
    if isinstance(made, (ENTERED, ENTERED_ASYNC)):
        manager: Any = made
        is_async = isinstance(made, ENTERED_ASYNC)
        made = await manager.__aenter__() if is_async else manager.__enter__()
        exit_ = manager.__aexit__ if is_async else manager.__exit__

        async def leave_manager(error: BaseException | None) -> None:
            left = exit_(*(None, None, None) if error is None else (type(error), error, error.__traceback__))
            if inspect.isawaitable(left):
                await left

        leave = leave_manager
    elif service.is_async:
        made = await made
    else:
        made = check_result(made, service.function)
    if made is None and service.promised:
        raise TypeError(f"it made None instead of {service.promised}; return or yield the object")
    return made, leave
