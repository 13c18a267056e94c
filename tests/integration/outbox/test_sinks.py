"""From the outbox through real sinks to a consumer: what is sent arrives once, in order, with its trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from onceward.outbox.claims import OutboxRows
from onceward.testing import record
from tests.support.chain import SINKS, Chain, chain_to


@pytest.fixture(params=SINKS)
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    with chain_to(request.param, tmp_path, request) as made:
        yield made


@pytest.mark.req("OB-19", "OB-20")
def test_what_is_sent_arrives_in_order_and_balances_on_its_way(chain: Chain) -> None:
    chain.send(1, 2, 3)
    waiting = chain.balance()
    assert (waiting.appended, waiting.pending, waiting.applied, waiting.verdict) == (3, 3, 0, "holds")
    chain.relay()
    chain.send(4)
    published = chain.balance()
    assert (published.appended, published.applied, published.pending) == (4, 3, 1)
    assert published.verdict == "holds", published
    chain.relay()
    assert chain.consume() == [1, 2, 3, 4]
    assert chain.balance().verdict == "holds", chain.balance()
    assert chain.balance_of_consumer().verdict == "holds", chain.balance_of_consumer()


@pytest.mark.req("OB-19", "OB-20")
def test_a_copy_has_the_same_id_and_is_not_applied_twice(chain: Chain) -> None:
    chain.send(1, 2)
    chain.relay()
    # As if the relay had died before it recorded that it sent them.
    chain.execute(
        "UPDATE onceward_outbox SET state = 'ready', ended_at = NULL",
        "UPDATE onceward_outbox_tally SET messages = 0 WHERE what = 'published'",
    )
    chain.relay()
    found = chain.balance()
    assert (found.verdict, found.appended, found.applied) == ("holds", 2, 2), found
    if chain.kind != "boundary":  # it keeps one fact of an id
        assert "2 copies with the same ids" in found.notes["applied"]
    assert chain.consume() == [1, 2]
    assert chain.balance_of_consumer().verdict == "holds"


@pytest.mark.req("OB-15", "OB-19")
def test_the_consumers_span_continues_the_trace_of_the_sender(chain: Chain) -> None:
    with record() as recording:
        tracer = recording.tracer_provider.get_tracer("a web service")
        with tracer.start_as_current_span("POST /orders") as span:
            chain.send(1)
        chain.relay()
        chain.consume()
    life = recording.span("start_processing")
    assert life.context is not None
    assert life.parent is not None
    assert life.context.trace_id == span.get_span_context().trace_id
    assert life.parent.span_id == span.get_span_context().span_id


@pytest.mark.req("OB-08", "OB-20")
def test_published_rows_are_removed_in_batches_and_still_balance(chain: Chain) -> None:
    chain.send(1, 2, 3)
    chain.relay()
    rows = OutboxRows(chain.engine)
    assert [rows.purge(-60.0, 2), rows.purge(-60.0, 2), rows.purge(-60.0, 2)] == [2, 1, 0]
    found = chain.balance()
    assert (found.verdict, found.appended, found.applied, found.gone) == ("holds", 3, 0, 3), found
    with chain.engine.connect() as connection:
        tally = connection.execute(text("SELECT what, messages FROM onceward_outbox_tally")).all()
    assert sorted(map(tuple, tally)) == [("published", 3), ("removed published", 3)]
