"""A verification of consumers that send: messages are compared like rows, and relayed to a sink of its own."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from onceward.verify.scenarios.sends import Sent, compare_arrivals
from tests.integration.verify.test_kit import failure_of
from tests.verification import senders
from tests.verification.consumers import EVENTS, Right, setup

pytestmark = pytest.mark.usefixtures("no_live_sink")


@pytest.fixture
def no_live_sink() -> Any:
    yield
    assert not senders.LIVE.exists(), "a message of a verification reached a live sink"


def examine(consumer: Any, *only: str, **given: Any) -> VerificationReport:
    given = {"events": EVENTS[:2], "setup": setup, "seed": 7, "only": only, **given}
    return examine_consumer(consumer, **given)


CORNERS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)]


@pytest.mark.req("OB-18")
@pytest.mark.parametrize("database", CORNERS)
def test_a_right_sender_passes(database: str, request: pytest.FixtureRequest) -> None:
    url = None if database == "sqlite" else request.getfixturevalue("postgres_url")
    report = examine(senders.right, "exceptions", "kills", "sends", "unknown-fields", database=url)
    assert report.passed, str(report)
    assert report["sends"].result is ScenarioStatus.PASSED, str(report)
    assert "4 messages" in report["sends"].note


@pytest.mark.req("OB-18")
def test_a_right_asyncio_sender_passes_with_commits_out_of_order(postgres_url: str) -> None:
    report = examine(senders.right_async, "sends", database=postgres_url)
    assert report.passed, str(report)
    assert report["sends"].result is ScenarioStatus.PASSED, str(report)


@pytest.mark.req("OB-18")
def test_the_scenario_does_not_apply_to_a_consumer_that_sends_nothing() -> None:
    result = examine(Right, "sends")["sends"]
    assert (result.result, result.applies) == (ScenarioStatus.SKIPPED, False)


@pytest.mark.usual("new_ids", "into_memory", "swallows", "ids_of_the_day", "produces")
@pytest.mark.req("OB-18")
@pytest.mark.parametrize(
    ("handler", "scenario", "expected"),
    [
        (senders.new_ids, "clean", "messages with other ids"),
        (senders.into_memory, "clean", "another memory"),
        (senders.on_the_connection, "clean", "messages with other ids"),
        (senders.swallows, "exceptions", "was swallowed"),
        (senders.swallows_what_cannot_be_sent, "clean", "a message was not sent, and the handler caught"),
        (senders.fewer_on_a_repeat, "exceptions", "messages (onceward_outbox): 2 rows missing"),
        (senders.in_the_order_of_a_set, "interpreters", "the rows differ"),
        (senders.ids_of_the_day, "interpreters", "its messages have other ids"),
        (senders.on_its_own_connection, "outside-calls", "opened another database connection"),
        (senders.produces, "outside-calls", "sent messages to"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_wrong_sender_is_found(handler: Any, scenario: str, expected: str) -> None:
    assert expected in failure_of(examine(handler, scenario), scenario)


@pytest.mark.req("OB-18")
def test_another_message_in_place_of_one_that_cannot_be_sent_is_no_finding() -> None:
    assert examine(senders.sends_something_else_instead, "clean").passed


ONE, TWO = Sent("queue", "1", "one", "k"), Sent("queue", "2", "two", "k")


@pytest.mark.req("OB-18")
def test_messages_beside_an_open_transaction_have_no_order() -> None:
    assert compare_arrivals([ONE, TWO], [TWO, ONE], early=1) == []


@pytest.mark.req("OB-18")
@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        ([ONE, TWO, ONE], []),
        ([ONE], ["committed and never arrived"]),
        ([ONE, TWO, Sent("queue", "3", "three")], ["arrived without its row"]),
        ([ONE, Sent("queue", "2", "else")], ["arrived with another payload"]),
        ([TWO, ONE], ["arrived before an earlier one of its key"]),
        ([Sent("elsewhere", "1", "one"), ONE, TWO], ["arrived without its row"]),
    ],
)
def test_the_comparison_names_what_is_wrong(arrived: list[Sent], expected: list[str]) -> None:
    found = compare_arrivals([ONE, TWO], arrived)
    assert len(found) == len(expected)
    for finding, text in zip(found, expected, strict=True):
        assert text in finding.text
