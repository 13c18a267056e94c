"""Objects in a directory: what is confirmed is on disk, with every directory on the way to it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from onceward.boundary.errors import Unavailable
from onceward.boundary.stores.files import FileObjects
from onceward.boundary.stores.sqlite import SqliteBoundaryStore


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


@pytest.mark.req("RN-08")
@pytest.mark.parametrize("which", ["objects", "objects/names", "objects/content", "objects/incoming"])
@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_nothing_is_put_into_a_directory_that_took_the_place_of_ours(
    tmp_path: Path, which: str, how: str
) -> None:
    async def story() -> None:
        store = SqliteBoundaryStore(tmp_path / "data")
        try:
            await store.objects.put("bucket", "first", chunks(), "")
            place = tmp_path / "data" / which
            if how == "replaced":
                shutil.copytree(place, tmp_path / "copy")
            place.rename(tmp_path / "aside")
            if how == "replaced":
                (tmp_path / "copy").rename(place)
            for name in ("first", "second"):
                with pytest.raises(Unavailable, match=r"objects/\w+ was (deleted or moved|replaced)"):
                    await store.objects.put("bucket", name, chunks(), "")
            with pytest.raises(Unavailable, match="objects"):
                await store.bounds()
            if how == "replaced":
                shutil.rmtree(place)
            (tmp_path / "aside").rename(place)
            await store.objects.put("bucket", "second", chunks(), "")
            assert (await store.bounds()).last == 0
        finally:
            await store.close()

    asyncio.run(story())
