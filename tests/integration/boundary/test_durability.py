"""What a boundary reports about its store, and what `onceward explain` makes of it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from onceward.boundary.boundary import Boundary
from onceward.boundary.stores import open_store
from onceward.cli.main import app
from onceward.connectors.reports import Survives
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.testing import servers
from tests.support.boundary.databases import StorePlace, place
from tests.support.boundary.in_process import serving
from tests.support.boundary.server import Tell, in_thread

__all__ = ["place"]

APP = """
from onceward import Onceward

app = Onceward("shop")


@app.consumer("boundary+{url}?consumer=billing")
def bill(fact: dict):
    pass
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(store_url: str) -> Iterator[str]:
    async def serve(tell: Tell, stop: asyncio.Event) -> None:
        store = await open_store(store_url)
        try:
            async with serving(Boundary(store)) as url:
                await tell(url)
                await stop.wait()
        finally:
            await store.close()

    with in_thread(serve) as url:
        yield url


def facts_of(url: str) -> Any:
    return Address(f"boundary+{url}?consumer=billing").facts()


@pytest.mark.req("BC-44")
@pytest.mark.parametrize(
    ("durable", "survives", "why"),
    [
        (True, Survives.MACHINE_CRASH, "NATS with `sync_interval: always`: a fact is on disk first"),
        (False, Survives.PROCESS_CRASH, "NATS acknowledges facts before they are on disk"),
    ],
)
def test_nats_survives_a_machine_crash_only_if_it_syncs_always(
    durable: bool, survives: Survives, why: str
) -> None:
    port = free_port()
    with (
        servers.nats_server(durable=durable, monitoring=port) as nats,
        served(f"{nats.url}?monitoring={port}") as url,
    ):
        found = facts_of(url)
    assert found.durability.survives is survives
    assert why in found.durability.why
    assert ("sync_interval: always" in found.durability.advice) is not durable


@pytest.mark.req("BC-44")
def test_nats_that_does_not_say_it_is_not_checked_and_explain_says_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers.nats_server() as nats, served(f"{nats.url}?monitoring={free_port()}") as url:
        durability = facts_of(url).durability
        assert durability.survives is None
        assert durability.why.startswith("not checked whether the boundary's store, NATS, has `sync_interval")
        (tmp_path / "durability_shop.py").write_text(APP.format(url=url))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "durability_shop", raising=False)
        result = CliRunner().invoke(app, ["explain", "durability_shop:app"], env={"COLUMNS": "400"})
    assert "unknown, at best" in result.output
    assert "not checked whether the boundary's store, NATS" in result.output


@pytest.mark.req("BC-44")
def test_another_server_on_the_monitoring_port_says_nothing_about_this_one() -> None:
    port = free_port()
    with (
        servers.nats_server(durable=True, monitoring=port),
        servers.nats_server() as nats,
        served(f"{nats.url}?monitoring={port}") as url,
    ):
        assert facts_of(url).durability.survives is None


@pytest.mark.req("BC-44")
def test_a_directory_and_postgresql_survive_a_machine_crash(tmp_path: Path, place: StorePlace) -> None:
    with served(str(tmp_path / "data")) as url:
        assert facts_of(url).durability.survives is Survives.MACHINE_CRASH
    expected = Survives.MACHINE_CRASH if place.ask("SHOW fsync") == [("on",)] else Survives.PROCESS_CRASH
    with served(place.url) as url:
        assert facts_of(url).durability.survives is expected


@pytest.mark.req("BC-44")
def test_a_boundary_that_reports_nothing_or_cannot_read_its_store_is_not_checked() -> None:
    class Old(BaseHTTPRequestHandler):
        status, body = 200, {"first": 1, "last": 0, "consumers": []}

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.end_headers()
            self.wfile.write(json.dumps(self.body).encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Old)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        durability = facts_of(url).durability
        assert (durability.survives, durability.why[:11]) == (None, "not checked")
        Old.status, Old.body = 503, {"code": "unavailable", "message": "the store cannot be read: away"}
        found = facts_of(url)
        assert found.durability is None
        assert "/stats: the store cannot be read: away; check that it is running" in found.unreachable[0]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("option", ["monitoring=x", "replicas=two", "monitor=1"])
def test_options_of_a_nats_store_are_checked(option: str) -> None:
    with pytest.raises(ConfigurationError, match=option.partition("=")[0]):
        asyncio.run(open_store(f"nats://127.0.0.1:1?{option}"))
