"""Root causes: open until every letter that died of them is settled, and reopened when one dies again."""

from __future__ import annotations

from typing import Any

import msgspec

from onceward._secrets import mask
from onceward._text import storable
from onceward.db.transaction import DbTransaction
from onceward.deadletters.letter import Category
from onceward.errors import ConfigurationError, OncewardError
from onceward.storage.database import Sql, wait_for_lock


class RedriveRefusedError(OncewardError):
    """A redrive is not allowed. The message says what is missing."""


class Rca(msgspec.Struct, frozen=True, kw_only=True):
    """A root cause: why letters died, and what fixed it."""

    category: Category
    root_cause: str
    fix_ref: str
    """What was deployed: a version, a change, a ticket."""

    def __post_init__(self) -> None:
        try:
            msgspec.structs.force_setattr(self, "category", Category(self.category))
        except ValueError:
            known = ", ".join(Category)
            raise ConfigurationError(
                f"an RCA's category must be one of {known}, not {self.category!r}"
            ) from None
        for field in ("root_cause", "fix_ref"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                what = "why the letters died" if field == "root_cause" else "which fix is deployed"
                raise RedriveRefusedError(f"a redrive needs an RCA, and its {field} is empty: say {what}")
            msgspec.structs.force_setattr(self, field, storable(mask(value)))


def lock(transaction: DbTransaction, rows: Sql) -> None:
    """Lock before settling or scheduling letters: of two transactions that settle the last two letters, one must see
    the other's."""
    wait_for_lock(transaction, "onceward rcas")


def use(transaction: DbTransaction, rows: Sql, rca: Rca | int, operator: str) -> int:
    """Return the number of a new root cause, or of one that is open already."""
    if isinstance(rca, Rca):
        values = {
            "category": str(rca.category),
            "cause": rca.root_cause,
            "fix": rca.fix_ref,
            "operator": operator,
        }
        return int(rows.run(transaction, _OPEN, **values).scalar_one())
    if not isinstance(rca, int) or isinstance(rca, bool):
        raise RedriveRefusedError(
            "a redrive needs an RCA: Rca(category=…, root_cause=…, fix_ref=…), or the number of an open one"
        )
    found = rows.first(
        transaction, "SELECT id, category, closed_at FROM onceward_rcas WHERE id = :id", id=rca
    )
    if found is None:
        raise RedriveRefusedError(
            f"there is no RCA {rca}; give the number of an open one, or describe the cause"
        )
    if found["closed_at"] is not None:
        raise RedriveRefusedError(
            f"RCA {rca} is closed: letters that died since have another cause; open a new one"
        )
    return int(found["id"])


def reopen(transaction: DbTransaction, rows: Sql, letter_id: int) -> None:
    """Reopen the cause of a letter that died again."""
    rows.run(transaction, _REOPEN, id=letter_id)


def close_settled(transaction: DbTransaction, rows: Sql) -> None:
    """Close root causes whose letters are all resolved or discarded."""
    rows.run(transaction, _CLOSE)


def last(transaction: DbTransaction, rows: Sql, limit: int) -> list[dict[str, Any]]:
    return rows.all(transaction, _LAST, limit=limit)


_OPEN = """
    INSERT INTO onceward_rcas (category, root_cause, fix_ref, operator, opened_at)
    VALUES (:category, :cause, :fix, :operator, {now}) RETURNING id
"""
_REOPEN = """
    UPDATE onceward_rcas SET closed_at = NULL, reopened = reopened + 1
    WHERE id = (SELECT rca_id FROM onceward_dead_letters WHERE id = :id)
"""
_CLOSE = """
    UPDATE onceward_rcas SET closed_at = {now}
    WHERE closed_at IS NULL
        AND EXISTS (SELECT 1 FROM onceward_dead_letters d WHERE d.rca_id = onceward_rcas.id)
        AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters d
            WHERE d.rca_id = onceward_rcas.id AND d.status IN ('open', 'redriven'))
"""
_LAST = """
    SELECT id, category, root_cause, fix_ref, operator, opened_at, closed_at, reopened FROM onceward_rcas
    ORDER BY id DESC LIMIT :limit
"""
