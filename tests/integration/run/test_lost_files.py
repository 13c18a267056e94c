"""A run whose queue or database is deleted is not ready, says why, and goes on when the file is back."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support.run.world import Run, Site
from tests.support.wait import until

PORT = ("--health", "127.0.0.1:0")
WITH_DATABASE = """
    import os
    from onceward import Onceward
    from onceward.inbox import Contract

    app = Onceward("shop", database="sqlite:///app.db")
    contract = Contract(
        consumer_id="charge", event_types=["order"], owner_team="shop", idempotency_mechanism="inbox"
    )
    POLICY = {"loop": {"empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}}

    @app.consumer("sqlite:///orders.db", contract=contract, policy=POLICY)
    def charge(order: dict, session) -> None:
        pass
"""


def is_lost(run: Run, file: str) -> bool:
    status, body = run.get("/readyz")
    return status == 503 and f"{file} was deleted or moved while it was open" in body


@pytest.mark.req("RN-08")
def test_a_run_without_its_queue_is_not_ready_until_the_file_is_back(tmp_path: Path) -> None:
    site = Site(tmp_path, "asyncio")
    site.send({"id": "first"})
    queue, away = site.directory / "orders.db", site.directory / "away.db"
    with site.run(*PORT) as run:
        until(lambda: site.done == ["first"] and run.is_ready())
        queue.rename(away)
        until(lambda: is_lost(run, "orders.db"))
        assert not queue.exists()
        away.rename(queue)
        until(run.is_ready)
        site.send({"id": "second"})
        until(lambda: site.done == ["first", "second"])


@pytest.mark.req("RN-08")
def test_an_idle_run_without_its_database_is_not_ready(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(textwrap.dedent(WITH_DATABASE))
    with site.run(*PORT, "--env", "dev") as run:
        until(run.is_ready)
        for each in site.directory.glob("app.db*"):
            each.unlink()
        until(lambda: is_lost(run, "app.db"))
        assert not (site.directory / "app.db").exists()
