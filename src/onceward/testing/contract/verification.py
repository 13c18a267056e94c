"""What a verification is given: the consumer, its events, and what it needs around it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Engine

from onceward import AsyncConsumerTask, ConsumerTask
from onceward.app.build import as_task
from onceward.errors import ConfigurationError
from onceward.inbox import Contract
from onceward.task.base import BaseTask
from onceward.testing.contract.names import CLEAN, NAMES
from onceward.testing.contract.samples import as_transactions
from onceward.transaction import Transaction


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """How a consumer is verified. As `verification` on its class, the command line needs nothing else.

    There it may also be a dict of the same, or a classmethod that returns either, so that production code need not
    import this package.
    """

    contract: Contract | None = None
    """Of a plain handler, as `inbox.process` takes it. A class has its own."""
    events: Any = ()
    """Some events as they come in production, or a function that makes them; no two with the same id. A few are
    enough, two of one aggregate among them."""
    old: Any = ()
    """Samples of older schema versions. One with the id of an event is that event in its older form, and must have the
    same outcome."""
    refused: Any = ()
    """Events that the handler must refuse: it has to raise, and nothing may be written."""
    database: str | Engine | None = None
    """Where scenarios run, in databases of their own: a URL, or an engine that has one. None: SQLite files."""
    setup: Callable[[Engine], Any] | None = None
    """Makes the consumer's tables, and whatever rows it needs."""
    services: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None
    """The consumer's other services, or a function of the scenario's engine that makes them."""
    build: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None
    """Makes the consumer of connectors and services, if its class takes more than these two."""
    optional: Sequence[str] = ()
    """Fields of the payload that may be missing, besides those with a default in the contract's model."""
    exclude: Sequence[str] | None = None
    """Columns that are not compared, as `table.column` or `column`. None: those that the database generates."""
    outside: Sequence[str] = ()
    """Services that stand for the outside world, so that every call to them has to be a `session.effect`."""
    reads: Sequence[str] = ()
    """Services that only read from the outside: what they open is not held against the handler."""
    skip: Sequence[str] = ()
    """Scenarios to leave out, by name; it is recorded that they were."""
    only: Sequence[str] = ()
    """Scenarios to run, and no others, for a quick look; the clean delivery is always among them."""
    seed: int | None = None
    """Of what is left to chance: which orders are tried. None: another one each time, which is reported."""
    timeout: float = 10.0
    """Seconds that one delivery may take before it is said to hang."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A verification, checked and with everything in its place."""

    consumer: Any
    contract: Contract
    asked: Verification
    events: tuple[Transaction, ...]
    old: tuple[Transaction, ...]
    refused: tuple[Transaction, ...]
    asynchronous: bool
    seed: int

    @property
    def subject(self) -> str:
        return f"{self.consumer.__module__}:{self.consumer.__qualname__}"

    def leaves_out(self, scenario: str) -> bool:
        asked = self.asked
        return scenario in asked.skip or (bool(asked.only) and scenario not in (CLEAN, *asked.only))

    def services(self, engine: Any) -> dict[str, Any]:
        given = self.asked.services
        return dict((given(engine) if callable(given) else given) or {})

    def make(self, connectors: dict[str, Any], services: dict[str, Any]) -> Any:
        build = self.asked.build or self.consumer
        return build(connectors, services)


def plan_of(consumer: Any, given: Mapping[str, Any]) -> Plan:
    """From what the class says itself, and what was given beside it, which goes before."""
    consumer = as_task(consumer)
    asked = _asked(consumer, given)
    consumer = _as_class(consumer, asked)
    contract = _contract_of(consumer)
    unknown = sorted({*asked.skip, *asked.only} - set(NAMES))
    if unknown:
        raise ConfigurationError(f"there is no scenario {unknown[0]!r}; there are: {', '.join(NAMES)}")
    events = as_transactions(asked.events, contract)
    if not events:
        raise ConfigurationError(
            f"{consumer.__qualname__} needs events to be verified with: verify_consumer({consumer.__qualname__}, "
            "events=[…]), or `verification` on the class or in @app.consumer(…, verification=…), or on the command "
            "line --events FILE"
        )
    ids = [event.id for event in events]
    if len(set(ids)) < len(ids):
        raise ConfigurationError("two of the events have the same id; the kit makes the copies itself")
    return Plan(
        consumer=consumer,
        contract=contract,
        asked=asked,
        events=events,
        old=as_transactions(_flat(asked.old), contract),
        refused=as_transactions(asked.refused, contract),
        asynchronous=consumer._asynchronous,
        seed=random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed,
    )


def _as_class(consumer: Any, asked: Verification) -> Any:
    """A handler of `inbox.process` as a consumer that does nothing but call it."""
    if not inspect.isfunction(consumer):
        return consumer
    handler: Any = consumer

    def process(self: Any, transaction: Transaction, session: Any) -> Any:
        return handler(session.event, session)

    async def process_async(self: Any, transaction: Transaction, session: Any) -> Any:
        return await handler(session.event, session)

    asynchronous = inspect.iscoroutinefunction(handler)
    named = {
        "__module__": handler.__module__,
        "__qualname__": handler.__qualname__,
        "contract": asked.contract or getattr(handler, "contract", None),
        "process_transaction": process_async if asynchronous else process,
    }
    return type(handler.__name__, (AsyncConsumerTask if asynchronous else ConsumerTask,), named)


def _contract_of(consumer: Any) -> Contract:
    if not (isinstance(consumer, type) and issubclass(consumer, BaseTask)):
        raise ConfigurationError(
            "what is verified is the class of a ConsumerTask or AsyncConsumerTask, or a handler of inbox.process, "
            f"not {consumer!r}"
        )
    contract = getattr(consumer, "contract", None)
    if not isinstance(contract, Contract):
        raise ConfigurationError(
            f"{consumer.__qualname__} has no contract; give its class one: `contract = Contract(…)`, or a handler "
            "contract=…"
        )
    return contract


def _asked(consumer: Any, given: Mapping[str, Any]) -> Verification:
    own = getattr(consumer, "verification", None)
    if callable(own):
        own = own()
    if own is None:
        own = Verification()
    if isinstance(own, Mapping):
        own = _made(consumer, own)
    if not isinstance(own, Verification):
        raise ConfigurationError(
            f"`verification` of {_name(consumer)} must be a Verification(…) or a dict, not {type(own).__name__}"
        )
    said = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.structs.replace(own, **said)
    except TypeError as error:
        raise ConfigurationError(f"verify_consumer: {error}") from None


def _made(consumer: Any, own: Mapping[str, Any]) -> Verification:
    try:
        return Verification(**own)
    except TypeError as error:
        raise ConfigurationError(f"`verification` of {_name(consumer)}: {error}") from None


def _name(consumer: Any) -> str:
    return str(getattr(consumer, "__qualname__", consumer))


def _flat(old: Any) -> Any:
    """Samples by version, or just samples."""
    if not isinstance(old, Mapping):
        return old
    return [
        _of_version(sample, version)
        for version, samples in old.items()
        for sample in (samples if isinstance(samples, list | tuple) else [samples])
    ]


def _of_version(sample: Any, version: int) -> Any:
    if isinstance(sample, Transaction):
        if "schema_version" in sample.metadata:
            return sample
        metadata = {**sample.metadata, "schema_version": version}
        return msgspec.structs.replace(sample, metadata=metadata)
    if isinstance(sample, Mapping):
        return {"schema_version": version, **sample}
    return sample
