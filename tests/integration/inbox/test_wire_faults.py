"""The inbox on PostgreSQL, behind a wire that fails at every single request: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import Postponed
from onceward.inbox import AsyncInbox, Inbox
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


class Ways(NamedTuple):
    """An inbox in threads or asyncio behind the same calls."""

    register: Callable[[Any], None]
    process: Callable[[Any, Any, Any, bool], Any]


@pytest.fixture(params=["threads", "asyncio"])
def ways(request: pytest.FixtureRequest, schema: Schema, line: TcpProxy) -> Iterator[Ways]:
    url = make_url(schema.url).set(**line.address).difference_update_query(["host"])
    settings = {"options": f"-csearch_path={schema.name} -csynchronous_commit=off"}
    if request.param == "threads":
        engine = create_engine(url, connect_args=settings)
        inbox = Inbox(engine)

        def process(promised: Any, event: Any, charge: Any, charges: bool) -> Any:
            def handle(current: Any, session: Any) -> None:
                if charges:
                    session.effect("charge", lambda key: charge(key, current.tracking_id))
                write(current, session)

            return inbox.process(promised, event, handle)

        yield Ways(inbox.register, process)
        engine.dispose()
        return
    with asyncio.Runner() as runner:
        async_engine = create_async_engine(url, connect_args=settings)
        async_inbox = AsyncInbox(async_engine)

        def process_async(promised: Any, event: Any, charge: Any, charges: bool) -> Any:
            async def call(key: str, id_: str) -> str:
                return str(charge(key, id_))

            async def handle(current: Any, session: Any) -> None:
                if charges:
                    await session.effect("charge", lambda key: call(key, current.tracking_id))
                await session.execute(
                    "INSERT INTO written (tracking_id) VALUES (:id)", {"id": current.tracking_id}
                )

            return runner.run(async_inbox.process(promised, event, handle))

        yield Ways(lambda promised: runner.run(async_inbox.register(promised)), process_async)
        runner.run(async_engine.dispose())


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
    schema: Schema, line: TcpProxy, ways: Ways, fault: WireFault, mode: Any, request: pytest.FixtureRequest
) -> None:
    provider = Provider()
    name = f"{mode}-{fault.name}-{request.node.callspec.params['ways']}"
    promised = contract(name, mode=mode, lease=0.5, poison_after=100)
    ways.register(promised)
    ids = [f"{name}-{at}" for at in AT]
    refused = 0
    for at, id_ in zip(AT, ids, strict=True):
        line.strike(fault, at)
        refused += deliver_until_acknowledged(
            lambda id_=id_: ways.process(promised, event(id_), provider.charge, mode == "effectful")  # type: ignore[misc]
        )
    assert line.struck >= 5
    assert fault is WireFault.DELAY or refused > 0

    rows = schema.execute(f"SELECT tracking_id FROM {schema.name}.written")
    written = Counter(id_ for (id_,) in rows if id_.startswith(f"{name}-"))
    assert written == Counter(ids)
    if mode == "effectful":
        assert Counter(provider.charges.values()) == Counter(ids)
    done = schema.execute(
        f"SELECT count(*) FROM {schema.name}.onceward_dedup WHERE consumer_id = '{promised.consumer_id}'"
    )
    assert done == [(len(ids),)]
