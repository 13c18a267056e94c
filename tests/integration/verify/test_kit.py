"""The verification kit: each deliberately wrong consumer is caught by the right scenario, each correct twin passes."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy import inspect as look_into
from sqlalchemy.pool import NullPool

from onceward import ConsumerTask, Transaction
from onceward.errors import ConfigurationError
from onceward.inbox import Event
from onceward.inbox.evidence.code_digest import code_of
from onceward.verify import (
    NAMES,
    ScenarioStatus,
    Verification,
    VerificationError,
    VerificationReport,
    children,
    examine_consumer,
    verify_consumer,
)
from tests.verification import consumers
from tests.verification.consumers import EVENTS, EVENTS_2, OLD, PRICES, contract, setup

SEED = 7


def examine(consumer: Any, *only: str, **given: Any) -> VerificationReport:
    return examine_consumer(
        consumer, **{"events": EVENTS[:2], "setup": setup, "seed": SEED, "only": only, **given}
    )


def failure_of(report: VerificationReport, scenario: str) -> str:
    """What a failed scenario reports."""
    assert report[scenario].result is ScenarioStatus.FAILED, str(report)
    return str(report[scenario])


def line_of(function: Any, fragment: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + index for index, line in enumerate(lines) if fragment in line]
    return f"{inspect.getsourcefile(function)}:{number}"


with_database = {"services": lambda engine: {"database": engine}}
with_cards = {"services": lambda engine: {"cards": consumers.Cards(engine)}, "outside": ["cards"]}

# ── correct consumers ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-030")
@pytest.mark.parametrize(
    "consumer", [consumers.Right, pytest.param(consumers.AsyncRight, marks=pytest.mark.long)]
)
def test_a_correct_consumer_passes_every_scenario(consumer: Any) -> None:
    report = verify_consumer(consumer, EVENTS, setup=setup, optional=["note"], seed=SEED)
    results = {each.name: each.result for each in report.scenarios}
    assert list(results) == list(NAMES)
    skipped = {name for name, result in results.items() if result is ScenarioStatus.SKIPPED}
    # It has one version and sends nothing, no events to refuse were given, and SQLite has one writer.
    assert skipped == {"old-versions", "refused", "lost-updates", "side-by-side", "sends"}
    assert report["order"].note == "6 orders of 3 events"
    assert report["kills"].note == "15 processes killed at 5 boundaries"
    assert report["exceptions"].note == "at 7 boundaries"
    assert (report.seed, report.backend, report.passed) == (SEED, "sqlite", True)


@pytest.mark.req("CC-030")
def test_a_correct_consumer_passes_on_postgresql(postgres_url: str) -> None:
    before = _databases(postgres_url)
    report = verify_consumer(
        consumers.Right, EVENTS[:2], setup=setup, database=postgres_url, seed=SEED, skip=["exceptions"]
    )
    assert (report.backend, report["kills"].result) == ("postgresql", ScenarioStatus.PASSED)
    assert report["exceptions"].note == "left out on request"
    assert _databases(postgres_url) == before, "the kit drops the databases it creates"


@pytest.mark.parametrize("handler", [consumers.bill, consumers.bill_async])
def test_a_handler_of_process_is_verified_with_its_contract(handler: Any) -> None:
    report = examine(handler, "replay", "exceptions", contract=contract())
    assert report.passed, str(report)
    assert report.subject == f"tests.verification.consumers:{handler.__name__}"
    assert report.code == code_of(handler, contract())


@pytest.mark.req("CC-149")
@pytest.mark.parametrize("handler", [consumers.bill_at_first, consumers.bill_at_first_async])
def test_a_handler_that_does_nothing_when_an_event_comes_again_is_found(handler: Any) -> None:
    report = examine(handler, "exceptions", contract=contract())
    found = failure_of(report, "exceptions")
    assert "does something else if event.deliveries is more than 1" in found
    assert "bills: 2 rows missing" in found


def test_wrong_and_correct_consumers_on_postgresql_in_asyncio(postgres_url: str) -> None:
    def with_rows(engine: Engine) -> None:
        setup(engine)
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO prices VALUES ('coffee', 1, 1)"))

    given = {"database": postgres_url, "events": EVENTS[:1]}
    wrong = examine(consumers.AsyncMarksFirst, "kills", "outside-calls", **given, **with_database)
    assert "bills: 1 row missing" in failure_of(wrong, "kills")
    assert line_of(consumers.AsyncMarksFirst, "connection.execute(mark") in failure_of(wrong, "outside-calls")
    right = examine(consumers.AsyncRight, "duplicates-at-once", "replay", **given, setup=with_rows)
    assert right.passed, str(right)


def _databases(url: str) -> list[str]:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = sorted(connection.scalars(text("SELECT datname FROM pg_database")))
    engine.dispose()
    return found


# ── wrong consumers and their twins ─────────────────────────────────────────────────────────────────────

LOST = r"bills: 2 rows missing: \{id: 'order-1', total: 10\}"
WRONG = [
    ("marks before the work", consumers.MarksFirst, "exceptions", with_database, LOST),
    (
        "marks before the work",
        consumers.MarksFirst,
        "kills",
        with_database,
        r"kill -9 after write 1.*\n.*" + LOST,
    ),
    (
        "swallows",
        consumers.Swallows,
        "exceptions",
        {},
        r"instead of write 1 of event 'order-1' was swallowed",
    ),
    ("gives up", consumers.GivesUp, "exceptions", {}, r"write 1 and those after it of event .* swallowed"),
    (
        "swallows its own",
        consumers.SwallowsItsOwn,
        "refused",
        {"refused": [{"tracking_id": "bad", "payload": {"total": -1}}]},
        r"event 'bad' must be refused, but the handler returned",
    ),
    (
        "goes back in time",
        consumers.GoesBackInTime,
        "order",
        {"events": PRICES},
        r"in the order \(price-2, price-1\).*declare sequencing(.*\n)*.*too many: \{item: 'tea', price: 101",
    ),
    ("state on self", consumers.Remembers, "state", {}, r"keeps on self.*: self\.seen\n.*" + LOST),
    (
        "state on self",
        consumers.Remembers,
        "exceptions",
        {},
        r"With a new process for each attempt it does not",
    ),
    ("outside call", consumers.CallsOutside, "outside-calls", {}, r"opened the file .* for writing"),
    (
        "outside call",
        consumers.SendsADatagram,
        "outside-calls",
        {},
        r"sent a datagram to \('127\.0\.0\.1', 9\)",
    ),
    ("outside call", consumers.StartsAProcess, "outside-calls", {}, r"started the process 'true'"),
    ("outside call", consumers.CallsAService, "outside-calls", with_cards, r"called cards\.charge"),
    (
        "effect before the check",
        consumers.EffectInUpcaster,
        "early-effects",
        {"events": EVENTS_2, "old": OLD, "only": ["old-versions", "early-effects"]},
        r"before the inbox knew whether the event is new, the consumer opened the file",
    ),
    ("effect before the check", consumers.EffectInInit, "early-effects", {}, r"the consumer opened the file"),
]


@pytest.mark.req("CC-030")
@pytest.mark.parametrize(
    ("wrong", "scenario", "given", "words"),
    [pytest.param(*case[1:], id=f"{case[0]} → {case[2]}") for case in WRONG],
)
def test_a_wrong_consumer_is_caught(wrong: Any, scenario: str, given: dict[str, Any], words: str) -> None:
    report = examine(wrong, **{"only": [scenario], **given})
    assert re.search(words, failure_of(report, scenario)), str(report)
    assert f"seed {SEED}" in str(report)


@pytest.mark.parametrize(
    ("twin", "only", "given"),
    [
        (consumers.MarksWithTheWork, ["exceptions", "kills"], {}),
        (
            consumers.Recovers,
            ["exceptions", "refused"],
            {"refused": [{"id": "bad", "payload": {"total": -1}}]},
        ),
        pytest.param(consumers.TriesAgain, ["exceptions"], {}, marks=pytest.mark.long),
        (consumers.LooksAtTheVersion, ["order"], {"events": PRICES}),
        pytest.param(consumers.DeclaresItsOrder, ["order"], {"events": PRICES}, marks=pytest.mark.long),
        (consumers.DeclaresStrictOrder, ["order", "duplicates-at-once"], {"events": PRICES}),
        (consumers.CallsThroughTheLedger, ["exceptions", "kills", "outside-calls"], with_cards),
        (consumers.PureUpcaster, ["old-versions", "early-effects"], {"events": EVENTS_2, "old": OLD}),
    ],
)
def test_its_correct_twin_passes(twin: Any, only: list[str], given: dict[str, Any]) -> None:
    report = examine(twin, *only, **given)
    assert [report[name].result for name in only] == [ScenarioStatus.PASSED] * len(only), str(report)


# ── early effects: file and line ────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-031")
def test_an_effect_before_the_dedup_decision_is_named_by_file_and_line() -> None:
    given = {"events": EVENTS_2, "old": OLD}
    report = examine(consumers.EffectInUpcaster, "old-versions", "early-effects", **given)
    (finding,) = report["early-effects"].findings
    assert finding.where == line_of(consumers.upcast_and_tell, "write_text")


@pytest.mark.req("CC-031")
def test_an_effect_of_a_module_s_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaky_shop.py").write_text(
        "from tests.verification.consumers import Right\n"
        "import socket\n"
        f"open({str(tmp_path / 'log')!r}, 'a').close()\n"
        "class Leaky(Right): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import leaky_shop  # type: ignore[import-not-found]

    report = examine(leaky_shop.Leaky, "early-effects")
    (finding,) = report["early-effects"].findings
    assert finding.where == f"{tmp_path / 'leaky_shop.py'}:3"


@pytest.mark.req("CC-031")
def test_an_effect_of_a_payload_s_own_code_is_named(tmp_path: Path) -> None:
    class Telling(dict[str, Any]):
        def keys(self) -> Any:  # called when the inbox inspects the payload
            with open(tmp_path / "effects", "w"):
                return super().keys()

        def items(self) -> Any:
            with open(tmp_path / "effects", "w"):
                return super().items()

    event = Transaction(
        id="order-1", payload=Telling(total=1, lock_token="x"), metadata={"event_type": "order"}
    )
    report = examine(consumers.Right, "early-effects", events=[event])
    assert line_of(Telling.items, "open(") in failure_of(report, "early-effects")


@pytest.mark.req("CC-031")
def test_at_run_time_an_effect_before_the_dedup_decision_is_refused(tmp_path: Path) -> None:
    """There is no session yet; one kept from an earlier event refuses."""
    from onceward.inbox import EffectError, Inbox

    kept: list[Any] = []
    calls: list[str] = []
    refused: list[EffectError] = []

    def upcast(payload: Any) -> Any:
        try:
            kept[0].effect("charge", calls.append)
        except EffectError as error:
            refused.append(error)
        return payload

    promised = contract(mode="effectful", schema_version=2, upcasters={1: upcast})
    inbox = Inbox(create_engine(f"sqlite:///{tmp_path}/inbox.db", poolclass=NullPool))
    inbox.migrate()
    inbox.register(promised)
    first = {**EVENTS[0], "schema_version": 2, "created_at": "2026-01-01T00:00:00Z"}
    inbox.process(promised, Event.of(first), lambda event, session: kept.append(session))
    second = {**EVENTS[1], "created_at": "2026-01-01T00:00:00Z"}
    inbox.process(promised, Event.of(second), lambda event, session: None)
    assert (len(refused), calls) == (1, [])
    assert "effects are not allowed before the inbox knows" in str(refused[0])


# ── hanging ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("consumer", "waits", "line"),
    [
        (consumers.Hangs, consumers.wait_forever, "threading.Event().wait()"),
        (consumers.HangsAwaiting, consumers.await_forever, "create_future()"),
    ],
)
def test_a_handler_that_hangs_is_named_with_its_stack(consumer: Any, waits: Any, line: str) -> None:
    report = examine(consumer, timeout=2.0)
    stack = failure_of(report, "clean")
    assert "the handler with event 'order-1' did not finish within 2 s" in stack
    file, _, number = line_of(waits, line).rpartition(":")
    assert f'File "{file}", line {number}, in {waits.__name__}' in stack
    assert "in process_transaction" in stack
    assert report["kills"].note.startswith("not run")


def test_a_handler_that_hangs_in_c_code_is_named_too() -> None:
    stack = failure_of(examine(consumers.HangsInC, timeout=1.0), "clean")
    assert "the handler with event 'order-1' did not finish" in stack
    file, _, number = line_of(consumers.match_forever, "re.match(").rpartition(":")
    assert f'File "{file}", line {number} in match_forever' in stack
    assert "onceward/task" not in stack


def test_work_that_hangs_is_named_with_the_limit_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "PREPARING", 0.5)
    with pytest.raises(children.Hung, match=r"^preparing did not finish within 0\.5 s$"):
        children.run_in_child(lambda _: threading.Event().wait(), 10.0).value()


# ── options and comparison ──────────────────────────────────────────────────────────────────────────────


async def setup_later(engine: Any) -> None: ...


def test_a_failure_is_an_assertion_error_with_the_report() -> None:
    with pytest.raises(AssertionError, match="1 scenario failed, 1 passed, 19 skipped") as caught:
        verify_consumer(consumers.Swallows, EVENTS, setup=setup, only=["exceptions"])
    assert isinstance(caught.value, VerificationError)
    assert not caught.value.report.passed


def test_a_class_can_say_itself_how_it_is_verified() -> None:
    class Notified(consumers.Right):
        verification = Verification(events=EVENTS, setup=setup, only=["duplicates"])

    class ToldByADict(consumers.Right):
        @classmethod
        def verification(cls) -> dict[str, Any]:
            return {"events": lambda: EVENTS, "setup": setup, "only": ["duplicates"]}

    for consumer in (Notified, ToldByADict):
        assert verify_consumer(consumer)["duplicates"].result is ScenarioStatus.PASSED


@pytest.mark.parametrize(
    ("consumer", "given", "words"),
    [
        (consumers.Right, {"events": []}, "needs events"),
        (consumers.Right, {"setup": setup_later}, "setup of Right is `async def`"),
        (consumers.Right, {"events": [EVENTS[0], EVENTS[0]]}, "same id"),
        (consumers.Right, {"skip": ["nonsense"]}, "no scenario 'nonsense'"),
        (consumers.Right, {"nonsense": 1}, "nonsense"),
        (consumers.Right, {"database": "mysql://host/name"}, "sqlite or postgresql, not on 'mysql'"),
        (ConsumerTask, {}, "has no contract"),
        (len, {}, "class of a ConsumerTask"),
    ],
)
def test_what_cannot_be_verified_is_refused(consumer: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        examine(consumer, **given)


def test_what_the_database_generates_is_not_compared_and_what_the_handler_generates_is_found() -> None:
    def tables(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE TABLE bills (number INTEGER PRIMARY KEY, id TEXT, total TEXT, "
                "at TEXT DEFAULT CURRENT_TIMESTAMP)"
            )
            connection.exec_driver_sql("CREATE TABLE marks (id TEXT, bill INTEGER REFERENCES bills (number))")
        assert "onceward_dedup" in look_into(engine).get_table_names()

    class Random(ConsumerTask):
        contract = contract()

        def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            values = {"id": transaction.id, "total": os.urandom(4).hex()}
            session.execute(consumers.INSERT, values)

    report = examine(Random, setup=tables)
    assert "exclude=['bills.total']" in failure_of(report, "clean")
    assert report.not_compared == ("bills.number", "bills.at", "marks.bill")
    assert examine(Random, "duplicates", setup=tables, exclude=["total", "number", "at"]).passed


def test_a_field_that_nobody_knows_and_one_that_is_missing() -> None:
    class Strict(ConsumerTask):
        contract = contract()

        def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            if set(transaction.payload) != {"total"}:
                raise ValueError("what is this?")
            session.execute(consumers.INSERT, consumers.values(transaction))

    report = examine(Strict, "unknown-fields", "missing-fields", optional=["total"])
    assert "ValueError: what is this?" in failure_of(report, "unknown-fields")
    assert "without the optional field 'total', event 'order-1' failed" in failure_of(
        report, "missing-fields"
    )


@pytest.mark.req("CC-030")
def test_a_consumer_that_keeps_whole_payloads_learns_what_to_leave_out() -> None:
    class Keeps(ConsumerTask):
        contract = contract()

        def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            session.execute("INSERT INTO kept VALUES (:whole)", {"whole": repr(transaction.payload)})

    def table(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE kept (whole TEXT)")

    report = examine(Keeps, "clean", "unknown-fields", setup=table)
    assert "exclude=['kept.whole']" in report["unknown-fields"].findings[0].text


def test_an_old_version_without_a_sample_is_no_proof() -> None:
    report = examine(consumers.PureUpcaster, "old-versions", events=EVENTS_2)
    assert "no sample of schema version 1" in failure_of(report, "old-versions")
    wrong = {1: [{"tracking_id": "order-1", "payload": {"cents": 99}}]}
    report = examine(consumers.PureUpcaster, "old-versions", events=EVENTS_2, old=wrong)
    assert "in schema version 1, the database differs from that of one clean delivery" in failure_of(
        report, "old-versions"
    )


def test_it_can_be_called_while_an_event_loop_runs() -> None:
    async def test() -> VerificationReport:
        return examine(consumers.AsyncRight, "duplicates-at-once")

    assert asyncio.run(test()).passed


def test_a_consumer_that_ends_its_process_is_named() -> None:
    class Exits(ConsumerTask):
        contract = contract()

        def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            os._exit(3)

    assert "ended its process" in failure_of(examine(Exits), "clean")
