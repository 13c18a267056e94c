"""The calls of outside services in effects, with their arguments: what a provider would see."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec

from onceward.transaction import Transaction
from onceward.verify.watch.silence import silence_of

KEY = "<the key>"
"""Stands for the key of the effect, which contains the number of a claim."""
MESSAGE = "a message"
"""The name of a call that is a message of onceward."""
LONGEST = 2000
LIKE_A_KEY = re.compile(r"idempot|dedup|(^|[\W_])keys?$", re.IGNORECASE)
"""Names of parameters."""
ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""Where an object lies in memory."""


class OutsideCall(msgspec.Struct, frozen=True):
    effect: str
    name: str
    arguments: Mapping[str, str]
    """As text, by the names of the parameters; the values in a dict by their own keys."""
    part_of_key: str = ""
    """What is passed as a key and is only a part of the effect's."""

    @property
    def has_key(self) -> bool:
        """Whether the key that `session.effect` passes is part of it."""
        return any(KEY in each for each in self.arguments.values())


class WatchedEffect(msgspec.Struct):
    name: str
    key: str
    calls: list[OutsideCall]
    unanswered: bool = False
    """Whether the next call gets no answer."""
    lost: OutsideCall | None = None
    """The call that got no answer."""
    rekeyed: OutsideCall | None = None
    """The same call again, with another key."""


_effect: ContextVar[WatchedEffect | None] = ContextVar("onceward_recorded_effect", default=None)


@contextmanager
def recording(name: str, key: str, calls: list[OutsideCall], *, unanswered: bool) -> Iterator[WatchedEffect]:
    """Record the calls of an effect. The first one is not made if it is to be unanswered."""
    effect = WatchedEffect(name, key, calls, unanswered)
    token = _effect.set(effect)
    try:
        yield effect
    finally:
        _effect.reset(token)


def record(name: str, function: Callable[..., Any], args: tuple[Any, ...], more: Mapping[str, Any]) -> None:
    effect = _effect.get()
    if effect is None:
        return
    given = dict(_parameters(function, args, more))
    named = {each: _text(value, effect.key) for each, value in given.items()}
    part = next((each for each in given.items() if _is_part(*each, effect.key)), ("", ""))[1]
    call = OutsideCall(effect.name, name, named, part)
    if effect.unanswered:
        effect.unanswered, effect.lost = False, call
        raise silence_of(function, f"{name} did not answer")
    if effect.lost is not None and _is_again(call, effect.lost):
        effect.rekeyed = call
    effect.calls.append(call)


def _is_again(call: OutsideCall, lost: OutsideCall) -> bool:
    """Whether it is the same call with another key. With other arguments, too, it is a call of its own."""
    if call.name != lost.name or call.arguments.keys() != lost.arguments.keys():
        return False
    differing = [each for each, value in call.arguments.items() if value != lost.arguments[each]]
    return bool(differing) and all(
        LIKE_A_KEY.search(each) or KEY in call.arguments[each] + lost.arguments[each] for each in differing
    )


def _is_part(name: str, value: Any, key: str) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value) < len(key)
        and value in key
        and bool(LIKE_A_KEY.search(name))
    )


def record_messages(messages: Any = ()) -> None:
    """Record the ids of messages that an effect sends."""
    effect = _effect.get()
    for each in messages if effect is not None and isinstance(messages, Sequence) else ():
        if effect is not None and isinstance(each, Transaction):
            effect.calls.append(OutsideCall(effect.name, MESSAGE, {"id": _text(each.id, effect.key)}))


def _parameters(
    function: Callable[..., Any], args: tuple[Any, ...], more: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        bound: Mapping[str, Any] = inspect.signature(function).bind(*args, **more).arguments
    except (TypeError, ValueError):  # of C, or called in a wrong way
        bound = {**{f"argument {number}": each for number, each in enumerate(args, 1)}, **more}
    yield from _flat(bound)


def _flat(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Also the values in dicts, such as headers in keyword arguments, by their own keys."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield str(name), value


def _text(value: Any, key: str) -> str:
    """Sets have no order; addresses do not count."""
    try:
        plain = sorted(map(repr, value)) if isinstance(value, set | frozenset) else value
        return ADDRESS.sub("0x…", repr(plain).replace(key, KEY))[:LONGEST]
    except Exception:  # noqa: BLE001  a user's repr may raise anything
        return ""
