"""Processes of sixteen slots, killed with -9 again and again: each key in its order, never two at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward.testing.servers import redis_server
from tests.crash.order.campaign import campaign
from tests.support.schema import new_schema


@pytest.fixture(params=["sqlite", pytest.param("named", marks=pytest.mark.long), "postgresql", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    settings = "lease=2&redelivery_delay=0.05"
    if request.param == "postgresql":
        with new_schema(request.getfixturevalue("postgres_url")) as schema:
            yield schema.plain_url, f"{schema.plain_url}&queue=orders&{settings}"
        return
    if request.param == "redis":
        with redis_server() as server:
            yield f"sqlite:///{tmp_path}/shop.db", f"{server.url}/orders?{settings}"
        return
    queue = "shop.db?queue=orders" if request.param == "named" else "orders.db?synchronous=OFF"
    yield f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/{queue}&{settings}"


@pytest.mark.req("OR-01", "OR-02")
@pytest.mark.parametrize(
    ("keys", "events", "processes", "kills"),
    [(40, 300, 3, 2), pytest.param(1000, 4000, 4, 12, marks=pytest.mark.long)],
)
def test_order_survives_kills(
    place: tuple[str, str], tmp_path: Path, keys: int, events: int, processes: int, kills: int
) -> None:
    database, source = place
    log = tmp_path / "log.txt"
    campaign(database, source, log, keys=keys, events=events, processes=processes, kills=kills)


@pytest.mark.long
@pytest.mark.req("OR-02")
def test_order_survives_kills_of_redis(tmp_path: Path) -> None:
    with redis_server(durable=True) as server:
        database, source = (
            f"sqlite:///{tmp_path}/shop.db",
            f"{server.url}/orders?lease=2&redelivery_delay=0.05",
        )

        def restart() -> None:
            server.kill()
            server.start()

        log = tmp_path / "log.txt"
        campaign(database, source, log, keys=60, events=1500, processes=4, kills=4, after_kill=restart)
