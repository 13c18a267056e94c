"""Canonical JSON (RFC 8785), and the content identity of a fact.

Most JSON is canonicalized by msgspec, which is fifty times as fast as doing it in Python and agrees with the RFC for
ASCII characters and integers of ordinary size. Everything else goes to `rfc8785`.
"""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from math import isinf
from typing import Any, NoReturn

import msgspec
import rfc8785

from onceward.boundary.errors import InvalidArgument
from onceward.boundary.model import Envelope, Fact

LARGEST_WHOLE = 2**53 - 1
"""Beyond this the RFC, where every number is a double, has no exact form."""


class _Unusual(Exception):
    """JSON that msgspec does not canonicalize as the RFC does."""


def _refuse_fraction(text: str) -> Any:
    raise _Unusual


_decode = msgspec.json.Decoder(float_hook=_refuse_fraction).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def canonical(text: str) -> bytes:
    """Return the canonical form of JSON. Raise ValueError if it is not JSON, or has no exact canonical form."""
    if text.isascii() and "\\" not in text:
        try:
            value = _decode(text)
            if text.count(":") <= _count_names(value):  # more colons: in a string, or a duplicate name
                return _encode(value)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except _Unusual:
            pass
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
            parse_float=_parse_fraction,
        )
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it has a lone surrogate, which is half a character") from None


def content_digest(envelope: Envelope, fact: Fact) -> bytes:
    """Hash everything that makes two facts the same: all but time, labels and lineage."""
    try:
        body = canonical(fact.object_json)
    except ValueError as error:
        raise InvalidArgument("fact.object_json", f"cannot be stored as JSON: {error}") from None
    parts = (
        fact.subject,
        fact.predicate,
        envelope.object_media_type,
        envelope.object_schema,
        envelope.from_zone,
        envelope.to_zone,
    )
    digest = hashlib.sha256("\0".join(parts).encode())
    digest.update(b"\0")
    digest.update(body)
    return digest.digest()


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _parse_integer(digits: str) -> int | float:
    """Refuse a number whose digits would change as a double, as the RFC has it: two different facts must not look the
    same."""
    value = int(digits) if len(digits) < 400 else 10**400
    if -LARGEST_WHOLE <= value <= LARGEST_WHOLE:
        return value
    try:
        double = float(value)
    except OverflowError:
        _refuse_number(digits)
    is_exact = int(double) == value or rfc8785.dumps(double).decode() == digits
    return double if is_exact else _refuse_number(digits)


def _parse_fraction(text: str) -> float:
    """Refuse a large number that would change as a double. One with an exponent may also be the shortest text of its
    double: 6.02214076e23 is not exact, but nobody means another number."""
    double = float(text)
    if abs(double) <= LARGEST_WHOLE:
        return double
    if isinf(double):  # even a Decimal may not hold it
        _refuse_number(text)
    accepted = {Decimal(double)} if "e" not in text.lower() else {Decimal(double), Decimal(repr(double))}
    return double if Decimal(text) in accepted else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text:.40} has no exact form as a double; send it as a string")


def _count_names(value: Any) -> int:
    """Count the names in all objects. Raise `_Unusual` for a number that has no exact double."""
    kind = type(value)
    if kind is dict:
        return len(value) + sum([_count_names(each) for each in value.values() if type(each) is not str])
    if kind is list:
        return sum([_count_names(each) for each in value if type(each) is not str])
    if kind is int and not -LARGEST_WHOLE <= value <= LARGEST_WHOLE:
        raise _Unusual
    return 0


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
