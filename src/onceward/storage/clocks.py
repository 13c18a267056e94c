"""A clock that nobody can set, for a database without a server; and whether the wall clock may be wrong.

The table has a row for each start of a machine. The time since that start plus `ahead` is the steady clock, the same
in all processes of the machine. After another start it continues from the wall clock, and the holders of leases are
gone.

A purge compares the clock of the database with the time since the machine started. What it removes is gone permanently,
so it refuses if that clock was set ahead, or if the machine seems to have been off for longer than is usual.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, text

from onceward._time import boot_id, uptime, wall
from onceward.errors import OncewardError

TOLERANCE: Final = 1800.0
"""Seconds by which a clock may be corrected. An hour may be a wrong time zone."""
LONGEST_ABSENCE: Final = 7.5 * 86400
"""Seconds for which a machine may be off. A week is normal."""


class ClockDoubtError(OncewardError):
    """The clock of the database may be wrong, so nothing was removed. Confirm the time, or correct the clock."""


class Clocks:
    """The row of this machine."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """A given clock replaces the time since the start, too."""
        self._boot = boot_id() if clock is None else "given"
        self._uptime = clock or uptime
        self._ahead: float | None = None

    def steady(self, connection: Connection) -> float:
        """Return the steady time in seconds, close to the wall clock when the machine started."""
        if not self._boot:
            return wall()
        if self._ahead is None:
            row = connection.execute(_READ, {"boot": self._boot}).first()
            if row is None:  # its value is kept in mind once it is committed
                now = wall()
                if connection.execute(_ANY).first() is not None:
                    for end_leases in _END_LEASES:
                        connection.execute(end_leases, {"now": now})
                self.note(connection, now)
                return now
            self._ahead = float(row.ahead)
        return self._uptime() + self._ahead

    def note(self, connection: Connection, now: float) -> None:
        """Note the time of the database, unless it is known for this start of the machine."""
        if not self._boot or connection.execute(_READ, {"boot": self._boot}).first() is not None:
            return
        newest, ahead = self._newest(connection), now - self._uptime()
        plausible = newest is None or (newest <= now + TOLERANCE and ahead <= newest + LONGEST_ABSENCE)
        since = now if plausible else newest if newest is not None and newest < now else None
        values = {"boot": self._boot, "ahead": ahead, "trusted": ahead if plausible else None, "at": since}
        connection.execute(_BEGIN, values)

    def trust(self, connection: Connection, now: float) -> None:
        """From now on, the clock of the database is right."""
        self.note(connection, now)
        if self._boot:
            values = {"boot": self._boot, "trusted": now - self._uptime(), "now": now}
            connection.execute(_TRUST, values)

    def check(self, connection: Connection, now: float, command: str, *, trust: bool) -> None:
        """Raise `ClockDoubtError`, which names the command, if the clock of the database may be ahead; with `trust`, an
        operator says that it is not."""
        if trust:
            self.trust(connection, now)
            return
        self.note(connection, now)
        row = connection.execute(_READ, {"boot": self._boot}).first()
        if row is not None and row.trusted_ahead is not None:
            jump = now - self._uptime() - row.trusted_ahead
            if jump > TOLERANCE:
                self._doubt(now, f"it was set {_span(jump)} ahead since {_date(row.trusted_at)}", command)
            connection.execute(_TRUST, {"boot": self._boot, "trusted": row.trusted_ahead, "now": now})
            return
        since = row.trusted_at if row is not None and row.trusted_at is not None else self._newest(connection)
        booted_at = now - self._uptime()
        if since is not None and booted_at > since + LONGEST_ABSENCE:
            what = (
                f"the last time known to be right is {_date(since)}, {_span(booted_at - since)} before this machine "
                "was started"
            )
            self._doubt(now, what, command)
        self.trust(connection, now)

    def _doubt(self, now: float, what: str, command: str) -> None:
        raise ClockDoubtError(
            f"the clock says {_date(now)}, but {what}; nothing was removed. If the clock is wrong, correct it. If it "
            f"is right, confirm it once: `{command} --trust-clock`, or purge(trust_clock=True)"
        )

    def _newest(self, connection: Connection) -> float | None:
        found: float | None = connection.execute(_NEWEST).scalar()
        act: str | None = connection.execute(_LAST_ACT).scalar()
        known = [] if found is None else [float(found)]
        known += [] if act is None else [datetime.fromisoformat(act).timestamp()]
        return max(known, default=None)


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _span(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} hours"


_READ = text("SELECT ahead, trusted_ahead, trusted_at FROM onceward_clocks WHERE boot = :boot")
_ANY = text("SELECT 1 FROM onceward_clocks LIMIT 1")
_BEGIN = text("""
    INSERT INTO onceward_clocks (boot, ahead, trusted_ahead, trusted_at)
    VALUES (:boot, :ahead, CAST(:trusted AS double precision), CAST(:at AS double precision)) ON CONFLICT DO NOTHING
""")
_TRUST = text("""
    UPDATE onceward_clocks SET trusted_ahead = :trusted, trusted_at = :now WHERE boot = :boot
""")
_NEWEST = text("""
    SELECT max(at) FROM (
        SELECT max(trusted_at) AS at FROM onceward_clocks
        UNION ALL SELECT max(updated_at) FROM onceward_consumers
        UNION ALL SELECT max(last_at) FROM onceward_attempts
        UNION ALL SELECT max(died_at) FROM onceward_dead_letters
    ) AS known
""")
_LAST_ACT = text("SELECT at FROM onceward_audit ORDER BY seq DESC LIMIT 1")
_END_LEASES = [
    *(
        text(f"UPDATE {table} SET locked_until = :now WHERE locked_until > :now")
        for table in ("onceward_attempts", "onceward_dead_letters")
    ),
    text("UPDATE onceward_outbox SET at = :now WHERE state = 'held' AND at > :now"),
]
