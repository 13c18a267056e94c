"""What holds consumers, in the app's database: outages with the lease of their probe, and pauses.

Every process reads it, so the fleet agrees. A probe is leased: a token that changes with each lease keeps a prober that
was stopped for too long from changing anything, and a killed one's lease expires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec
from sqlalchemy import Connection

from onceward._secrets import mask
from onceward._text import storable
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.failures.states import Down, FleetState, Identity, Paused
from onceward.storage import audit
from onceward.storage.database import Sql, StoragePorts

MARKS: Final = 1 << 20
"""A token is a count times this, plus the mark of the process that took the probe."""
LONGEST_REASON = 500
"""Characters."""


class _NotDue(Exception):
    """Ends the transaction that takes probes, so it takes none."""


class FleetRecords:
    """The records, for threads and asyncio. Each method is one transaction."""

    def __init__(
        self, ports: StoragePorts, clock: Callable[[], float] | None = None, owner: str | None = None
    ) -> None:
        """`owner` is the process that takes probes: see `free_probes`."""
        self._ports = ports
        self._mark = _mark_of(owner or "")
        self._rows = Sql(ports.dialect.name, clock)

    async def read(self) -> FleetState:
        return await self._ports.outside(read_state, self._rows)

    async def introduce(self, consumer: Identity) -> None:
        """Make a consumer known to `onceward pause`."""
        await self._change(_INTRODUCE, consumer_id=consumer[0], name=consumer[1])

    async def declare(self, subject: str, reason: str, probe_in: float) -> bool:
        """Note an outage. Returns False if it is known."""
        return await self._change(_DECLARE, subject=subject, reason=_fit(reason), probe_in=probe_in)

    async def take_probes(self, intervals: Mapping[str, float], lease: float) -> dict[str, int] | None:
        """Lease the next probe of each of these, if all are due and nobody has one. Returns their tokens. The ones
        after them are due after these intervals, whatever becomes of these."""

        def take(transaction: DbTransaction) -> dict[str, int]:
            tokens = {}
            for subject, interval in sorted(intervals.items()):
                found = self._rows.first(
                    transaction, _TAKE, subject=subject, lease=lease, interval=interval, mark=self._mark
                )
                if found is None:
                    raise _NotDue
                tokens[subject] = int(found["token"])
            return tokens

        try:
            return await self._ports.transact(take)
        except _NotDue:
            return None

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


def free_probes(transaction: DbTransaction, rows: Sql, owner: str) -> None:
    """Give back the probes of a process that is known to be dead. If another one has the same mark, its probe is given
    back, too: then one more message is tried."""
    rows.run(transaction, _FREE, mark=_mark_of(owner))


def _mark_of(owner: str) -> int:
    """What is in the token of each probe that a process takes."""
    return crc32(owner.encode()) % MARKS


# ── pauses ──────────────────────────────────────────────────────────────────────────────────────────────


def known(transaction: DbTransaction, rows: Sql) -> list[Identity]:
    """Every consumer that has run."""
    return [(row["consumer_id"], row["name"]) for row in rows.all(transaction, _KNOWN)]


class PauseChange(NamedTuple):
    """What a command to pause or resume found and did."""

    changed: bool
    earlier: list[Paused]
    """The pauses there were before."""


def pause(
    transaction: DbTransaction, rows: Sql, consumer: str | Identity, operator: str, reason: str
) -> PauseChange:
    """Pause a consumer, by its id or its name; or exactly one, which need not have run yet. A paused one gets the new
    operator and reason; without a reason it keeps its own."""
    if not isinstance(consumer, str):
        rows.run(transaction, _INTRODUCE, consumer_id=consumer[0], name=consumer[1])
    return _set(transaction, rows, "pause", consumer, operator, reason)


def resume(
    transaction: DbTransaction, rows: Sql, consumer: str | Identity, operator: str, reason: str
) -> PauseChange:
    """Let a paused consumer go on."""
    return _set(transaction, rows, "resume", consumer, operator, reason)


def _set(
    transaction: DbTransaction,
    rows: Sql,
    action: str,
    consumer: str | Identity,
    operator: str,
    reason: str,
) -> PauseChange:
    who, why = audit.check_operator(operator), storable(mask(reason.strip()))
    changed, earlier = False, []
    found = _find(known(transaction, rows), consumer) if isinstance(consumer, str) else [consumer]
    for consumer_id, name in found:
        identity = {"consumer_id": consumer_id, "name": name}
        row = rows.first(transaction, _PAUSE_OF + rows.for_update, **identity)
        before = None if row is None or row["paused_at"] is None else msgspec.convert(row, Paused)
        if before is not None:
            earlier.append(before)
        if action == "pause":
            is_new = before is None or (bool(why) and (who, why) != (before.operator, before.reason))
        else:
            is_new = before is not None
        if is_new:
            rows.run(
                transaction, _PAUSE if action == "pause" else _RESUME, operator=who, reason=why, **identity
            )
            details: dict[str, Any] = {**identity, "reason": why}
            if action == "pause" and before is not None:
                details["replaces"] = {"operator": before.operator, "reason": before.reason}
            audit.note(transaction, rows, who, action, details)
            changed = True
    return PauseChange(changed, earlier)


def _find(known: Sequence[Identity], consumer: str) -> list[Identity]:
    """Those with this id; if there are none, those with this name. Both, if it is the id of one without a contract:
    it may have got one since, with another id."""
    by_id = [each for each in known if each[0] == consumer]
    if by_id and (consumer, consumer) not in by_id:
        return by_id
    found = [each for each in known if consumer in each]
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
    UPDATE onceward_outages SET token = (token / {marks} + 1) * {marks} + :mark,
        held_until = {steady} + :lease, next_probe = {steady} + :interval
    WHERE subject = :subject AND next_probe <= {steady} AND (held_until IS NULL OR held_until <= {steady})
    RETURNING token
""".replace("{marks}", str(MARKS))
_KEEP = (
    "UPDATE onceward_outages SET held_until = {steady} + :lease WHERE subject = :subject AND token = :token"
)
_RELEASE = "UPDATE onceward_outages SET held_until = NULL WHERE subject = :subject AND token = :token"
_FAIL = """
    UPDATE onceward_outages SET probes = probes + 1, held_until = NULL, next_probe = {steady} + :probe_in,
        reason = COALESCE(:reason, reason)
    WHERE subject = :subject AND token = :token
"""
_FREE = f"""
    UPDATE onceward_outages SET held_until = NULL
    WHERE held_until IS NOT NULL AND token - token / {MARKS} * {MARKS} = :mark
"""
_END = "DELETE FROM onceward_outages WHERE subject = :subject AND token = :token"
_INTRODUCE = (
    "INSERT INTO onceward_pauses (consumer_id, name) VALUES (:consumer_id, :name) ON CONFLICT DO NOTHING"
)
_PAUSED = (
    "SELECT consumer_id, name, paused_at, operator, reason FROM onceward_pauses WHERE paused_at IS NOT NULL"
)
_PAUSE_OF = """
    SELECT consumer_id, name, paused_at, operator, reason FROM onceward_pauses
    WHERE consumer_id = :consumer_id AND name = :name
"""
_KNOWN = "SELECT consumer_id, name FROM onceward_pauses ORDER BY consumer_id, name"
_PAUSE = """
    UPDATE onceward_pauses SET paused_at = CASE WHEN operator = :operator THEN paused_at ELSE {now} END,
        operator = :operator, reason = :reason
    WHERE consumer_id = :consumer_id AND name = :name
"""
_RESUME = """
    UPDATE onceward_pauses SET paused_at = NULL, operator = NULL, reason = NULL
    WHERE consumer_id = :consumer_id AND name = :name
"""
