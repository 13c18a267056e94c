"""A verification delivers events in other interpreters, too: what depends on the process is found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from onceward import ConsumerTask
from onceward.verify import ScenarioStatus, VerificationReport, examine_app, examine_consumer, interpreters
from tests.support import ROOT
from tests.verification import imported_function, per_process, senders
from tests.verification.consumers import EVENTS, Right, contract, setup
from tests.verification.per_process import KEYS

pytestmark = pytest.mark.req("CC-086")


def examine(consumer: Any, **given: Any) -> VerificationReport:
    return examine_consumer(
        consumer, **{"events": EVENTS[:2], "setup": setup, "only": ["interpreters"], **given}
    )


def failure_of(report: VerificationReport) -> str:
    assert report["clean"].result is ScenarioStatus.PASSED, str(report)
    assert report["interpreters"].result is ScenarioStatus.FAILED, str(report)
    return str(report["interpreters"])


@pytest.mark.usual("hash", "counter")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("frozenset", "start")))
        for name in sorted(KEYS)
    ],
)
def test_rows_that_depend_on_the_process_are_found(name: str) -> None:
    consumer = per_process.AsyncWritesIt if name == "set" else per_process.WritesIt
    finding = failure_of(examine(consumer, services={"key": KEYS[name]}))
    assert "the rows differ" in finding
    assert "exclude=['bills.id']" in finding


def test_so_are_keys_that_only_a_provider_sees() -> None:
    fakes = {"key": KEYS["hash"], "cards": per_process.FakeCards()}
    finding = failure_of(examine(per_process.SendsIt, services=fakes, outside=["cards"]))
    assert "effect 'charge' of event 'order-1' calls cards.charge with another reference" in finding
    assert "without the key that session.effect passes" in finding


def test_what_differs_in_every_process_is_found_by_the_name_of_a_key() -> None:
    finding = failure_of(examine_consumer(per_process.process_id, only=["interpreters"]))
    assert "with another Idempotency-Key" in finding


@pytest.mark.req("CC-167")
def test_a_consumer_may_know_its_process_and_another_app_have_one_of_its_name() -> None:
    assert senders.right.__qualname__ == per_process.right.__qualname__
    report = examine_consumer(per_process.right, only=["interpreters"])
    assert report["interpreters"].result is ScenarioStatus.PASSED, str(report)
    assert "one of them after kill -9" in report["interpreters"].note


def test_on_postgresql(postgres_url: str) -> None:
    report = examine(Right, database=postgres_url)
    assert report["interpreters"].result is ScenarioStatus.PASSED, str(report)
    failure_of(examine(per_process.WritesIt, services={"key": KEYS["import"]}, database=postgres_url))


def test_all_consumers_of_an_app_share_them() -> None:
    found = {each.consumer: each for each in examine_app(per_process.app, only=["interpreters"])}
    assert {name: each.passed for name, each in found.items()} == {"process_id": False, "right": True}


@pytest.mark.req("CC-167")
def test_a_function_of_another_module_is_found_by_its_app() -> None:
    for each in examine_app(imported_function.app, only=["interpreters"]):
        assert each.report is not None, str(each)
        assert each.report["interpreters"].result is ScenarioStatus.PASSED, str(each.report)


def test_a_temporary_directory_with_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket may have about a hundred bytes."""
    long = tmp_path / ("x" * 150)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    started: dict[int, Any] = {}
    monkeypatch.setattr(interpreters, "_running", started)
    report = examine(Right)
    for each in started.values():
        each.process.communicate()  # ends it
        each._folder.cleanup()
    assert report["interpreters"].result is ScenarioStatus.PASSED, str(report)


def test_what_cannot_be_imported_is_not_checked() -> None:
    class Local(Right):
        pass

    report = examine(Local)
    assert report.passed
    assert report["interpreters"].result is ScenarioStatus.SKIPPED
    assert "interpreters: not checked: another interpreter cannot build it" in str(report)
    assert "interpreters" in report.gaps, "it is no proof"


class NeedsAPatch(ConsumerTask):
    contract = contract()
    table = "nowhere"

    def process_transaction(self, transaction: Any, session: Any) -> None:  # type: ignore[override]
        session.execute(f"INSERT INTO {self.table} VALUES (:id)", {"id": transaction.id})


def test_nor_is_what_needs_the_state_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may patch a module; a failure elsewhere says nothing about the consumer."""
    monkeypatch.setattr(NeedsAPatch, "table", "marks")
    report = examine(NeedsAPatch)
    assert report.passed
    assert "not checked: in another interpreter the events do not succeed" in report["interpreters"].note


SCRIPT = """
from onceward.verify import examine_consumer
from tests.verification.consumers import EVENTS, contract, setup
from onceward import ConsumerTask

class Hashes(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction, session):
        session.execute("INSERT INTO marks VALUES (:id)", {"id": str(hash(transaction.id))})

"""
EXAMINE = "print(examine_consumer(Hashes, EVENTS[:1], setup=lambda e: setup(e), only=['interpreters']))"


@pytest.mark.usual("rest0")
@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (f'if __name__ == "__main__":\n    {EXAMINE}\n', "the rows differ"),
        (f"{EXAMINE}\n", "not checked: it is defined in __main__"),
    ],
)
def test_a_script_is_checked_if_importing_it_does_nothing(tmp_path: Path, rest: str, expected: str) -> None:
    script = tmp_path / "billing.py"
    script.write_text(SCRIPT + rest)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert expected in done.stdout
