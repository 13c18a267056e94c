"""Objects in a directory: what is confirmed is on disk, with every directory on the way to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from onceward.boundary.stores.files import FileObjects


async def chunks() -> AsyncIterator[bytes]:
    yield b"content"


def test_every_new_directory_is_made_durable_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    root = tmp_path / "data" / "objects"
    objects = FileObjects(root)
    assert {tmp_path, tmp_path / "data", root} <= set(synced)
    synced.clear()
    ref = asyncio.run(objects.put("bucket", "key", chunks(), "text/plain"))
    content = root / "content" / ref.digest.removeprefix("sha256:")[:2]
    assert {root / "content", content, root / "names", root / "names" / "bucket"} <= set(synced)
    assert synced.index(root / "content") < synced.index(content)
