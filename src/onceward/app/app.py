"""An app: functions that consume and produce, and the URLs they use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload
from weakref import WeakSet

from msgspec import UNSET, UnsetType

from onceward._functions import code_of, is_async, yields
from onceward.app.engines import SharedEngines, open_engine
from onceward.app.policies import parse_policy, policy_of
from onceward.app.services import Services
from onceward.app.settings import AppSettings, Resolved, resolve
from onceward.app.signature import Signature
from onceward.app.targets import AppTargets, database_place
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.middleware import Middleware, check_middleware
from onceward.outbox import Outbox
from onceward.schedules import CatchUp, Schedule
from onceward.schedules.schedule import Slots, cron, every
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.inbox import Contract
    from onceward.task.report import Report

F = TypeVar("F", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")

RELAY = "outbox-relay"
"""The name of the consumer that relays the outbox."""

_apps: WeakSet[Onceward] = WeakSet()


class Consumer:
    """A decorated consumer function with its source, contract and policy."""

    def __init__(
        self,
        function: Callable[..., Any],
        source: str,
        contract: Contract | UnsetType | None,
        policy: ConsumerPolicy,
        name: str,
        verification: Any = None,
        services: Services | None = None,
        app: Onceward | None = None,
    ) -> None:
        self.app = app
        """Its app, which is found among all apps for as long as one of its consumers is known."""
        self.says_contract = contract is not UNSET
        """Whether the code says which contract it has, even if it says None. Production asks for that."""
        contract = None if contract is UNSET else contract
        self.function = function
        self.name = name
        self.signature = Signature(function, session=contract is not None, services=services)
        self.source = _address(source, name)
        self.contract = _with_model(contract, self.signature.model, name)
        self.policy = policy
        self.verification = verification
        self.outbox: Outbox | None = None
        """What its handler publishes through."""
        self.asynchronous = is_async(function)
        self._check_services()

    def _check_services(self) -> None:
        """Refuse what cannot be opened: services that need each other, or an event loop for a `def`."""
        services, taken = self.signature.injection
        for parameter, service in taken.items():
            needs_loop = services.need_a_loop([service])
            if needs_loop and not self.asynchronous:
                through = "" if service in needs_loop else f", which needs {needs_loop[0]}"
                raise ConfigurationError(
                    f"{self.name} takes {parameter}, but it runs in threads and the service {service}{through} is "
                    "`async def`; make the consumer `async def`, or the factory a plain `def`"
                )


def _address(url: str, name: str, *, sink: bool = False) -> Address:
    try:
        return Address(url, sink=sink)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


class Consumers(dict[str, Consumer]):
    """Consumers by name, and as attributes so a command can name one: `shop:app.consumers.charge`."""

    def __getattr__(self, name: str) -> Consumer:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Producer:
    """A decorated function whose return value, or every value it yields, goes to a sink."""

    def __init__(
        self,
        function: Callable[..., Any],
        sink: str,
        policy: ProducerPolicy,
        follows: Callable[..., Any] | None = None,
    ) -> None:
        self.function = function
        self.follows = follows
        """The consumer function that was given as the sink, if one was."""
        self.name = function.__name__
        self.sink = _address(sink, self.name, sink=True)
        self.policy = policy
        self.asynchronous = is_async(function) or inspect.isasyncgenfunction(code_of(function))


class Onceward:
    """`app = Onceward("shop", database="sqlite:///shop.db")`; then decorate functions and `onceward run module:app`.

    Keywords are settings. ONCEWARD_… variables, `onceward.toml` and `[tool.onceward]` win over them.
    """

    def __init__(self, name: str = "app", *, middleware: Sequence[Middleware] = (), **settings: Any) -> None:
        self.name = name
        self.middleware = check_middleware(middleware, name)
        """Wraps every consumer and producer of this app, outermost first."""
        self.owner: str | None = None
        """The name of this process for its leases. `onceward run` sets it, and ends them if the process dies."""
        self.only: tuple[str, ...] = ()
        """The consumers that run in this process; empty for all. `onceward run` sets it."""
        self.run_only: tuple[str, ...] = ()
        """The consumers that run in all processes of the run together; empty for all."""
        self.engines = SharedEngines(self)
        self.services = Services()
        self.opened: dict[str, Any] = {}
        """The services that are open in this process, by name. `onceward run` opens them before the first message."""
        self._resolved = resolve(settings)
        self.consumers = Consumers()
        self.producers: dict[str, Producer] = {}
        self.schedules: dict[str, Schedule] = {}
        self.outbox = Outbox(AppTargets(self), partial(database_place, self))
        """`app.outbox(connection).send(target, payload)` publishes in a transaction of yours: see `onceward.outbox`."""
        _apps.add(self)

    @property
    def settings(self) -> AppSettings:
        return self._resolved.settings

    @property
    def resolved(self) -> Resolved:
        """The settings and where each value came from."""
        return self._resolved

    def check(self) -> None:
        """Refuse settings of unknown consumers or producers. Call it after decorating all functions."""
        self._resolved.check_names("consumers", self.consumers)
        self._resolved.check_names("producers", self.producers)
        self.services.in_order(self.services.values())

    def create_engine(self) -> Engine:
        """Return a SQLAlchemy engine on the app's database, for your own tables and queries. You `dispose` of it."""
        engine: Engine = open_engine(self, asynchronous=False)
        return engine

    def create_async_engine(self) -> AsyncEngine:
        """`create_engine` for asyncio."""
        engine: AsyncEngine = open_engine(self, asynchronous=True)
        return engine

    @property
    def database(self) -> str:
        """The URL of its database; raises ConfigurationError if it has none."""
        if self.settings.database is None:
            raise ConfigurationError(
                f"{self.name} has no database: write Onceward({self.name!r}, database='sqlite:///shop.db'), or set "
                "ONCEWARD_DATABASE"
            )
        return self.settings.database

    def override(self, origin: str, **settings: Any) -> None:
        """Apply settings that win over all others, such as the options of a command. None means not given."""
        given = {name: value for name, value in settings.items() if value is not None}
        self._resolved = self._resolved.with_these(given, origin)
        if "concurrency" in given:
            for consumer in self.consumers.values():
                consumer.policy = policy_of(consumer.name, consumer.policy, None, given["concurrency"])

    def consumer(
        self,
        source: str,
        *,
        contract: Contract | UnsetType | None = UNSET,
        policy: ConsumerPolicy | Mapping[str, Any] | None = None,
        name: str | None = None,
        verification: Any = None,
    ) -> Callable[[F], F]:
        """Call the function with every message of the source. The function itself is returned unchanged.

        `def` runs in threads, `async def` in asyncio. Its one free parameter gets the payload, converted to the
        annotated type; a payload that does not fit is rejected permanently. A parameter annotated `Transaction` gets
        the transaction, one with the name or the type of a service gets the service. With a `contract` it takes
        `session`, and its effects happen once; `verification` is what `onceward verify` needs to prove that: a dict of
        the fields of `Verification`, or a function that returns one. In production, a consumer
        without a contract starts only if `contract=None` is written out.
        """
        if callable(source):
            raise ConfigurationError(
                f"@app.consumer needs a source: write @app.consumer('sqlite:///orders.db') above {_name_of(source)}"
            )

        def decorate(function: F) -> F:
            own = name or _name_of(function)
            _check_function(function, own)
            if own == RELAY:
                raise ConfigurationError(f"{own!r} is the name of the outbox's relay; rename the consumer")
            if own in self.consumers:
                raise ConfigurationError(
                    f"{self.name} has two consumers {own!r}; rename one of them with name=…"
                )
            _check_contract(contract, own)
            if contract not in (None, UNSET) and self.settings.database is None:
                raise ConfigurationError(
                    f"{own} has a contract, so the app needs a database: write Onceward({self.name!r}, "
                    "database='sqlite:///shop.db'), or set ONCEWARD_DATABASE"
                )
            changed = self.resolved.of_consumer(own)
            consumer = Consumer(
                function,
                changed.source or source,
                contract,
                policy_of(
                    own, policy, changed.policy, self.settings.concurrency, self.resolved.origin_of(own)
                ),
                own,
                verification,
                self.services,
                self,
            )
            self._check_sharing(consumer)
            consumer.outbox = self.outbox
            self.consumers[own] = consumer
            return function

        return decorate

    @overload
    def service(self, function: F, /) -> F: ...
    @overload
    def service(self, function: None = None, /, *, outside: bool = True) -> Callable[[F], F]: ...
    def service(self, function: Any = None, /, *, outside: bool = True) -> Any:
        """Let consumers declared below take what the function makes, as a parameter of its name or its return type.

        The function returns the object, or yields it and cleans up after the `yield`; `async def` is for `async def`
        consumers. Its own parameters are services. Each worker process opens a service once, before its first message,
        and closes it after the last. `onceward verify` never opens it, but asks for a fake, unless `outside=False` says
        that it calls nothing outside the process.
        """

        def decorate(function: F) -> F:
            self.services.add(function, outside=outside)
            return function

        return decorate if function is None else decorate(function)

    def _check_sharing(self, consumer: Consumer) -> None:
        """Two consumers of one queue would split its messages; two that share an inbox would split the work."""
        for other in self.consumers.values():
            if _share_an_inbox(other, consumer):
                assert consumer.contract is not None
                raise ConfigurationError(
                    f"{other.name} and {consumer.name} have contracts with the same consumer_id "
                    f"{consumer.contract.consumer_id!r}, so an event that one has processed would be a duplicate for "
                    "the other; give each its own consumer_id"
                )
            if other.source.queue == consumer.source.queue:
                raise ConfigurationError(
                    f"{other.name} and {consumer.name} both consume from {consumer.source}, so each message would "
                    "reach only one of them; give each its own source (Redis: ?group=, a boundary: ?consumer=)"
                )

    def producer(
        self, sink: str | Callable[..., Any], *, policy: ProducerPolicy | Mapping[str, Any] | None = None
    ) -> Callable[[F], F]:
        """`app.produce(function, …)` sends what the function returns or yields to the sink.

        The sink is a URL, or a consumer of this app: then messages go to that consumer's source, even if a setting
        changes it.
        """

        def decorate(function: F) -> F:
            called: Any = function.__func__ if isinstance(function, (classmethod, staticmethod)) else function
            own = _name_of(called)
            if own in self.producers:
                raise ConfigurationError(
                    f"{self.name} has two producers {own!r}; rename one of the functions"
                )
            url = self.resolved.of_producer(own).sink or given
            follows = sink if callable(sink) else None
            self.producers[own] = Producer(called, url, parse_policy(ProducerPolicy, policy, own), follows)
            return function

        given = self._source_of(sink) if callable(sink) else sink
        return decorate

    def _source_of(self, function: Callable[..., Any]) -> str:
        found = [each for each in self.consumers.values() if each.function == function]
        if len(found) == 1:
            return found[0].source.url
        name = getattr(function, "__name__", repr(function))
        problem = f"is {len(found)} consumers" if found else "is not a consumer"
        raise ConfigurationError(
            f"{name} {problem} of {self.name}: a producer needs a sink; write @app.producer('sqlite:///orders.db'), or "
            "name one consumer decorated above it, as in @app.producer(charge)"
        )

    def every(
        self,
        interval: str | timedelta,
        *,
        name: str | None = None,
        payload: Any = UNSET,
        catch_up: CatchUp = "last",
    ) -> Callable[[F], F]:
        """Send the consumer or producer below a message every "30s", "5m", "24h", "7d": once across all processes.

        A consumer gets `payload`, or {"schedule": …, "slot": …} without one. What a producer returns goes to its sink;
        it takes nothing, or the slot as a datetime. The slots are multiples of the interval since 1970, in UTC. Slots
        that pass while nothing runs: `catch_up` says whether the "last", "all" or "none" of them are sent later. The
        relay of `onceward run` or `onceward relay` sends them; each message has an id that names its slot.
        """
        return self._scheduled(lambda: every(interval), f"every {interval}", name, payload, catch_up)

    def cron(
        self,
        expression: str,
        *,
        tz: str | None = None,
        name: str | None = None,
        payload: Any = UNSET,
        catch_up: CatchUp = "last",
    ) -> Callable[[F], F]:
        """`every`, at the times of a cron expression such as "0 3 * * *" in a time zone; None is UTC."""
        text = f"{expression} {tz or 'UTC'}"
        return self._scheduled(lambda: cron(expression, tz), text, name, payload, catch_up)

    def _scheduled(
        self, slots: Callable[[], Slots], text: str, name: str | None, payload: Any, catch_up: CatchUp
    ) -> Callable[[F], F]:
        from onceward.app.schedules import schedule_of

        def decorate(function: F) -> F:
            made = schedule_of(self, function, slots, text, name, payload, catch_up)
            self.schedules[made.name] = made
            return function

        return decorate

    def produce(
        self, function: Callable[Arguments, Any], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Report:
        """Call a producer and send what it returns or yields: payloads or transactions.

        Returns once everything is in the sink. Raises `NotSentException`, with the report, if some of it is not.
        """
        from onceward.app.produce import produce

        producer = self._producer(function, asynchronous=False)
        return produce(self, producer, partial(function, *args, **kwargs))

    async def produce_async(
        self, function: Callable[Arguments, Any], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Report:
        """`produce` for `async def` producers."""
        from onceward.app.produce import produce_async

        producer = self._producer(function, asynchronous=True)
        return await produce_async(self, producer, partial(function, *args, **kwargs))

    def _producer(self, function: Callable[..., Any], *, asynchronous: bool) -> Producer:
        found = self.producers.get(getattr(function, "__name__", ""))
        if found is None or found.function not in (function, getattr(function, "__func__", None)):
            raise ConfigurationError(
                f"{function!r} is not a producer of {self.name}; decorate it with @app.producer(sink)"
            )
        if found.asynchronous != asynchronous:
            raise ConfigurationError(
                f"{found.name} is async: use `await app.produce_async({found.name}, …)`"
                if found.asynchronous
                else f"{found.name} is not async: use `app.produce({found.name}, …)`"
            )
        self._resolved.check_names("producers", self.producers)
        return found


def consumers_of(function: Any) -> list[tuple[Onceward, Consumer]]:
    """The consumers that a decorated function is, in all apps."""
    return [(app, each) for app in _apps for each in app.consumers.values() if each.function == function]


def _name_of(function: Any) -> str:
    named = callable(function) and hasattr(function, "__name__")
    if not named or isinstance(function, (type, staticmethod)):  # @staticmethod goes around our decorator
        raise ConfigurationError(
            f"only a function (`def` or `async def`) can be decorated, not {type(function).__name__} {function!r}"
        )
    return str(function.__name__)


def _share_an_inbox(one: Consumer, other: Consumer) -> bool:
    """Two sources of one function may share an inbox: an event that arrives from both is processed once."""
    if one.contract is None or other.contract is None or one.function == other.function:
        return False
    return one.contract.consumer_id == other.contract.consumer_id


def _check_function(function: Any, name: str) -> None:
    _name_of(function)
    if yields(function):
        raise ConfigurationError(
            f"{name} yields, so it is a producer, not a consumer; use @app.producer(sink)"
        )
    if not name.replace("-", "_").isidentifier():
        raise ConfigurationError(
            f"{name!r} is not a valid consumer name: settings and commands use it; pass one, as in name='charge'"
        )


def _check_contract(contract: Any, name: str) -> None:
    if contract is None or contract is UNSET:
        return
    from onceward.inbox import Contract

    if not isinstance(contract, Contract):
        raise ConfigurationError(
            f"{name}: contract must be a Contract(consumer_id=…, …) or None, not {type(contract).__name__}"
        )


def _with_model(contract: Contract | None, model: Any, name: str) -> Contract | None:
    """Use the annotation as the contract's model, unless the contract names one."""
    from onceward.models import is_model

    if contract is None or not is_model(model):
        return contract
    if contract.model is not None and contract.model is not model:
        raise ConfigurationError(
            f"the contract of {name} converts payloads to {contract.model.__qualname__}, but the function takes "
            f"{model.__qualname__}; leave `model` out of the contract, or annotate the function with it"
        )
    import msgspec

    return msgspec.structs.replace(contract, model=model)
