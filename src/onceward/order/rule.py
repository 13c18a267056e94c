"""What a consumer says about its order: the key of an event, and what a dead one does to those behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, get_args
from uuid import UUID

import msgspec

from onceward._functions import is_async, takes_one, yields
from onceward._text import storable
from onceward.errors import ConfigurationError
from onceward.models import field_problem, is_model, payload_names
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.connectors.urls import Address
    from onceward.inbox import Contract

OrderBy = str | Callable[[Any], Any]
"""The name of a field of the payload, with dots for fields inside of fields; or a function of the payload."""
OnDead = Literal["hold", "continue"]

LONGEST_KEY: Final = 200
"""Characters; a longer key is stored as its first ones and a digest."""
MOST_HELD: Final = 1000
"""Keys that dead letters may hold, unless the consumer says otherwise."""

_KEYS: Final = (str, int, UUID)


class NoKey(ValueError):
    """An event has no key."""


class OrderRule(msgspec.Struct, frozen=True):
    """How a consumer keeps order."""

    by: OrderBy
    on_dead: OnDead = "hold"
    most_held: int = MOST_HELD
    aliases: tuple[str, ...] = ()
    """What payloads may call the field, if the model calls it otherwise."""

    @property
    def holds(self) -> bool:
        """Whether a dead letter holds its key."""
        return self.on_dead == "hold"

    @property
    def name(self) -> str:
        """For people."""
        return self.by if isinstance(self.by, str) else getattr(self.by, "__name__", repr(self.by))

    @property
    def words(self) -> str:
        """For `onceward explain`."""
        dead = (
            f"a dead one holds those behind it, up to {self.most_held:,} keys"
            if self.holds
            else "a dead one holds nobody"
        )
        return f"by {self.name}, one event of each at a time, as they arrive; {dead}"

    def key_of(self, transaction: Transaction) -> str | None:
        """The key of an event; None if it has none: it runs at once, and is refused."""
        try:
            return self.find_key(transaction)
        except NoKey:
            return None

    def find_key(self, transaction: Transaction) -> str:
        """The key of an event, or raise `NoKey` with the reason why it has none."""
        by, payload = self.by, transaction.payload
        # This runs for every event, and usually the key is a field of a dict.
        is_plain = type(by) is str and type(payload) is dict and "." not in by
        found = payload.get(by) if is_plain else self._value_in(payload)
        if found is None and self.aliases:
            found = self._value_by_alias(payload)
        kind = type(found)
        if kind is str or kind is int:
            key = self._text_of(found)
            if key and key.isascii() and "\0" not in key and len(key) <= LONGEST_KEY:
                return key
        if isinstance(found, bool) or not isinstance(found, _KEYS) or found == "":
            what = "it is empty" if found in ("", None) else f"it is of type {kind.__name__}"
            raise NoKey(f"{self.name} is not a text, a whole number or a UUID: {what}")
        key = storable(self._text_of(found))
        if len(key) <= LONGEST_KEY:
            return key
        return f"{key[:LONGEST_KEY]}…{hashlib.sha256(key.encode()).hexdigest()}"

    def _text_of(self, found: Any) -> str:
        try:
            return str(found)
        except Exception as error:  # Python refuses to write a number of 5,000 digits
            raise NoKey(f"{self.name} cannot be written as text") from error

    def _value_in(self, payload: Any) -> Any:
        by = self.by
        if not isinstance(by, str):
            try:
                return by(payload)
            except Exception as error:
                raise NoKey(f"{self.name} raised {type(error).__name__}") from error
        return _value_at(by, payload)

    def _value_by_alias(self, payload: Any) -> Any:
        assert isinstance(self.by, str)
        _, dot, rest = self.by.partition(".")
        values = (_value_at(alias + dot + rest, payload) for alias in self.aliases)
        return next((each for each in values if each is not None), None)


def _value_at(path: str, payload: Any) -> Any:
    found = payload
    for part in path.split("."):
        is_mapping = type(found) is dict or isinstance(found, Mapping)  # the second is slow
        found = found.get(part) if is_mapping else getattr(found, part, None)
    return found


def check_order(
    order_by: Any,
    on_dead: Any,
    most_held: Any,
    contract: Contract | None,
    source: Address,
    consumer: str,
    model: Any = None,
) -> OrderRule | None:
    """Refuse what cannot be, with the remedy. None if the consumer asks for no order."""
    if order_by is None:
        if on_dead != "hold" or most_held != MOST_HELD:
            what = f"on_dead={on_dead!r}" if on_dead != "hold" else f"most_held={most_held!r}"
            raise ConfigurationError(
                f"{consumer} has {what} but no order_by; name the field by which it keeps order, as in "
                "order_by='customer_id', or leave it out"
            )
        return None
    _check_key(order_by, consumer)
    if on_dead not in get_args(OnDead):
        raise ConfigurationError(
            f"{consumer}: on_dead must be 'hold' (later events of its key wait for a dead one) or 'continue' (they do "
            f"not), not {on_dead!r}"
        )
    if isinstance(most_held, bool) or not isinstance(most_held, int) or most_held < 1:
        raise ConfigurationError(
            f"{consumer}: most_held is how many keys dead letters may hold, 1 or more, not {most_held!r}"
        )
    if contract is None:
        raise ConfigurationError(
            f"{consumer} has order_by but no contract: an event that is delivered twice would run again after later "
            "ones; pass contract=Contract(…), or leave order_by out"
        )
    if contract.sequencing != "none":
        raise ConfigurationError(
            f"{consumer} has order_by, and its contract has sequencing={contract.sequencing!r}: numbers of the "
            "producer already say the order; leave one of the two out"
        )
    if not source.keeps_order:
        raise ConfigurationError(
            f"{consumer} has order_by, but {source} cannot keep order: it does not tell what waits before a message. "
            "Use a queue in SQLite, PostgreSQL or Redis, or a boundary; or number the events and use "
            "Contract(sequencing='strict')"
        )
    return OrderRule(order_by, on_dead, most_held, _aliases_of(order_by, consumer, model))


def _aliases_of(order_by: Any, consumer: str, model: Any) -> tuple[str, ...]:
    """What payloads may call the field. Raises `ConfigurationError` if payloads of this model cannot have it."""
    if not isinstance(order_by, str):
        return ()
    if problem := field_problem(model, order_by):
        raise ConfigurationError(
            f"{consumer} has order_by={order_by!r}, but {problem} (order_by may also be a function of the payload)"
        )
    field = order_by.partition(".")[0]
    names = payload_names(model).get(field, ()) if is_model(model) else ()
    return tuple(each for each in names if each != field)


def _check_key(order_by: Any, consumer: str) -> None:
    if isinstance(order_by, str):
        if not order_by or not all(part.isidentifier() for part in order_by.split(".")):
            raise ConfigurationError(
                f"{consumer}: order_by={order_by!r} is not the name of a field; write order_by='customer_id', or pass "
                "a function of the payload"
            )
        return
    if not callable(order_by):
        raise ConfigurationError(
            f"{consumer}: order_by must be the name of a field or a function of the payload, not "
            f"{type(order_by).__name__}"
        )
    if is_async(order_by) or yields(order_by):
        raise ConfigurationError(
            f"{consumer}: order_by must be a plain function, not `async def`, and have no `yield`"
        )
    if not takes_one(order_by):
        raise ConfigurationError(
            f"{consumer}: the function for order_by gets one argument, the payload, which {order_by!r} does not take"
        )
