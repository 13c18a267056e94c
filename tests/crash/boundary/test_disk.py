"""A full disk and a read-only directory: typed errors, no partial writes, and recovery.

A limit on the size of files, set on a running server from outside, stands for the full disk: the kernel refuses the
write in the same place. If the tests run as root, which no permission stops, the server drops its rights first.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, envelope_for, fact_of
from onceward.boundary.errors import BoundaryError, Unavailable
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.errors import ConfigurationError

NOBODY = 65534
SERVE = """
import asyncio, os, sys
from onceward.boundary.boundary import Boundary
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from tests.support.boundary.in_process import serving
# What is imported late would not be found any more.
import concurrent.futures.thread, encodings.idna, uvicorn.lifespan.off, uvicorn.loops.auto, uvicorn.protocols.http.auto
if "humble" in sys.argv and os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

async def main():
    async with serving(Boundary(SqliteBoundaryStore(sys.argv[1]))) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class DiskServer:
    def __init__(self, directory: Path, *how: str) -> None:
        self.directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(directory), *how], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            self.stop()
            raise AssertionError("the server did not start")

    def limit_files(self, size: int | None) -> None:
        _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def stop(self) -> None:
        self._process.terminate()
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that the server may use after dropping its rights: pytest's own are closed to other users."""
    directory = Path(tempfile.mkdtemp(prefix="onceward-disk-"))
    if os.getuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    yield directory
    for each in [directory, *directory.rglob("*")]:
        if each.is_dir():
            each.chmod(stat.S_IRWXU)
    shutil.rmtree(directory)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DiskServer]:
    site = DiskServer(tmp_path)
    yield site
    site.stop()


@pytest.fixture
def humble(home: Path) -> Iterator[DiskServer]:
    """A server that permissions stop."""
    site = DiskServer(home / "data", "humble")
    yield site
    site.stop()


@pytest.mark.req("BC-16", "BC-18")
def test_a_full_disk_refuses_appends_keeps_what_is_there_and_takes_more_when_there_is_space(
    site: DiskServer,
) -> None:
    async def append(client: AsyncBoundaryClient, number: int) -> int | BoundaryError:
        envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b")
        try:
            return (await client.append(envelope, fact_of("a:b", "done", "x" * 2000))).offset
        except BoundaryError as error:
            return error

    async def append_all() -> list[int | BoundaryError]:
        async with AsyncBoundaryClient(site.url) as client:
            return list(await asyncio.gather(*(append(client, number) for number in range(300))))

    with BoundaryClient(site.url) as client:
        client.fetch("reader", 1)  # which registers its name, so it needs space
    site.limit_files(200_000)
    outcomes = asyncio.run(append_all())
    refused = [each for each in outcomes if isinstance(each, BoundaryError)]
    assert refused
    assert {type(each) for each in refused} == {Unavailable}
    assert "nothing was written" in str(refused[0])

    with BoundaryClient(site.url) as client:
        kept = [fact.offset for fact in client.fetch("reader", 1000).facts]
        assert kept == sorted(each for each in outcomes if isinstance(each, int))

    site.limit_files(None)
    assert sorted(asyncio.run(append_all()), key=str) == sorted(range(1, 301), key=str)
    with BoundaryClient(site.url) as client:
        assert [fact.offset for fact in client.fetch("reader", 1000).facts] == list(range(1, 301))


@pytest.mark.req("BC-17", "BC-18")
def test_a_full_disk_refuses_an_object_whole_and_takes_it_when_there_is_space(site: DiskServer) -> None:
    with BoundaryClient(site.url) as client:
        site.limit_files(500_000)
        with pytest.raises(Unavailable, match="could not be written"):
            client.put("b", "k", b"x" * 2_000_000)
        assert list((site.directory / "objects" / "incoming").iterdir()) == []
        with pytest.raises(BoundaryError, match="there is no object"):
            client.get("b", "k")
        site.limit_files(None)
        assert client.put("b", "k", b"x" * 2_000_000).size == 2_000_000
        assert client.get("b", "k")[0] == b"x" * 2_000_000


@pytest.mark.req("BC-18")
def test_objects_in_a_read_only_directory_are_refused_until_it_is_writable(humble: DiskServer) -> None:
    places = [humble.directory / "objects" / name for name in ("incoming", "content", "names")]
    with BoundaryClient(humble.url) as client:
        for place in places:
            place.chmod(stat.S_IRUSR | stat.S_IXUSR)
            with pytest.raises(Unavailable, match="could not be written"):
                client.put("b", "k", b"x")
            place.chmod(stat.S_IRWXU)
        assert client.put("b", "k", b"x").size == 1


def test_a_data_directory_that_is_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(ConfigurationError, match="data directory"):
        SqliteBoundaryStore(tmp_path / "data")


@pytest.mark.req("BC-18")
def test_a_read_only_data_directory_is_refused_at_the_start(home: Path) -> None:
    (home / "data").mkdir()
    if os.getuid() == 0:
        os.chown(home / "data", NOBODY, NOBODY)
    (home / "data").chmod(stat.S_IRUSR | stat.S_IXUSR)
    ended = subprocess.run(
        [sys.executable, "-c", SERVE, str(home / "data"), "humble"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    assert "ConfigurationError" in ended.stderr
    assert "cannot be used as a data directory" in ended.stderr
    assert list((home / "data").iterdir()) == []
