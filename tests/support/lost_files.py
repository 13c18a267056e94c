"""Ways in which the file of a database disappears while it is open, and ways in which it only seems to."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

Change = Callable[[Path], object]


def _with(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement).fetchall()


def _replace_by_copy(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


def _move_and_create(path: Path) -> None:
    path.rename(path.with_name("away"))
    _with(path, "CREATE TABLE other (x)")


def _cut(path: Path) -> None:
    _with(path, "PRAGMA wal_checkpoint")
    os.truncate(path, 2048)  # less than a page, which every file has


def _vacuum(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in (
            "CREATE TABLE other AS SELECT randomblob(100000)",
            "PRAGMA wal_checkpoint",
            "DROP TABLE other",
            "VACUUM",
            "PRAGMA wal_checkpoint(TRUNCATE)",
        ):
            connection.execute(statement).fetchall()


def _overwrite(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:  # as cp does
        file.write(content)


LOSSES: dict[str, Change] = {
    "deleted": lambda path: path.unlink(),
    "deleted with its companions": lambda path: [each.unlink() for each in path.parent.glob(f"{path.name}*")],
    "moved": lambda path: path.rename(path.with_name("away")),
    "moved and created again": _move_and_create,
    "directory deleted": lambda path: shutil.rmtree(path.parent),
    "directory moved": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    "replaced by a copy": _replace_by_copy,
    "emptied": lambda path: os.truncate(path, 0),
}
WAL_LOSSES: dict[str, Change] = {
    "cut": _cut,
    "wal deleted": lambda path: path.with_name(f"{path.name}-wal").unlink(),
    "shm deleted": lambda path: path.with_name(f"{path.name}-shm").unlink(),
}
WAL_CUTS: dict[str, Change] = {
    "wal cut": lambda path: os.truncate(log := path.with_name(f"{path.name}-wal"), log.stat().st_size // 2),
    "wal emptied": lambda path: os.truncate(path.with_name(f"{path.name}-wal"), 0),
}
"""Noticed before a transaction begins. One that runs makes the file longer again."""
HARMLESS: dict[str, Change] = {
    "overwritten in place": _overwrite,
    "another mode": lambda path: path.chmod(0o640),
    "another time": lambda path: os.utime(path, (0, 0)),
    "a hard link": lambda path: os.link(path, path.with_name("link")),
    "read by another process": lambda path: _with(path, "SELECT count(*) FROM sqlite_master"),
    "checkpointed": lambda path: _with(path, "PRAGMA wal_checkpoint(TRUNCATE)"),
    "vacuumed": lambda path: _with(path, "VACUUM"),
    "vacuumed and shorter": _vacuum,
}

every_loss = pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
EVERY = LOSSES | WAL_LOSSES | WAL_CUTS
every_wal_loss = pytest.mark.parametrize("lose", EVERY.values(), ids=EVERY)
every_wal_loss_meanwhile = pytest.mark.parametrize(
    "lose", (LOSSES | WAL_LOSSES).values(), ids=LOSSES | WAL_LOSSES
)
every_harmless_change = pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
