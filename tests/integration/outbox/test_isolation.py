"""A database whose transactions see one moment by default: a relay must see what was committed while it waited."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text

from onceward.outbox.claims import LOCK, OutboxClaim, OutboxRows
from tests.support.outbox import OutboxWorld, outbox_on_postgresql
from tests.support.wait import until


@pytest.fixture
def world(postgres_url: str) -> Iterator[OutboxWorld]:
    with outbox_on_postgresql(postgres_url) as made:
        yield made


@pytest.mark.req("OB-02", "OB-03")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_claim_that_waits_for_its_turn_sees_what_is_committed_meanwhile(
    world: OutboxWorld, level: str
) -> None:
    engine = create_engine(world.engine.url, isolation_level=level)
    claims: list[OutboxClaim] = []

    def claim() -> None:
        claims.extend(
            OutboxRows(engine).claim(
                16, without=(), promote=False, lease=30.0, owner=None, targets=["redis://x/ship"]
            )
        )

    claiming = threading.Thread(target=claim)
    with world.engine.connect() as other:
        other.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        claiming.start()
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        until(lambda: other.scalar(waiting))
        world.send("sent meanwhile")
        other.commit()
    claiming.join()
    engine.dispose()
    assert [len(each.rows) for each in claims] == [1]
