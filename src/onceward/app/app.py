"""An app: functions that consume and produce, and the URLs they use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload
from weakref import WeakSet

from msgspec import UNSET, UnsetType

from onceward._functions import code_of, is_async
from onceward.app.checks import (
    address_of,
    check_connections,
    check_contract,
    check_function,
    check_limit,
    name_of,
    share_an_inbox,
)
from onceward.app.consumer import Consumer as Consumer
from onceward.app.consumer import Consumers
from onceward.app.engines import SharedEngines, open_engine
from onceward.app.lifespan import RELAY as RELAY
from onceward.app.policies import parse_policy, policy_of
from onceward.app.send.functions import (
    CONSUMER_WAYS,
    PRODUCER_WAYS,
    ConsumerFunction,
    ProducerFunction,
    SendsToSink,
    attach,
)
from onceward.app.services import Per, Services
from onceward.app.settings import AppSettings, Resolved, resolve
from onceward.app.targets import AppTargets, database_place, reachable
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.failures.board import Board
from onceward.failures.rules import OutageRule, RuleBook, Rules, check_dependencies, check_names, check_rules
from onceward.failures.states import ProcessRecords
from onceward.limits.limit import Limit
from onceward.middleware import Middleware, check_middleware
from onceward.order import OnDead, OrderBy
from onceward.order.rule import MOST_HELD
from onceward.outbox import Outbox
from onceward.schedules import CatchUp, Schedule
from onceward.schedules.schedule import Slots, check_is_called, cron, every
from onceward.task.guards.receipt import wraps_steps
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.inbox import Contract
    from onceward.inbox.commits.group import Commit
    from onceward.limits.limiter import Limiter
    from onceward.task.report import Report

F = TypeVar("F", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_apps: WeakSet[Onceward] = WeakSet()


class Producer(SendsToSink):
    """A decorated function whose return value, or every value it yields, goes to a sink."""

    def __init__(
        self,
        app: Onceward,
        function: Callable[..., Any],
        sink: str,
        policy: ProducerPolicy,
        follows: Consumer | None = None,
    ) -> None:
        self.app = app
        self.function = function
        self.follows = follows
        """The consumer that was given as the sink, if one was."""
        self.name = function.__name__
        self.sink = address_of(sink, self.name, sink=True)
        self.policy = policy
        self.asynchronous = is_async(function) or inspect.isasyncgenfunction(code_of(function))


class Onceward:
    """`app = Onceward("shop", database="sqlite:///shop.db")`; then decorate functions and `onceward run module:app`.

    Keywords are settings. ONCEWARD_… variables, `onceward.toml` and `[tool.onceward]` win over them.
    """

    def __init__(
        self,
        name: str = "app",
        *,
        middleware: Sequence[Middleware] = (),
        failures: Rules | None = None,
        dependencies: Sequence[str] | Mapping[str, OutageRule] = (),
        **settings: Any,
    ) -> None:
        """`failures` are rules for all consumers; `dependencies` are what consumers may name: see `consumer`."""
        self.name = name
        self.dependencies = check_dependencies(dependencies, name)
        self.failures = check_rules(failures or {}, name)
        check_names((), self.dependencies, self.failures, name)
        self.board = Board()
        """Why its consumers are held, as this process knows it."""
        self.records = ProcessRecords()
        """Where outages are recorded if the app has no database."""
        self.limiters: dict[str, Limiter] = {}
        """The messages that wait for a limit in this process, by consumer name."""
        self.middleware = check_middleware(middleware, name)
        """Wraps every consumer and producer of this app, outermost first."""
        self.owner: str | None = None
        """The name of this process for its leases. `onceward run` sets it, and ends them if the process dies."""
        self.only: tuple[str, ...] = ()
        """The consumers that run in this process; empty for all. `onceward run` sets it."""
        self.run_only: tuple[str, ...] = ()
        """The consumers that run in all processes of the run together; empty for all."""
        self.detour: Callable[[Address], Address] = reachable
        """Where the outbox publishes what goes to an address; it raises if it cannot. A test keeps it in memory."""
        self.engines = SharedEngines(self)
        self.services = Services()
        self.opened: dict[str, Any] = {}
        """The services that are open in this process, by name. `onceward run` opens them before the first message."""
        self._resolved = resolve(settings)
        self.consumers = Consumers()
        self.producers: dict[str, Producer] = {}
        self.schedules: dict[str, Schedule] = {}
        self.outbox = Outbox(AppTargets(self), partial(database_place, self))
        """`app.outbox(connection).send(target, payload)` publishes in your own transaction: see `onceward.outbox`."""
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

    def restore(self, resolved: Resolved, opened: dict[str, Any]) -> None:
        """Undo what a test has overridden."""
        self._resolved, self.opened = resolved, opened

    def consumer(
        self,
        source: str,
        *,
        contract: Contract | UnsetType | None = UNSET,
        policy: ConsumerPolicy | Mapping[str, Any] | None = None,
        name: str | None = None,
        verification: Any = None,
        commit: Commit | None = None,
        failures: Rules | None = None,
        depends_on: Sequence[str] = (),
        limit: Limit | None = None,
        order_by: OrderBy | None = None,
        on_dead: OnDead = "hold",
        most_held: int = MOST_HELD,
    ) -> Callable[[Callable[Arguments, Returned]], ConsumerFunction[Arguments, Returned]]:
        """Call the function with every message of the source. The decorator returns the function itself, with `send`
        and similar methods, which put messages there: see `ConsumerFunction`.

        A `def` function runs in threads, an `async def` function in asyncio. Its one free parameter gets the payload,
        converted to the annotated type; a payload that does not fit is rejected permanently. A parameter annotated
        `Transaction` gets the transaction, and a parameter with the name or the type of a service gets the service.
        With a `contract` the function takes `session`, and its effects happen once; `verification` is what `onceward
        verify` needs to prove that: a dict of the fields of `Verification`, or a function that returns one. In
        production, a consumer without a contract starts only with an explicit `contract=None`. `failures` classifies
        what it raises, as in `{CardDeclined: business, Overloaded: outage()}`. `depends_on` names services it needs:
        while one is down, all consumers that need it wait together. `limit` says how many messages may start in a
        time or run at once in all processes together, as in `Limit(rate="10/s", concurrency=5, by="customer_id")`.

        `commit="group"` lets events that are waiting at the same time share one commit, `commit="each"` gives each
        its own; the default is "group" on SQLite and "each" on PostgreSQL.

        `order_by="customer_id"`, or a function of the payload, runs events of one customer one after another, in
        order of arrival. A dead letter blocks later events of its key until it is redriven or discarded, unless
        `on_dead="continue"`; when `most_held` keys are blocked, the consumer waits.
        """
        if callable(source):
            raise ConfigurationError(
                f"@app.consumer needs a source: write @app.consumer('sqlite:///orders.db') above {name_of(source)}"
            )

        def decorate(function: Callable[Arguments, Returned]) -> ConsumerFunction[Arguments, Returned]:
            own = name or name_of(function)
            check_function(function, own)
            if own == RELAY:
                raise ConfigurationError(f"{own!r} is the name of the outbox's relay; rename the consumer")
            if own in self.consumers:
                raise ConfigurationError(
                    f"{self.name} has two consumers {own!r}; rename one of them with name=…"
                )
            check_contract(contract, own)
            if contract not in (None, UNSET) and self.settings.database is None:
                raise ConfigurationError(
                    f"{own} has a contract, so the app needs a database: write Onceward({self.name!r}, "
                    "database='sqlite:///shop.db'), or set ONCEWARD_DATABASE"
                )
            check_limit(limit, own, self.settings.database)
            changed = self.resolved.of_consumer(own)
            how = changed.commit or commit
            if how is not None:
                from onceward.inbox.commits.group import check_commit

                check_commit(how, None if contract is UNSET else contract, own)
                if how == "group" and (around := [each for each in self.middleware if wraps_steps(each)]):
                    raise ConfigurationError(
                        f"{own} has commit='group', but the middleware {around[0].name} wraps its handler, and would "
                        "see it return before its commit; leave `commit` out, or have the middleware wrap the source"
                    )
            consumer = Consumer(
                function,
                changed.source or source,
                contract,
                policy_of(
                    own,
                    policy,
                    changed.policy,
                    self.settings.concurrency,
                    self.resolved.origin_of(own),
                    asynchronous=is_async(function),
                ),
                own,
                verification,
                self.services,
                self,
                how,
                self._rules_of(own, failures, depends_on),
                limit,
                (order_by, on_dead, most_held),
            )
            self._check_sharing(consumer)
            if consumer.contract is not None:
                check_connections(consumer, self.database)
            consumer.outbox = self.outbox
            self.consumers[own] = consumer
            decorated: ConsumerFunction[Arguments, Returned] = attach(function, consumer, CONSUMER_WAYS)
            return decorated

        return decorate

    def _rules_of(self, name: str, failures: Rules | None, depends_on: Sequence[str]) -> RuleBook:
        own = check_rules(failures or {}, name)
        names = check_names(depends_on, self.dependencies, own, name)
        return RuleBook.of(name, own, names, self.failures, self.dependencies)

    @overload
    def service(self, function: F, /) -> F: ...
    @overload
    def service(
        self, function: None = None, /, *, outside: bool = True, per: Per = "process"
    ) -> Callable[[F], F]: ...
    def service(self, function: Any = None, /, *, outside: bool = True, per: Per = "process") -> Any:
        """Let consumers declared below take the object that the function returns, as a parameter with its name or its
        return type.

        The function returns the object, or yields it and cleans up after the `yield`; `async def` is for `async def`
        consumers. Its own parameters are services. Each worker process opens a service once, before its first
        message, and closes it after the last. With `per="message"`, each call of a handler gets its own object: the
        factory may also take the message's `Transaction` and sessions, and cleans up before the commit. `onceward
        verify` never opens a service, but asks for a fake, unless `outside=False` says that it calls nothing outside
        the process.
        """

        def decorate(function: F) -> F:
            self.services.add(function, outside=outside, per=per)
            return function

        return decorate if function is None else decorate(function)

    def lifespan(self, function: F) -> F:
        """Run the function around the messages of each worker process: the code before its `yield` before the first
        message, the rest after the last. It may take services. An `async def` lifespan needs an `async def`
        consumer."""
        self.services.add_lifespan(function)
        return function

    def _check_sharing(self, consumer: Consumer) -> None:
        """Two consumers of one queue would split its messages; two that share an inbox would split the work."""
        for other in self.consumers.values():
            if share_an_inbox(other, consumer):
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
    ) -> Callable[[Callable[Arguments, Returned]], ProducerFunction[Arguments, Returned]]:
        """`app.produce(function, …)` sends what the function returns or yields to the sink; `function.send(…)` is short
        for it.

        The sink is a URL, or a consumer of this app: then messages go to that consumer's source, even if a setting
        changes it.
        """

        def decorate(function: Callable[Arguments, Returned]) -> ProducerFunction[Arguments, Returned]:
            called: Any = function.__func__ if isinstance(function, (classmethod, staticmethod)) else function
            own = name_of(called)
            if own in self.producers:
                raise ConfigurationError(
                    f"{self.name} has two producers {own!r}; rename one of the functions"
                )
            url = self.resolved.of_producer(own).sink or given
            producer = Producer(self, called, url, parse_policy(ProducerPolicy, policy, own), follows)
            self.producers[own] = producer
            decorated: ProducerFunction[Arguments, Returned] = attach(function, producer, PRODUCER_WAYS)
            return decorated

        follows = None if isinstance(sink, str) else self._followed(sink)
        given = follows.source.url if follows else str(sink)
        return decorate

    def _followed(self, function: Callable[..., Any]) -> Consumer:
        found = [each for each in self.consumers.values() if each.function == function]
        if len(found) == 1:
            return found[0]
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

        A consumer gets `payload`, or {"schedule": …, "slot": …} without one. What a producer returns goes to its
        sink; it takes nothing, or the slot as a datetime. The slots are multiples of the interval since 1970, in UTC.
        `catch_up` says which slots that passed while nothing ran are sent later: the "last", "all" or "none". The
        relay of `onceward run` or `onceward relay` sends them; each message has an id that names its slot.
        """
        check_is_called(interval, '@app.every("5m")')
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
        check_is_called(expression, '@app.cron("0 3 * * *")')
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
        """Call a producer and send what it returns or yields: payloads, transactions, or `Delayed` messages.

        Returns when everything is in the sink. Raises `NotSentException`, with the report, if something is not.
        """
        from onceward.app.send.produce import produce

        producer = self._producer(function, asynchronous=False)
        return produce(producer, partial(function, *args, **kwargs))

    async def produce_async(
        self, function: Callable[Arguments, Any], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Report:
        """`produce` for `async def` producers."""
        from onceward.app.send.produce import produce_async

        producer = self._producer(function, asynchronous=True)
        return await produce_async(producer, partial(function, *args, **kwargs))

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


def consumers_of(function: Any = None) -> list[tuple[Onceward, Consumer]]:
    """The consumers that a decorated function is, in all apps. None: all consumers."""
    found = [(app, each) for app in _apps for each in app.consumers.values()]
    return [pair for pair in found if function is None or pair[1].function == function]
