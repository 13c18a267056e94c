"""Uploads that break: the error says whose fault it is, and the log has one line."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import struct
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from onceward.boundary.server import rpc
from onceward.boundary.v1 import boundary_pb as pb
from tests.support.boundary.server import boundary_server, served
from tests.support.wait import until

PATH = "/onceward.boundary.v1.BoundaryService/PutObjectStream"
FIRST = pb.PutObjectChunk(bucket="b", key="k").to_binary()
DATA = pb.PutObjectChunk(data=b"x").to_binary()


def frame(data: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(data)) + data


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with boundary_server(tmp_path) as url:
        yield url


def names_of(directory: Path) -> list[Path]:
    return [each for each in (directory / "objects" / "names").rglob("*") if each.is_file()]


MALFORMED = {
    "not a message": frame(b"\xff\xff\xff"),
    "the second is not a message": frame(FIRST) + frame(b"\xff\xff\xff"),
    "cut off in a message": frame(FIRST) + b"\x00\x00\x00\x00\x50abc",
    "cut off in a length": frame(FIRST) + b"\x00\x00",
    "unknown flags": frame(FIRST) + frame(DATA, 0x40),
    "compressed without saying so": frame(FIRST) + frame(DATA, 1),
    "a length beyond all limits": frame(FIRST) + b"\x00\xff\xff\xff\xff",
    "a name that is not text": frame(b"\x0a\x02\xff\xfe"),
    "another name in the middle": frame(FIRST) + frame(pb.PutObjectChunk(key="other").to_binary()),
    "an empty piece after the first": frame(FIRST) + frame(b""),
    "nothing": b"",
}
JSON = {
    "not JSON": frame(b"{nope"),
    "not an object": frame(b'{"bucket":"b","key":"k"}') + frame(b"[1]"),
    "not base64": frame(b'{"bucket":"b","key":"k"}') + frame(b'{"data":"!!!"}'),
}


@pytest.mark.req("BC-42")
@pytest.mark.parametrize(
    ("kind", "body"),
    [("proto", body) for body in MALFORMED.values()] + [("json", body) for body in JSON.values()],
    ids=[*MALFORMED, *JSON],
)
def test_a_malformed_upload_is_the_callers_mistake(
    url: str, tmp_path: Path, kind: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.request("POST", PATH, body, {"content-type": f"application/connect+{kind}"})
    answer = connection.getresponse().read()
    connection.close()
    error = json.loads(answer[5:])["error"]
    assert error["code"] == "invalid_argument", error
    (line,) = [record for record in caplog.records if record.name == "onceward.boundary"]
    assert (line.levelno, line.exc_info) == (logging.WARNING, None)
    assert line.getMessage().startswith("put refused: ")
    assert names_of(tmp_path) == []


@pytest.mark.req("BC-42")
@pytest.mark.parametrize("sent", [b"", frame(FIRST), frame(FIRST) + frame(DATA)])
def test_a_caller_that_goes_away_has_canceled(
    url: str, tmp_path: Path, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    place = urllib.parse.urlsplit(url)
    with socket.create_connection((place.hostname, place.port)) as connection:
        headers = {"host": "x", "content-type": "application/connect+proto", "content-length": "9999"}
        head = [f"POST {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        connection.sendall("\r\n".join(head).encode() + sent)
    until(lambda: any("disconnected" in record.getMessage() for record in caplog.records))
    lines = [record for record in caplog.records if record.name == "onceward.boundary"]
    assert [(line.levelno, line.exc_info, vars(line)["outcome"]) for line in lines] == [
        (logging.WARNING, None, "canceled")
    ]
    assert names_of(tmp_path) == []


@pytest.mark.req("BC-42")
def test_a_grpc_client_that_sends_nonsense_or_cancels_is_not_an_internal_error(
    tmp_path: Path,
) -> None:
    with (
        served(tmp_path / "data") as server,
        grpc.insecure_channel(server.url.removeprefix("http://")) as channel,
    ):
        upload = channel.stream_unary(PATH, lambda message: message, lambda answer: answer)
        with pytest.raises(grpc.RpcError) as raised:
            upload(iter([FIRST, b"\xff\xff\xff"]), timeout=30)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        def pieces() -> Iterator[bytes]:
            yield FIRST
            yield DATA
            raise ConnectionError

        with pytest.raises(grpc.RpcError):
            upload(pieces(), timeout=30)
        until(lambda: "disconnected" in server.log)
        refusals = [line for line in server.lines if "outcome" in line]
        assert [(line["level"], line["outcome"]) for line in refusals] == [
            ("warning", "invalid_argument"),
            ("warning", "canceled"),
        ]
        assert not [line for line in server.lines if "traceback" in line]
        assert names_of(tmp_path / "data") == []


@pytest.mark.req("BC-56")
@pytest.mark.parametrize("first", [b"", FIRST], ids=["refused at once", "accepted"])
def test_an_upload_that_never_ends_and_carries_nothing_is_ended(
    url: str, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "DRAIN", 0.3)
    place = urllib.parse.urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        headers = {"host": "x", "content-type": "application/connect+proto", "content-length": "99999"}
        head = [f"POST {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        connection.sendall("\r\n".join(head).encode() + frame(first) + frame(b""))
        connection.settimeout(0.05)
        answer = b""

        def is_ended() -> bool:
            nonlocal answer
            with suppress(TimeoutError):
                answer += connection.recv(4096)
            if b"invalid_argument" in answer:
                return True
            connection.sendall(frame(b""))
            return False

        until(is_ended)
