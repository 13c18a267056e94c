"""What holds consumers, in the app's database: outages with the lease of their probe, and pauses.

Every process reads it, so the fleet agrees. A probe is leased: a token that changes with each lease keeps a prober that
was stopped for too long from changing anything, and a killed one's lease expires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from onceward._secrets import mask
from onceward._text import storable
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.failures.states import Down, FleetState, Identity, Paused
from onceward.storage import audit
from onceward.storage.database import Sql, StoragePorts

LONGEST_REASON = 500
"""Characters."""


class FleetRecords:
    """The records, for threads and asyncio. Each method is one transaction."""

    def __init__(self, ports: StoragePorts, clock: Callable[[], float] | None = None) -> None:
        self._ports = ports
        self._rows = Sql(ports.dialect.name, clock)

    async def read(self) -> FleetState:
        return await self._ports.outside(read_state, self._rows)

    async def introduce(self, consumer: Identity) -> None:
        """Make a consumer known to `onceward pause`."""
        await self._change(_INTRODUCE, consumer_id=consumer[0], name=consumer[1])

    async def declare(self, subject: str, reason: str, probe_in: float) -> bool:
        """Note an outage. Returns False if it is known."""
        return await self._change(_DECLARE, subject=subject, reason=_fit(reason), probe_in=probe_in)

    async def take_probe(self, subject: str, lease: float, interval: float) -> int | None:
        """Lease the next probe, if it is due and nobody has it. Returns its token. The one after it is due after the
        interval, whatever becomes of this one."""

        def take(transaction: DbTransaction) -> dict[str, Any] | None:
            return self._rows.first(transaction, _TAKE, subject=subject, lease=lease, interval=interval)

        found = await self._ports.transact(take)
        return None if found is None else int(found["token"])

    async def keep_probe(self, subject: str, token: int, lease: float) -> bool:
        """Extend the lease of a probe that still runs. Returns False if it is lost."""
        return await self._change(_KEEP, subject=subject, token=token, lease=lease)

    async def release_probe(self, subject: str, token: int) -> None:
        """Give a probe back that did not happen."""
        await self._change(_RELEASE, subject=subject, token=token)

    async def fail_probe(self, subject: str, token: int, reason: str | None, probe_in: float) -> None:
        """Note that it is still down. None for `reason` keeps the last one."""
        why = None if reason is None else _fit(reason)
        await self._change(_FAIL, subject=subject, token=token, reason=why, probe_in=probe_in)

    async def end(self, subject: str, token: int) -> bool:
        """Note that a probe succeeded: it is up. Returns False if another probe was leased since."""
        return await self._change(_END, subject=subject, token=token)

    async def _change(self, sql: str, **values: Any) -> bool:
        def change(transaction: DbTransaction) -> int:
            return self._rows.changed(transaction, sql, **values)

        return bool(await self._ports.transact(change))


def read_state(connection: Connection, rows: Sql) -> FleetState:
    """What holds consumers now."""
    down = {}
    for row in rows.on(connection, _DOWN).mappings():
        down[str(row["subject"])] = msgspec.convert(dict(row), Down, strict=False)
    paused = [msgspec.convert(dict(row), Paused) for row in rows.on(connection, _PAUSED).mappings()]
    return FleetState(down, {each.identity: each for each in paused})


# ── pauses ──────────────────────────────────────────────────────────────────────────────────────────────


def known(transaction: DbTransaction, rows: Sql) -> list[Identity]:
    """Every consumer that has run."""
    return [(row["consumer_id"], row["name"]) for row in rows.all(transaction, _KNOWN)]


def pause(
    transaction: DbTransaction, rows: Sql, consumer: str | Identity, operator: str, reason: str
) -> bool:
    """Pause a consumer, by its id or its name; or exactly one, which need not have run yet. Returns False if it is
    paused already."""
    if not isinstance(consumer, str):
        rows.run(transaction, _INTRODUCE, consumer_id=consumer[0], name=consumer[1])
    return _note(transaction, rows, "pause", _PAUSE, consumer, operator, reason)


def resume(
    transaction: DbTransaction, rows: Sql, consumer: str | Identity, operator: str, reason: str
) -> bool:
    """Let a paused consumer go on. Returns False if it is not paused."""
    return _note(transaction, rows, "resume", _RESUME, consumer, operator, reason)


def _note(
    transaction: DbTransaction,
    rows: Sql,
    action: str,
    sql: str,
    consumer: str | Identity,
    operator: str,
    reason: str,
) -> bool:
    who, why = audit.check_operator(operator), storable(mask(reason.strip()))
    changed = False
    found = _find(known(transaction, rows), consumer) if isinstance(consumer, str) else [consumer]
    for consumer_id, name in found:
        identity = {"consumer_id": consumer_id, "name": name}
        if rows.changed(transaction, sql, operator=who, reason=why, **identity):
            audit.note(transaction, rows, who, action, {**identity, "reason": why})
            changed = True
    return changed


def _find(known: Sequence[Identity], consumer: str) -> list[Identity]:
    """Those with this id; if there are none, those with this name."""
    for place in (0, 1):
        found = [identity for identity in known if identity[place] == consumer]
        if found:
            return found
    names = sorted(
        {name if name == consumer_id else f"{consumer_id} ({name})" for consumer_id, name in known}
    )
    raise ConfigurationError(
        f"there is no consumer {consumer!r} in this database; it knows {', '.join(names)}"
        if names
        else f"there is no consumer {consumer!r} in this database: none has run on it yet; a consumer is known here "
        "from its first `onceward run` on"
    )


def _fit(reason: str) -> str:
    return storable(reason[:LONGEST_REASON])


_DOWN = """
    SELECT subject, since, reason, probes, next_probe - {steady} AS due_in, token,
        CASE WHEN held_until > {steady} THEN 1 ELSE 0 END AS probing
    FROM onceward_outages
