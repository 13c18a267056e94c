"""The boundary store on NATS JetStream: tests beyond the suite of all stores."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import nats as nats_py
import pytest
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from onceward._nats import connection
from onceward._nats.page import NatsPage
from onceward.boundary.errors import ConflictingDuplicate, InvalidArgument, ObjectConflict, Unavailable
from onceward.boundary.model import Appended, ObjectRef
from onceward.boundary.store import Bounds, NewFact
from onceward.boundary.stores.jetstream import expiry, objects
from onceward.boundary.stores.jetstream.connection import JetStreamConnection
from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.boundary.wire import stored
from onceward.errors import ConfigurationError
from onceward.testing import servers
from onceward.testing.boundary import fact
from tests.support.boundary.availability import until_available
from tests.support.wait import until_async

_numbers = itertools.count()


@pytest.fixture(scope="module")
def nats() -> Iterator[servers.Server]:
    with servers.nats_server() as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@asynccontextmanager
async def opened(
    url: str, name: str, count: int = 1, replicas: int = 1
) -> AsyncIterator[list[JetStreamBoundaryStore]]:
    """The stores of this many servers on one stream, each with its own connection."""
    async with AsyncExitStack() as closing:
        stores = []
        for _ in range(count):
            stores.append(await JetStreamBoundaryStore.open(url, name=name, replicas=replicas))
            closing.push_async_callback(stores[-1].close)
        yield stores


@asynccontextmanager
async def plain(url: str) -> AsyncIterator[nats_py.NATS]:
    client = await nats_py.connect(url)
    yield client
    await client.close()


def freeze(server: servers.Server) -> int:
    """Its process exists, but does nothing."""
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGSTOP)
    os.waitpid(server._process.pid, os.WUNTRACED)
    return server._process.pid


async def pieces(blob: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(blob), 50_000):
        yield blob[at : at + 50_000]


# ── ids ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-15", "BC-26")
def test_the_duplicate_window_of_jetstream_is_not_what_protects_ids(nats: servers.Server, name: str) -> None:
    async def main() -> None:
        async with opened(nats.url, name) as [store], plain(nats.url) as client:
            js = client.jetstream()
            config = (await js.stream_info(f"{name}-facts")).config
            config.duplicate_window = 0.1
            await js.update_stream(config)
            await store.append(fact("m1", "x"))
            assert "Nats-Msg-Id" not in ((await js.get_msg(f"{name}-facts", 1)).headers or {})
            await asyncio.sleep(0.3)
            assert await store.append(fact("m1", "x")) == Appended(1, duplicate=True)
            with pytest.raises(ConflictingDuplicate):
                await store.append(fact("m1", "y"))
            assert await store.bounds() == Bounds(1, 1)

    asyncio.run(main())


@pytest.mark.req("BC-15", "BC-16", "BC-26")
def test_several_servers_on_one_stream_take_each_id_once_and_leave_no_offset_out(
    nats: servers.Server, name: str
) -> None:
    async def main() -> None:
        async with opened(nats.url, name, count=3) as stores:
            for number in range(20):
                appended = await asyncio.gather(
                    *(store.append(fact(f"m{number}")) for store in stores for _ in range(17))
                )
                assert {each.offset for each in appended} == {number + 1}
                assert sum(not each.duplicate for each in appended) == 1
            outcomes = await asyncio.gather(
                *(stores[at % 3].append(fact("other", str(at))) for at in range(51)), return_exceptions=True
            )
            assert sum(isinstance(each, Appended) for each in outcomes) == 1
            assert sum(isinstance(each, ConflictingDuplicate) for each in outcomes) == 50
            for store in stores:
                assert [each[0] for each in await store.read(0, 1000)] == list(range(1, 22))

    asyncio.run(main())


@pytest.mark.req("BC-15", "BC-16", "BC-26")
def test_several_servers_append_the_same_many_at_once_and_each_is_there_once_and_in_order(
    nats: servers.Server, name: str
) -> None:
    facts = [fact(f"m{number}", str(number)) for number in range(600)]

    async def main() -> None:
        async with opened(nats.url, name, count=3) as stores:
            *outcomes, _ = await asyncio.gather(
                *(store.append_all(facts) for store in stores),
                asyncio.gather(*(stores[0].append(fact(f"beside{number}")) for number in range(200))),
            )
            offsets = [[each.offset for each in given if isinstance(each, Appended)] for given in outcomes]
            assert offsets[0] == offsets[1] == offsets[2] == sorted(offsets[0])
            log = {each[0]: stored(each).message_id for each in await stores[1].read(0, 1000)}
            assert list(log) == list(range(1, 801))
            assert [log[offset] for offset in offsets[0]] == [each.message_id for each in facts]
            assert sum(not each.duplicate for given in outcomes for each in given) == 600  # type: ignore[union-attr]
            again = await stores[2].append_all([*facts[:5], fact("new"), *facts[5:]])
            assert again[5] == Appended(801)

    asyncio.run(main())


@pytest.mark.req("BC-02", "BC-03", "BC-26")
def test_several_servers_move_one_cursor_and_never_back(nats: servers.Server, name: str) -> None:
    async def main() -> None:
        async with opened(nats.url, name, count=2) as [one, other]:
            offsets = random.Random(1).sample(range(1, 41), 40)
            answers = await asyncio.gather(
                *((one, other)[at % 2].advance("c", offset) for at, offset in enumerate(offsets))
            )
            assert all(answer >= offset for answer, offset in zip(answers, offsets, strict=True))
            assert await one.position("c", create=False) == await other.position("c", create=False) == 40

    asyncio.run(main())


def test_a_fact_that_is_too_large_for_this_nats_is_refused_and_harms_nobody(
    nats: servers.Server, name: str
) -> None:
    async def main() -> None:
        async with opened(nats.url, name) as [store]:
            with pytest.raises(InvalidArgument, match="max_payload"):
                await store.append(NewFact("m1", b"digest", b"x" * 33_554_432))
            assert await store.append(fact("m2")) == Appended(1)
            large = fact("m3", "x" * 16_000_000)
            assert await store.append(large) == Appended(2)
            assert await store.append(large) == Appended(2, duplicate=True)

    asyncio.run(main())


# ── expiry ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-21", "BC-26")
def test_what_expires_is_what_is_old_in_its_class_wherever_it_lies(
    nats: servers.Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "BLOCK", 10)
    dice = random.Random(7)
    classes = ("operational", "audit", "documents")
    left: dict[int, tuple[str, int]] = {}

    async def main() -> None:
        async with opened(nats.url, name, count=2) as stores:
            for time_ in range(1000, 1100, 10):
                for _ in range(dice.randint(0, 15)):
                    stream, appended_at = dice.choice(classes), time_ + dice.randint(-30, 9)
                    new = fact(f"m{next(_numbers)}", stream=stream, appended_at=appended_at)
                    left[(await stores[0].append(new)).offset] = (stream, appended_at)
                older_than = {"operational": time_ - 20, "audit": time_ - 60}
                due = [offset for offset, (stream, at) in left.items() if at < older_than.get(stream, 0)]
                assert await dice.choice(stores).expire(older_than) == len(due)
                for offset in due:
                    del left[offset]
                assert [each[0] for each in await stores[1].read(0, 1000)] == sorted(left)
                assert (await stores[0].bounds()).first == min(left)

    asyncio.run(main())


def test_expiry_reads_again_only_where_something_has_come_of_age(
    nats: servers.Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "BLOCK", 10)
    read: list[int] = []
    page = JetStreamConnection.page

    async def counted(
        self: JetStreamConnection, stream: str, after: int, limit: int, **how: object
    ) -> list[Msg]:
        read.append(after)
        return await page(self, stream, after, limit, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(JetStreamConnection, "page", counted)

    async def main() -> None:
        async with opened(nats.url, name) as [store]:
            for number in range(100):
                await store.append(fact(f"m{number}", appended_at=1000 + number))
            read.clear()
            assert await store.expire({"operational": 1000}) == 0
            assert read == list(range(0, 100, 10))
            read.clear()
            assert await store.expire({"operational": 1015}) == 15
            assert read == [0, 10]

    asyncio.run(main())


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_object_is_one_for_every_client_of_nats(nats: servers.Server, name: str) -> None:
    blob = os.urandom(300_000)

    async def main() -> None:
        async with opened(nats.url, name) as [store], plain(nats.url) as client:
            await store.objects.put("files", "a/b c.pdf", pieces(blob), "application/pdf")
            objects = await client.jetstream().object_store(f"{name}-objects")
            assert (await objects.get("files/a/b c.pdf")).data == blob
            await objects.delete("files/a/b c.pdf")
            assert await store.objects.head("files", "a/b c.pdf") is None
            assert [each async for each in store.objects.refs()] == []

    asyncio.run(main())


@pytest.mark.req("BC-17", "BC-26")
def test_of_different_bytes_from_two_servers_one_stays_and_the_others_leave_nothing(
    nats: servers.Server, name: str
) -> None:
    blobs = [bytes([number]) * 200_000 for number in range(8)]

    async def main() -> None:
        async with opened(nats.url, name, count=2) as stores:
            outcomes = await asyncio.gather(
                *(stores[at % 2].objects.put("b", "k", pieces(blob), "") for at, blob in enumerate(blobs)),
                return_exceptions=True,
            )
            assert sum(isinstance(each, ObjectConflict) for each in outcomes) == 7
            won = next(at for at, each in enumerate(outcomes) if isinstance(each, ObjectRef))
            for store in stores:
                assert await _blob(store, "b", "k") == blobs[won]
        assert await _uploads(nats.url, name) == 1

    asyncio.run(main())


@pytest.mark.req("BC-17", "BC-26")
def test_the_bytes_of_an_upload_that_broke_off_are_removed(
    nats: servers.Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield b"x" * 300_000
        raise ConnectionError

    async def main() -> None:
        async with opened(nats.url, name) as [store]:
            with pytest.raises(ConnectionError):
                await store.objects.put("b", "k", breaking(), "")
            assert await _uploads(nats.url, name) == 0
            await store.objects.put("b", "kept", pieces(b"x" * 300_000), "")
            async with plain(nats.url) as client:  # what a server leaves behind that dies during an upload
                await client.jetstream().publish(f"$O.{name}-objects.C.died", b"half")
        async with opened(nats.url, name) as [store]:
            await store._tidying  # type: ignore[misc]
            assert await _uploads(nats.url, name) == 2, "it may still go on"
        monkeypatch.setattr(objects, "LEFT_OVER_AFTER", timedelta())
        async with opened(nats.url, name) as [store]:
            await store._tidying  # type: ignore[misc]
            assert await _uploads(nats.url, name) == 1
            assert await _blob(store, "b", "kept") == b"x" * 300_000

    asyncio.run(main())


@pytest.mark.req("BC-26")
def test_a_large_object_needs_no_large_memory(nats: servers.Server, name: str) -> None:
    count, chunk = 40, b"x" * 1_000_000

    async def many() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield chunk

    async def main() -> None:
        async with opened(nats.url, name) as [store]:
            tracemalloc.start()
            try:
                ref = await store.objects.put("b", "large", many(), "")
                received = 0
                async for each in (await store.objects.get("b", "large"))[1]:
                    received += len(each)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert ref.size == received == count * len(chunk)
            assert peak < 12_000_000

    asyncio.run(main())


async def _blob(store: JetStreamBoundaryStore, bucket: str, key: str) -> bytes:
    return b"".join([chunk async for chunk in (await store.objects.get(bucket, key))[1]])


async def _uploads(url: str, name: str) -> int:
    async with plain(url) as client:
        info = await client.jetstream().stream_info(
            f"OBJ_{name}-objects", subjects_filter=f"$O.{name}-objects.C.>"
        )
        return len(info.state.subjects or {})


# ── NATS is unavailable ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-26")
def test_without_nats_everything_is_unavailable_at_once_and_comes_back_by_itself(name: str) -> None:
    async def main() -> None:
        with servers.nats_server() as server:
            async with opened(server.url, name) as [store]:
                await store.append(fact("m1"))
                await store.advance("c", 1)
                server.kill()
                await asyncio.sleep(0.1)
                calls: list[Callable[[], Awaitable[object]]] = [
                    lambda: store.append(fact("m2")),
                    lambda: store.read(0, 10),
                    store.bounds,
                    store.size,
                    lambda: store.expire({"operational": 1}),
                    lambda: store.drop(1),
                    lambda: store.position("c", create=True),
                    lambda: store.advance("c", 1),
                    store.cursors,
                    lambda: store.objects.put("b", "k", pieces(b"x"), ""),
                    lambda: store.objects.head("b", "k"),
                    lambda: store.objects.get("b", "k"),
                ]
                began = time.monotonic()
                for call in calls:
                    with pytest.raises(Unavailable, match="try again"):
                        await call()
                assert time.monotonic() - began < connection.CALL_WAIT * len(calls) / 2
                server.start()
                await until_available(lambda: store.append(fact("m2")))
                assert [each[0] for each in await store.read(0, 10)] == [1, 2]
                assert await store.position("c", create=False) == 1

    asyncio.run(main())


@pytest.mark.req("BC-26")
def test_a_call_that_nats_does_not_answer_is_unavailable_and_may_be_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CALL_WAIT", 0.5)

    async def main() -> None:
        with servers.nats_server() as server:
            async with opened(server.url, name) as [store]:
                process = freeze(server)
                try:
                    with pytest.raises(Unavailable, match="unknown"):
                        await store.append(fact("m1"))
                    with pytest.raises(Unavailable):
                        await store.read(0, 10)
                finally:
                    os.kill(process, signal.SIGCONT)
                appended = await until_available(lambda: store.append(fact("m1")))
                assert isinstance(appended, Appended)
                assert appended.offset == 1
                assert await store.bounds() == Bounds(1, 1)

    asyncio.run(main())


@pytest.mark.req("BC-26")
def test_those_who_wait_when_the_connection_breaks_hear_of_it_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CALL_WAIT", 60.0)

    async def main() -> None:
        with servers.nats_server() as server:
            async with opened(server.url, name) as [store]:
                freeze(server)
                waiting = [asyncio.create_task(store.append(fact(f"m{number}"))) for number in range(10)]
                await asyncio.sleep(0.1)
                began = time.monotonic()
                server.kill()
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
                assert [type(each) for each in outcomes] == [Unavailable] * 10
                assert time.monotonic() - began < connection.CALL_WAIT / 2

    asyncio.run(main())


@pytest.mark.req("BC-26")
def test_a_connection_that_nats_has_ended_for_good_is_made_anew(nats: servers.Server, name: str) -> None:
    async def main() -> None:
        async with opened(nats.url, name) as [store]:
            await store.append(fact("m1"))
            before = store._link._nats
            before._transport.write(b"RUBBISH\r\n")  # the client gives up permanently at the answer to this
            await until_async(lambda: before.is_closed)
            assert await until_available(lambda: store.append(fact("m2"))) == Appended(2)
            assert [each[0] for each in await store.read(0, 10)] == [1, 2]

    asyncio.run(main())


def test_closing_answers_those_who_wait(nats: servers.Server, name: str) -> None:
    async def main() -> None:
        async with opened(nats.url, name) as [store]:
            waiting = [asyncio.create_task(store.append(fact(f"m{number}"))) for number in range(20)]
            await asyncio.sleep(0)
            await store.close()
            assert all(isinstance(each, Appended) for each in await asyncio.gather(*waiting))
            with pytest.raises(Unavailable, match="closing"):
                await store.bounds()

    asyncio.run(main())


# ── opening ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_nats_that_is_not_there_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CALL_WAIT", 0.3)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached") as raised:
        asyncio.run(JetStreamBoundaryStore.open("nats://me:secret@127.0.0.1:1"))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"name": "a.b"}, "name must be"),
        ({"name": ""}, "name must be"),
        ({"replicas": 2}, "replicas must be"),
        ({"replicas": 3}, "single server"),
    ],
)
def test_what_cannot_be_opened_is_reported(
    nats: servers.Server, how: dict[str, object], reported: str
) -> None:
    with pytest.raises(ConfigurationError, match=reported):
        asyncio.run(JetStreamBoundaryStore.open(nats.url, **{"name": "never-made", **how}))  # type: ignore[arg-type]


def test_a_stream_of_somebody_else_is_not_touched(nats: servers.Server, name: str) -> None:
    async def main() -> None:
        async with plain(nats.url) as client:
            await client.jetstream().add_stream(
                StreamConfig(name=f"{name}-facts", subjects=[f"{name}.other"])
            )
        with pytest.raises(ConfigurationError, match="was not created by onceward"):
            await JetStreamBoundaryStore.open(nats.url, name=name)

    asyncio.run(main())


def test_a_nats_without_jetstream_is_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(connection, "OPEN_WAIT", 0.1)
    with servers.nats_server() as server:
        assert server._command is not None
        server._command.remove("--jetstream")
        server.kill()
        server.start()
        with pytest.raises((Unavailable, ConfigurationError), match="--jetstream"):
            asyncio.run(JetStreamBoundaryStore.open(server.url, name=name))


def test_a_nats_that_is_too_old_is_reported(nats: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OLDEST_NATS", (99, 0))
    with pytest.raises(ConfigurationError, match=r"needs 99\.0 or newer"):
        asyncio.run(JetStreamBoundaryStore.open(nats.url))


def test_many_servers_may_open_a_new_place_at_once(nats: servers.Server, name: str) -> None:
    async def main() -> None:
        stores = await asyncio.gather(*(JetStreamBoundaryStore.open(nats.url, name=name) for _ in range(8)))
        for number, store in enumerate(stores, 1):
            assert await store.append(fact(f"m{number}")) == Appended(number)
            await store.close()

    asyncio.run(main())


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_page_that_lost_a_message_on_its_way_is_not_taken_for_whole() -> None:
    async def main() -> None:
        page = NatsPage(Unavailable)
        for sequence, before in ((4, 0), (6, 5)):
            headers = {"Nats-Sequence": str(sequence), "Nats-Last-Sequence": str(before)}
            page.take(Msg(_client=None, data=b"x", headers=headers))  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="lost"):
            await page.whole

    asyncio.run(main())
