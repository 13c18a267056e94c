"""What callers cannot do to a server: use up its connections, files, memory or calls, or keep it from stopping."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import pytest

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.errors import Unavailable
from onceward.boundary.v1 import boundary_pb as pb
from tests.integration.boundary.test_serve import refused
from tests.support.boundary.server import COMMAND, Served, served
from tests.support.processes import processes
from tests.support.wait import until

DEADLINE = 60.0
SERVICE = "/onceward.boundary.v1.BoundaryService"
LIMITS = """
[limits]
connections = 30
calls = 10
headers = "2s"
body = "4s"
body_memory = "4MB"
resets = 50
shutdown = "1s"
"""
MB = 10**6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("limits")
    (home / "boundary.toml").write_text(LIMITS)
    with served(home / "data", "--config", str(home / "boundary.toml")) as server:
        yield server
        assert "Exception" not in server.log  # mistakes of callers are not errors of the server


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def is_alive(server: Served) -> bool:
    with urllib.request.urlopen(f"{server.url}/livez", timeout=DEADLINE) as answer:
        return bool(answer.status == 200)


def files(server: Served) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def limited(server: Served, limit: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(each.rpartition(" ")[2])
        for each in lines
        if each.startswith(f'onceward_boundary_limited_requests_total{{limit="{limit}"')
    )


def head(method: str, length: int, kind: str = "application/proto") -> bytes:
    return (
        f"POST {SERVICE}/{method} HTTP/1.1\r\nHost: boundary\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def answer_of(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer."""
    received = b""
    while part := sock.recv(65536):
        received += part
        if b"}\r\n" in received or received.endswith(b"}"):
            break
    top, _, body = received.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])


def append(url: str, message_id: str) -> int:
    with BoundaryClient(url) as client:
        return client.append(
            envelope_for(message_id, from_zone="a", to_zone="b"), fact_of("a:b", "done", 1)
        ).offset


# ── connections ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-28")
def test_connections_that_their_peer_closed_use_no_files(server: Served) -> None:
    before = files(server)
    for _ in range(100):
        assert is_alive(server)
    until(lambda: files(server) <= before + 5)


@pytest.mark.req("BC-28")
@pytest.mark.parametrize(
    "sent", [b"", b"G", b"GET /livez HTTP/1.1\r\nHost: a\r\nX-A:", b"PRI * HTTP/2.0\r\n\r\nSM"]
)
def test_who_does_not_send_its_headers_in_time_is_closed(server: Served, sent: bytes) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(closing(connect(server))) for _ in range(5)]
        for each in slow:
            each.sendall(sent)
        assert is_alive(server)
        for each in slow:
            with suppress(ConnectionResetError):
                while each.recv(65536):  # until it is closed; a timeout fails
                    pass


@pytest.mark.req("BC-28")
def test_more_connections_than_allowed_are_closed_and_the_others_go_on(server: Served) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(connect(server))) for _ in range(60)]
        closed = 0
        for each in held:
            each.settimeout(0.02)
            try:
                closed += each.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                closed += 1
        assert closed >= 30
    until(lambda: _answers(server))


def _answers(server: Served) -> bool:
    try:
        return is_alive(server)
    except OSError:
        return False


