"""Correct the payload of a dead letter.

The body stays as it was delivered, byte for byte, and with it the letter's identity: its digest, its message id, and
the id and time by which the inbox knows the event. A redrive delivers the corrected body instead. If the event was
applied before, the inbox has the digest of another payload under its id, and does not run it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from onceward._text import storable
from onceward.connectors.codec import DecodeError, PayloadError, decode, encode_with
from onceward.db.transaction import DbTransaction
from onceward.deadletters.letter import DeadLetter, Status, transaction_of
from onceward.errors import ConfigurationError, OncewardError
from onceward.storage import audit
from onceward.storage.database import Sql
from onceward.transaction import Transaction


class EditRefusedError(OncewardError):
    """A letter cannot be edited like this. Nothing was changed; the message says why."""


class Draft(msgspec.Struct, frozen=True):
    """A letter as it was read, to see whether it changes until the edit is stored."""

    letter: DeadLetter
    body: bytes
    """As it was delivered."""
    current: bytes
    """What a redrive would deliver: the body, or the last edit of it."""
    event_at: float | None

    def transaction(self, body: bytes | None = None) -> Transaction:
        """Return what a redrive would deliver, now or with another body. Raises `DecodeError`."""
        return transaction_of(
            self.current if body is None else body,
            message_id=self.letter.message_id,
            event_at=self.event_at,
            first_failed_at=self.letter.first_failed_at.timestamp(),
        )

    def as_text(self) -> str:
        """Return the payload as JSON to edit. Refuses one that would not come back the same."""
        try:
            payload = self.transaction().payload
        except DecodeError:
            self._refuse("is not a transaction and not JSON; give the whole body as a file")
        if not is_json(payload):
            self._refuse("has a payload that JSON cannot express; give the whole encoded body as a file")
        return json.dumps(payload, indent=2, ensure_ascii=False) + "\n"

    def with_payload(self, payload: Any) -> bytes:
        """Return the body with this payload; id, time and metadata stay."""
        try:
            return encode_with({}, msgspec.structs.replace(decode(self.current), payload=payload))
        except PayloadError as error:
            self._refuse(f"cannot have this payload: {error}")
        except DecodeError:
            pass
        try:
            content = json.loads(self.current)
        except ValueError:
            content = None
        if isinstance(content, Mapping) and content.get("tracking_id") is not None and "payload" in content:
            payload = {**content, "payload": payload}
        return msgspec.json.encode(payload)

    def with_file(self, content: bytes) -> bytes:
        """Return the body for the content of a file: JSON is a payload, an encoded transaction a whole body."""
        try:
            whole = decode(content)
        except DecodeError:
            return self.with_payload(parse(content))
        kept = self.transaction() if self._is_readable() else None
        identity = (self.letter.message_id, kept.created_at if kept else whole.created_at)
        if (whole.id, whole.created_at) != identity:
            self._refuse(
                f"has id {identity[0]} and its own time; the file is another transaction, {whole.id}"
            )
        return content

    def changes(self, body: bytes) -> bool:
        """Return False if the body says the same as now."""
        if body == self.current:
            return False
        if not self._is_readable():
            return True
        before, after = self.transaction(), self.transaction(body)
        return (_exactly(before.payload), before.metadata) != (_exactly(after.payload), after.metadata)

    def _is_readable(self) -> bool:
        try:
            self.transaction()
        except DecodeError:
            return False
        return True

    def _refuse(self, why: str) -> NoReturn:
        raise EditRefusedError(f"dead letter {self.letter.id} {why}")


def parse(text: bytes | str) -> Any:
    """Read JSON, strictly."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number in JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            raise EditRefusedError(
                f"{digits[:40]} is too large to be stored: the largest number is about 1.8e308"
            )
        return number

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, number in Counter(name for name, _ in pairs).items():
            if number > 1:
                raise ValueError(f"an object has {name!r} twice")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise EditRefusedError(f"this is not JSON: {error}") from None


def is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_json(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _exactly(payload: Any) -> str:
    """Tell 1 from True and 1.0."""
    return json.dumps(payload, sort_keys=True, default=repr)


def check(letter: DeadLetter) -> None:
    if letter.status is not Status.OPEN:
        raise EditRefusedError(f"dead letter {letter.id} is {letter.status}; only open letters can be edited")


def check_cause(cause: str) -> str:
    if not isinstance(cause, str) or not cause.strip():
        raise ConfigurationError("an edit needs a cause: say why the payload is wrong")
    return storable(cause.strip())


def store(
    transaction: DbTransaction, rows: Sql, draft: Draft, body: bytes, cause: str, operator: str, outcome: str
) -> None:
    """Store the edit, and its row in the audit, if the letter is still as it was read."""
    operator = audit.check_operator(operator)
    values = {"id": draft.letter.id, "body": body, "cause": check_cause(cause), "operator": operator}
    found = rows.first(transaction, _CURRENT + rows.for_update, id=draft.letter.id)
    if found is None:
        raise EditRefusedError(f"dead letter {draft.letter.id} was removed meanwhile; nothing was changed")
    if found["status"] != Status.OPEN:
        raise EditRefusedError(
            f"dead letter {draft.letter.id} is {found['status']} by now; nothing was changed"
        )
    if bytes(found["current"]) != draft.current:
        raise EditRefusedError(
            f"dead letter {draft.letter.id} was edited meanwhile by {found['edited_by']}; look at it and edit again"
        )
    rows.run(transaction, _EDIT, **values)
    details = {
        "letter": draft.letter.id,
        "consumer": draft.letter.consumer,
        "message_id": draft.letter.message_id,
        "cause": values["cause"],
        "before": _digest(draft.current),
        "after": _digest(body),
        "original": draft.letter.digest,
        "dry_run": outcome,
    }
    audit.note(transaction, rows, operator, "edit", details)


def read(transaction: DbTransaction, rows: Sql, letter: DeadLetter) -> Draft | None:
    found = rows.first(transaction, _READ, id=letter.id)
    if found is None:
        return None
    return Draft(letter, bytes(found["body"]), bytes(found["current"]), found["event_at"])


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


_READ = """
    SELECT body, coalesce(edited_body, body) AS current, event_at FROM onceward_dead_letters WHERE id = :id
"""
_CURRENT = """
    SELECT status, coalesce(edited_body, body) AS current, edited_by FROM onceward_dead_letters WHERE id = :id
"""
_EDIT = """
    UPDATE onceward_dead_letters SET edited_body = :body, edited_at = {now}, edited_by = :operator, edit_cause = :cause
    WHERE id = :id
"""
