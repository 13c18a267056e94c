"""What a schedule of an app sends, and to whom."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from onceward._functions import is_async, yields
from onceward.connectors.codec import PayloadError
from onceward.errors import ConfigurationError
from onceward.outbox.errors import OutboxError
from onceward.outbox.message import message
from onceward.schedules.schedule import CatchUp, Schedule, Slots, check_catch_up

if TYPE_CHECKING:
    from onceward.app.app import Onceward


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
    own = name or called
    try:
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
        headers = {} if is_producer else _headers(app, target)
        return Schedule(
            name=own,
            slots=slots(),
            catch_up=check_catch_up(catch_up),
            text=text,
            target=function,
            payload=_from_producer(function) if is_producer else _for_consumer(own, payload),
            headers=headers,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"the schedule {own!r} ({text}): {error}") from None


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


def _for_consumer(name: str, payload: Any) -> Callable[[datetime], Any]:
    if payload is UNSET:
        return lambda slot: {"schedule": name, "slot": slot.isoformat()}
    if callable(payload):
        of_slot: Callable[[datetime], Any] = payload
        return of_slot
    try:
        message("", payload, id=name, key=None, delay=None, at=None, headers=None)
    except (OutboxError, PayloadError) as error:
        raise ConfigurationError(str(error)) from None
    return lambda _: payload


def _from_producer(function: Callable[..., Any]) -> Callable[[datetime], Any]:
    if is_async(function) or yields(function):
        raise ConfigurationError(
            "it yields, or is async; a producer of a schedule is a plain `def` that returns one payload"
        )
    parameters = len(inspect.signature(function).parameters)
    if parameters > 1:
        raise ConfigurationError(
            "it takes several parameters; a producer of a schedule takes none, or the slot"
        )
    return function if parameters else lambda _: function()
