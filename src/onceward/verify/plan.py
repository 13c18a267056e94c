"""The input of a verification: the consumer, its events, and its options."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Engine

from onceward import AsyncConsumerTask, ConsumerTask
from onceward._functions import check_function, is_async
from onceward.app.build import as_task
from onceward.app.services import Injection
from onceward.errors import ConfigurationError
from onceward.inbox import Contract, Event
from onceward.inbox.errors import ContractError
from onceward.inbox.evidence.scenarios import CLEAN, NAMES
from onceward.limits.limit import KeyProblem, KeyReader
from onceward.order.rule import OrderRule
from onceward.task.base import AsyncTask, BaseTask
from onceward.transaction import Transaction
from onceward.verify.fakes import replace_services

UNKNOWN = "onceward_unknown_field"
"""A field that a future producer might add."""
_HEAD = ("event_type", "aggregate_id", "sequence", "schema_version", "lock_token")


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """How to verify a consumer. As `verification` on its class, it is all that the command line needs.

    There it may also be a dict with these fields, or a classmethod that returns either, so production code need not
    import this package.
    """

    contract: Contract | None = None
    """The contract of a plain handler, as passed to `inbox.process`. A class has its own."""
    events: Any = ()
    """A few events as they arrive in production, or a function that makes them; each with its own id. Include two of
    the same aggregate."""
    old: Any = ()
    """Samples of older schema versions. One with the id of an event is that event in its older form, and must have the
    same outcome."""
    refused: Any = ()
    """Events that the handler must refuse: it must raise, and nothing may be written."""
    database: str | Engine | None = None
    """The server that scenarios run on, in their own databases: a URL, or an engine. None: SQLite files."""
    setup: Callable[[Engine], Any] | None = None
    """Creates the consumer's tables, and the rows it needs."""
    services: Mapping[Any, Any] | Callable[[Any], Mapping[Any, Any]] | None = None
    """The consumer's services, or a function of the scenario's engine that makes them. For a function of an app, the
    fakes of its services, by name or type: a class or a function is a factory, anything else the fake itself."""
    build: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None
    """Builds the consumer from connectors and services, for a class that takes more than these two."""
    optional: Sequence[str] = ()
    """Fields of the payload that may be missing, in addition to those with a default in the contract's model."""
    exclude: Sequence[str] | None = None
    """Columns that are not compared, as `table.column` or `column`. None: those that the database generates."""
    outside: Sequence[str] = ()
    """Services that stand for the outside world: every call to them must be a `session.effect`."""
    reads: Sequence[str | type[Any]] = ()
    """Services that only read from the outside world; their connections and files are allowed."""
    allow: Sequence[str] = ()
    """Where your own fakes listen, as `host` or `host:port`. Every other connection is refused before it is made."""
    skip: Sequence[str] = ()
    """Scenarios to leave out, by name. What is left proves nothing."""
    only: Sequence[str] = ()
    """The only scenarios to run, for a quick check; the clean delivery always runs."""
    seed: int | None = None
    """Decides which orders are tried. None: a new one each time; the report names it."""
    timeout: float = 10.0
    """Seconds that a delivery may take before it is reported as hanging."""


class VerificationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A verification whose input is checked and complete."""

    consumer: Any
    contract: Contract
    options: Verification
    events: tuple[Transaction, ...]
    old: tuple[Transaction, ...]
    refused: tuple[Transaction, ...]
    asynchronous: bool
    seed: int
    given: Mapping[str, Any] = {}
    """What was passed, as opposed to what the consumer has itself."""

    @property
    def subject(self) -> str:
        return f"{self.consumer.__module__}:{self.consumer.__qualname__}"

    def leaves_out(self, scenario: str) -> bool:
        options = self.options
        return scenario in options.skip or (bool(options.only) and scenario not in (CLEAN, *options.only))

    @property
    def injection(self) -> Injection | None:
        """The services that a function of an app takes."""
        taken: Injection | None = getattr(self.consumer, "injection", None)
        return taken if taken and taken.parameters else None

    def line_of(self, event: Transaction) -> str | None:
        """The key in whose line the event waits for those before it, also for dead ones; None if it may overtake."""
        rule = getattr(self.consumer, "order_rule", None)
        return rule.key_of(event) if isinstance(rule, OrderRule) and rule.holds else None

    def keys_of(self, event: Transaction) -> dict[str, str | None]:
        """What the functions of the consumer for `order_by` and `Limit(by=…)` return, by their names."""
        rule, reader = getattr(self.consumer, "order_rule", None), getattr(self.consumer, "limit_keys", None)
        found: dict[str, str | None] = {}
        if isinstance(rule, OrderRule) and callable(rule.by):
            found["order_by"] = rule.key_of(event)
        if isinstance(reader, KeyReader) and reader.is_function:
            with suppress(KeyProblem):
                found["Limit(by=…)"] = reader.key_of(event.payload)
        return found

    def may_meet(self, one: Transaction, other: Transaction) -> bool:
        """Whether the two may run at the same time, or in either order."""
        line = self.line_of(one)
        return line is None or line != self.line_of(other)

    def services(self, engine: Any) -> dict[Any, Any]:
        given = self.options.services
        return dict((given(engine) if callable(given) else given) or {})

    def make(self, connectors: dict[str, Any], services: dict[str, Any]) -> Any:
        build = self.options.build or self.consumer
        return build(connectors, services)


def plan_of(consumer: Any, given: Mapping[str, Any]) -> VerificationPlan:
    """Build the plan from `verification` on the class and from `given`, which overrides it.

    Raises ConfigurationError if something is missing or wrong.
    """
    consumer = as_task(consumer)
    options = _options_of(consumer, given)
    consumer = _as_class(consumer, options)
    contract = _contract_of(consumer)
    unknown = sorted({*options.skip, *options.only} - set(NAMES))
    if unknown:
        raise ConfigurationError(f"no scenario {unknown[0]!r}; choose from: {', '.join(NAMES)}")
    if options.setup is not None:
        check_function(options.setup, f"setup of {consumer.__qualname__}", asynchronous=False)
    events = as_transactions(options.events, contract)
    if not events:
        raise ConfigurationError(
            f"{consumer.__qualname__} needs events: pass verify_consumer({consumer.__qualname__}, events=[…]), set "
            "`verification` on the class or in @app.consumer(…, verification=…), or use --events FILE on the command "
            "line"
        )
    ids = [event.id for event in events]
    if len(set(ids)) < len(ids):
        raise ConfigurationError("two of the events have the same id; the kit makes duplicates itself")
    plan = VerificationPlan(
        consumer=consumer,
        contract=contract,
        options=options,
        events=events,
        old=as_transactions(_flatten(options.old), contract),
        refused=as_transactions(options.refused, contract),
        asynchronous=issubclass(consumer, AsyncTask),
        seed=random.SystemRandom().randrange(2**31) if options.seed is None else options.seed,
        given=given,
    )
    if plan.injection is not None and not callable(options.services):  # else a child checks what it returns
        replace_services(consumer.__name__, plan.injection, options.services or {}, options.reads)
    return plan


def _as_class(consumer: Any, options: Verification) -> Any:
    """Turn a handler of `inbox.process` into a consumer class that only calls it."""
    if not inspect.isfunction(consumer):
        return consumer
    handler: Any = consumer
    check_function(handler, f"the handler {handler.__qualname__}", asynchronous=is_async(handler))

    def counted(self: Any, event: Event) -> Event:
        """As a queue delivers it: the samples have no number."""
        calls = vars(self).setdefault("calls_of_verification", Counter())
        calls[event.tracking_id] += 1
        return msgspec.structs.replace(event, deliveries=calls[event.tracking_id])

    def process(self: Any, transaction: Transaction, session: Any) -> Any:
        return handler(counted(self, session.event), session)

    async def process_async(self: Any, transaction: Transaction, session: Any) -> Any:
        return await handler(counted(self, session.event), session)

    asynchronous = is_async(handler)
    members = {
        "__module__": handler.__module__,
        "__qualname__": handler.__qualname__,
        "contract": options.contract or getattr(handler, "contract", None),
        "process_transaction": process_async if asynchronous else process,
        "gets_deliveries": True,
    }
    return type(handler.__name__, (AsyncConsumerTask if asynchronous else ConsumerTask,), members)


def _contract_of(consumer: Any) -> Contract:
    if not (isinstance(consumer, type) and issubclass(consumer, BaseTask)):
        raise ConfigurationError(
            "verify_consumer takes the class of a ConsumerTask or AsyncConsumerTask, or a handler of inbox.process, "
            f"not {consumer!r}"
        )
    contract = getattr(consumer, "contract", None)
    if not isinstance(contract, Contract):
        raise ConfigurationError(
            f"{consumer.__qualname__} has no contract; set `contract = Contract(…)` on the class, or pass contract=… "
            "with a handler"
        )
    return contract


def _options_of(consumer: Any, given: Mapping[str, Any]) -> Verification:
    own = getattr(consumer, "verification", None)
    if callable(own):
        own = own()
    if own is None:
        own = Verification()
    if isinstance(own, Mapping):
        own = _parse_options(consumer, own)
    if not isinstance(own, Verification):
        raise ConfigurationError(
            f"`verification` of {_name(consumer)} must be a Verification(…) or a dict, not {type(own).__name__}"
        )
    overrides = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.structs.replace(own, **overrides)
    except TypeError as error:
        raise ConfigurationError(f"verify_consumer: {error}") from None


def _parse_options(consumer: Any, own: Mapping[str, Any]) -> Verification:
    try:
        return Verification(**own)
    except TypeError as error:
        known = ", ".join(Verification.__struct_fields__)
        raise ConfigurationError(
            f"`verification` of {_name(consumer)}: {error}; it may have {known}"
        ) from None


def _name(consumer: Any) -> str:
    return str(getattr(consumer, "__qualname__", consumer))


def _flatten(old: Any) -> Any:
    """Samples as a list, from samples by version or a list."""
    if not isinstance(old, Mapping):
        return old
    return [
        _with_version(sample, version)
        for version, samples in old.items()
        for sample in (samples if isinstance(samples, list | tuple) else [samples])
    ]


def _with_version(sample: Any, version: int) -> Any:
    if isinstance(sample, Transaction):
        if "schema_version" in sample.metadata:
            return sample
        metadata = {**sample.metadata, "schema_version": version}
        return msgspec.structs.replace(sample, metadata=metadata)
    if isinstance(sample, Mapping):
        return {"schema_version": version, **sample}
    return sample


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────


def as_transactions(given: Any, contract: Contract) -> tuple[Transaction, ...]:
    """Convert transactions, events, or dicts as in a JSONL file; raises ConfigurationError for anything else."""
    if callable(given):
        given = given()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"events must be a list, not {type(given).__name__}")
    return tuple(_as_transaction(each, number, contract) for number, each in enumerate(given))


def _as_transaction(thing: Any, number: int, contract: Contract) -> Transaction:
    if isinstance(thing, Transaction):
        return thing
    try:
        if isinstance(thing, Mapping):
            return _from_mapping(thing, number, contract)
        return _from_event(Event.of(thing))
    except (ContractError, TypeError, ValueError) as error:
        raise ConfigurationError(f"event {number + 1}: {error}") from None


def _from_mapping(given: Mapping[str, Any], number: int, contract: Contract) -> Transaction:
    """Convert an envelope with `payload`, or a payload that contains the event's fields."""
    if "payload" not in given:
        given = {"payload": given, **{name: given[name] for name in ("tracking_id", *_HEAD) if name in given}}
    head = {**given.get("metadata", {}), **{name: given[name] for name in _HEAD if name in given}}
    body = given["payload"]
    in_body = isinstance(body, Mapping) and "event_type" in body
    if "event_type" not in head and not in_body and contract.event_types[0] != "*":
        head["event_type"] = contract.event_types[0]
    fields: dict[str, Any] = {"payload": body, "metadata": head}
    fields["id"] = str(given.get("tracking_id", given.get("id", f"event-{number + 1}")))
    if "created_at" in given:
        fields["created_at"] = msgspec.convert(given["created_at"], type=datetime, strict=False)
    return Transaction(**fields)