def test_a_server_allows_no_more_connections_than_it_may_open_files(tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data")]
    few_files = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh"]
    with processes() as start:
        process = start([*few_files, *command], stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://")
        process.terminate()
        _, log = process.communicate(timeout=DEADLINE)
    assert "may open 200 files: the limit of connections is 72, not 1000" in log


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-29")
def test_messages_that_have_not_arrived_take_no_more_memory_than_allowed(server: Served) -> None:
    refused = limited(server, "body_memory")
    with ExitStack() as stack:
        large = [stack.enter_context(closing(connect(server))) for _ in range(2)]
        for each in large:
            each.sendall(head("PutObject", 3 * MB))
        large[0].sendall(b"x" * (3 * MB - 1))
        until(lambda: _is_refused(large[1]))
        status, error = answer_of(large[1])
        assert (status, error["code"]) == (429, "resource_exhausted")
        assert "[limits] body_memory allows 4000000" in error["message"]
        assert append(server.url, "small calls work") > 0
        assert limited(server, "body_memory") == refused + 1
    with closing(connect(server)) as later:  # the memory is free again
        message = pb.PutObjectRequest(bucket="b", key="k", blob=b"x" * 3 * MB).to_binary()
        later.sendall(head("PutObject", len(message)) + message)
        assert later.recv(100).startswith(b"HTTP/1.1 200")


def _is_refused(sock: socket.socket) -> bool:
    """Send more until there is an answer."""
    sock.settimeout(0.1)
    try:
        sock.sendall(b"x" * 100_000)
        return sock.recv(1, socket.MSG_PEEK) != b""
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        sock.settimeout(DEADLINE)


def memory(server: Served) -> int:
    [line] = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    return int(line) * 1024


@pytest.mark.req("BC-29")
def test_large_messages_that_are_not_finished_hold_little(server: Served) -> None:
    before = memory(server)
    with ExitStack() as stack:
        for _ in range(12):
            each = stack.enter_context(closing(connect(server)))
            each.sendall(head("PutObject", 9 * MB))
            with suppress(OSError):  # refused in the meantime
                each.sendall(b"x" * (9 * MB - 1))
        assert memory(server) < before + 12 * 9 * MB // 2
    until(
        lambda: _put(server, b"\0" * 3 * MB, compressed=False)[0] == 400
    )  # no rest of them takes memory any more


@pytest.mark.req("BC-29")
@pytest.mark.parametrize("compressed", [False, True])
def test_messages_that_cannot_be_read_leave_little_behind(server: Served, compressed: bool) -> None:
    message = b"\0" * 3 * MB
    body = gzip.compress(message) if compressed else message
    before = memory(server)
    for _ in range(40):
        assert _put(server, body, compressed)[0] == 400
    assert memory(server) < before + 40 * 3 * MB // 2


@pytest.mark.req("BC-58")
def test_a_compressed_message_counts_with_what_it_expands_to(server: Served) -> None:
    refused = limited(server, "body_memory")
    fits, too_large = (
        pb.PutObjectRequest(bucket="b", key="zeros", blob=b"\0" * size * MB) for size in (3, 9)
    )
    assert _put(server, gzip.compress(fits.to_binary()), compressed=True)[0] == 200
    status, answer = _put(server, gzip.compress(too_large.to_binary()), compressed=True)
    assert (status, answer["code"]) == (429, "resource_exhausted")
    assert limited(server, "body_memory") == refused + 1


@pytest.mark.req("BC-58")
@pytest.mark.parametrize("damaged", [gzip.compress(b"\0" * 9 * MB)[:-8], gzip.compress(b"\0" * 40 * MB)])
def test_compressed_messages_that_are_damaged_or_too_large_leave_little_behind(
    server: Served, damaged: bytes
) -> None:
    before = memory(server)
    for _ in range(20):
        assert _put(server, damaged, compressed=True)[0] in (400, 429)
    assert memory(server) < before + 20 * 9 * MB // 2


def _put(server: Served, body: bytes, compressed: bool) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/proto"} | ({"content-encoding": "gzip"} if compressed else {})
    request = urllib.request.Request(f"{server.url}{SERVICE}/PutObject", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return int(answer.status), {}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.req("BC-29")
def test_a_message_that_does_not_arrive_in_time_ends_its_call(server: Served) -> None:
    refused = limited(server, "body")
    kinds = {"application/json": "FetchFacts", "application/grpc": "FetchFacts"}
    with ExitStack() as stack:
        slow = []
        for kind, method in {**kinds, "application/connect+proto": "PutObjectStream"}.items():
            slow.append(stack.enter_context(closing(connect(server))))
            slow[-1].sendall(head(method, 1000, kind) + b"\0\0\0\0\x50abc")
        for each in slow:
            assert each.recv(100).startswith(b"HTTP/1.1 ")
    assert limited(server, "body") == refused + 3


@pytest.mark.req("BC-29")
def test_an_upload_in_tiny_pieces_ends_at_the_deadline(server: Served) -> None:
    refused = limited(server, "body")

    def piece(**fields: Any) -> bytes:
        message = pb.PutObjectChunk(**fields).to_binary()
        return b"\0" + len(message).to_bytes(4) + message

    with closing(connect(server)) as slow:
        slow.sendall(head("PutObjectStream", 10**6, "application/connect+proto") + piece(bucket="b", key="k"))

        def has_ended() -> bool:
            try:
                slow.sendall(piece(data=b"x"))
            except OSError:
                return True
            return limited(server, "body") > refused

        until(has_ended)
    assert limited(server, "body") == refused + 1


@pytest.mark.req("BC-30")
def test_more_calls_than_allowed_are_refused_but_not_the_pages_of_operators(server: Served) -> None:
    def status_with_all_calls_running() -> int:
        with ExitStack() as stack:
            for _ in range(10):
                held = stack.enter_context(closing(connect(server)))
                held.sendall(head("PutObject", 1000) + b"x")
            found = _status(server)
            assert is_alive(server)
        return found

    until(lambda: status_with_all_calls_running() == 503)
    assert limited(server, "calls") >= 1
    until(lambda: _status(server) == 200)


def _status(server: Served) -> int:
    data, kind = b'{"consumerName":"c","limit":1}', {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}{SERVICE}/FetchFacts", data, kind)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


# ── HTTP/2, and other protocols ─────────────────────────────────────────────────────────────────────────


def _fetches(client: BoundaryClient) -> bool:
    try:
        client.fetch("c")
    except Unavailable:
        return False
    return True


def reset_many(server: Served, count: int) -> int:
    """Start and reset calls until the connection is closed. Returns how many there were."""
    http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    http2.initiate_connection()
    with closing(connect(server)) as sock:
        for number in range(count):
            stream = http2.get_next_available_stream_id()
            names = [
                (":method", "POST"),
                (":path", f"{SERVICE}/FetchFacts"),
                (":authority", "b"),
                (":scheme", "http"),
            ]
            http2.send_headers(stream, [*names, ("content-type", "application/grpc"), ("te", "trailers")])
            http2.reset_stream(stream)
            try:
                sock.sendall(http2.data_to_send())
            except OSError:
                return number
    return count


@pytest.mark.req("BC-31")
def test_a_peer_that_resets_its_calls_loses_its_connection_and_no_one_else_does(server: Served) -> None:
    with BoundaryClient(server.url) as client:
        client.fetch("c")
        assert reset_many(server, 20_000) < 20_000
        assert is_alive(server)
        until(lambda: _fetches(client))  # the calls of the other have ended


@pytest.mark.req("BC-32")
def test_an_unknown_grpc_method_does_not_break_its_connection(server: Served) -> None:
    with grpc.insecure_channel(server.url.removeprefix("http://")) as channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"{SERVICE}/Nothing")(b"", timeout=DEADLINE)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            fetch = channel.unary_unary(f"{SERVICE}/FetchFacts")
            assert (
                fetch(pb.FetchFactsRequest(consumer_name="none", limit=1).to_binary(), timeout=DEADLINE)
                is not None
            )


@pytest.mark.req("BC-33")
@pytest.mark.parametrize("path", ["/livez", "/metrics", "/nowhere", f"{SERVICE}/FetchFacts"])
def test_a_websocket_is_refused(server: Served, path: str) -> None:
    with closing(connect(server)) as sock:
        sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        status, error = answer_of(sock)
    assert status == 400
    assert "does not speak WebSocket" in error["message"]
    assert is_alive(server)


@pytest.mark.parametrize("path", ["/%ff", "/livez%00", "/%6civez", "/a%c3"])
def test_an_escape_in_a_path_is_refused_at_once(server: Served, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(server.url + path, timeout=DEADLINE)
    with refused.value as error:
        assert error.code == 403


def test_a_download_that_its_reader_leaves_is_no_error(server: Served) -> None:
    with BoundaryClient(server.url) as client:
        client.put_stream("b", "large", [b"x" * MB] * 5)
    request = pb.GetObjectRequest(bucket="b", key="large").to_binary()
    for _ in range(5):
        with closing(connect(server)) as sock:
            sock.sendall(head("GetObjectStream", len(request) + 5, "application/connect+proto"))
            sock.sendall(b"\0" + len(request).to_bytes(4) + request)
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    assert is_alive(server)


# ── its end ─────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def hurried(home: Path) -> Iterator[Served]:
    (home / "boundary.toml").write_text('[limits]\nshutdown = "0.5s"\n')
    with served(home / "data", "--config", str(home / "boundary.toml")) as server:
        yield server


@pytest.mark.req("BC-34")
def test_it_stops_in_time_whatever_hangs(tmp_path: Path) -> None:
    with hurried(tmp_path) as server, ExitStack() as stack:
        for sent in (
            b"",
            b"GET",
            head("PutObject", 1000) + b"x",
            head("PutObjectStream", 9, "application/connect+proto"),
        ):
            for _ in range(5):
                hung = stack.enter_context(closing(connect(server)))
                hung.sendall(sent)
        reset_many(server, 1500)
        until(lambda: is_alive(server))
        assert server.end(signal.SIGTERM) == (0, "")
        assert "calls that still ran after 0.5 s were cut off" in server.log
        assert server.lines[-1]["message"] == "stopped"


@pytest.mark.req("BC-34")
def test_it_is_one_process_and_nothing_is_left_when_it_is_killed(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        pid = server.process.pid
        children = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
        assert "".join(children) == ""
        assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            connect(server)
    with served(tmp_path / "data") as server:  # neither the port nor the store is taken
        assert append(server.url, "m1") == 1


def test_what_it_keeps_for_itself_is_private_and_removed(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="s-"))  # the path of a socket must be short
    environment = {**os.environ, "TMPDIR": str(place)}
    command = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data")]
    for ends in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert process.stdout is not None
        process.stdout.readline()
        [private] = place.iterdir()  # that of the killed one is gone
        assert private.stat().st_mode & 0o777 == 0o700
        process.send_signal(ends)
        process.communicate(timeout=DEADLINE)
    place.rmdir()  # it is empty


def test_a_python_without_its_library_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("find_libpython.candidate_paths", list)
    reported = refused("--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"))
    assert "has no shared libpython, which the server needs" in reported
