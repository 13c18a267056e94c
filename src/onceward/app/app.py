"""An app: functions that consume and produce, with the URLs they do it on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from onceward.app.settings import AppSettings, Resolved, resolve
from onceward.app.signature import Signature
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.middleware import Middleware, check_middleware
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.inbox import Contract
    from onceward.task.report import Report

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", ConsumerPolicy, ProducerPolicy)


_apps: WeakSet[Onceward] = WeakSet()


class Consumer:
    """A function that consumes, as the app knows it."""

    def __init__(
        self,
        function: Callable[..., Any],
        source: str,
        contract: Contract | None,
        policy: ConsumerPolicy,
        name: str,
        verification: Any = None,
    ) -> None:
        self.function = function
        self.name = name
        self.signature = Signature(function, session=contract is not None)
        self.source = _address(source, name)
        self.contract = _with_model(contract, self.signature.model, name)
        self.policy = policy
        self.verification = verification
        self.asynchronous = inspect.iscoroutinefunction(function)


def _address(url: str, name: str, *, sink: bool = False) -> Address:
    try:
        return Address(url, sink=sink)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


class Consumers(dict[str, Consumer]):
    """By name; also as attributes, so that a command can name one: `shop:app.consumers.charge`."""

    def __getattr__(self, name: str) -> Consumer:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Producer:
    """A function whose results go to a sink: what it returns, or everything that it yields."""

    def __init__(
        self,
        function: Callable[..., Any],
        sink: str,
        policy: ProducerPolicy,
        follows: Callable[..., Any] | None = None,
    ) -> None:
        self.function = function
        self.follows = follows
        """The function that consumes what is sent, where that names the sink."""
        self.name = function.__name__
        self.sink = _address(sink, self.name, sink=True)
        self.policy = policy
        self.asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


class Onceward:
    """`app = Onceward("shop", database="sqlite:///shop.db")`; then decorate, and `onceward run module:app`.

    Keywords are settings; what is not given comes from ONCEWARD_… variables, `onceward.toml` or `[tool.onceward]`.
    """

    def __init__(self, name: str = "app", *, middleware: Sequence[Middleware] = (), **settings: Any) -> None:
        self.name = name
        self.middleware = check_middleware(middleware, name)
        """Around every consumer and producer of this app, outermost first."""
        self._resolved = resolve(settings)
        self.consumers = Consumers()
        self.producers: dict[str, Producer] = {}
        _apps.add(self)

    @property
    def settings(self) -> AppSettings:
        return self._resolved.settings

    @property
    def resolved(self) -> Resolved:
        """The settings, and where each value came from."""
        return self._resolved

    def check(self) -> None:
        """Refuse settings that concern nothing here. To be called when all functions are decorated."""
        self._resolved.check_names("consumers", self.consumers)
        self._resolved.check_names("producers", self.producers)

    def create_engine(self) -> Engine:
        """SQLAlchemy's, on the app's database: for tables and queries of your own. Yours to `dispose` of."""
        import sqlalchemy

        from onceward.app.build import database_url

        return sqlalchemy.create_engine(database_url(self._database(), asynchronous=False))

    def create_async_engine(self) -> AsyncEngine:
        """`create_engine` for asyncio."""
        import sqlalchemy.ext.asyncio

        from onceward.app.build import database_url

        return sqlalchemy.ext.asyncio.create_async_engine(database_url(self._database(), asynchronous=True))

    def _database(self) -> str:
        if self.settings.database is None:
            raise ConfigurationError(
                f"{self.name} has no database: give it Onceward({self.name!r}, database='sqlite:///shop.db'), or "
                "ONCEWARD_DATABASE"
            )
        return self.settings.database

    def override(self, origin: str, **settings: Any) -> None:
        """Settings that win over all others, as the options of a command do. None is not given."""
        given = {name: value for name, value in settings.items() if value is not None}
        self._resolved = self._resolved.with_these(given, origin)
        if "concurrency" in given:
            for consumer in self.consumers.values():
                consumer.policy = _policy(consumer.name, consumer.policy, None, given["concurrency"])

    def consumer(
        self,
        source: str,
        *,
        contract: Contract | None = None,
        policy: ConsumerPolicy | Mapping[str, Any] | None = None,
        name: str | None = None,
        verification: Any = None,
    ) -> Callable[[F], F]:
        """The function is called with every message of the source. It stays what it is, and can be called as before.

        `def` runs in threads, `async def` in asyncio. Its one free parameter gets the payload, in the type that it is
        annotated with; a payload that does not fit is refused for good. A parameter annotated `Transaction` gets the
        transaction. With a `contract` it takes `session`, and effects are once; `verification` is what proving that
        takes: a dict of the fields of `Verification`, or a function that makes one.
        """

        if callable(source):
            raise ConfigurationError(
                f"@app.consumer needs a source: write @app.consumer('sqlite:///orders.db') above {_name_of(source)}"
            )

        def decorate(function: F) -> F:
            own = name or _name_of(function)
            _check_function(function, own)
            if own in self.consumers:
                raise ConfigurationError(f"{self.name} has two consumers {own!r}; give one of them name=…")
            if contract is not None and self.settings.database is None:
                raise ConfigurationError(
                    f"{own} has a contract, so that the app needs a database: Onceward({self.name!r}, "
                    "database='sqlite:///shop.db'), or ONCEWARD_DATABASE"
                )
            changed = self.resolved.of_consumer(own)
            made = Consumer(
                function,
                changed.source or source,
                contract,
                _policy(own, policy, changed.policy, self.settings.concurrency, self.resolved.origin_of(own)),
                own,
                verification,
            )
            self._check_sharing(made)
            self.consumers[own] = made
            return function

        return decorate

    def _check_sharing(self, consumer: Consumer) -> None:
        """Of two that take from one queue, each would get a part of the messages; of one inbox, a part of the work."""
        for other in self.consumers.values():
            if _share_an_inbox(other, consumer):
                assert consumer.contract is not None
                raise ConfigurationError(
                    f"{other.name} and {consumer.name} have contracts with the same consumer_id "
                    f"{consumer.contract.consumer_id!r}, so that what one has done would be a duplicate for the other; "
                    "give each a consumer_id of its own"
                )
            if other.source.queue == consumer.source.queue:
                raise ConfigurationError(
                    f"{other.name} and {consumer.name} both take from {consumer.source}, so that each message would "
                    "come to one of them only; give each a source of its own (Redis: ?group=, a boundary: ?consumer=)"
                )

    def producer(
        self, sink: str | Callable[..., Any], *, policy: ProducerPolicy | Mapping[str, Any] | None = None
    ) -> Callable[[F], F]:
        """What the function returns or yields is sent to the sink by `app.produce(function, …)`.

        The sink is a URL, or a consumer of this app: then messages go to where that one takes them from, also when a
        setting names another place.
        """

        def decorate(function: F) -> F:
            own = _name_of(function)
            if own in self.producers:
                raise ConfigurationError(
                    f"{self.name} has two producers {own!r}; rename one of the functions"
                )
            url = self.resolved.of_producer(own).sink or given
            follows = sink if callable(sink) else None
            self.producers[own] = Producer(function, url, _checked(ProducerPolicy, policy, own), follows)
            return function

        given = self._source_of(sink) if callable(sink) else sink
        return decorate

    def _source_of(self, function: Callable[..., Any]) -> str:
        found = [each for each in self.consumers.values() if each.function is function]
        if len(found) == 1:
            return found[0].source.url
        name = getattr(function, "__name__", repr(function))
        problem = f"is {len(found)} consumers" if found else "is no consumer"
        raise ConfigurationError(
            f"{name} {problem} of {self.name}: a producer needs a sink; write @app.producer('sqlite:///orders.db'), or "
            "name a consumer that is decorated above it, as in @app.producer(charge)"
        )

    def produce(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """Call a producer, and send what it returns or yields: payloads, or transactions.

        Returns when all of it is in the sink. Raises `NotSentException` if some of it is not, with the report.
        """
        from onceward.app.produce import produce

        return produce(self, self._producer(function, asynchronous=False), args, kwargs)

    async def produce_async(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """`produce` for `async def`."""
        from onceward.app.produce import produce_async

        producer = self._producer(function, asynchronous=True)
        return await produce_async(self, producer, args, kwargs)

    def _producer(self, function: Callable[..., Any], *, asynchronous: bool) -> Producer:
        found = self.producers.get(getattr(function, "__name__", ""))
        if found is None or found.function is not function:
            raise ConfigurationError(
                f"{function!r} is no producer of {self.name}; decorate it with @app.producer(sink)"
            )
        if found.asynchronous != asynchronous:
            other = "produce_async" if found.asynchronous else "produce"
            raise ConfigurationError(f"{found.name} goes to app.{other}")
        self._resolved.check_names("producers", self.producers)
        return found


def consumers_of(function: Any) -> list[tuple[Onceward, Consumer]]:
    """What a decorated function is, in the apps that there are."""
    return [(app, each) for app in _apps for each in app.consumers.values() if each.function is function]


def _name_of(function: Any) -> str:
    if not callable(function) or isinstance(function, type) or not hasattr(function, "__name__"):
        raise ConfigurationError(
            f"what is decorated is a function, `def` or `async def`, not {type(function).__name__} {function!r}"
        )
    return str(function.__name__)


def _share_an_inbox(one: Consumer, other: Consumer) -> bool:
    """Two sources of one function may: an event that comes both ways is done once."""
    if one.contract is None or other.contract is None or one.function is other.function:
        return False
    return one.contract.consumer_id == other.contract.consumer_id


def _check_function(function: Any, name: str) -> None:
    _name_of(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{name} yields: that is a producer, not a consumer; use @app.producer(sink)"
        )
    if not name.replace("-", "_").isidentifier():
        raise ConfigurationError(
            f"{name!r} is no name for a consumer: settings and commands go by it; give it name='charge'"
        )


def _policy(
    name: str,
    given: ConsumerPolicy | Mapping[str, Any] | None,
    changed: Mapping[str, Any] | None,
    concurrency: int | None,
    origin: str = "",
) -> ConsumerPolicy:
    """`origin` is where `changed` stands."""
    tree = _checked(ConsumerPolicy, given, name).model_dump(exclude_unset=True)
    if concurrency is not None:
        tree = _over(tree, {"loop": {"concurrency": {"value": concurrency}}})
    return _checked(ConsumerPolicy, _over(tree, changed or {}), name, origin)


def _checked(kind: type[P], given: P | Mapping[str, Any] | None, name: str, origin: str = "") -> P:
    from pydantic import ValidationError

    try:
        return kind.model_validate(given or {})
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {_told(kind, each)}" for each in problems)
        raise ConfigurationError(f"{origin and f'{origin}: '}the policy of {name}: {told}") from None


def _told(kind: type[Any], problem: Any) -> str:
    if problem["type"] != "extra_forbidden":
        return str(problem["msg"]).removeprefix("Value error, ")
    for part in problem["loc"][:-1]:
        kind = kind.model_fields[part].annotation
    return f"there is no such field; there is {', '.join(kind.model_fields)}"


def _over(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for name, value in changes.items():
        known = merged.get(name)
        merged[name] = (
            _over(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _with_model(contract: Contract | None, model: Any, name: str) -> Contract | None:
    """The annotation is the contract's model, unless the contract names one."""
    from onceward.models import is_model

    if contract is None or not is_model(model):
        return contract
    if contract.model is not None and contract.model is not model:
        raise ConfigurationError(
            f"the contract of {name} makes {contract.model.__qualname__} of its payloads, and the function takes "
            f"{model.__qualname__}; leave `model` out of the contract, or annotate the function with it"
        )
    import msgspec

    return msgspec.structs.replace(contract, model=model)
