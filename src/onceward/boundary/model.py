"""Facts and envelopes, and what is wrong with those that are malformed. Pure; no store, no wire."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from onceward.boundary.errors import InvalidArgument

LONGEST_ID = 400
LONGEST_TEXT = 1000
LARGEST_FACT = 1024 * 1024
"""Bytes of object_json. What is larger is an artifact."""
LARGEST_PAGE = 1000
"""Facts; a larger limit is answered with so many."""

STREAMS = ("operational", "audit", "documents")
"""Classes of facts that are retained alike; the first is for those that name none."""
STREAM_LABEL = "retention"

_SUBJECT = re.compile(r"[a-z][a-z0-9_]*:([^/\s]+/)?[^/\s]+")
_PREDICATE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """How a fact travels. No domain meaning here."""

    message_id: str
    from_zone: str
    to_zone: str
    produced_at_unix_ms: int
    correlation_id: str = ""
    causation_id: str = ""
    labels: Mapping[str, str] = {}
    object_media_type: str = ""
    object_schema: str = ""


class Fact(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What happened: subject, predicate, object."""

    subject: str
    """kind:id, or kind:scope/id"""
    predicate: str
    """lower_snake_case"""
    object_json: str
    """A JSON text, as it came."""

    @property
    def object(self) -> Any:
        """The value that `object_json` stands for."""
        return msgspec.json.decode(self.object_json)


class StoredFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact in its log."""

    offset: int
    envelope: Envelope
    fact: Fact
    appended_at_unix_ms: int

    @property
    def message_id(self) -> str:
        return self.envelope.message_id


class Appended(msgspec.Struct, frozen=True, gc=False):
    offset: int
    duplicate: bool = False
    """It was there already; `offset` is where."""


class Gap(msgspec.Struct, frozen=True):
    """Facts that a cursor would have come to, and that have expired."""

    first_missing: int
    last_missing: int


class Page(msgspec.Struct, frozen=True):
    facts: tuple[StoredFact, ...]
    gap: Gap | None = None


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact, by name and content."""

    bucket: str
    key: str
    digest: str
    """sha256:<hex>"""
    size: int
    media_type: str = ""


def check_append(envelope: Envelope, fact: Fact) -> None:
    """Refuses what is malformed, naming the field. What it means is nobody's business here."""
    _check_id("envelope.message_id", envelope.message_id)
    _check_text("envelope.from_zone", envelope.from_zone)
    _check_text("envelope.to_zone", envelope.to_zone)
    if envelope.produced_at_unix_ms <= 0:
        raise InvalidArgument("envelope.produced_at_unix_ms", "must be a time in milliseconds since 1970")
    if envelope.correlation_id:
        _check_id("envelope.correlation_id", envelope.correlation_id)
    if envelope.causation_id:
        _check_id("envelope.causation_id", envelope.causation_id)
    if envelope.object_media_type:
        _check_text("envelope.object_media_type", envelope.object_media_type)
    if envelope.object_schema:
        _check_text("envelope.object_schema", envelope.object_schema)
    if envelope.labels:
        for name, value in envelope.labels.items():
            if not name or len(name) > LONGEST_TEXT or len(value) > LONGEST_TEXT:
                raise InvalidArgument(
                    "envelope.labels", f"has a name or value that is empty or over {LONGEST_TEXT} characters"
                )
        if stream_of(envelope) not in STREAMS:
            raise InvalidArgument(
                f"envelope.labels.{STREAM_LABEL}",
                f"must be {', '.join(STREAMS)} or left out, not {stream_of(envelope)!r:.80}",
            )
    if not _SUBJECT.fullmatch(fact.subject) or len(fact.subject) > LONGEST_TEXT:
        raise InvalidArgument(
            "fact.subject", f"must be kind:id or kind:scope/id, such as batch:B1042, not {fact.subject!r:.80}"
        )
    if not _PREDICATE.fullmatch(fact.predicate) or len(fact.predicate) > LONGEST_TEXT:
        raise InvalidArgument("fact.predicate", f"must be lower_snake_case, not {fact.predicate!r:.80}")
    if not fact.object_json:
        raise InvalidArgument("fact.object_json", "is empty; it must be a JSON text")
    size = len(
        fact.object_json if fact.object_json.isascii() else fact.object_json.encode("utf-8", "replace")
    )
    if size > LARGEST_FACT:
        raise InvalidArgument(
            "fact.object_json",
            f"has {size} bytes; {LARGEST_FACT} are allowed: put it into an object, and let the fact refer to that",
        )


def stream_of(envelope: Envelope) -> str:
    """The class by which a fact is retained."""
    return envelope.labels.get(STREAM_LABEL, STREAMS[0])


def check_consumer(name: str) -> None:
    _check_id("consumer_name", name)


def checked_limit(limit: int) -> int:
    if limit < 1:
        raise InvalidArgument("limit", f"must be 1 or more, not {limit}")
    return min(limit, LARGEST_PAGE)


def check_object_name(bucket: str, key: str) -> None:
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(
            "bucket", f"must be 1 to 63 of a-z, 0-9, dot, dash and underscore, not {bucket!r:.80}"
        )
    if not key or not key.isprintable() or len(key.encode()) > LONGEST_TEXT:
        raise InvalidArgument("key", f"must be 1 to {LONGEST_TEXT} bytes of text that can be seen")


def _check_id(field: str, value: str) -> None:
    if not value.isascii():
        raise InvalidArgument(field, f"must be ASCII, so that it is the same everywhere, not {value!r:.80}")
    _check_text(field, value, LONGEST_ID)


def _check_text(field: str, value: str, longest: int = LONGEST_TEXT) -> None:
    if not value:
        raise InvalidArgument(field, "is missing")
    if len(value) > longest:
        raise InvalidArgument(field, f"has {len(value)} characters; {longest} are allowed")
    if not value.isprintable() or value[0] == " " or value[-1] == " ":
        raise InvalidArgument(
            field, f"has characters that cannot be seen, or blanks around it: {value!r:.80}"
        )


# What a producer makes: an id that every retry has again, an envelope, a fact.


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
