"""`onceward boundary serve` as a real process: its output, its log, its end, and what it refuses."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from onceward.boundary import BoundaryClient, BoundaryError, envelope_for, fact_of
from onceward.boundary.certs import make_certificates
from onceward.cli.main import app
from tests.support.boundary.server import COMMAND, DEADLINE, served
from tests.support.wait import until


def refused(*arguments: str) -> str:
    """The message of a server that does not start. Not in another process: it ends before it serves."""
    loggers = [logging.getLogger(), logging.getLogger("onceward")]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    try:
        result = CliRunner().invoke(
            app, ["boundary", "serve", "--log-format", "console", *arguments], env={"COLUMNS": "200"}
        )
    finally:
        logging.captureWarnings(False)
        for each, level, handlers in before:
            each.setLevel(level)
            each.handlers[:] = handlers
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def append(client: BoundaryClient, message_id: str, value: object = 1, subject: str = "batch:B1") -> int:
    envelope = envelope_for(message_id, from_zone="plant-a", to_zone="hq")
    return client.append(envelope, fact_of(subject, "completed", value)).offset


# ── its life ────────────────────────────────────────────────────────────────────────────────────────────


def test_it_says_its_url_in_one_line_answers_and_ends_with_0_after_ctrl_c(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        assert server.url.startswith("http://127.0.0.1:")
        with urlopen(f"{server.url}/readyz") as answer:
            assert answer.status == 200
        with BoundaryClient(
            server.url
        ) as client:  # which keeps its connection open: the server does not wait for it
            assert append(client, "m1") == 1
            assert server.end(signal.SIGINT) == (0, "")


@pytest.mark.req("BC-02")
def test_facts_and_cursors_are_there_for_the_next_server_on_the_directory(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server, BoundaryClient(server.url) as client:
        for number in range(3):
            append(client, f"m{number}")
        client.fetch("hq-receiver")
        client.confirm("hq-receiver", 2)
        assert server.end(signal.SIGTERM) == (0, "")
    with served(tmp_path / "data") as server, BoundaryClient(server.url) as client:
        assert [fact.offset for fact in client.fetch("hq-receiver").facts] == [3]
        assert [fact.offset for fact in client.fetch("another").facts] == [1, 2, 3]


class SlowUpload:
    """An upload that lasts until it is asked to end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._begun = threading.Event()
        self._may_end = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._put)

    def _put(self) -> int:
        with BoundaryClient(self._url) as client:
            return client.put_stream("batch-files", "slow", self._pieces()).size

    def _pieces(self) -> Iterator[bytes]:
        yield b"begin "
        self._begun.set()
        assert self._may_end.wait(DEADLINE)
        yield b"end"

    def wait_for_server(self, data: Path) -> None:
        assert self._begun.wait(DEADLINE)
        until(lambda: any((data / "objects" / "incoming").iterdir()))

    def end(self) -> int:
        self._may_end.set()
        return self._done.result(DEADLINE)


def test_a_call_that_runs_may_end_when_the_server_is_asked_to_stop(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        upload = SlowUpload(server.url)
        upload.wait_for_server(tmp_path / "data")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in server.log)
        assert upload.end() == len(b"begin end")
        assert server.end()[0] == 0


def test_a_second_signal_cuts_off_what_runs_and_the_log_is_whole(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        with BoundaryClient(server.url) as client:
            append(client, "m1")
        upload = SlowUpload(server.url)
        upload.wait_for_server(tmp_path / "data")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in server.log)
        assert server.end(signal.SIGTERM)[0] == 128 + signal.SIGTERM
        with pytest.raises(BoundaryError):
            upload.end()
        assert server.lines[-1]["message"] == "stopped, with calls cut off"
    with served(tmp_path / "data") as server, BoundaryClient(server.url) as client:
        assert [fact.message_id for fact in client.fetch("c").facts] == ["m1"]
        with pytest.raises(BoundaryError, match="there is no object"):
            client.get("batch-files", "slow")


BROKEN = """
from onceward.boundary.{module} import {name}
from onceward.boundary.server.worker import application

async def broken(self):
    raise RuntimeError("it broke")

{name}.{method} = broken
"""
SERVE_BROKEN = """
import sys
from onceward.boundary.server import envoy
from onceward.cli.main import main

sys.path.append(sys.argv.pop(1))
envoy.APPLICATION = "broken:application"
main()
"""


