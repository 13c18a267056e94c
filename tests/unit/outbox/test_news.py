"""When a relay looks at a SQLite database that others write to. A commit is written before it can be seen."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from onceward.outbox import news as news_module
from onceward.outbox.news import BUSY_LOOK, FileNews

LONG = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WrittenFile:
    """A file, and when others write to it. Stands for the watch of it, and for the waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.writes: list[float] = []

    def write_in(self, *seconds: float) -> None:
        self.writes += [self.clock.now + each for each in seconds]

    def wait(self, seconds: float, *doors: int) -> bool:
        until = self.clock.now + seconds
        if self.writes and self.writes[0] <= until:
            self.clock.now = max(self.clock.now, self.writes[0])
            self.writes = [each for each in self.writes if each > self.clock.now]
            return True
        self.clock.now = until
        return False

    def pass_by(self, doors: list[int], seconds: float) -> bool:
        self.clock.now += seconds
        return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> WrittenFile:
    file = WrittenFile(clock)
    monkeypatch.setattr(news_module, "FileWatch", lambda *_: file)
    monkeypatch.setattr(news_module, "wait_readable", file.pass_by)
    monkeypatch.setattr(news_module, "monotonic", clock)
    return file


def looks(news: FileNews, clock: Clock, until: float) -> list[float]:
    """Look in vain until then. Return the times of the looks."""
    times: list[float] = []
    while clock.now < until:
        if news.wait(min(LONG, until - clock.now)):
            times.append(clock.now)
            news.looked(False)
    return times


def idle(clock: Clock) -> FileNews:
    """News of a relay that found a message, and has looked in vain since."""
    news = FileNews("file")
    news.looked(True)
    news.looked(False)
    return news


@pytest.mark.req("OB-14")
@pytest.mark.parametrize("quiet", [0.0, 0.001, 0.01, 0.05, 0.1, 0.126, 0.15, 0.2, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("takes", [0.001, 0.02, 0.2, 2.0])
def test_a_look_follows_soon_after_a_commit_can_be_seen(
    clock: Clock, file: WrittenFile, quiet: float, takes: float
) -> None:
    news = idle(clock)
    looks(news, clock, clock.now + quiet)
    written = clock.now
    file.write_in(0.0)
    times = looks(news, clock, written + 20.0)
    late = min(each for each in times if each >= written + takes) - written - takes
    assert late <= takes + 0.002


@pytest.mark.req("OB-14")
def test_a_file_that_others_write_to_all_the_time_is_looked_at_seldom(
    clock: Clock, file: WrittenFile
) -> None:
    news = idle(clock)
    file.write_in(*(0.001 * number for number in range(10_000)))
    times = looks(news, clock, clock.now + 10.0)
    assert len(times) < 10.0 / BUSY_LOOK + 20
    assert max(later - earlier for earlier, later in pairwise(times)) < 2 * BUSY_LOOK


@pytest.mark.req("OB-14")
def test_the_last_write_of_many_is_followed_by_looks(clock: Clock, file: WrittenFile) -> None:
    news = idle(clock)
    file.write_in(*(0.001 * number for number in range(1000)))
    last = clock.now + 0.999
    times = looks(news, clock, clock.now + 10.0)
    for takes in (0.001, 0.2, 2.0):
        late = min(each for each in times if each >= last + takes) - last - takes
        assert late <= takes + 2 * BUSY_LOOK


def test_a_quiet_file_is_looked_at_less_and_less(clock: Clock, file: WrittenFile) -> None:
    news = idle(clock)
    assert len(looks(news, clock, clock.now + 60.0)) < 20


def test_a_stop_ends_a_wait_without_a_look(
    clock: Clock, file: WrittenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    news: Any = idle(clock)
    monkeypatch.setattr(news_module, "is_stopped", lambda: True)
    assert not news.wait(LONG)
