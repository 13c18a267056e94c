"""Objects in a directory: what is confirmed is on disk, with every directory on the way to it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import ObjectConflict, Unavailable
from onceward.boundary.stores.files import FileObjects
from onceward.boundary.stores.sqlite import SqliteBoundaryStore


async def chunks() -> AsyncIterator[bytes]:
    yield b"content"


async def others() -> AsyncIterator[bytes]:
    yield b"others!"


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


def _cut(path: Path) -> None:
    os.truncate(path, 3)


def _turn_into_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.req("BC-59")
@pytest.mark.parametrize("damage", [Path.unlink, _cut, _turn_into_a_pipe], ids=["deleted", "cut", "a pipe"])
def test_an_object_that_lost_its_bytes_is_not_served_and_can_be_put_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    async def story() -> None:
        objects = FileObjects(tmp_path)
        first = await objects.put("bucket", "key", chunks(), "")
        [content] = tmp_path.glob("content/*/*")
        damage(content)
        with pytest.raises(Unavailable, match="object bucket/key is damaged"):
            await objects.get("bucket", "key")
        with pytest.raises(ObjectConflict):
            await objects.put("bucket", "key", others(), "")
        assert await objects.put("bucket", "key", chunks(), "") == first
        _, pieces = await objects.get("bucket", "key")
        assert [piece async for piece in pieces] == [b"content"]
        assert (await objects.usage()).count == 1
        assert list((tmp_path / "incoming").iterdir()) == []

    asyncio.run(story())


@pytest.mark.req("BC-59")
def test_an_object_whose_name_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    async def story() -> None:
        objects = FileObjects(tmp_path)
        await objects.put("bucket", "key", chunks(), "")
        [name] = tmp_path.glob("names/*/*")
        name.write_text("{")
        for call in (objects.get("bucket", "key"), objects.put("bucket", "key", chunks(), "")):
            with pytest.raises(Unavailable, match="object bucket/key is damaged"):
                await call

    asyncio.run(story())


@pytest.mark.req("BC-59")
def test_an_object_that_ends_early_in_its_store_is_an_error_and_not_a_shorter_object(tmp_path: Path) -> None:
    async def story() -> None:
        store = SqliteBoundaryStore(tmp_path)
        await store.objects.put("bucket", "key", chunks(), "")
        _, pieces = await Boundary(store).get("bucket", "key")
        [content] = tmp_path.glob("objects/content/*/*")
        _cut(content)
        with pytest.raises(Unavailable, match="3 of its 7 bytes"):
            async for _ in pieces:
                pass
        await store.close()

    asyncio.run(story())
