"""Decorated functions: still the functions they were, and with ways to send to their queue."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Protocol, Self, TypeVar, overload

from onceward._ids import new_id
from onceward.app.checks import address_of
from onceward.app.send.event_types import with_event_type
from onceward.connectors.kept import kept
from onceward.errors import ConfigurationError
from onceward.models import as_plain_data
from onceward.outbox.delay import Delayed
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.app.app import Onceward
    from onceward.app.send.sender import Sender
    from onceward.connectors.urls import Address
    from onceward.inbox import Contract
    from onceward.task.mixins.policies import ProducerPolicy
    from onceward.task.report import Report

Arguments = ParamSpec("Arguments")
Rest = ParamSpec("Rest")
Result = TypeVar("Result", covariant=True)
Returned = TypeVar("Returned")


class DecoratedFunction(Protocol[Arguments, Result]):
    """What stays of a function or method when it is decorated: it can be called."""

    @property
    def __name__(self) -> str: ...
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result: ...
    @overload
    def __get__(self, instance: None, owner: Any, /) -> Self: ...
    @overload
    def __get__(
        self: DecoratedFunction[Concatenate[Any, Rest], Returned], instance: object, owner: Any, /
    ) -> Callable[Rest, Returned]: ...


class ConsumerFunction(DecoratedFunction[Arguments, Result], Protocol[Arguments, Result]):
    """A function decorated with `@app.consumer`. Calling it runs the function and sends nothing."""

    def send(self, message: Any, /, *, id: str | None = None) -> str:
        """Send a message to the consumer's source, and return its id. It is in the source when this returns.

        The message is a model, plain data, or a whole `Transaction`. Raises `NotSentException` if it did not arrive.
        If the connection was lost on the way back, it may have: send it again with the same `id`, and an inbox
        recognizes it. In a handler with a contract use `session.send`, which sends it with the transaction.
        """
        ...

    async def send_async(self, message: Any, /, *, id: str | None = None) -> str:
        """`send` in asyncio, whether the consumer is `async def` or not."""
        ...

    def send_many(self, messages: Iterable[Any], /) -> Report:
        """Send all of these, in order, in batches. Raises `NotSentException`, with the report, unless all arrived."""
        ...

    async def send_many_async(self, messages: Iterable[Any] | AsyncIterable[Any], /) -> Report:
        """`send_many` in asyncio."""
        ...


class ProducerFunction(DecoratedFunction[Arguments, Result], Protocol[Arguments, Result]):
    """A function decorated with `@app.producer`. Calling it runs the function and sends nothing."""

    def send(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Report:
        """`app.produce(function, …)`: call it, and send what it returns or yields."""
        ...

    async def send_async(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Report:
        """`app.produce_async(function, …)`, for `async def`."""
        ...


class _Sends:
    """Has a sender from its first send on."""

    # Not a cached property: before Python 3.12 those have a lock, which a child would inherit that is forked meanwhile.
    _sender: Sender | None = None

    @property
    def sender(self) -> Sender:
        return self._sender or self._first_sender()

    def _first_sender(self) -> Sender:
        with kept.opening:
            self._sender = self._sender or self._make_sender()
            return self._sender

    def _make_sender(self) -> Sender:
        raise NotImplementedError

    def forget_sender(self) -> None:
        """It sends elsewhere from now on."""
        self._sender = None


class SendsToSource(_Sends):
    """The ways to send of a consumer. `ConsumerFunction` describes them."""

    app: Onceward | None
    name: str
    source: Address
    contract: Contract | None
    function: Callable[..., Any]

    def _make_sender(self) -> Sender:
        from onceward.app.send.sender import PLAIN, Sender

        if self.app is None:
            raise ConfigurationError(f"{self.name} belongs to no app, so there is nothing to send with")
        return Sender(
            self.app, self.name, address_of(self.source.url, self.name, sink=True), PLAIN, self.function
        )

    def send(self, message: Any, /, *, id: str | None = None) -> str:
        made = self._transaction(message, id)
        self.sender.send_one(made)
        return made.id

    async def send_async(self, message: Any, /, *, id: str | None = None) -> str:
        made = self._transaction(message, id)
        await self.sender.send_one_async(made)
        return made.id

    def send_many(self, messages: Iterable[Any], /) -> Report:
        self._check_many(messages, Iterable)

        def each() -> Iterator[Transaction]:
            yield from map(self._transaction, messages)

        return self.sender.send(each())

    async def send_many_async(self, messages: Iterable[Any] | AsyncIterable[Any], /) -> Report:
        self._check_many(messages, (Iterable, AsyncIterable))

        async def each() -> AsyncIterator[Transaction]:
            if isinstance(messages, AsyncIterable):
                async for message in messages:
                    yield self._transaction(message)
            else:
                for message in messages:
                    yield self._transaction(message)

        return await self.sender.send_async(each())

    def _transaction(self, message: Any, id: str | None = None) -> Transaction:
        # A dict, as most are, needs no more questions.
        if type(message) is not dict and isinstance(message, Transaction | Delayed):
            return self._as_given(message, id)
        payload = as_plain_data(message)
        own = new_id() if id is None else id
        try:
            return Transaction(own, payload, with_event_type(self.name, self.contract, payload))
        except ConfigurationError as error:
            raise ConfigurationError(
                f"nothing was sent: {error}; send Transaction(payload=…, metadata={{'event_type': …}})"
            ) from None

    def _as_given(self, message: Transaction | Delayed, id: str | None) -> Transaction:
        if isinstance(message, Delayed):
            raise TypeError(
                f"{self.name}.send sends now; to send later, use app.outbox(connection).send({self.name}, …, delay=…), "
                "or a producer that returns Delayed(…)"
            )
        if id is not None and id != message.id:
            raise ValueError(f"the transaction has the id {message.id!r} already; leave out id=…")
        return message

    def _check_many(self, messages: Any, kinds: Any) -> None:
        if isinstance(messages, (str, bytes, dict, Transaction)) or not isinstance(messages, kinds):
            raise TypeError(
                f"{self.name}.send_many takes an iterable of messages, not {type(messages).__name__}; to send one, "
                f"use {self.name}.send(…)"
            )


class SendsToSink(_Sends):
    """The ways to send of a producer. `ProducerFunction` describes them."""

    app: Onceward
    name: str
    sink: Address
    policy: ProducerPolicy
    function: Callable[..., Any]

    def _make_sender(self) -> Sender:
        from onceward.app.send.sender import Sender

        return Sender(self.app, self.name, self.sink, self.policy, self.function)

    def send(self, *args: Any, **kwargs: Any) -> Report:
        return self.app.produce(self.function, *args, **kwargs)

    async def send_async(self, *args: Any, **kwargs: Any) -> Report:
        return await self.app.produce_async(self.function, *args, **kwargs)


CONSUMER_WAYS = ("send", "send_async", "send_many", "send_many_async")
PRODUCER_WAYS = ("send", "send_async")


def attach(function: Any, declared: SendsToSource | SendsToSink, ways: tuple[str, ...]) -> Any:
    """Give a plain function the ways to send. One that is declared twice has none that is unambiguous."""
    if not isinstance(
        function, FunctionType
    ):  # a method, or an object of another library: app.consumers has it
        return function
    for way in ways:
        known = vars(function).get(way)
        if known is None:
            setattr(function, way, getattr(declared, way))
        elif isinstance(getattr(known, "__self__", None), SendsToSource | SendsToSink):
            setattr(function, way, partial(_refuse, function.__name__, way))
    return function


def _refuse(name: str, way: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(
        f"{name} is declared more than once, so {name}.{way} does not know where to; use app.consumers[NAME].{way}(…), "
        "or app.produce(…) for a producer"
    )
