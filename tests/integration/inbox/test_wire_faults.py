"""The inbox on PostgreSQL, behind a wire that fails at every single request: nothing is lost, nothing is done twice."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url

from onceward import Postponed
from onceward.inbox import Inbox
from onceward.testing.inbox.samples import contract, event, write
from tests.support.proxy import TcpProxy, WireFault, proxy_to
from tests.support.schema import Schema, new_schema
from tests.support.wait import LIMIT

pytestmark = pytest.mark.timeout(120)

AT = range(8)
"""More requests than an event needs."""


@pytest.fixture(scope="module")
def schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        made.execute(f"CREATE TABLE {made.name}.written (tracking_id text)")
        engine = create_engine(made.url, connect_args=made.connect_args)
        Inbox(engine).migrate()
        engine.dispose()
        yield made


@pytest.fixture
def line(schema: Schema) -> Iterator[TcpProxy]:
    url = make_url(schema.url)
    host = url.host or str(url.query["host"])
    with proxy_to(host, url.port or 5432) as made:
        yield made


@pytest.fixture
def engine(schema: Schema, line: TcpProxy) -> Iterator[Engine]:
    url = make_url(schema.url).set(**line.address).difference_update_query(["host"])
    settings = {"options": f"-csearch_path={schema.name} -csynchronous_commit=off"}
    made = create_engine(url, connect_args=settings)
    yield made
    made.dispose()


class Provider:
    def __init__(self) -> None:
        self.charges: dict[str, str] = {}

    def charge(self, key: str, id_: str) -> str:
        self.charges.setdefault(key, id_)
        return key


def deliver_until_acknowledged(process: Callable[[], Any]) -> int:
    """Deliver an event again and again, as a queue does. Returns how often it was refused."""
    end = time.monotonic() + LIMIT
    for refused in itertools.count():
        try:
            process()
            return refused
        except Postponed as busy:
            time.sleep(min(busy.delay, 0.05))
        except Exception:
            if time.monotonic() > end:
                raise
    raise AssertionError


@pytest.mark.req("ST-13")
@pytest.mark.parametrize("mode", ["transactional", "effectful"])
@pytest.mark.parametrize("fault", list(WireFault))
def test_an_event_takes_effect_once_wherever_its_connection_fails(
    schema: Schema, line: TcpProxy, engine: Engine, fault: WireFault, mode: Any
) -> None:
    provider = Provider()
    inbox = Inbox(engine)
    promised = contract(f"{mode}-{fault.name}", mode=mode, lease=0.5, poison_after=100)
    inbox.register(promised)

    def handle(current: Any, session: Any) -> None:
        if mode == "effectful":
            session.effect("charge", lambda key: provider.charge(key, current.tracking_id))
        write(current, session)

    ids = [f"{mode}-{fault.name}-{at}" for at in AT]
    refused = 0
    for at, id_ in zip(AT, ids, strict=True):
        line.strike(fault, at)
        refused += deliver_until_acknowledged(
            lambda id_=id_: inbox.process(promised, event(id_), handle)  # type: ignore[misc]
        )
    assert line.struck >= 5
    assert fault is WireFault.DELAY or refused > 0

    rows = schema.execute(f"SELECT tracking_id FROM {schema.name}.written")
    written = Counter(id_ for (id_,) in rows if id_.startswith(f"{mode}-{fault.name}-"))
    assert written == Counter(ids)
    if mode == "effectful":
        assert Counter(provider.charges.values()) == Counter(ids)
    done = schema.execute(
        f"SELECT count(*) FROM {schema.name}.onceward_dedup WHERE consumer_id = '{promised.consumer_id}'"
    )
    assert done == [(len(ids),)]
