"""Mistakes of boundary callers: each is reported in one line, with what to do; and Ctrl-C ends a waiting call."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onceward.boundary import BoundaryClient
from onceward.boundary.errors import BoundaryError, Unavailable
from onceward.boundary.tls import Tls
from onceward.cli.main import app
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from tests.support.boundary.server import boundary_server
from tests.support.boundary.tls import CLIENTS, EitherClient, SecuredZone
from tests.support.wait import until

ASK = (("fetch", "--consumer", "c"), ("stats",))
"""One command for each of the two ways in which commands call."""
SOON = 20.0
"""Seconds: well below the 30 of a call's timeout."""
UNREADABLE = "/proc/self/mem"
"""It can be opened."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def site(home: Path) -> Iterator[SecuredZone]:
    site = SecuredZone(home / "site")
    site.write()
    with site.serving():
        yield site


@pytest.fixture(scope="module")
def hq(site: SecuredZone) -> Tls:
    return site.issue("hq-bsfg")


@pytest.fixture(scope="module")
def stranger(home: Path) -> Tls:
    """Of another CA."""
    return SecuredZone(home / "elsewhere").issue("hq-bsfg")


@pytest.fixture(scope="module")
def plain(home: Path) -> Iterator[str]:
    with boundary_server(home / "plain") as url:
        yield url


def variables(tls: Tls | None, **others: str) -> dict[str, str]:
    files = {} if tls is None else {"CA": str(tls.ca), "CERT": str(tls.cert), "KEY": str(tls.key)}
    return {f"ONCEWARD_BOUNDARY_{name}": path for name, path in (files | others).items()}


def run(*arguments: str, env: dict[str, str]) -> Result:
    return CliRunner().invoke(app, ["boundary", *arguments], env={"NO_COLOR": "1", **env})


def output(kind: Any, url: str, tls: Tls | None) -> str:
    """A client's message; every command prints the same, in one line."""
    with EitherClient(kind, url, tls) as client, pytest.raises(Unavailable) as caught:
        client.fetch("c")
    assert caught.value.retryable
    words = str(caught.value)
    for arguments in ASK:
        result = run(*arguments, env=variables(tls, URL=url))
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"{words}\n"
    return words


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_server_of_another_ca_is_not_trusted_and_the_files_to_give_are_named(
    site: SecuredZone, hq: Tls, stranger: Tls, kind: Any
) -> None:
    for files in (None, Tls(ca=stranger.ca, cert=hq.cert, key=hq.key)):
        words = output(kind, site.url, files)
        assert "its certificate was not issued by a CA that is trusted here; set its CA in `tls`" in words
        assert "ONCEWARD_BOUNDARY_CA, _CERT and _KEY" in words


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_server_that_does_not_trust_the_caller_hangs_up_and_its_log_is_named(
    site: SecuredZone, hq: Tls, stranger: Tls, kind: Any
) -> None:
    words = output(kind, site.url, Tls(ca=hq.ca, cert=stranger.cert, key=stranger.key))
    assert "it requires another client certificate; see its log" in words


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_certificate_for_another_name_is_said(home: Path, site: SecuredZone, hq: Tls, kind: Any) -> None:
    name = f"elsewhere-{kind.__name__}"
    elsewhere = SecuredZone(home / name, name, site.authority)
    elsewhere.write(tls=site.issue(name, hosts=("elsewhere.example",)))
    with elsewhere.serving() as url:
        assert "its certificate is not for '127.0.0.1'; use a name that is in its" in output(kind, url, hq)


@pytest.mark.parametrize("kind", CLIENTS)
def test_the_wrong_scheme_is_said(site: SecuredZone, hq: Tls, plain: str, kind: Any) -> None:
    assert "it does not speak TLS; use a URL that begins with http://" in output(
        kind, plain.replace("http://", "https://"), hq
    )
    assert "it closed the connection; check that it is running" in (
        words := output(kind, site.url.replace("https://", "http://"), None)
    )
    assert words.endswith("if it speaks TLS, the URL begins with https://")


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_host_that_nobody_knows_is_one_plain_line(kind: Any) -> None:
    assert output(kind, "http://nosuch.invalid:7700", None) == (
        "the boundary at http://nosuch.invalid:7700 cannot be reached: host 'nosuch.invalid' is unknown here; correct "
        "its URL"
    )


def test_a_url_that_leads_past_the_boundary_is_answered_with_what_there_is(plain: str) -> None:
    with BoundaryClient(f"{plain}/foo") as client, pytest.raises(BoundaryError) as caught:
        client.fetch("c")
    assert (
        "there is no /foo/onceward.boundary.v1.BoundaryService/FetchFacts; the calls are POST /onceward"
        in str(caught.value)
    )


