"""An app: functions that consume and produce, with the URLs they do it on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from onceward.app.functions import Signature
from onceward.app.settings import AppSettings, Resolved, resolve
from onceward.app.sources import Address
from onceward.task.exceptions import ConfigurationError
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy

if TYPE_CHECKING:
    from onceward.inbox import Contract
    from onceward.task.report import Report

F = TypeVar("F", bound=Callable[..., Any])


class Consumer:
    """A function that consumes, as the app knows it."""

    def __init__(
        self,
        function: Callable[..., Any],
        source: str,
        contract: Contract | None,
        policy: ConsumerPolicy,
        name: str,
    ) -> None:
        self.function = function
        self.name = name
        self.signature = Signature(function, session=contract is not None)
        self.source = Address(source)
        self.contract = _with_model(contract, self.signature.model)
        self.policy = policy
        self.asynchronous = inspect.iscoroutinefunction(function)


class Producer:
    """A function whose results go to a sink: what it returns, or everything that it yields."""

    def __init__(self, function: Callable[..., Any], sink: str, policy: ProducerPolicy) -> None:
        self.function = function
        self.name = function.__name__
        self.sink = Address(sink)
        self.policy = policy
        self.asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


class Onceward:
    """`app = Onceward("shop", database="sqlite:///shop.db")`; then decorate, and `onceward run module:app`.

    Keywords are settings; what is not given comes from ONCEWARD_… variables, `onceward.toml` or `[tool.onceward]`.
    """

    def __init__(self, name: str = "app", **settings: Any) -> None:
        self.name = name
        self._resolved = resolve(settings)
        self.consumers: dict[str, Consumer] = {}
        self.producers: dict[str, Producer] = {}

    @property
    def settings(self) -> AppSettings:
        return self._resolved.settings

    @property
    def resolved(self) -> Resolved:
        """The settings, and where each value came from."""
        return self._resolved

    def consumer(
        self,
        source: str,
        *,
        contract: Contract | None = None,
        policy: ConsumerPolicy | Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Callable[[F], F]:
        """The function is called with every message of the source. It stays what it is, and can be called as before.

        `def` runs in threads, `async def` in asyncio. Its one free parameter gets the payload, in the type that it is
        annotated with; a payload that does not fit is refused for good. A parameter annotated `Transaction` gets the
        transaction. With a `contract` it takes `session`, and effects are once.
        """

        def decorate(function: F) -> F:
            own = name or function.__name__
            if own in self.consumers:
                raise ConfigurationError(f"{self.name} has two consumers {own!r}; give one of them name=…")
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise ConfigurationError(f"{own} yields: that is a producer, not a consumer")
            changed = self.settings.consumers.get(own)
            self.consumers[own] = Consumer(
                function,
                (changed and changed.source) or source,
                contract,
                _policy(policy, changed.policy if changed else None, self.settings.concurrency),
                own,
            )
            if contract is not None and self.settings.database is None:
                raise ConfigurationError(
                    f"{own} has a contract, so that the app needs a database: Onceward({self.name!r}, "
                    "database='sqlite:///shop.db'), or ONCEWARD_DATABASE"
                )
            return function

        return decorate

    def producer(
        self, sink: str, *, policy: ProducerPolicy | Mapping[str, Any] | None = None
    ) -> Callable[[F], F]:
        """What the function returns or yields is sent to the sink by `app.produce(function, …)`."""

        def decorate(function: F) -> F:
            given = ProducerPolicy.model_validate(policy or {})
            self.producers[function.__name__] = Producer(function, sink, given)
            return function

        return decorate

    def produce(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """Call a producer, and send what it returns or yields: payloads, or transactions."""
        from onceward.app.building import produce

        return produce(self._producer(function, asynchronous=False), args, kwargs)

    async def produce_async(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """`produce` for `async def`."""
        from onceward.app.building import produce_async

        return await produce_async(self._producer(function, asynchronous=True), args, kwargs)

    def _producer(self, function: Callable[..., Any], *, asynchronous: bool) -> Producer:
        found = self.producers.get(getattr(function, "__name__", ""))
        if found is None or found.function is not function:
            raise ConfigurationError(
                f"{function!r} is no producer of {self.name}; decorate it with @app.producer(sink)"
            )
        if found.asynchronous != asynchronous:
            other = "produce_async" if found.asynchronous else "produce"
            raise ConfigurationError(f"{found.name} goes to app.{other}")
        return found


def _policy(
    given: ConsumerPolicy | Mapping[str, Any] | None,
    changed: Mapping[str, Any] | None,
    concurrency: int | None,
) -> ConsumerPolicy:
    tree = given.model_dump(exclude_unset=True) if isinstance(given, ConsumerPolicy) else dict(given or {})
    if concurrency is not None:
        tree = _over(tree, {"loop": {"concurrency": {"value": concurrency}}})
    return ConsumerPolicy.model_validate(_over(tree, changed or {}))


def _over(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for name, value in changes.items():
        known = merged.get(name)
        merged[name] = (
            _over(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _with_model(contract: Contract | None, model: Any) -> Contract | None:
    """The annotation is the contract's model, unless the contract names one."""
    if contract is None or contract.model is not None or model is None:
        return contract
    import msgspec

    from onceward.fitting import is_model

    return msgspec.structs.replace(contract, model=model) if is_model(model) else contract
