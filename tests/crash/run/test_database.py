"""The database of a run goes away or refuses writes for a while: the run waits, and no message suffers."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from tests.support.own_postgres import own_postgres
from tests.support.run.world import Run, Site
from tests.support.wait import until

PORT = ("--health", "127.0.0.1:0")


@pytest.fixture(params=["threads", pytest.param("asyncio", marks=pytest.mark.long)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, request.param)


def verdict(run: Run, path: str) -> tuple[int, str]:
    status, body = run.get(path)
    return status, "; ".join(json.loads(body)["problems"])


CHARGING = """
import asyncio, time
from onceward import Onceward
from onceward.inbox import Contract

app = Onceward("shop")
contract = Contract(consumer_id="charge", event_types=["*"], owner_team="t", idempotency_mechanism="inbox row")
INSERT = "INSERT INTO charges VALUES (:id)"

if {asynchronous}:

    @app.consumer("sqlite:///orders.db", contract=contract)
    async def charge(order: dict, session) -> None:
        await asyncio.sleep(0.01)
        await session.execute(INSERT, order)

else:

    @app.consumer("sqlite:///orders.db", contract=contract)
    def charge(order: dict, session) -> None:
        time.sleep(0.01)
        session.execute(INSERT, order)
"""


class Charges:
    """The app's table in PostgreSQL, which may be away at times."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)

    def close(self) -> None:
        self._engine.dispose()

    def make(self) -> None:
        self._ask("CREATE TABLE charges (id TEXT)")

    def make_read_only(self, is_so: bool) -> None:
        self._ask("SET default_transaction_read_only = off")
        self._ask(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if is_so else 'off'}")
        self._ask("SELECT pg_reload_conf()")

    def count(self) -> int:
        return len(self.ids())

    def ids(self) -> list[str]:
        return [row[0] for row in self._ask("SELECT id FROM charges")]

    def letters(self) -> int:
        return len(self._ask("SELECT 1 FROM onceward_dead_letters"))

    def _ask(self, sql: str) -> list[Any]:
        with self._engine.connect() as connection:
            found = connection.exec_driver_sql(sql)
            return list(found) if found.returns_rows else []


def test_an_outage_of_the_database_in_the_midst_is_waited_out_and_spends_nothing(site: Site) -> None:
    (site.directory / "shop.py").write_text(CHARGING.format(asynchronous=site.mode == "asyncio"))
    ids = [f"o{number}" for number in range(300)]
    site.send(*({"id": each} for each in ids))
    with own_postgres() as server, closing(Charges(server.url)) as charges:
        charges.make()
        with site.run(*PORT, ONCEWARD_DATABASE=server.url) as run:
            until(lambda: charges.count() > 20)
            server.control("stop", "-m", "immediate")
            until(lambda: run.consumer().get("state") == "waiting")
            assert "charge is waiting" in verdict(run, "/readyz")[1]
            assert verdict(run, "/livez")[0] == 200
            server.start()
            until(lambda: charges.count() == 300)
            until(lambda: site.counts()["leased"] == site.counts()["ready"] == 0)
            until(run.is_ready)
            run.signal(signal.SIGTERM)
            assert run.ended() == 0
        assert sorted(charges.ids()) == sorted(ids), "each of them once"
        assert site.counts()["dead"] == 0
        postponed = [line for line in run.lines if "is postponed" in line["message"]]
        assert len(postponed) < 300, "nothing more is fetched while the database is away"


def test_a_drain_gives_up_on_a_database_that_stays_away(site: Site) -> None:
    text = CHARGING.format(asynchronous=site.mode == "asyncio")
    text += "\nfrom onceward.run import outages\noutages.PATIENCE = 0.5\n"
    (site.directory / "shop.py").write_text(text)
    site.send(*({"id": f"o{number}"} for number in range(300)))
    with own_postgres() as server, closing(Charges(server.url)) as charges:
        charges.make()
        with site.run("--drain", ONCEWARD_DATABASE=server.url) as run:
            until(lambda: charges.count() > 20)
            server.control("stop", "-m", "immediate")
            assert run.ended() == 1
            assert run.says("charge gave up after waiting 0.5 s for its source or database")
        server.start()
    assert site.counts()["dead"] == 0


def test_a_database_that_is_read_only_for_a_while_buries_nothing(site: Site) -> None:
    """As after a failover, when the server has become a standby."""
    (site.directory / "shop.py").write_text(CHARGING.format(asynchronous=site.mode == "asyncio"))
    site.send(*({"id": f"o{number}"} for number in range(100)))
    with own_postgres() as server, closing(Charges(server.url)) as charges:
        charges.make()
        with site.run(*PORT, ONCEWARD_DATABASE=server.url) as run:
            until(lambda: charges.count() > 10)
            charges.make_read_only(True)
            until(lambda: run.consumer().get("state") == "waiting")
            assert "read-only" in verdict(run, "/readyz")[1]
            charges.make_read_only(False)
            until(lambda: charges.count() == 100)
            run.signal(signal.SIGTERM)
            assert run.ended() == 0
        assert site.counts()["dead"] == 0
        assert charges.letters() == 0