"""
_DECLARE = """
    INSERT INTO onceward_outages (subject, since, reason, probes, next_probe, token)
    VALUES (:subject, {now}, :reason, 0, {steady} + :probe_in, 0) ON CONFLICT DO NOTHING
"""
_TAKE = """
    UPDATE onceward_outages SET token = token + 1, held_until = {steady} + :lease, next_probe = {steady} + :interval
    WHERE subject = :subject AND next_probe <= {steady} AND (held_until IS NULL OR held_until <= {steady})
    RETURNING token
"""
_KEEP = (
    "UPDATE onceward_outages SET held_until = {steady} + :lease WHERE subject = :subject AND token = :token"
)
_RELEASE = "UPDATE onceward_outages SET held_until = NULL WHERE subject = :subject AND token = :token"
_FAIL = """
    UPDATE onceward_outages SET probes = probes + 1, held_until = NULL, next_probe = {steady} + :probe_in,
        reason = COALESCE(:reason, reason)
    WHERE subject = :subject AND token = :token
"""
_END = "DELETE FROM onceward_outages WHERE subject = :subject AND token = :token"
_INTRODUCE = (
    "INSERT INTO onceward_pauses (consumer_id, name) VALUES (:consumer_id, :name) ON CONFLICT DO NOTHING"
)
_PAUSED = (
    "SELECT consumer_id, name, paused_at, operator, reason FROM onceward_pauses WHERE paused_at IS NOT NULL"
)
_KNOWN = "SELECT consumer_id, name FROM onceward_pauses ORDER BY consumer_id, name"
_PAUSE = """
    UPDATE onceward_pauses SET paused_at = {now}, operator = :operator, reason = :reason
    WHERE consumer_id = :consumer_id AND name = :name AND paused_at IS NULL
"""
_RESUME = """
    UPDATE onceward_pauses SET paused_at = NULL, operator = NULL, reason = NULL
    WHERE consumer_id = :consumer_id AND name = :name AND paused_at IS NOT NULL
"""
