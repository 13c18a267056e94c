"""Objects on PostgreSQL: in pieces, complete or absent, and no trace of abandoned uploads."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from onceward.boundary.errors import BoundaryError, ObjectConflict, Unavailable
from onceward.boundary.stores.postgresql.objects import CHUNK, PAGE
from tests.support.boundary.databases import StorePlace, place

__all__ = ["place"]


async def content(size: int, chunk: int = 300_007) -> AsyncIterator[bytes]:
    for at in range(0, size, chunk):
        yield b"x" * min(chunk, size - at)


def left(place: StorePlace) -> tuple[int, int]:
    """Uploads in progress, and pieces that belong to no object."""
    [(uploads,)] = place.ask("SELECT count(*) FROM onceward_boundary_uploads")
    [(pieces,)] = place.ask("""
        SELECT count(*) FROM onceward_boundary_chunks
        WHERE content NOT IN (SELECT content FROM onceward_boundary_objects)
    """)
    return uploads, pieces


@pytest.mark.req("BC-17")
def test_an_object_goes_in_and_out_in_pieces(place: StorePlace) -> None:
    size = 24 * CHUNK + 5

    async def main() -> None:
        async with place.opened() as store:
            tracemalloc.start()
            ref = await store.objects.put("b", "large", content(size), "")
            _, chunks = await store.objects.get("b", "large")
            digest = hashlib.sha256()
            async for chunk in chunks:
                digest.update(chunk)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert (ref.size, ref.digest) == (size, f"sha256:{digest.hexdigest()}")
            assert peak < 10 * CHUNK

    asyncio.run(main())
    assert place.ask(
        "SELECT octet_length(data), count(*) FROM onceward_boundary_chunks GROUP BY 1 ORDER BY 1"
    ) == [
        (5, 1),
        (CHUNK, 24),
    ]
    assert left(place) == (0, 0)


def test_an_upload_goes_on_though_connections_break_between_its_pieces(place: StorePlace) -> None:
    async def interrupted() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * CHUNK
            place.kill_connections()

    async def main() -> None:
        async with place.opened() as store:
            ref = await store.objects.put("b", "k", interrupted(), "")
            assert ref.size == 3 * CHUNK

    asyncio.run(main())
    assert left(place) == (0, 0)


def test_of_an_upload_that_is_given_up_nothing_is_left(place: StorePlace) -> None:
    async def breaking(how: type[BaseException]) -> AsyncIterator[bytes]:
        yield b"x" * CHUNK
        yield b"x" * CHUNK
        assert left(place) == (1, 2)
        raise how

    async def main() -> None:
        async with place.opened() as store:
            with pytest.raises(ConnectionError):
                await store.objects.put("b", "k", breaking(ConnectionError), "")
            assert left(place) == (0, 0)
            with pytest.raises(asyncio.CancelledError):
                await store.objects.put("b", "k", breaking(asyncio.CancelledError), "")
            assert left(place) == (0, 0)

    asyncio.run(main())


def test_of_uploads_at_once_under_one_name_only_the_first_leaves_pieces(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as one, place.opened() as two:
            sizes = range(CHUNK, CHUNK + 6)
            outcomes = await asyncio.gather(
                *((one, two)[size % 2].objects.put("b", "k", content(size), "") for size in sizes),
                *((one, two)[size % 2].objects.put("b", "same", content(9), "") for size in sizes),
                return_exceptions=True,
            )
            assert sum(isinstance(each, ObjectConflict) for each in outcomes) == 5
            assert len(set(outcomes[6:])) == 1

    asyncio.run(main())
    assert left(place) == (0, 0)


def test_what_a_killed_server_left_is_removed_after_a_day_and_not_before(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened():
            pass
        place.admin.execute("""
            INSERT INTO onceward_boundary_uploads (begun_at) VALUES (now() - interval '25 hours'), (now());
            INSERT INTO onceward_boundary_chunks SELECT content, 0, '' FROM onceward_boundary_uploads
        """)
        assert left(place) == (2, 2)
        async with place.opened():
            pass
        assert left(place) == (1, 1)

    asyncio.run(main())


@pytest.mark.parametrize("pieces", [1, 2])
def test_an_upload_that_was_taken_for_a_left_over_is_refused(place: StorePlace, pieces: int) -> None:
    async def slow() -> AsyncIterator[bytes]:
        for _ in range(pieces):
            yield b"x" * CHUNK
        place.admin.execute("DELETE FROM onceward_boundary_uploads; DELETE FROM onceward_boundary_chunks")
        yield b"x" * (pieces - 1)

    async def main() -> None:
        async with place.opened() as store:
            with pytest.raises(Unavailable, match="took longer than 1 day"):
                await store.objects.put("b", "k", slow(), "")
            assert await store.objects.head("b", "k") is None

    asyncio.run(main())
    assert left(place) == (0, 0)


@pytest.mark.parametrize(
    "damage", ["DELETE FROM {} WHERE number = 1", "UPDATE {} SET data = 'x' WHERE number = 1"]
)
def test_a_damaged_object_is_not_handed_out_as_whole(place: StorePlace, damage: str) -> None:
    async def main() -> None:
        async with place.opened() as store:
            await store.objects.put("b", "k", content(2 * CHUNK), "")
            place.admin.execute(damage.format("onceward_boundary_chunks"))
            _, chunks = await store.objects.get("b", "k")
            with pytest.raises(BoundaryError, match="b/k is damaged"):
                _ = [chunk async for chunk in chunks]

    asyncio.run(main())


def test_all_objects_are_listed_over_several_pages(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            place.admin.execute(f"""
                INSERT INTO onceward_boundary_objects
                SELECT 'b' || n % 3, 'k' || n, 'sha256:', 0, '', n FROM generate_series(1, {2 * PAGE + 1}) AS n
            """)
            names = [(ref.bucket, ref.key) async for ref in store.objects.refs()]
            assert len(names) == len(set(names)) == 2 * PAGE + 1

    asyncio.run(main())