# ── variables and options ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("missing", ["CA", "CERT", "KEY"])
@pytest.mark.parametrize("arguments", ASK)
def test_a_variable_of_tls_that_lacks_is_named(
    site: SecuredZone, hq: Tls, missing: str, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments, env=variables(hq, URL=site.url, **{missing: ""}))
    assert result.exit_code == 2
    assert f"together: ONCEWARD_BOUNDARY_{missing} is not set" in result.stderr
    assert "--url" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(("put", "b", "k", UNREADABLE), 2), (("append", "--lines", UNREADABLE), 1)]
)
def test_a_file_that_can_be_opened_but_not_read_is_named(
    plain: str, arguments: tuple[str, ...], code: int
) -> None:
    result = run(*arguments, env=variables(None, URL=plain))
    assert (result.exit_code, result.stdout) == (code, "")
    assert f"{UNREADABLE} cannot be read: Input/output error; name another file" in result.stderr


@pytest.mark.parametrize("arguments", ASK)
def test_a_file_of_tls_that_cannot_be_read_is_named_with_its_variables(
    site: SecuredZone, hq: Tls, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments, env=variables(hq, URL=site.url, CERT="/no/such/file"))
    assert result.exit_code == 2
    assert "ONCEWARD_BOUNDARY_CERT" in result.stderr
    assert "cert: /no/such/file cannot be read: No such file" in result.stderr
    assert "--url" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("fetch", "--consumer", "c", "--url", "/foo"), "--url"),
        (("get", "b", "k", "-", "--url", "/foo"), "--url"),
        (("stats", "--url", "/foo"), "--url"),
        (("skip", "--consumer", "c", "--from", "/foo"), "--from"),
        (("forward", "--from", "/foo", "--to", "http://127.0.0.1:1", "--zone", "hq"), "--from"),
        (("import", __file__, "--zone", "hq", "--url", "/foo"), "--url"),
    ],
)
def test_what_is_no_url_is_named_with_its_option(arguments: tuple[str, ...], option: str) -> None:
    result = run(*arguments, env={})
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"{option}: the URL of a boundary must be http://HOST:PORT or https://HOST:PORT"
    )
    assert "not '/foo'" in result.stderr
    assert not Path("/foo").exists()


@pytest.mark.req("BC-35")
@pytest.mark.parametrize("user", ["me:hunter2", "hunter2", ":hunter2", "me:"])
def test_a_user_or_password_is_refused_because_it_would_not_be_sent(user: str) -> None:
    url = f"http://{user}@127.0.0.1:1"
    with pytest.raises(ConfigurationError) as of_client:
        BoundaryClient(url)
    with pytest.raises(ConfigurationError) as of_source:
        Address(f"boundary+{url}?consumer=c")
    result = run("stats", "--url", url, env={})
    assert (result.exit_code, result.stderr[:7]) == (2, "--url: ")
    for said in (str(of_client.value), str(of_source.value), result.stderr):
        assert "a user or password" in said
        assert "certificate" in said
        assert "hunter2" not in said


# ── Ctrl-C ──────────────────────────────────────────────────────────────────────────────────────────────


FACT = ("--subject", "a:b", "--predicate", "done", "--from-zone", "a", "--to-zone", "b", "--message-id", "m")
WAITING = [
    ("append", *FACT, "--object", "1"),
    ("append", "--lines", "facts.jsonl"),
    ("tail", "--consumer", "c"),
    ("skip", "--consumer", "c", "--from"),
    ("stats",),
]
LINE = """{"envelope": {"message_id": "m", "from_zone": "a", "to_zone": "b"},
    "fact": {"subject": "a:b", "predicate": "done", "object": 1}}"""


def test_ctrl_c_ends_a_call_at_once_though_the_boundary_is_silent(tmp_path: Path) -> None:
    (tmp_path / "facts.jsonl").write_text(re.sub(r"\n *", " ", LINE))
    with socket.create_server(("127.0.0.1", 0), backlog=len(WAITING)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "onceward",
                    "boundary",
                    *each,
                    *([url] if each[-1] == "--from" else []),
                ],
                env=os.environ | {"ONCEWARD_BOUNDARY_URL": url},
                cwd=tmp_path,
                stderr=subprocess.PIPE,
                text=True,
            )
            for each in WAITING
        ]
        silent.settimeout(60)
        connections = [silent.accept()[0] for _ in processes]
        for connection in connections:
            connection.settimeout(60)
            assert connection.recv(1)  # it has called, and is waiting
        began = time.monotonic()
        for process in processes:
            process.send_signal(signal.SIGINT)
        ended = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
        for connection in connections:
            connection.close()
    assert [code for _, code in ended] == [130] * len(WAITING), ended
    assert time.monotonic() - began < SOON


def test_ctrl_c_ends_the_reading_of_lines_from_a_pipe_that_is_silent(plain: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "onceward", "boundary", "append", "--lines", "-", "--url", plain],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(re.sub(r"\n *", " ", LINE) + "\n")
    process.stdin.flush()
    with BoundaryClient(plain) as client:
        until(lambda: client.fetch("c").facts)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130  # while the pipe is open
    assert "it is safe to repeat" in process.communicate()[1]
