"""Whether the place of a SQLite file can hold it, and what it survives there."""

from __future__ import annotations

import os
from pathlib import Path

from onceward.connectors.reports import Durability, Survives
from onceward.errors import ConfigurationError

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p")
"""Locks and writes of SQLite depend on a server there, and on how it is mounted."""
OF_THE_KERNEL = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs")
ON_A_DISK = "use a path on a disk"
SHUT = "cannot be opened"


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return where the file of a queue is or will be, or refuse it."""
    if str(path) in ("", ":memory:"):
        raise ConfigurationError("a SQLite queue needs a file; for a queue in memory use MemoryConnector")
    absolute = Path(path).absolute()  # the working directory may change before it is reopened
    if not absolute.parent.is_dir():
        raise ConfigurationError(
            f"the directory of the queue file does not exist: {absolute.parent}; create it first"
        )
    if absolute.is_dir():
        raise ConfigurationError(f"{absolute} is a directory; use the path of a file in it")
    return absolute


def doubt_place(what: str, path: Path) -> Durability | None:
    """Say why this file is not durable, or cannot be opened; None if it is an ordinary file on a disk."""
    path = path.absolute()
    if problem := _problem_of(path):
        return Durability(None, f"{what} {SHUT}: {problem}", "use the path of a file", SHUT)
    kind = file_system_of(path)
    if kind in OF_THE_KERNEL:
        return Durability(None, f"{what} {SHUT}: {path.parent} belongs to the kernel", ON_A_DISK, SHUT)
    if kind in IN_MEMORY:
        return Durability(
            Survives.PROCESS_CRASH,
            f"{what} is on {kind}, in the memory of this machine: a restart or a power cut loses all of it",
            ON_A_DISK,
            "not durable",
        )
    if kind in REMOTE:
        return Durability(
            None,
            f"{what} is on {kind}: whether locks and writes hold there depends on its server and its options",
            f"{ON_A_DISK} of this machine, or a server: Redis or PostgreSQL",
        )
    if kind is None:
        why = f"whether the file of {what} is on a disk: this system does not say"
        return Durability(None, why, "check it")
    return None


def _problem_of(path: Path) -> str:
    try:
        if path.is_dir():
            return f"{path} is a directory"
        if path.exists():
            if not path.is_file():
                return f"{path} is not an ordinary file"
            return "" if os.access(path, os.R_OK | os.W_OK) else f"this user may not read and write {path}"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
    except OSError as error:
        return f"{path}: {error.strerror}"
    may_create = os.access(path.parent, os.W_OK | os.X_OK)
    return "" if may_create else f"this user may not create a file in {path.parent}"


def file_system_of(path: Path) -> str | None:
    """The type of the file system that the file is on, or will be; None if the system does not say."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
        place = path.resolve()
    except OSError:
        return None
    found: tuple[int, str] | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        mounted = Path(before.split(" ")[4].encode("latin-1", "ignore").decode("unicode_escape"))
        # The last one at a place hides those before it.
        if place.is_relative_to(mounted) and (found is None or len(mounted.parts) >= found[0]):
            found = len(mounted.parts), after.split(" ")[0]
    return None if found is None else found[1]
