"""Killed while burying, redriving or processing a redriven letter: nothing is lost, and nothing happens twice."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onceward import Transaction
from onceward.deadletters import Category, DeadLetter, DeadLetters, Status
from onceward.inbox import Inbox
from tests.crash.deadletters import worker
from tests.crash.deadletters.worker import CONTRACT, Orders
from tests.support.site import Site, exit_code
from tests.support.wait import until


class LetterSite(Site):
    def set_up(self) -> None:
        self.orders = Orders(self.folder, self.url, self.connect_args)
        self.letters = DeadLetters(self.engine)
        self.letters.migrate()
        Inbox(self.engine).register(CONTRACT)
        self.do("CREATE TABLE bills (id text)")

    def send(self, *ids: str) -> None:
        metadata = {"event_type": "order.paid"}
        self.queue().dispatch_transactions(
            [Transaction(id=id_, payload={}, metadata=metadata) for id_ in ids]
        )

    def run(self, function: Callable[[Orders], None], point: str = "", *, fixed: bool = False) -> None:
        """Run it to its end; with a point, see it killed there."""
        assert self.ends(function, point, fixed=fixed) == (-signal.SIGKILL if point else 0)

    def ends(self, function: Callable[[Orders], None], point: str, *, fixed: bool) -> int | None:
        """Its exit code."""
        return exit_code(self.fork(function, self.orders._replace(point=point, fixed=fixed)))

    def work_until(self, condition: Callable[[], bool]) -> None:
        """Healthy workers, one after another, as leases run out."""
        until(lambda: condition() or self.run(worker.consume, fixed=True))

    def letter(self, message_id: str = "bad") -> DeadLetter:
        (found,) = (each for each in self.letters.find() if each.message_id == message_id)
        return found

    def is_resolved(self) -> bool:
        return all(letter.status is Status.RESOLVED for letter in self.letters.find())

    def bills(self) -> list[str]:
        return sorted(id_ for (id_,) in self.ask("SELECT id FROM bills"))

    def count(self, table: str) -> int:
        [(count,)] = self.ask(f"SELECT count(*) FROM onceward_{table}")
        return int(count)


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LetterSite]:
    with LetterSite.on(request, tmp_path) as made:
        yield made


@pytest.mark.req("CC-050")
@pytest.mark.parametrize("point", ["burying", "buried"])
def test_killed_while_burying(site: LetterSite, point: str) -> None:
    """It is in the store before its source forgets it, and there once however often it is reported."""
    site.send("bad", "good")
    site.run(worker.consume, point)
    assert len(site.letters.find()) == (point == "buried")
    assert site.queue().counts()["dead"] == 1
    site.run(worker.consume)
    letter = site.letter()
    assert (letter.attempts, letter.deaths, len(letter.history)) == (1, 1, 1)
    assert site.queue().counts()["dead"] == 0
    assert site.letters.count() == 1


@pytest.mark.req("CC-052")
def test_killed_in_the_middle_of_a_redrive(site: LetterSite) -> None:
    site.send(*(f"bad-{number}" for number in range(5)))
    site.run(worker.consume)
    site.run(worker.redrive, "scheduling")
    assert {letter.status for letter in site.letters.find()} == {Status.OPEN}
    assert [site.count(table) for table in ("rcas", "redrives", "audit")] == [0, 0, 0]
    for _ in range(2):
        site.run(worker.redrive)
    assert [site.count(table) for table in ("rcas", "redrives", "audit")] == [1, 1, 1]
    assert {letter.redrives for letter in site.letters.find()} == {1}
    assert site.letters.verify_audit().broken is None
    site.work_until(site.is_resolved)
    assert site.bills() == [f"bad-{number}" for number in range(5)]


@pytest.mark.req("CC-052", "CC-050")
@pytest.mark.parametrize("point", ["handling", "settling", "settled"])
def test_killed_with_a_redriven_letter_in_hand(site: LetterSite, point: str) -> None:
    site.send("bad")
    site.run(worker.consume)
    site.run(worker.redrive)
    site.run(worker.consume, point, fixed=True)
    assert site.bills() == ([] if point == "handling" else ["bad"])
    assert site.letter().status is (Status.RESOLVED if point == "settled" else Status.REDRIVEN)
    site.work_until(site.is_resolved)
    assert site.bills() == ["bad"]
    letter = site.letter()
    assert letter.attempts == len(letter.history) == (1 if point == "settled" else 2), (
        "the lost delivery counts"
    )
    assert site.letters.rcas()[0]["closed_at"] is not None


@pytest.mark.req("CC-050")
def test_a_redriven_letter_that_kills_its_process_ends_as_poison(site: LetterSite) -> None:
    site.send("bad", "bad-too")
    site.run(worker.consume)
    site.run(worker.redrive)
    deaths = 0

    def is_poison() -> bool:
        nonlocal deaths
        if {letter.category for letter in site.letters.find()} == {Category.POISON}:
            return True
        deaths += site.ends(worker.consume, "handling", fixed=True) == -signal.SIGKILL
        return False

    until(is_poison)
    assert deaths <= 6, "three for each"
    assert site.bills() == []
    assert {letter.status for letter in site.letters.find()} == {Status.OPEN}
    site.send("good")
    site.work_until(lambda: site.bills() == ["good"])
