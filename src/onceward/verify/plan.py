"""What a verification is given: the consumer, its events, and what it needs around it."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Engine

from onceward import AsyncConsumerTask, ConsumerTask
from onceward.app.build import as_task
from onceward.errors import ConfigurationError
from onceward.inbox import Contract, Event
from onceward.inbox.errors import ContractError
from onceward.task.base import BaseTask
from onceward.transaction import Transaction
from onceward.verify.report import CLEAN, NAMES

# Events for a verification, and the forms in which the same event may come one day.


UNKNOWN = "onceward_unknown_field"
"""What a producer adds tomorrow."""
_HEAD = ("event_type", "aggregate_id", "sequence", "schema_version", "lock_token")


def as_transactions(given: Any, contract: Contract) -> tuple[Transaction, ...]:
    """Transactions, events, or dicts as they are in a JSONL file: one event each."""
    if callable(given):
        given = given()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"events are a list, not {type(given).__name__}")
    return tuple(_as_transaction(each, number, contract) for number, each in enumerate(given))


def _as_transaction(thing: Any, number: int, contract: Contract) -> Transaction:
    if isinstance(thing, Transaction):
        return thing
    try:
        if isinstance(thing, Mapping):
            return _of_mapping(thing, number, contract)
        return _of_event(Event.of(thing))
    except (ContractError, TypeError, ValueError) as error:
        raise ConfigurationError(f"event {number + 1}: {error}") from None


def _of_mapping(given: Mapping[str, Any], number: int, contract: Contract) -> Transaction:
    """An envelope with `payload`, or a payload with the event's fields among its own."""
    if "payload" not in given:
        given = {"payload": given, **{name: given[name] for name in ("tracking_id", *_HEAD) if name in given}}
    head = {**given.get("metadata", {}), **{name: given[name] for name in _HEAD if name in given}}
    body = given["payload"]
    in_body = isinstance(body, Mapping) and "event_type" in body
    if "event_type" not in head and not in_body and contract.event_types[0] != "*":
        head["event_type"] = contract.event_types[0]
    made: dict[str, Any] = {"payload": body, "metadata": head}
    made["id"] = str(given.get("tracking_id", given.get("id", f"event-{number + 1}")))
    if "created_at" in given:
        made["created_at"] = msgspec.convert(given["created_at"], type=datetime, strict=False)
    return Transaction(**made)


def _of_event(event: Event) -> Transaction:
    head = {name: getattr(event, name) for name in _HEAD if getattr(event, name) is not None}
    return Transaction(
        id=event.tracking_id, payload=event.payload, metadata=head, created_at=event.created_at
    )


def with_payload(transaction: Transaction, payload: Any) -> Transaction:
    """The same event with another payload: not `derive`, which makes another event."""
    return msgspec.structs.replace(transaction, payload=payload)


# ── forms of an event ───────────────────────────────────────────────────────────────────────────────────


def with_unknown_fields(transaction: Transaction) -> Transaction | None:
    """With a field nobody knows; None if the payload has no fields.

    Only at the top: an inner dict may be a table of data, where another key means another thing.
    """
    if not isinstance(transaction.payload, Mapping):
        return None
    return with_payload(transaction, {**transaction.payload, UNKNOWN: {"anything": [1, "two", None]}})


def without(transaction: Transaction, field: str) -> Transaction | None:
    """Without one field; None if it is not there."""
    payload = transaction.payload
    if not isinstance(payload, Mapping) or field not in payload:
        return None
    return with_payload(transaction, {key: value for key, value in payload.items() if key != field})


def optional_fields(model: Any) -> list[str]:
    """The fields of a contract's model that have a default, by the name they have in a payload."""
    if model is None:
        return []
    if hasattr(model, "__pydantic_fields__"):
        fields = model.__pydantic_fields__
        return [field.alias or name for name, field in fields.items() if not field.is_required()]
    if issubclass(model, msgspec.Struct):
        return [field.encode_name for field in msgspec.structs.fields(model) if not field.required]
    if dataclasses.is_dataclass(model):
        missing = dataclasses.MISSING
        return [
            field.name
            for field in dataclasses.fields(model)
            if field.default is not missing or field.default_factory is not missing
        ]
    return sorted(getattr(model, "__optional_keys__", ()))


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
        asynchronous=consumer.asynchronous,
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
