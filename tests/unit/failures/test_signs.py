"""Which errors are signs of an outage, and how long their servers ask to wait."""

from __future__ import annotations

import errno
import smtplib
import socket
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any
from urllib.request import urlopen

import httpx
import pytest
import requests

from onceward.failures.signs import LONGEST_RETRY_AFTER, is_sign_of_outage, retry_after_of

pytestmark = pytest.mark.req("OU-01")


class Answer(BaseHTTPRequestHandler):
    """Answers with the status in the path, and what else is in it as Retry-After."""

    def do_GET(self) -> None:
        _, status, *more = self.path.split("/")
        self.send_response(int(status))
        for each in more:
            self.send_header("Retry-After", each.replace("_", " "))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def raised_by(library: str, url: str) -> Exception:
    try:
        if library == "httpx":
            httpx.get(url, timeout=5).raise_for_status()
        elif library == "requests":
            requests.get(url, timeout=5).raise_for_status()
        else:
            with urlopen(url, timeout=5):
                pass
    except Exception as error:
        return error
    raise AssertionError("it answered")


LIBRARIES = pytest.mark.parametrize("library", ["httpx", "requests", "urllib"])


@LIBRARIES
@pytest.mark.parametrize(
    ("status", "down"),
    [(429, True), (502, True), (503, True), (504, True), (400, False), (404, False), (500, False)],
)
def test_some_answers_of_http_are_signs(library: str, status: int, down: bool, provider: str) -> None:
    error = raised_by(library, f"{provider}/{status}")
    assert is_sign_of_outage(error) is down
    if isinstance(error, urllib.error.HTTPError):
        error.close()


@LIBRARIES
def test_a_server_that_is_not_there_is_a_sign(library: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        assert is_sign_of_outage(raised_by(library, f"http://127.0.0.1:{taken.getsockname()[1]}/"))


@LIBRARIES
@pytest.mark.req("OU-02")
def test_the_wait_that_a_server_asks_for_is_read_in_both_forms_and_bounded(
    library: str, provider: str
) -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True).replace(" ", "_")

    def asked(form: str) -> float | None:
        error = raised_by(library, f"{provider}/503{form}")
        found = retry_after_of(error)
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return found

    assert asked("/7") == 7.0
    date = asked(f"/{soon}")
    assert date is not None
    assert 60 < date <= 90
    assert asked("/999999999999999999999") == LONGEST_RETRY_AFTER
    assert asked("/Sun,_06_Nov_1994_08:49:37_GMT") == 0.0
    assert asked("/soon") is None
    assert asked("/-5") is None
    assert asked("") is None


def foreign(module: str, name: str, base: type[Exception] = Exception, **attributes: Any) -> Exception:
    """An error of a library that is not installed here, as its class is named."""
    root = type(name, (base,), {"__module__": module})
    error = type("Derived", (root,), {"__module__": module})("it failed")
    for attribute, value in attributes.items():
        setattr(error, attribute, value)
    return error


def aws(status: int, code: str) -> Exception:
    answer = {
        "Error": {"Code": code},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "3"}},
    }
    return foreign("botocore.exceptions", "ClientError", response=answer)


@pytest.mark.parametrize(
    "error",
    [
        foreign("aiohttp.client_exceptions", "ClientConnectionError"),
        foreign("aiohttp.client_exceptions", "ClientResponseError", status=503),
        foreign("botocore.exceptions", "HTTPClientError"),
        foreign("botocore.exceptions", "ConnectionError"),
        aws(503, "Whatever"),
        aws(400, "ThrottlingException"),
        smtplib.SMTPServerDisconnected("gone"),
        smtplib.SMTPConnectError(421, "busy"),
        smtplib.SMTPDataError(451, b"later"),
        smtplib.SMTPRecipientsRefused({"a@x": (421, b"closing"), "b@x": (451, b"later")}),
        OSError(errno.ENETUNREACH, "no network"),
        OSError(errno.EHOSTUNREACH, "no route"),
        OSError(errno.EHOSTDOWN, "host is down"),
        OSError(errno.ENETDOWN, "network is down"),
        urllib.error.URLError(OSError(errno.ENETUNREACH, "no network")),
        urllib.error.URLError(socket.gaierror(-2, "no such name")),
        urllib.error.URLError(ssl.SSLEOFError(8, "it ended in the middle")),
        ssl.SSLZeroReturnError(6, "closed"),
        urllib.error.URLError(ConnectionRefusedError()),
        httpx.ReadTimeout("slow"),
        requests.Timeout("slow"),
        TimeoutError(),
        ConnectionResetError(),
        socket.gaierror(-3, "temporary failure"),
    ],
    ids=repr,
)
def test_errors_of_common_libraries_are_signs(error: Exception) -> None:
    assert is_sign_of_outage(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        FileNotFoundError("no file"),
        OSError("something"),
        OSError(errno.ENOSPC, "disk full"),
        urllib.error.URLError(ssl.SSLCertVerificationError(1, "unknown issuer")),
        smtplib.SMTPRecipientsRefused({"a@x": (421, b"closing"), "b@x": (550, b"unknown")}),
        foreign("aiohttp.client_exceptions", "ClientResponseError", status=404),
        foreign("aiohttp.client_exceptions", "InvalidURL"),
        aws(400, "ValidationException"),
        smtplib.SMTPRecipientsRefused({}),
        smtplib.SMTPDataError(554, b"no"),
        urllib.error.URLError("unknown url type"),
        urllib.error.HTTPError("http://x", 404, "no", Message(), None),
        httpx.UnsupportedProtocol("ftp"),
        foreign("shop", "ConnectionError"),
        foreign("shop", "Odd", response=object(), status="503"),
    ],
    ids=repr,
)
def test_mistakes_and_refusals_are_not(error: Exception) -> None:
    assert not is_sign_of_outage(error)


def test_the_wait_of_botocore_is_read() -> None:
    assert retry_after_of(aws(503, "SlowDown")) == 3.0


def test_no_library_is_imported_to_recognize_its_errors() -> None:
    code = (
        "import sys; from onceward.failures.signs import is_sign_of_outage; is_sign_of_outage(ValueError());"
        "assert not {'httpx', 'requests', 'aiohttp', 'botocore', 'urllib3', 'sqlalchemy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class ShopError(urllib.error.HTTPError):
    pass


class ShopUrlError(urllib.error.URLError):
    pass


@pytest.mark.parametrize(("status", "down"), [(503, True), (404, False)])
def test_a_class_of_ones_own_that_is_derived_from_theirs_is_as_theirs(status: int, down: bool) -> None:
    with ShopError("http://shop", status, "no", Message(), None) as error:
        assert is_sign_of_outage(error) is down
    theirs = type(foreign("aiohttp.client_exceptions", "ClientResponseError"))
    assert is_sign_of_outage(type("ShopError", (theirs,), {"status": status})()) is down


def test_the_reason_in_a_class_of_ones_own_counts() -> None:
    assert is_sign_of_outage(ShopUrlError(ConnectionRefusedError()))
    assert not is_sign_of_outage(ShopUrlError(FileNotFoundError()))
