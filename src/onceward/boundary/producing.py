"""What a producer makes: an id that every retry has again, an envelope, a fact."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import msgspec

from onceward.boundary.errors import InvalidArgument
from onceward.boundary.model import Envelope, Fact


def message_id_for(*parts: str | int) -> str:
    """An id made from what happened, such as ("batch", "B1042", "step_completed", 7): the same for every retry.

    Give it all that makes the event unlike every other, and nothing that a retry would have anew: no time, nothing
    random, no counter that starts again. It is the SHA-256 of the parts as a JSON array, the same for ever.
    """
    for part in parts:
        if not isinstance(part, str | int) or isinstance(part, bool):
            raise TypeError(
                f"the parts of a message id are texts and whole numbers, not {type(part).__name__}"
            )
    if not parts or "" in parts:
        raise ValueError(
            "a message id needs parts, none of them empty: what kind of thing, which one, what happened"
        )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def envelope_for(message_id: str, *, from_zone: str, to_zone: str, **more: Any) -> Envelope:
    """An envelope with the time of now, which is no part of a fact's identity."""
    produced_at = more.pop("produced_at_unix_ms", time.time_ns() // 1_000_000)
    return Envelope(
        message_id=message_id, from_zone=from_zone, to_zone=to_zone, produced_at_unix_ms=produced_at, **more
    )


def fact_of(subject: str, predicate: str, value: Any) -> Fact:
    """A fact whose object is this value, which has to be JSON: NaN and dates are not."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument("fact.object_json", f"cannot be made of this value: {error}") from None
    return Fact(subject=subject, predicate=predicate, object_json=text)
