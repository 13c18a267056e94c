"""Where a queue or a database is a file: on a disk, in memory, or where there can be none."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceward.connectors import file_place
from onceward.connectors.file_place import doubt_place, file_system_of
from onceward.connectors.reports import Survives
from onceward.connectors.urls import Address

pytestmark = pytest.mark.req("CC-123")


def mount(monkeypatch: pytest.MonkeyPatch, folder: Path, *mounts: tuple[str, str]) -> None:
    lines = [
        f"{n} 1 0:{n} / {place} rw,relatime shared:1 - {kind} dev rw\n"
        for n, (place, kind) in enumerate(mounts)
    ]
    (folder / "mountinfo").write_text("".join(lines))
    monkeypatch.setattr(file_place, "MOUNTS", folder / "mountinfo")


@pytest.mark.parametrize(
    ("kind", "survives", "why"),
    [
        ("tmpfs", Survives.PROCESS_CRASH, "on tmpfs, in the memory of this machine"),
        ("ramfs", Survives.PROCESS_CRASH, "on ramfs, in the memory of this machine"),
        ("nfs4", None, "on nfs4: whether locks and writes hold there"),
        ("proc", None, "belongs to the kernel"),
    ],
)
def test_a_file_is_as_durable_as_the_file_system_that_it_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, survives: Survives | None, why: str
) -> None:
    there = tmp_path / "a b"
    there.mkdir()
    escaped = str(there).replace(" ", "\\040")
    mount(monkeypatch, tmp_path, ("/", "ext4"), (escaped, "ext4"), (escaped, kind), (f"{escaped}/c", "ext4"))
    found = Address(f"sqlite:///{there}/orders.db").facts().durability
    assert found is not None
    assert found.survives is survives
    assert why in found.why
    assert doubt_place("the queue", tmp_path / "orders.db") is None


def test_a_link_to_memory_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    mount(monkeypatch, tmp_path, ("/", "ext4"), (str(tmp_path / "shm"), "tmpfs"))
    (tmp_path / "data").symlink_to(tmp_path / "shm")
    (tmp_path / "orders.db").symlink_to(tmp_path / "shm" / "orders.db")
    assert file_system_of(tmp_path / "data" / "orders.db") == "tmpfs"
    assert file_system_of(tmp_path / "orders.db") == "tmpfs"


def test_where_the_system_does_not_say_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_place, "MOUNTS", tmp_path / "none")
    doubt = doubt_place("the queue", tmp_path / "orders.db")
    assert doubt is not None
    assert doubt.survives is None


def test_what_cannot_be_a_file_cannot_be_opened(tmp_path: Path) -> None:
    for path, why in {
        "/dev/null": "/dev/null is not an ordinary file",
        str(tmp_path): f"{tmp_path} is a directory",
        f"{tmp_path}/none/orders.db": f"there is no directory {tmp_path}/none",
    }.items():
        doubt = doubt_place("the database", Path(path))
        assert doubt is not None
        assert (doubt.why, doubt.label) == (f"the database cannot be opened: {why}", "cannot be opened")
