"""Health of a run: alive means that work progresses, ready means that sources answer."""

from __future__ import annotations

import json
import re
import signal
import socket
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.console import Role, UsersFile
from onceward.run.health.server import CONNECTIONS
from onceward.testing.servers import redis_server
from onceward.transaction import Transaction
from tests.support.run.world import Run, Site
from tests.support.wait import until

PORT = ("--health", "127.0.0.1:0")
IN_ONE_MODE = pytest.mark.parametrize(
    "site", ["threads", pytest.param("asyncio", marks=pytest.mark.long)], indirect=True
)


@pytest.fixture(params=["threads", "asyncio"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, request.param)


def verdict(run: Run, path: str) -> tuple[int, str]:
    status, body = run.get(path)
    output = json.loads(body)
    assert output["ok"] == (status == 200)
    return status, "; ".join(output["problems"])


# ── progress ────────────────────────────────────────────────────────────────────────────────────────────


def test_work_that_does_not_move_is_unhealthy_and_an_idle_worker_is_not(site: Site) -> None:
    with site.run(*PORT, ONCEWARD_STALLED_AFTER="1") as run:
        until(run.is_ready)
        until(lambda: run.consumer()["last_progress_seconds"] > 2.0)
        assert verdict(run, "/livez") == (200, "")
        site.send({"id": "long", "seconds": 60})
        until(lambda: verdict(run, "/livez")[0] == 503)
        assert re.fullmatch(
            r"worker 1 \(pid \d+\): charge has 1 in flight and has made no progress for \d+ s",
            verdict(run, "/livez")[1],
        )
        consumer = run.consumer()
        assert consumer["in_flight"] == 1
        assert consumer["oldest_in_flight_seconds"] >= 1


def test_a_worker_that_says_nothing_at_all_is_unhealthy(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.run(*PORT, ONCEWARD_STALLED_AFTER="1") as run:
        until(run.is_ready)
        run.signal_worker(signal.SIGSTOP)
        until(lambda: verdict(run, "/livez")[0] == 503)
        assert "has reported nothing for" in verdict(run, "/livez")[1]
        run.signal_worker(signal.SIGCONT)
        until(lambda: verdict(run, "/livez")[0] == 200)


def test_progress_and_metrics_tell_what_each_consumer_of_each_worker_did(site: Site) -> None:
    site.send({"id": "good"}, {"id": "bad", "fail": True}, {"id": "slow", "seconds": 60})
    with site.run(*PORT, RUN_SOURCE="sqlite:///orders.db?on_failure=dead_letter") as run:
        until(lambda: run.consumer().get("processed") == 2)
        output = json.loads(run.get("/progress")[1])
        assert output["stage"] == "running"
        [worker] = output["workers"]
        assert (worker["worker"], worker["restarts"], worker["live"], worker["ready"]) == (1, 0, True, True)
        assert worker["pid"] == run.workers()[0]
        [consumer] = worker["consumers"]
        assert consumer == consumer | {
            "consumer": "charge", "state": "consuming", "succeeded": 1, "failed": 1, "returned": 0,
            "in_flight": 1, "stuck": 0, "problem": None,
        }  # fmt: skip
        status, metrics = run.get("/metrics")
        assert status == 200
        for line in (
            'onceward_worker_up{worker="1"} 1.0',
            'onceward_worker_ready{worker="1"} 1.0',
            'onceward_worker_restarts_total{worker="1"} 0.0',
            'onceward_consumer_succeeded_total{consumer="charge",worker="1"} 1.0',
            'onceward_consumer_failed_total{consumer="charge",worker="1"} 1.0',
            'onceward_consumer_in_flight{consumer="charge",worker="1"} 1.0',
        ):
            assert line in metrics.splitlines()


def test_a_run_that_stops_is_not_ready_any_more(site: Site) -> None:
    site.send({"id": "slow", "seconds": 60})
    with site.run(*PORT) as run:
        until(run.is_ready)
        run.signal(signal.SIGTERM)
        until(lambda: verdict(run, "/readyz") == (503, "worker 1: charge is stopping"))
        assert json.loads(run.get("/progress")[1])["stage"] == "draining"


# ── the port ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_port_answers_get_for_four_pages_and_nothing_else(tmp_path: Path) -> None:
    with Site(tmp_path).run(*PORT) as run:
        there = "the pages are /livez, /readyz, /progress, /metrics"
        assert run.get("/other") == (404, f"not found; {there}\n")
        assert run.get("/") == (200, f"{there}; start with --console for pages to click\n")
        connection = HTTPConnection(*_where(run), timeout=10)
        connection.request("POST", "/livez")
        assert connection.getresponse().status == 405
        connection.close()
        with socket.create_connection(_where(run), timeout=10) as other:
            other.sendall(b"not http\r\n\r\n")
            assert other.recv(100).startswith(b"HTTP/1.1 400 ")
        assert run.get("/livez?verbose=1")[0] == 200


@pytest.mark.req("UI-27", "UI-31")
def test_a_head_that_is_too_large_gets_431_and_idle_connections_do_not_keep_probes_out(
    tmp_path: Path,
) -> None:
    with Site(tmp_path).run(*PORT) as run:
        with socket.create_connection(_where(run), timeout=10) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nX: " + b"x" * 70_000)
            assert client.recv(100).startswith(b"HTTP/1.1 431 ")
        for number in range(3):  # one of them arrives in one read, whole
            with socket.create_connection(_where(run), timeout=10) as client:
                client.sendall(
                    b"GET /livez HTTP/1.1\r\nHost: h\r\nX: %s\r\n\r\n" % (b"x" * (66_000 + number))
                )
                assert client.recv(100).startswith(b"HTTP/1.1 431 ")
        with ExitStack() as idle:
            first = idle.enter_context(socket.create_connection(_where(run), timeout=10))
            for _ in range(CONNECTIONS):
                idle.enter_context(socket.create_connection(_where(run), timeout=10))
            assert run.get("/livez")[0] == 200
            with suppress(ConnectionResetError):
                assert first.recv(100) == b"", "the oldest was closed for a new one"
        until(lambda: run.get("/livez")[0] == 200)


def _where(run: Run) -> tuple[str, int]:
    host, _, port = run.url.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.mark.req("UI-27")
def test_one_port_serves_probes_metrics_and_the_console_if_both_have_the_same_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    users = tmp_path / "users.txt"
    UsersFile(users).add("ann", "a long password", Role.OPERATOR)
    options = ("--health", address, "--console", address, "--users", str(users))
    with Site(tmp_path).run(*options) as run:
        until(run.is_ready)
        for path in ("/livez", "/progress", "/metrics"):
            assert run.get(path)[0] == 200, path
        assert 'onceward_worker_up{worker="1"} 1.0' in run.get("/metrics")[1]
        assert run.get("/")[0] == 401, "the pages need a user all the same"


# ── outages ─────────────────────────────────────────────────────────────────────────────────────────────


@IN_ONE_MODE
def test_an_outage_of_redis_is_waited_out_from_the_start_and_in_the_midst(site: Site) -> None:
    with redis_server(durable=True) as server:
        with RedisStreamsConnector(server.url, "orders", "shop") as orders:
            orders.dispatch_transactions([Transaction(payload={"id": "o1"})])
        server.kill()
        source = f"{server.url}/orders?group=shop&lease=1"
        with site.run(*PORT, RUN_SOURCE=source, ONCEWARD_STALLED_AFTER="60") as run:
            until(lambda: run.consumer().get("state") == "waiting")
            status, problem = verdict(run, "/readyz")
            assert status == 503
            assert "charge is waiting: ConnectionError" in problem
            assert verdict(run, "/livez")[0] == 200
            server.start()
            until(lambda: site.done == ["o1"] and run.is_ready())
            server.kill()
            until(lambda: not run.is_ready())
            server.start()
            with RedisStreamsConnector(server.url, "orders", "shop") as orders:
                orders.dispatch_transactions([Transaction(payload={"id": "o2"})])
            until(lambda: "o2" in site.done and run.is_ready())
            assert len(run.workers()) == 1, "it was the same process all the time"
            run.signal(signal.SIGTERM)
            assert run.ended() == 0


@IN_ONE_MODE
def test_a_database_that_is_away_is_waited_for_and_no_reason_to_crash(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        away = f"postgresql://127.0.0.1:{taken.getsockname()[1]}/shop"
    with site.run(*PORT, ONCEWARD_DATABASE=away) as run:
        until(lambda: run.consumer().get("state") == "waiting")
        assert "charge is waiting: OperationalError" in verdict(run, "/readyz")[1]
        assert verdict(run, "/livez")[0] == 200
        run.signal(signal.SIGTERM)
        assert run.ended() == 0
        assert len(run.workers()) == 1