@pytest.mark.usual("retention")
@pytest.mark.parametrize(
    ("module", "name", "method", "reported"),
    [
        ("retention", "Retention", "sweep", "onceward-boundary-retention ended unexpectedly"),
        (
            "server.process",
            "Live",
            "reload_if_changed",
            "onceward-boundary-configuration ended unexpectedly",
        ),
    ],
)
def test_a_server_of_which_a_part_broke_ends_with_1_for_its_supervisor(
    tmp_path: Path, module: str, name: str, method: str, reported: str
) -> None:
    (tmp_path / "boundary.toml").write_text('store = "facts"\n')
    (tmp_path / "broken.py").write_text(BROKEN.format(module=module, name=name, method=method))
    ended = subprocess.run(
        [
            *(sys.executable, "-c", SERVE_BROKEN, str(tmp_path)),
            *("boundary", "serve"),
            *("--listen", "127.0.0.1:0", "--config", str(tmp_path / "boundary.toml"), "--log-format", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    (line,) = [each for each in lines if reported in each["message"]]
    assert line["level"] == "error"
    assert "it broke" in json.dumps(line)
    assert lines[-1]["message"] == "stopped"


def test_its_options_are_the_rules_of_the_boundary(tmp_path: Path) -> None:
    with (
        served(
            tmp_path / "data", "--strict-consumers", "--consumer", "known", "--require-artifacts"
        ) as server,
        BoundaryClient(server.url) as client,
    ):
        with pytest.raises(BoundaryError, match="there is no consumer 'c'"):
            client.fetch("c")
        assert client.fetch("known").facts == ()
        reference = {
            "bucket": "batch-files",
            "key": "k",
            "digest": "sha256:00",
            "size": 1,
            "media_type": "x/y",
        }
        with pytest.raises(BoundaryError, match="batch-files/k does not exist here"):
            append(client, "m1", reference)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_server_on_one_directory_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        reported = refused("--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"))
        assert "another process, such as a server, uses" in reported
        assert str(tmp_path / "data") in reported
        with BoundaryClient(server.url) as client:
            assert append(client, "m1") == 1


def test_a_port_that_is_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        reported = refused("--listen", f"127.0.0.1:{port}", "--data", str(tmp_path / "data"))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in reported


UNCHECKED = """
from onceward.boundary.server import address
from onceward.cli.main import main

address.free_address = lambda host, port: host
main()
"""


def test_a_port_that_is_taken_at_the_last_moment_ends_the_server_with_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        ended = subprocess.run(
            [
                *(sys.executable, "-c", UNCHECKED, "boundary", "serve"),
                *("--listen", listen, "--data", str(tmp_path / "data")),
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    assert (ended.returncode, ended.stdout) == (1, "")
    messages = [json.loads(line)["message"] for line in ended.stderr.splitlines()]
    assert any(f"cannot bind '{listen}': Address already in use" in each for each in messages)
    assert messages[-1] == "stopped"


def test_a_consumer_that_cannot_have_this_name_is_refused(tmp_path: Path) -> None:
    reported = refused("--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"), "--consumer", "a\nb")
    assert "consumer_name" in reported


@pytest.mark.parametrize("listen", ["7700", "localhost", "127.0.0.1:http", "127.0.0.1:65536", "127.0.0.1:-1"])
def test_what_is_no_address_is_refused(tmp_path: Path, listen: str) -> None:
    assert "--listen must be HOST:PORT" in refused("--listen", listen, "--data", str(tmp_path / "data"))


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    reported = refused("--listen", "192.0.2.1:0", "--data", str(tmp_path / "data"))
    assert "cannot listen on 192.0.2.1:0" in reported


STORES = {
    "nats://": "does not name a NATS server",
    "nats://:4222": "does not name a NATS server",
    "nats://host:port": "does not name a NATS server",
    "nats://host:99999": "does not name a NATS server",
    "nats://one:4222,:1": "does not name a NATS server",
    "nats://user:secret@": "does not name a NATS server",
    "nats:": "'nats' is a scheme, which needs two slashes; use a directory",
    "nats:host:4222": "'nats' is a scheme",
    "postgresql:shop": "'postgresql' is a scheme",
    "nats://user:secret@127.0.0.1:1": "NATS at nats://user:***@127.0.0.1:1 cannot be reached",
    "postgresql://user:secret@127.0.0.1:1/db": "Connection refused",
    "postgresql://user:secret@[::1/db": "is not a PostgreSQL URL",
    "postgresql://user:sec%ret@host/db": "is not a PostgreSQL URL",
    "postgresql+psycopg://user:secret@host/db": "'postgresql+psycopg' is not the scheme of a store",
    "ftp://user:secret@host": "'ftp' is not the scheme of a store; use a directory",
    "sqlite:////": "does not name a directory",
    " ": "does not name a directory",
    "\n": "does not name a directory",
    "": "--store is empty",
}


@pytest.mark.req("BC-43")
@pytest.mark.parametrize(("store", "problem"), STORES.items())
def test_a_store_that_cannot_be_is_refused_in_one_line(store: str, problem: str) -> None:
    reported = refused("--listen", "127.0.0.1:0", "--store", store)
    assert problem in reported
    assert "secret" not in reported
    assert "sec%ret" not in reported


RENAMED = """
import socket
from onceward.cli.main import main

resolve, names = socket.getaddrinfo, {"line.test": "127.0.0.1", "plant.test": "0.0.0.0"}
socket.getaddrinfo = lambda host, *more, **named: resolve(names.get(host, host), *more, **named)
main()
"""
"""The command, on a network with names for addresses of this machine."""


def warnings_of(data: Path, *options: str, command: Sequence[str] = COMMAND) -> list[str]:
    """What a server warns of until it says its URL."""
    with served(data, *options, command=command) as server:
        assert server.url, server.log
    return [line["message"] for line in server.lines if line["level"] not in ("debug", "info")]


@pytest.mark.usual("[::1]")
@pytest.mark.req("BC-43")
@pytest.mark.parametrize(
    "host",
    [
        "[::1]",
        "line.test",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("127.0.0.1", "127.0.0.2", "127.1", "localhost", "LOCALHOST")
        ),
    ],
)
def test_serving_this_machine_alone_needs_no_warning(tmp_path: Path, host: str) -> None:
    command = [sys.executable, "-c", RENAMED, "boundary"]
    assert warnings_of(tmp_path / "data", "--listen", f"{host}:0", command=command) == []


@pytest.mark.usual("0.0.0.0")
@pytest.mark.req("BC-43")
@pytest.mark.parametrize(
    "host", ["0.0.0.0", "plant.test", *(pytest.param(each, marks=pytest.mark.long) for each in ("::", "0"))]
)
def test_an_address_that_others_reach_is_warned_of(tmp_path: Path, host: str) -> None:
    command = [sys.executable, "-c", RENAMED, "boundary"]
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    (warning,) = warnings_of(tmp_path / "data", "--listen", listen, command=command)
    assert warning.startswith(f"everyone who reaches {host} can read, append and confirm")
    assert warning.endswith("listen on 127.0.0.1, or add [tls] and [[peers]] to its configuration")


SECURED = """
zone = "hq"
tls = { ca = "ca.pem", cert = "hq.pem", key = "hq.key" }
peers = [{ identity = "billing", zone = "hq" }]
links = [{ name = "plain", url = "http://127.0.0.1:1" }, { name = "secured", url = "https://127.0.0.1:1" }]
"""


@pytest.mark.req("BC-43")
def test_a_link_in_plain_text_beside_tls_is_warned_of(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["hq"], [], days=90)
    (tmp_path / "boundary.toml").write_text(SECURED)
    config = ("--listen", "0.0.0.0:0", "--config", str(tmp_path / "boundary.toml"))
    warnings = warnings_of(tmp_path / "data", *config)
    assert [each for each in warnings if "beside [tls]" in each] == [
        "link plain uses http:// beside [tls]: its facts travel in plain text, and nothing proves who answers; use "
        "https://"
    ]
    assert not [each for each in warnings if "everyone who reaches" in each]


@pytest.mark.parametrize("below", ["file/below", "objects-is-a-file"])
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("keep me")
    (tmp_path / "objects-is-a-file").mkdir()
    (tmp_path / "objects-is-a-file" / "objects").touch()
    reported = refused("--listen", "127.0.0.1:0", "--data", str(tmp_path / below))
    assert str(tmp_path / "file" if below.startswith("file") else tmp_path / below) in reported
    assert (tmp_path / "file").read_text() == "keep me"


def test_without_the_extra_it_says_what_to_install() -> None:
    for command in (["serve"], ["put", "b", "k", "-"]):
        code = (
            "import sys; sys.modules['connectrpc'] = None; sys.argv[1:] = ['boundary', *sys.argv[1:]]; "
            "from onceward.cli.main import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, check=False, text=True
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "a boundary needs connectrpc: pip install 'onceward[boundary]'\n"


def test_help_imports_neither_the_wire_nor_the_server() -> None:
    code = (
        "import sys, onceward.cli.main; "
        "print([each for each in ('connectrpc', 'pyvoy', 'onceward.boundary') if each in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True).stdout
        == "[]\n"
    )


# ── its log ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-25")
def test_every_line_of_its_log_is_json_and_says_what_it_is_about_and_no_payload(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server, BoundaryClient(server.url) as client:
        client.fetch("hq-receiver")
        for number in range(1, 5):
            append(client, f"old{number}")
        server.end(signal.SIGTERM)
    with closing(sqlite3.connect(tmp_path / "data" / "boundary.db")) as database, database:
        database.execute('DELETE FROM facts WHERE "offset" <= 3')  # they have expired
    with (
        served(tmp_path / "data", "--log-format", "json", "--log-level", "debug") as server,
        BoundaryClient(server.url) as client,
    ):
        assert append(client, "m5", {"secret": "s3cr3t"}) == 5
        assert append(client, "m5", {"secret": "s3cr3t"}) == 5
        with pytest.raises(BoundaryError):
            append(client, "m5", {"secret": "0th3r-s3cr3t"})
        with pytest.raises(BoundaryError):
            append(client, "m6", {"secret": "s3cr3t"}, subject="no-subject")
        client.fetch("hq-receiver")
        client.confirm("hq-receiver", 5)
        server.end(signal.SIGTERM)
        lines = server.lines
        assert "s3cr3t" not in server.log
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    appended, duplicate, conflict, malformed, gap, confirmed = [line for line in lines if "outcome" in line]
    of_fact = {"message_id": "m5", "offset": 5, "zone": "plant-a"}
    assert of_fact | {"outcome": "appended"} == only(appended)
    assert of_fact | {"outcome": "duplicate"} == only(duplicate)
    assert only(conflict) == {"message_id": "m5", "zone": "plant-a", "outcome": "already_exists"}
    assert only(malformed) == {"message_id": "m6", "zone": "plant-a", "outcome": "invalid_argument"}
    assert only(gap) == {"consumer": "hq-receiver", "offset": 1, "outcome": "gap"}
    assert only(confirmed) == {"consumer": "hq-receiver", "offset": 5, "outcome": "confirmed"}
    assert [each["level"] for each in (appended, conflict, gap)] == ["debug", "warning", "warning"]


def only(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in line.keys() - {"time", "level", "message", "logger"}}


def test_a_refusal_to_start_is_a_json_line_where_the_log_is_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--listen", "nowhere", "--data", str(tmp_path / "data")],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    line = json.loads(done.stderr)
    assert line["level"] == "critical"
    assert "--listen must be HOST:PORT" in line["message"]


def test_a_log_for_people_has_the_same_in_one_plain_line(tmp_path: Path) -> None:
    with (
        served(tmp_path / "data", "--log-format", "console") as server,
        BoundaryClient(server.url) as client,
    ):
        append(client, "m1")  # which logs no line at the default level
        with pytest.raises(BoundaryError):
            append(client, "m1", 2)
        server.end(signal.SIGTERM)
        _, warning, _, _ = server.log.splitlines()
    assert (
        " WARNING append refused: message_id 'm1' already exists at offset 1 with different content"
        in warning
    )
    assert warning.endswith("  message_id=m1  zone=plant-a  outcome=already_exists")
