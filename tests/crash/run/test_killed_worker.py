"""A worker is killed in the middle of its work: what it held comes back at once, on every source, not after a lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from onceward.connectors.urls import Address
from onceward.transaction import Transaction
from tests.support.run.world import Run, Site
from tests.support.schema import new_schema
from tests.support.wait import until

MESSAGES = 200

APP = """
import asyncio, os, signal, time
from pathlib import Path

from onceward import Onceward
from onceward.inbox import Contract

app = Onceward("shop")
CONTRACT = Contract(
    consumer_id="charge", event_types=["*"], owner_team="t", idempotency_mechanism="inbox row", lease=3600
)
KEPT = {contract!r}
POLICY = {{"loop": {{"concurrency": {{"value": 4}}}}}}


def begin(order):
    with Path("begun.txt").open("a") as lines:
        lines.write(f"{{order['id']}}\\n")
    if order.get("die") and not Path("died.txt").exists():
        Path("died.txt").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if order.get("poison"):
        os.kill(os.getpid(), signal.SIGKILL)


def end(order):
    with Path("done.txt").open("a") as lines:
        lines.write(f"{{order['id']}}\\n")


if KEPT and {asynchronous!r}:

    @app.consumer({source!r}, contract=CONTRACT, policy=POLICY)
    async def charge(order: dict, session) -> None:
        begin(order)
        await asyncio.sleep(order.get("seconds", 0.002))
        await session.execute("INSERT INTO charges VALUES (:id)", {{"id": order["id"]}})
        end(order)

elif KEPT:

    @app.consumer({source!r}, contract=CONTRACT, policy=POLICY)
    def charge(order: dict, session) -> None:
        begin(order)
        time.sleep(order.get("seconds", 0.002))
        session.execute("INSERT INTO charges VALUES (:id)", {{"id": order["id"]}})
        end(order)

else:

    @app.consumer({source!r}, policy=POLICY)
    def charge(order: dict) -> None:
        begin(order)
        time.sleep(order.get("seconds", 0.002))
        end(order)
"""


class Shop(Site):
    """One consumer whose leases are an hour: nothing that these tests wait for can come from one."""

    def __init__(self, directory: Path, source: str, *, contract: bool, asynchronous: bool = False) -> None:
        super().__init__(directory)
        self.source = source
        code = APP.format(source=source, contract=contract, asynchronous=asynchronous)
        (directory / "shop.py").write_text(code)

    def send(self, *orders: dict[str, Any]) -> None:
        connector = Address(self.source).open(asynchronous=False)
        try:
            connector.dispatch_transactions(
                [Transaction(id=str(order["id"]), payload=order) for order in orders]
            )
        finally:
            connector.close()


@contextmanager
def shop_on(
    kind: str, directory: Path, redis_url: str, postgres_url: str, settings: str = "lease=3600"
) -> Iterator[Shop]:
    source, _, database = kind.partition("+")
    url = f"sqlite:///{directory}/orders.db?{settings}"
    if source == "redis":
        url = f"{redis_url}/orders-{uuid4().hex}?{settings}"
    shop = Shop(directory, url, contract=bool(database), asynchronous="asyncio" in database)
    if not database:
        yield shop
    elif database.startswith("sqlite"):
        shop.environ["ONCEWARD_DATABASE"] = f"sqlite:///{directory}/shop.db"
        with create_engine(shop.environ["ONCEWARD_DATABASE"], poolclass=NullPool).begin() as connection:
            connection.execute(text("CREATE TABLE charges (id TEXT)"))
        yield shop
    else:
        with new_schema(postgres_url) as schema:
            shop.environ["ONCEWARD_DATABASE"] = schema.plain_url
            schema.execute(f"CREATE TABLE {schema.name}.charges (id TEXT)")
            yield shop


KINDS = [
    "sqlite+sqlite",
    *(
        pytest.param(kind, marks=pytest.mark.long)
        for kind in ("redis+postgresql", "sqlite", "redis", "sqlite+postgresql-asyncio")
    ),
]


@pytest.mark.req("RN-01")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_worker_held_is_done_by_others_without_waiting_for_its_lease(
    kind: str, tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    with shop_on(kind, tmp_path, redis_url, postgres_url) as shop:
        shop.send(*({"id": number, "die": number == 50} for number in range(MESSAGES)))
        with shop.run("--processes", "2") as run:
            until(lambda: len(set(shop.done)) == MESSAGES)
            assert run.says("was killed by SIGKILL")
            run.signal(signal.SIGTERM)
            assert run.ended() == 0


def holder_of(run: Run, shop: Shop) -> int:
    """The process that has begun a message, of two that run."""
    begun = until(lambda: (shop.directory / "holder.txt").exists() and shop.lines("holder.txt"))
    return int(begun[0])


@pytest.mark.req("RN-01")
@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.long), "redis+postgresql"])
def test_what_a_frozen_worker_holds_stays_with_it(
    kind: str, tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    with shop_on(kind, tmp_path, redis_url, postgres_url) as shop:
        code = (tmp_path / "shop.py").read_text()
        mark = 'if order.get("seconds"):\n        Path("holder.txt").write_text(str(os.getpid()))'
        (tmp_path / "shop.py").write_text(
            code.replace('if order.get("poison")', f'{mark}\n    if order.get("poison")')
        )
        shop.send({"id": "held", "seconds": 3})
        with shop.run("--processes", "2") as run:
            frozen = holder_of(run, shop)
            os.kill(frozen, signal.SIGSTOP)
            shop.send(*({"id": number} for number in range(50)))
            until(lambda: len(shop.done) == 50)
            assert len(run.workers()) == 2
            assert shop.begun.count("held") == 1
            os.kill(frozen, signal.SIGCONT)
            until(lambda: "held" in shop.done)
            assert shop.begun.count("held") == 1


@pytest.mark.req("RN-01")
@pytest.mark.parametrize(
    "kind",
    ["redis", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sqlite", "sqlite+postgresql"))],
)
def test_a_message_that_kills_its_workers_is_still_found_out_although_it_comes_back_at_once(
    kind: str, tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    with shop_on(kind, tmp_path, redis_url, postgres_url, "lease=3600&max_deliveries=2") as shop:
        shop.send({"id": "poison", "poison": True}, *({"id": number} for number in range(20)))
        with shop.run("--drain") as run:
            assert run.ended() == 0, run.log
        # Without a contract, one that was done and not yet acknowledged at a kill is done again.
        done = shop.done if "+" in kind else {*shop.done}
        assert sorted(done, key=int) == [str(number) for number in range(20)]
        # Beside an inbox, which counts starts, lost deliveries bury nothing; `poison_after` is 3.
        assert shop.begun.count("poison") == (3 if "+" in kind else 2)
        assert run.says("dead letter")
