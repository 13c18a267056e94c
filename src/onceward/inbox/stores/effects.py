"""The rows of the effect ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onceward.db.transaction import DbTransaction
from onceward.inbox.stores.types import Effect, Key
from onceward.storage.database import Sql

MOST_OF_AN_EVENT = 100
"""Effects of one event that are listed."""


class EffectRows(Sql):
    """The part of a store that the ledger of effects uses."""

    def _values(self, key: Key) -> dict[str, Any]:
        return {"consumer": key.consumer_id, "tracking": key.tracking_id, "day": key.day}

    def _one(self, transaction: DbTransaction, sql: str, key: Key, **more: Any) -> Any:
        return self.run(transaction, sql, **self._values(key), **more).first()

    def _execute(self, transaction: DbTransaction, sql: str, key: Key, **more: Any) -> int:
        result = self.run(transaction, sql, **self._values(key), **more)
        return int(result.rowcount)

    def intend(
        self,
        transaction: DbTransaction,
        key: Key,
        name: str,
        token: int,
        effect_key: str,
        valid_for: float | None,
    ) -> Effect:
        """Record that an effect is about to happen, or return its earlier record.

        A refused effect gets a new key. One in doubt keeps its key and its validity: later code can only shorten it.
        """
        values = {"name": name, "token": token, "effect_key": effect_key, "valid_for": valid_for}
        is_new = any(
            self._execute(transaction, sql, key, **values) == 1 for sql in (_INTEND, _INTEND_REFUSED)
        )
        if not is_new and valid_for is not None:
            self._execute(transaction, _SHORTEN, key, **values)
        found = self.effect(transaction, key, name)
        assert found is not None
        return found._replace(is_new=is_new)

    def effect(self, transaction: DbTransaction, key: Key, name: str) -> Effect | None:
        row = self._one(transaction, _EFFECT, key, name=name)
        if row is None:
            return None
        return Effect(row.effect_key, row.state, row.result, float(row.age), row.valid_for, row.refusals)

    def restart_key(self, transaction: DbTransaction, key: Key, name: str) -> None:
        """Count the validity of the key from now on: the provider has forgotten it, and says that nothing happened."""
        self._execute(transaction, _RESTART_KEY, key, name=name)

    def settle_effect(self, transaction: DbTransaction, key: Key, name: str, result: bytes) -> None:
        self._execute(transaction, _EFFECT_DONE, key, name=name, result=result)

    def doubt_effect(self, transaction: DbTransaction, key: Key, name: str, error: str) -> None:
        self._execute(transaction, _EFFECT_DOUBT, key, name=name, error=error)

    def refuse_effect(
        self, transaction: DbTransaction, key: Key, name: str, effect_key: str, error: str
    ) -> bool:
        """Record that it has not happened under this key. Returns False if it is not in doubt under this key."""
        return (
            self._execute(transaction, _EFFECT_REFUSED, key, name=name, effect_key=effect_key, error=error)
            == 1
        )

    def effects(self, transaction: DbTransaction, in_doubt: bool, limit: int) -> list[dict[str, Any]]:
        which = "state = 'intended'" if in_doubt else "1 = 1"
        return self.all(transaction, _EFFECTS.replace("{which}", which), limit=limit)

    def effects_of(
        self, transaction: DbTransaction, consumer_id: str, tracking_ids: Sequence[str]
    ) -> list[dict[str, Any]]:
        """All effects of one event, under each of these spellings of its id."""
        names = {f"tracking_{number}": each for number, each in enumerate(tracking_ids)}
        which = f"consumer_id = :consumer AND tracking_id IN ({', '.join(f':{name}' for name in names)})"
        sql = _EFFECTS.replace("{which}", which)
        return self.all(transaction, sql, consumer=consumer_id, limit=MOST_OF_AN_EVENT, **names)

    def has_expired_doubt(self, transaction: DbTransaction, key: Key) -> bool:
        """Whether an effect of this event is in doubt, and its provider may have forgotten the key."""
        return self._one(transaction, _EXPIRED_DOUBT, key) is not None

    def key_validity(self, transaction: DbTransaction, consumer_id: str) -> list[dict[str, Any]]:
        return self.all(transaction, _KEY_VALIDITY, consumer=consumer_id)


_INTEND = """
    INSERT INTO onceward_effects
        (consumer_id, tracking_id, name, event_day, effect_key, lock_token, state, intended_at, valid_for)
    VALUES (:consumer, :tracking, :name, :day, :effect_key, :token, 'intended', {steady}, :valid_for)
    ON CONFLICT DO NOTHING
"""
_OF_EFFECT = "consumer_id = :consumer AND tracking_id = :tracking AND name = :name"
# The number keeps the keys apart, even if the tokens of starts begin again at 1.
_INTEND_REFUSED = f"""
    UPDATE onceward_effects SET state = 'intended', effect_key = :effect_key || '-' || refusals, lock_token = :token,
        intended_at = {{steady}}, valid_for = :valid_for, settled_at = NULL, error = NULL
    WHERE {_OF_EFFECT} AND state = 'refused'
"""
_SHORTEN = f"""
    UPDATE onceward_effects SET valid_for = :valid_for
    WHERE {_OF_EFFECT} AND state = 'intended' AND (valid_for IS NULL OR valid_for > :valid_for)
"""
_RESTART_KEY = (
    f"UPDATE onceward_effects SET intended_at = {{steady}} WHERE {_OF_EFFECT} AND state = 'intended'"
)
_EFFECT = f"""
    SELECT effect_key, state, result, {{steady}} - intended_at AS age, valid_for, refusals FROM onceward_effects
    WHERE {_OF_EFFECT}
"""
_EXPIRED_DOUBT = """
    SELECT 1 FROM onceward_effects WHERE consumer_id = :consumer AND tracking_id = :tracking
        AND state = 'intended' AND {steady} - intended_at >= valid_for
"""
_KEY_VALIDITY = """
    SELECT name, min(valid_for) AS valid_for, count(*) - count(valid_for) AS without FROM onceward_effects
    WHERE consumer_id = :consumer GROUP BY name ORDER BY name
"""
_EFFECT_DONE = """
    UPDATE onceward_effects SET state = 'done', result = :result, error = NULL, settled_at = {now}
    WHERE consumer_id = :consumer AND tracking_id = :tracking AND name = :name
"""
_EFFECT_DOUBT = """
    UPDATE onceward_effects SET error = :error
    WHERE consumer_id = :consumer AND tracking_id = :tracking AND name = :name AND state = 'intended'
"""
_EFFECT_REFUSED = f"""
    UPDATE onceward_effects SET state = 'refused', error = :error, refusals = refusals + 1, settled_at = {{now}}
    WHERE {_OF_EFFECT} AND state = 'intended' AND effect_key = :effect_key
"""
_EFFECTS = """
    SELECT consumer_id, tracking_id, name, effect_key, lock_token, state, error, intended_at, settled_at, valid_for,
        CASE WHEN state = 'intended' THEN coalesce({steady} - intended_at >= valid_for, false) ELSE false END
            AS expired, refusals
    FROM onceward_effects WHERE {which} ORDER BY intended_at, tracking_id, name LIMIT :limit
"""