def _from_event(event: Event) -> Transaction:
    head = {name: getattr(event, name) for name in _HEAD if getattr(event, name) is not None}
    return Transaction(
        id=event.tracking_id, payload=event.payload, metadata=head, created_at=event.created_at
    )


# ── other forms of an event ─────────────────────────────────────────────────────────────────────────────


def with_unknown_fields(transaction: Transaction) -> Transaction | None:
    """The event with an unknown field; None if the payload has no fields.

    Only at the top level: an inner dict may hold data by key, where another key changes the meaning.
    """
    if not isinstance(transaction.payload, Mapping):
        return None
    return _with_payload(transaction, {**transaction.payload, UNKNOWN: {"anything": [1, "two", None]}})


def without(transaction: Transaction, field: str) -> Transaction | None:
    """The event without one field; None if it has no such field."""
    payload = transaction.payload
    if not isinstance(payload, Mapping) or field not in payload:
        return None
    return _with_payload(transaction, {key: value for key, value in payload.items() if key != field})


def _with_payload(transaction: Transaction, payload: Any) -> Transaction:
    """The same event with another payload. `derive` would make another event."""
    return msgspec.structs.replace(transaction, payload=payload)


def optional_fields(model: Any) -> list[str]:
    """The fields of a contract's model that have a default, by their names in a payload."""
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
