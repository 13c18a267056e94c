"""Entries of a stream and of its dead letters, as Redis returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onceward.connectors.lease_rules import DeadMessage, read_dead_message


def body_of(fields: Sequence[Any]) -> Any:
    """Return the field `body` of a flat list of names and values, or None; fast if it is at its usual place."""
    if len(fields) == 4 and fields[2] == b"body":
        return fields[3]
    return to_dict(fields).get("body")


def to_dict(flat: Sequence[Any]) -> dict[str, Any]:
    """Convert a flat list of names and values."""
    return {as_str(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def as_str(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def dead_message(entry: bytes, fields: dict[str, Any]) -> DeadMessage:
    def text(name: str) -> str:
        return as_str(fields.get(name, b""))

    return read_dead_message(
        as_str(entry),
        text("id") or None,
        fields.get("body", b""),
        text("reason"),
        text("category"),
        text("error") or None,
        text("deliveries"),
        _seconds(text("enqueued_at")),
        _seconds(text("died_at")),
        text("history"),
    )


def _seconds(milliseconds: str) -> float | None:
    return int(milliseconds) / 1000 if milliseconds.isascii() and milliseconds.isdigit() else None
