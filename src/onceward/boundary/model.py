"""Facts and envelopes, and the checks that refuse malformed ones. Pure: no store, no wire."""

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
"""Bytes of object_json and labels. Anything larger must be an artifact."""
MOST_APPENDED = 1000
"""Facts in one call."""
LARGEST_PAGE = 1000
"""Facts. A larger limit is lowered to this."""
PAGE_BYTES = 4 * 1024 * 1024
"""What a gRPC client accepts by default. A page is no larger, unless the caller asks for more."""
LARGEST_PAGE_BYTES = 32 * 1024 * 1024
"""A larger limit is lowered to this."""

STREAMS = ("operational", "audit", "documents")
"""Retention classes of facts. The first is the default."""
STREAM_LABEL = "retention"

_SUBJECT = re.compile(r"[a-z][a-z0-9_]*:([^/\s]+/)?[^/\s]+")
_PREDICATE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """How a fact travels. Carries no domain meaning."""

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
    """JSON, kept exactly as it was sent."""

    @property
    def object(self) -> Any:
        """The decoded `object_json`."""
        return msgspec.json.decode(self.object_json)


class StoredFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact in the log."""

    offset: int
    envelope: Envelope
    fact: Fact
    appended_at_unix_ms: int
    log_begins_at: int | None = None
    """No fact below this offset was in the log any more when this one was fetched; None if unknown."""

    @property
    def message_id(self) -> str:
        return self.envelope.message_id


class Appended(msgspec.Struct, frozen=True, gc=False):
    offset: int
    duplicate: bool = False
    """The fact was already in the log, at `offset`."""


class Gap(msgspec.Struct, frozen=True):
    """Facts that expired before the cursor reached them."""

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


def message_id_for(*parts: str | int) -> str:
    """Derive an id from what happened, such as ("batch", "B1042", "step_completed", 7): the same for every retry.

    Pass everything that distinguishes the event from all others, and nothing that differs in a retry: no time, no
    random value, no counter that restarts. The id is the SHA-256 of the parts as a JSON array; that never changes.
    """
    for part in parts:
        if not isinstance(part, str | int) or isinstance(part, bool):
            raise TypeError(
                f"the parts of a message id must be strings or integers, not {type(part).__name__}"
            )
    if not parts or "" in parts:
        raise ValueError(
            "a message id needs parts, none of them empty: the kind of thing, which one, what happened"
        )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def envelope_for(message_id: str, *, from_zone: str, to_zone: str, **more: Any) -> Envelope:
    """Build an envelope with the current time, which is not part of a fact's identity."""
    produced_at = more.pop("produced_at_unix_ms", time.time_ns() // 1_000_000)
    return Envelope(
        message_id=message_id, from_zone=from_zone, to_zone=to_zone, produced_at_unix_ms=produced_at, **more
    )


def fact_of(subject: str, predicate: str, value: Any) -> Fact:
    """Build a fact whose object is this value, which must be JSON: NaN and dates are not."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument("fact.object_json", f"cannot be encoded: {error}") from None
    return Fact(subject=subject, predicate=predicate, object_json=text)


def check_append(envelope: Envelope, fact: Fact) -> None:
    """Raise `InvalidArgument`, naming the field, if the envelope or the fact is malformed.

    The meaning of a fact is not checked.
    """
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
            if not (name.isprintable() and value.isprintable()):
                raise InvalidArgument(
                    "envelope.labels", f"has a name or value with unprintable characters: {name!r:.80}"
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
    if not fact.subject.isprintable():
        raise InvalidArgument("fact.subject", f"has unprintable characters: {fact.subject!r:.80}")
    if not _PREDICATE.fullmatch(fact.predicate) or len(fact.predicate) > LONGEST_TEXT:
        raise InvalidArgument("fact.predicate", f"must be lower_snake_case, not {fact.predicate!r:.80}")
    if not fact.object_json:
        raise InvalidArgument("fact.object_json", "is empty; it must be JSON")
    size = _bytes_of(fact.object_json)
    if size > LARGEST_FACT:
        raise InvalidArgument(
            "fact.object_json",
            f"has {size} bytes; the limit is {LARGEST_FACT}: put it into an object, and refer to that in the fact",
        )
    if envelope.labels:
        labels = sum(_bytes_of(name) + _bytes_of(value) for name, value in envelope.labels.items())
        if size + labels > LARGEST_FACT:
            raise InvalidArgument(
                "envelope.labels",
                f"have {labels} bytes, and fact.object_json has {size}; the limit for both is {LARGEST_FACT}",
            )


def check_labels(envelope: Envelope, most: int) -> None:
    """Raise `InvalidArgument` if there are too many."""
    if len(envelope.labels) > most:
        raise InvalidArgument("envelope.labels", f"has {len(envelope.labels)} labels; the limit is {most}")


def stream_of(envelope: Envelope) -> str:
    """Return the retention class of a fact."""
    return envelope.labels.get(STREAM_LABEL, STREAMS[0])


def check_consumer(name: str) -> None:
    _check_id("consumer_name", name)


def clamp_limit(limit: int) -> int:
    """Return `limit`, or `LARGEST_PAGE` if that is less. Raise `InvalidArgument` below 1."""
    if limit < 1:
        raise InvalidArgument("limit", f"must be 1 or more, not {limit}")
    return min(limit, LARGEST_PAGE)


def clamp_bytes(limit: int) -> int:
    """Return how many bytes a page may have. 0 is the default."""
    if limit < 0:
        raise InvalidArgument("max_bytes", f"must be 0 or more, not {limit}")
    return min(limit or PAGE_BYTES, LARGEST_PAGE_BYTES)


def check_object_name(bucket: str, key: str) -> None:
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(
            "bucket", f"must be 1 to 63 characters of a-z, 0-9, dot, dash and underscore, not {bucket!r:.80}"
        )
    if not key or not key.isprintable() or len(key.encode()) > LONGEST_TEXT:
        raise InvalidArgument("key", f"must be 1 to {LONGEST_TEXT} bytes of printable text")


def check_media_type(media_type: str) -> None:
    if media_type:
        _check_text("media_type", media_type)


def _bytes_of(text: str) -> int:
    return len(text if text.isascii() else text.encode("utf-8", "replace"))


def _check_id(field: str, value: str) -> None:
    if not value.isascii():
        raise InvalidArgument(field, f"must be ASCII, so it is the same everywhere, not {value!r:.80}")
    _check_text(field, value, LONGEST_ID)


def _check_text(field: str, value: str, longest: int = LONGEST_TEXT) -> None:
    if not value:
        raise InvalidArgument(field, "is missing")
    if len(value) > longest:
        raise InvalidArgument(field, f"has {len(value)} characters; the limit is {longest}")
    if not value.isprintable() or value[0] == " " or value[-1] == " ":
        raise InvalidArgument(
            field, f"has unprintable characters, or leading or trailing spaces: {value!r:.80}"
        )
