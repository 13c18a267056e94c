"""Storing and reading objects."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from onceward.boundary.errors import NotFound, ObjectConflict
from onceward.boundary.model import ObjectRef
from onceward.boundary.store import BoundaryStore
from onceward.testing.boundary.suite import StoreSuite, with_store


class ObjectCases(StoreSuite):
    @pytest.mark.req("BC-17", "BC-26")
    def test_an_object_comes_back_as_it_was_put(self) -> None:
        blob = bytes(range(256)) * 5000

        async def write(store: BoundaryStore) -> None:
            ref = await store.objects.put("batch-files", "B1/report.pdf", _pieces(blob), "application/pdf")
            assert ref == _ref("batch-files", "B1/report.pdf", blob, "application/pdf")

        async def read(store: BoundaryStore) -> None:
            ref, chunks = await store.objects.get("batch-files", "B1/report.pdf")
            assert ref == _ref("batch-files", "B1/report.pdf", blob, "application/pdf")
            assert await _whole(chunks) == blob
            assert await store.objects.head("batch-files", "B1/report.pdf") == ref

        self.on_store(write)
        self.on_store(read)

    @pytest.mark.req("BC-17", "BC-26")
    @with_store
    async def test_the_same_bytes_again_are_fine_and_other_bytes_are_refused(
        self, store: BoundaryStore
    ) -> None:
        first = await store.objects.put("b", "k", _pieces(b"one"), "")
        assert await store.objects.put("b", "k", _pieces(b"one"), "") == first
        with pytest.raises(ObjectConflict):
            await store.objects.put("b", "k", _pieces(b"two"), "")
        assert await _blob(store, "b", "k") == b"one"

    @pytest.mark.req("BC-17", "BC-26")
    @with_store
    async def test_of_different_bytes_at_once_for_one_key_one_stays(self, store: BoundaryStore) -> None:
        blobs = [str(number).encode() * 1000 for number in range(8)]
        outcomes = await asyncio.gather(
            *(store.objects.put("b", "k", _pieces(blob), "") for blob in blobs), return_exceptions=True
        )
        kept = [each for each in outcomes if isinstance(each, ObjectRef)]
        assert len(kept) == 1
        assert sum(isinstance(each, ObjectConflict) for each in outcomes) == 7
        assert await _blob(store, "b", "k") == blobs[outcomes.index(kept[0])]

    @pytest.mark.req("UI-21")
    @with_store
    async def test_a_store_knows_how_many_objects_it_has_and_how_large_they_are(
        self, store: BoundaryStore
    ) -> None:
        before = await store.objects.usage()
        for number in range(3):
            await store.objects.put("b", f"k{number}", _pieces(f"object {number}".encode() * 1000), "")
        await store.objects.put("b", "k0", _pieces(b"object 0" * 1000), "")
        after = await store.objects.usage()
        assert (before.count, after.count) == (0, 3)
        assert 24_000 <= after.size - before.size < 30_000, "their bytes, and not much around them"

    @pytest.mark.req("BC-26")
    @with_store
    async def test_an_object_that_is_not_there_is_not_found(self, store: BoundaryStore) -> None:
        assert await store.objects.head("b", "k") is None
        with pytest.raises(NotFound, match="b/k"):
            await store.objects.get("b", "k")

    @pytest.mark.req("BC-26")
    def test_an_upload_that_breaks_off_leaves_nothing(self) -> None:
        async def breaking() -> AsyncIterator[bytes]:
            yield b"half"
            raise ConnectionError

        async def body(store: BoundaryStore) -> None:
            with pytest.raises(ConnectionError):
                await store.objects.put("b", "k", breaking(), "")
            assert await store.objects.head("b", "k") is None
            await store.objects.put("b", "k", _pieces(b"whole"), "")
            assert await _blob(store, "b", "k") == b"whole"

        self.on_store(body)

    @pytest.mark.req("BC-26")
    @with_store
    async def test_an_object_may_be_empty_and_two_keys_may_have_the_same_bytes(
        self, store: BoundaryStore
    ) -> None:
        await store.objects.put("b", "empty", _pieces(b""), "")
        await store.objects.put("b", "one", _pieces(b"same"), "text/plain")
        await store.objects.put("c", "two", _pieces(b"same"), "text/html")
        assert await _blob(store, "b", "empty") == b""
        assert await _blob(store, "b", "one") == await _blob(store, "c", "two") == b"same"
        found = [(each.bucket, each.key, each.media_type) async for each in store.objects.refs()]
        assert sorted(found) == [
            ("b", "empty", ""),
            ("b", "one", "text/plain"),
            ("c", "two", "text/html"),
        ]

    @pytest.mark.req("BC-26")
    @pytest.mark.parametrize(
        "key", ["../../escape", "/etc/passwd", ".", "..", "a/../b", "ключ", "x" * 1000, "a.b.*.>"]
    )
    def test_a_key_is_any_text_and_leads_nowhere_else(self, key: str) -> None:
        async def body(store: BoundaryStore) -> None:
            await store.objects.put("b", key, _pieces(b"here"), "")
            await store.objects.put("b", "other", _pieces(b"there"), "")
            assert await _blob(store, "b", key) == b"here"
            assert await store.objects.head("b", key + "x") is None

        outside = {each for each in self.place.parent.rglob("*") if self.place not in each.parents}
        self.on_store(body)
        assert {each for each in self.place.parent.rglob("*") if self.place not in each.parents} == outside


async def _pieces(blob: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(blob), 100_000):
        yield blob[at : at + 100_000]


async def _whole(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def _blob(store: BoundaryStore, bucket: str, key: str) -> bytes:
    return await _whole((await store.objects.get(bucket, key))[1])


def _ref(bucket: str, key: str, blob: bytes, media_type: str) -> ObjectRef:
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    return ObjectRef(bucket=bucket, key=key, digest=digest, size=len(blob), media_type=media_type)
