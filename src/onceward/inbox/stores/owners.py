"""End the leases of starts whose process is known to be dead. The starts stay without an end: they count as crashes."""

from __future__ import annotations

from onceward.db.transaction import DbTransaction
from onceward.storage.database import Sql


def release_owner(transaction: DbTransaction, rows: Sql, owner: str) -> int:
    """End them now, and return how many are left because their rows are locked.

    A server may still be executing the last statement of a dead process. It will roll back, since no commit follows;
    until then its rows are not waited for.
    """
    skip = f"{rows.for_update} SKIP LOCKED" if rows.for_update else ""
    rows.run(transaction, _RELEASE.replace("{skip}", skip), owner=owner)
    return int(rows.run(transaction, _COUNT, owner=owner).scalar_one())


_HELD = "owner = :owner AND locked_until IS NOT NULL"
# Without a lease, `Store.renew` and `Store.finish` refuse whatever the dead process had sent before.
_RELEASE = f"""
    UPDATE onceward_attempts SET locked_until = NULL
    WHERE (consumer_id, tracking_id) IN (
        SELECT consumer_id, tracking_id FROM onceward_attempts WHERE {_HELD} {{skip}})
"""
_COUNT = f"SELECT count(*) FROM onceward_attempts WHERE {_HELD}"
