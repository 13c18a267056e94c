"""What a schedule of an app sends, and to whom."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from onceward._functions import is_async, yields
from onceward.connectors.codec import PayloadError, decode
from onceward.errors import ConfigurationError
from onceward.models import convert_payload
from onceward.outbox.errors import OutboxError
from onceward.outbox.message import checked_id, message
from onceward.schedules.schedule import CatchUp, Schedule, Slots, check_catch_up

if TYPE_CHECKING:
    from onceward.app.app import Consumer, Onceward

LONGEST_NAME = 200
EXAMPLE = datetime(2026, 3, 1, 12, 5, tzinfo=UTC)
"""A slot, to try what is made for each of them."""


def schedule_of(
    app: Onceward,
    function: Callable[..., Any],
    slots: Callable[[], Slots],
    text: str,
    name: str | None,
    payload: Any,
    catch_up: CatchUp,
) -> Schedule:
    """Return the schedule of a decorated consumer or producer. Raises `ConfigurationError` if it cannot be kept."""
    called = getattr(function, "__name__", repr(function))
    own = called if name is None else name
    try:
        _check_name(app, own)
        if app.settings.database is None:
            raise ConfigurationError(
                f"its slots are recorded in the app's database: write Onceward({app.name!r}, "
                "database='sqlite:///shop.db'), or set ONCEWARD_DATABASE"
            )
        if own in app.schedules:
            raise ConfigurationError(f"{app.name} has two schedules {own!r}; give one of them another name=…")
        kind, _, target = _target_of(app, function).partition(":")
        is_producer = kind == "producer"
        if is_producer and payload is not UNSET:
            raise ConfigurationError(
                "it is a producer, which returns its payload itself; leave out payload=…"
            )
        if is_producer:
            headers, of_slot = {}, _from_producer(function)
        else:
            headers, of_slot = _headers(app, target), _for_consumer(app.consumers[target], own, payload)
        return Schedule(
            name=own,
            slots=slots(),
            catch_up=check_catch_up(catch_up),
            text=text,
            target=function,
            payload=of_slot,
            runs_code=is_producer or callable(payload),
            headers=headers,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"the schedule {own!r} ({text}): {error}") from None


def _check_name(app: Onceward, name: Any) -> None:
    """A row and the ids of messages have the name."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ConfigurationError(
            f"name must be a text of 1 to {LONGEST_NAME} printable characters, not {name!r:.50}"
        )
    try:
        checked_id(f"{app.name}:{name}@{EXAMPLE.isoformat()}")
    except OutboxError:
        raise ConfigurationError(
            f"the ids of its messages begin with the name of the app, which is too long for that, or no plain text: "
            f"{app.name!r:.50}"
        ) from None


def _target_of(app: Onceward, function: Callable[..., Any]) -> str:
    try:
        return app.outbox.targets.name_of(function)
    except ConfigurationError as error:
        problem, _, _ = str(error).partition(";")
        raise ConfigurationError(f"{problem}; put the schedule above one consumer or producer") from None


def _headers(app: Onceward, consumer: str) -> dict[str, Any]:
    """The event type that its contract expects, if it expects one."""
    contract = app.consumers[consumer].contract
    types = () if contract is None else contract.event_types
    if not types or types == ("*",):
        return {}
    if len(types) > 1:
        raise ConfigurationError(
            f"the contract of {consumer} has several event types, {', '.join(types)}; a consumer of a schedule has one"
        )
    return {"event_type": types[0]}


def _for_consumer(consumer: Consumer, name: str, payload: Any) -> Callable[[datetime], Any]:
    of_slot: Callable[[datetime], Any]
    if payload is UNSET:
        of_slot = partial(_default_payload, name)
    elif callable(payload):
        of_slot = payload
        return of_slot
    else:
        of_slot = partial(_as_it_is, payload)
    try:
        made = message("", of_slot(EXAMPLE), id=name, key=None, delay=None, at=None, headers=None)
    except (OutboxError, PayloadError) as error:
        raise ConfigurationError(str(error)) from None
    _check_fit(consumer, decode(made.body).payload)
    return of_slot


def _default_payload(name: str, slot: datetime) -> dict[str, str]:
    return {"schedule": name, "slot": slot.isoformat()}


def _as_it_is(payload: Any, _: datetime) -> Any:
    return payload


def _check_fit(consumer: Consumer, payload: Any) -> None:
    """Refuse what the consumer could never take, unless its contract changes it first."""
    model, contract = consumer.signature.model, consumer.contract
    if model is None or (contract is not None and contract.upcasters):
        return
    _, problem, raised = convert_payload(model, payload)
    if problem is not None and raised is None:
        raise ConfigurationError(
            f"its payload is not what {consumer.name} takes ({problem}); give payload=…, or take a dict with "
            "`schedule` and `slot`"
        )


def _from_producer(function: Callable[..., Any]) -> Callable[[datetime], Any]:
    if is_async(function) or yields(function):
        raise ConfigurationError(
            "it yields, or is async; a producer of a schedule is a plain `def` that returns one payload"
        )
    signature = inspect.signature(function)
    parameters = [*signature.parameters.values()]
    if not parameters:
        return lambda _: function()
    [first, *others] = parameters
    if others or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD):
        raise ConfigurationError(
            f"its parameters are {_listed(parameters)}; a producer of a schedule takes none, or one for the slot"
        )
    return (lambda slot: function(**{first.name: slot})) if first.kind is first.KEYWORD_ONLY else function


def _listed(parameters: Sequence[inspect.Parameter]) -> str:
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(stars.get(each.kind, "") + each.name for each in parameters)
