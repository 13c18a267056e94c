"""What a consumer is limited to: how many starts in a time, how many at once, and by which key each is counted."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from onceward._functions import is_async, takes_one, yields
from onceward.errors import ConfigurationError, OncewardError
from onceward.models import field_problem, is_model, payload_names

FASTEST: Final = 100_000.0
"""Starts a second. The times of a database are not finer."""
SLOWEST: Final = 30 * 86400.0
"""Seconds from one start to the next."""
MOST: Final = 1_000_000
"""Handlers at once. Counting more would be of no use."""
LONGEST_KEY: Final = 120
"""Characters of a key that is stored as it is. A longer one is stored as its digest."""

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)?\s*(s|m|h|d)\s*")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PLAIN = (str, int, float, decimal.Decimal, uuid.UUID, datetime.date, enum.Enum)


class KeyProblem(OncewardError):
    """A message has no key by which its consumer could be limited."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """`@app.consumer(…, limit=Limit(rate="10/s", concurrency=5, by="customer_id"))`: for all processes together.

    `rate` is how many messages start in a time, evenly spaced: "10/s", "0.5/s", "100/m", "1/h", "5000/d" or "10/30s".
    `concurrency` is how many handlers run at once. `by` applies the limits to each key separately: a field of the
    payload, with dots for a nested field, or a function of the payload as it arrives.
    """

    rate: str | None = None
    concurrency: int | None = None
    by: str | Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.rate is None and self.concurrency is None:
            raise ConfigurationError("a Limit needs a rate, as in Limit(rate='10/s'), or a concurrency")
        _ = self.every
        count = self.concurrency
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigurationError(
                f"the concurrency of a Limit is how many handlers run at once, a whole number from 1, not {count!r}; "
                "to stop a consumer, use `onceward pause`"
            )
        if count is not None and count > MOST:
            raise ConfigurationError(f"the concurrency {count} of a Limit is more than {MOST}; leave it out")
        is_field = isinstance(self.by, str) and all(self.by.split("."))
        if self.by is not None and not callable(self.by) and not is_field:
            raise ConfigurationError(
                f"the `by` of a Limit is the name of a field of the payload, or a function of it, not {self.by!r}"
            )
        if callable(self.by) and (is_async(self.by) or yields(self.by)):
            raise ConfigurationError(
                "the `by` of a Limit is called for every message before it starts; make it a plain `def` without "
                "`yield`"
            )
        if callable(self.by) and not takes_one(self.by):
            raise ConfigurationError(
                f"the `by` of a Limit gets one argument, the payload, which {self.by!r} does not take"
            )

    @property
    def every(self) -> float:
        """Seconds from one start to the next; 0 without a rate."""
        if self.rate is None:
            return 0.0
        found = _RATE.fullmatch(self.rate) if isinstance(self.rate, str) else None
        number, seconds = (float(found[1]), float(found[2] or 1) * _UNITS[found[3]]) if found else (0.0, 0.0)
        if not number or not seconds:
            raise ConfigurationError(
                f"the rate of a Limit is a positive number of starts per time, such as '10/s', '0.5/s', '100/m', '1/h' "
                f"or '10/30s', not {self.rate!r}"
            )
        if not 1 / FASTEST <= seconds / number <= SLOWEST:
            raise ConfigurationError(
                f"the rate {self.rate!r} is not between {FASTEST:.0f}/s and 1/{SLOWEST / 86400:.0f}d; "
                "leave a higher one out, and use a schedule for a lower one"
            )
        return seconds / number

    def __str__(self) -> str:
        parts = [] if self.rate is None else [self.rate.replace(" ", "")]
        parts += [] if self.concurrency is None else [f"{self.concurrency} at once"]
        each = f", for each {self.key_name}" if self.by is not None else ""
        return f"{' and '.join(parts)}{each}, in all processes together"

    @property
    def key_name(self) -> str:
        return self.by if isinstance(self.by, str) else getattr(self.by, "__name__", "key")


class KeyReader:
    """Finds the key of a message."""

    def __init__(self, limit: Limit, consumer: str, model: Any = None) -> None:
        """Raises `ConfigurationError` if payloads of this model cannot have the field."""
        self._by, self._consumer = limit.by, consumer
        self.keyed = limit.by is not None
        self.is_function = callable(limit.by)
        field, *self._inside = limit.by.split(".") if isinstance(limit.by, str) else [""]
        self._names: tuple[str, ...] = (field,) if field else ()
        if not self._names or model is None:
            return
        if problem := field_problem(model, str(limit.by)):
            raise ConfigurationError(
                f"{consumer} is limited by {limit.by!r}, but {problem} (`by` may also be a function of the payload)"
            )
        if is_model(model):
            self._names = payload_names(model).get(field, self._names)

    def key_of(self, payload: Any) -> str:
        """Return the key as it is stored. Raises `KeyProblem`, which does not quote the payload."""
        if self._by is None:
            return ""
        found = self._call(payload) if callable(self._by) else self._look_up(payload)
        try:
            if isinstance(found, tuple) and found and all(isinstance(each, _PLAIN) for each in found):
                found = repr(tuple(map(str, found)))
            text = str(found) if isinstance(found, _PLAIN) else ""
        except Exception as error:  # Python refuses to write a number of 5,000 digits
            raise KeyProblem(
                f"{self._consumer} is limited by {self._what}, which cannot be written as text in this message"
            ) from error
        if not isinstance(found, _PLAIN) or found == "":
            raise KeyProblem(
                f"{self._consumer} is limited by {self._what}, which is {_kind(found)} in this message; it must be "
                "text or a number"
            )
        if len(text) <= LONGEST_KEY and text.isprintable():
            return text
        return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def _what(self) -> str:
        return f"{getattr(self._by, '__name__', 'a function')}()" if callable(self._by) else repr(self._by)

    def _look_up(self, payload: Any) -> Any:
        if isinstance(payload, Mapping):
            for name in self._names:
                if name in payload:
                    return self._look_inside(payload[name])
            if self._inside and self._by in payload:  # its name has the dots
                return payload[self._by]
        raise KeyProblem(
            f"{self._consumer} is limited by {self._what}, but the payload of this message has no such field; send it, "
            "or limit by a function that has a key for every payload"
        )

    def _look_inside(self, found: Any) -> Any:
        for name in self._inside:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def _call(self, payload: Any) -> Any:
        assert callable(self._by)
        try:
            return self._by(payload)
        except Exception as error:
            raise KeyProblem(
                f"{self._consumer} is limited by {self._what}, which raised {type(error).__name__} for this message"
            ) from error


def _kind(value: Any) -> str:
    return "None" if value is None else "empty" if value == "" else f"a {type(value).__name__}"
