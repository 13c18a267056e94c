"""The boundary's one port: curl's JSON, Connect's binary and gRPC; typed errors; streams; endpoints for operators."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, envelope_for, fact_of
from onceward.boundary.boundary import BoundarySettings
from onceward.boundary.errors import ConflictingDuplicate, InvalidArgument, Unavailable
from onceward.boundary.model import LARGEST_FACT
from onceward.boundary.v1 import boundary_pb as pb
from tests.support.boundary.server import boundary_process, boundary_server

SERVICE = "onceward.boundary.v1.BoundaryService"
ENVELOPE = {"messageId": "m1", "fromZone": "plant-a", "toZone": "hq", "producedAtUnixMs": "1700000000000"}
FACT = {"subject": "batch:B1042", "predicate": "completed", "objectJson": '{"litres":480}'}


class Curl:
    """JSON over HTTP/1.1, as curl sends it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, method: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._url}/{SERVICE}/{method}", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with boundary_server(tmp_path, BoundarySettings(require_artifacts=True)) as url:
        yield url


@pytest.fixture
def port(tmp_path: Path) -> Iterator[str]:
    """The URL of a server as users run it."""
    with boundary_process(tmp_path) as url:
        yield url


@pytest.fixture
def curl(url: str) -> Curl:
    return Curl(url)


@pytest.fixture
def client(url: str) -> Iterator[BoundaryClient]:
    with BoundaryClient(url) as client:
        yield client


def page(url: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url + path) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# ── the three protocols ─────────────────────────────────────────────────────────────────────────────────


def test_curl_appends_fetches_and_confirms(curl: Curl) -> None:
    assert curl("AppendFact", {"envelope": ENVELOPE, "fact": FACT}) == (200, {"offset": "1"})
    assert curl("AppendFact", {"envelope": ENVELOPE, "fact": FACT}) == (
        200,
        {"offset": "1", "duplicate": True},
    )
    status, fetched = curl("FetchFacts", {"consumerName": "c", "limit": 10})
    assert status == 200
    (fact,) = fetched["facts"]
    assert fact.pop("appendedAtUnixMs")
    assert fact == {"offset": "1", "envelope": ENVELOPE, "fact": FACT}
    assert curl("ConfirmReceipt", {"consumer_name": "c", "offset": 1}) == (200, {"cursorAdvancedTo": "1"})
    assert curl("FetchFacts", {"consumerName": "c", "limit": 10}) == (200, {})


def test_curl_puts_and_gets_objects(curl: Curl) -> None:
    blob = b"\x00\x01 report"
    digest = "sha256:" + hashlib.sha256(blob).hexdigest()
    sent = {"bucket": "b", "key": "k", "blob": base64.b64encode(blob).decode(), "mediaType": "text/plain"}
    assert curl("PutObject", sent) == (200, {"bucket": "b", "key": "k", "digest": digest, "size": "9"})
    status, got = curl("GetObject", {"bucket": "b", "key": "k"})
    assert status == 200
    assert base64.b64decode(got["blob"]) == blob
    assert (got["digest"], got["size"], got["mediaType"]) == (digest, "9", "text/plain")


def test_a_grpc_client_appends_fetches_confirms_and_streams(port: str) -> None:
    with grpc.insecure_channel(port.removeprefix("http://")) as channel:

        def call(method: str, request: Any, answer: Any) -> Any:
            stub = channel.unary_unary(
                f"/{SERVICE}/{method}", lambda message: message.to_binary(), answer.from_binary
            )
            return stub(request, timeout=30)

        envelope = pb.Envelope(message_id="m1", from_zone="a", to_zone="b", produced_at_unix_ms=1)
        fact = pb.Fact(subject="batch:B1", predicate="done", object_json="{}")
        appended = call(
            "AppendFact", pb.AppendFactRequest(envelope=envelope, fact=fact), pb.AppendFactResponse
        )
        assert (appended.offset, appended.duplicate) == (1, False)
        fetched = call("FetchFacts", pb.FetchFactsRequest(consumer_name="c", limit=5), pb.FetchFactsResponse)
        assert [each.offset for each in fetched.facts] == [1]
        confirmed = call(
            "ConfirmReceipt",
            pb.ConfirmReceiptRequest(consumer_name="c", offset=1),
            pb.ConfirmReceiptResponse,
        )
        assert confirmed.cursor_advanced_to == 1

        changed = pb.Fact(subject="batch:B1", predicate="done", object_json="[]")
        with pytest.raises(grpc.RpcError) as refused:
            call("AppendFact", pb.AppendFactRequest(envelope=envelope, fact=changed), pb.AppendFactResponse)
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "at offset 1" in refused.value.details()

        upload = channel.stream_unary(
            f"/{SERVICE}/PutObjectStream",
            lambda message: message.to_binary(),
            pb.PutObjectResponse.from_binary,
        )
        pieces = [pb.PutObjectChunk(bucket="b", key="k"), *(pb.PutObjectChunk(data=b"x" * 1000),) * 3]
        assert upload(iter(pieces), timeout=30).size == 3000
        download = channel.unary_stream(
            f"/{SERVICE}/GetObjectStream", lambda message: message.to_binary(), pb.GetObjectChunk.from_binary
        )
        chunks = list(download(pb.GetObjectRequest(bucket="b", key="k"), timeout=30))
        assert chunks[0].size == 3000
        assert b"".join(chunk.data for chunk in chunks) == b"x" * 3000


def test_many_clients_at_once_share_the_port(url: str) -> None:
    async def main() -> list[int]:
        async with AsyncBoundaryClient(url) as client:
            appends = [
                client.append(envelope_for(f"m{n}", from_zone="a", to_zone="b"), fact_of("a:b", "done", n))
                for n in range(200)
            ]
            return [each.offset for each in await asyncio.gather(*appends)]

    assert sorted(asyncio.run(main())) == list(range(1, 201))


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────

LARGE = {**FACT, "objectJson": json.dumps("x" * 10_000_000)}


@pytest.mark.req("BC-18")
@pytest.mark.parametrize(
    ("method", "body", "field"),
    [
        ("AppendFact", b"{nope", "request"),
        ("AppendFact", b"", "request"),
        ("AppendFact", b"[]", "request"),
        ("AppendFact", b"\xff\xfe", "request"),
        ("AppendFact", {}, "envelope"),
        ("AppendFact", {"envelope": ENVELOPE}, "fact"),
        ("AppendFact", {"envelope": [], "fact": FACT}, "envelope"),
        ("AppendFact", {"envelop": ENVELOPE, "fact": FACT}, "envelop"),
        ("AppendFact", {"envelope": {**ENVELOPE, "messageID": "x"}, "fact": FACT}, "envelope.messageID"),
        ("AppendFact", {"envelope": {**ENVELOPE, "messageId": 7}, "fact": FACT}, "envelope.message_id"),
        ("AppendFact", {"envelope": {**ENVELOPE, "messageId": "ключ"}, "fact": FACT}, "envelope.message_id"),
        ("AppendFact", {"envelope": {**ENVELOPE, "messageId": ""}, "fact": FACT}, "envelope.message_id"),
        ("AppendFact", {"envelope": {**ENVELOPE, "labels": {"a": 1}}, "fact": FACT}, "envelope.labels"),
        (
            "AppendFact",
            {"envelope": {**ENVELOPE, "producedAtUnixMs": 1.5}, "fact": FACT},
            "envelope.produced_at_unix_ms",
        ),
        (
            "AppendFact",
            {"envelope": {**ENVELOPE, "producedAtUnixMs": "9" * 20}, "fact": FACT},
            "envelope.produced_at_unix_ms",
        ),
        ("AppendFact", {"envelope": ENVELOPE, "fact": {**FACT, "objectJson": {"a": 1}}}, "fact.object_json"),
        ("AppendFact", {"envelope": ENVELOPE, "fact": {**FACT, "objectJson": "{"}}, "fact.object_json"),
        ("AppendFact", {"envelope": ENVELOPE, "fact": LARGE}, "fact.object_json"),
        ("AppendFact", {"envelope": ENVELOPE, "fact": {**FACT, "subject": "B1"}}, "fact.subject"),
        ("AppendFact", {"envelope": ENVELOPE, "fact": {**FACT, "predicate": "Done"}}, "fact.predicate"),
        ("FetchFacts", {"consumerName": "c", "limit": -1}, "limit"),
        ("FetchFacts", {"consumerName": "c", "limit": 0}, "limit"),
        ("FetchFacts", {"consumerName": "c"}, "limit"),
        ("FetchFacts", {"consumerName": "c", "limit": 1.5}, "limit"),
        ("FetchFacts", {"consumerName": "c", "limit": "ten"}, "limit"),
        ("FetchFacts", {"limit": 1}, "consumer_name"),
        ("ConfirmReceipt", {"consumerName": "c", "offset": 1.0}, "offset"),
        ("ConfirmReceipt", {"consumerName": "c", "offset": -1}, "offset"),
        ("ConfirmReceipt", {"consumerName": "c", "offset": True}, "offset"),
        ("PutObject", {"bucket": "../x", "key": "k", "blob": ""}, "bucket"),
        ("PutObject", {"bucket": "b", "key": "", "blob": ""}, "key"),
        ("PutObject", {"bucket": "b", "key": "k", "blob": "%%%"}, "blob"),
        ("GetObject", {"bucket": "b", "key": "k", "version": 1}, "version"),
    ],
)
def test_a_malformed_request_is_refused_by_the_name_of_its_field(
    url: str, curl: Curl, method: str, body: Any, field: str
) -> None:
    status, answer = curl(method, body)
    assert (status, answer["code"]) == (400, "invalid_argument")
    assert answer["details"][0]["debug"]["field"] == field
    assert answer["message"].startswith(field)
    stats = json.loads(page(url, "/stats")[1])
    assert stats.pop("durability")["survives"] == "machine_crash"
    assert 0 <= stats.pop("fill_percent") < 100
    assert stats == {"first": 1, "last": 0, "consumers": []}, "nothing was stored"


@pytest.mark.req("BC-18")
def test_bytes_that_are_no_message_are_refused(url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request(
        "POST", f"/{SERVICE}/AppendFact", b"\xff\xff\xff", {"content-type": "application/proto"}
    )
    answer = connection.getresponse()
    assert (answer.status, json.load(answer)["code"]) == (400, "invalid_argument")
    connection.close()


def test_each_refusal_has_its_code_and_its_reason(curl: Curl) -> None:
    def refused(method: str, body: Any) -> tuple[int, str, Any]:
        status, answer = curl(method, body)
        return status, answer["code"], answer["details"][0]["debug"].get("reason")

    curl("AppendFact", {"envelope": ENVELOPE, "fact": FACT})
    curl("FetchFacts", {"consumerName": "c", "limit": 1})
    curl("PutObject", {"bucket": "b", "key": "k", "blob": "AAAA"})
    other = {"envelope": ENVELOPE, "fact": {**FACT, "objectJson": "{}"}}
    named = {
        "envelope": {**ENVELOPE, "messageId": "m2"},
        "fact": {**FACT, "objectJson": '{"bucket":"b","key":"x"}'},
    }
    assert refused("AppendFact", other) == (409, "already_exists", "conflicting_duplicate")
    assert refused("AppendFact", named) == (400, "failed_precondition", "artifact_missing")
    assert refused("PutObject", {"bucket": "b", "key": "k", "blob": "BBBB"}) == (
        409, "already_exists", "object_conflict",
    )  # fmt: skip
    assert refused("ConfirmReceipt", {"consumerName": "c", "offset": 2}) == (400, "out_of_range", None)
    assert refused("ConfirmReceipt", {"consumerName": "x", "offset": 1}) == (404, "not_found", None)
    assert refused("GetObject", {"bucket": "b", "key": "x"}) == (404, "not_found", None)


def test_a_client_gets_the_error_that_was_raised(client: BoundaryClient) -> None:
    envelope = envelope_for("m1", from_zone="a", to_zone="b")
    client.append(envelope, fact_of("a:b", "done", 1))
    with pytest.raises(ConflictingDuplicate, match="at offset 1") as conflict:
        client.append(envelope, fact_of("a:b", "done", 2))
    assert conflict.value.original_offset == 1
    with pytest.raises(InvalidArgument, match="limit must be 1 or more") as invalid:
        client.fetch("c", 0)
    assert invalid.value.field == "limit"


@pytest.mark.req("BC-18")
def test_a_fact_just_small_enough_is_taken_and_one_byte_more_is_not(client: BoundaryClient) -> None:
    envelope = envelope_for("m1", from_zone="a", to_zone="b")
    with pytest.raises(InvalidArgument, match=str(LARGEST_FACT)):
        client.append(envelope, fact_of("a:b", "done", "x" * (LARGEST_FACT - 1)))
    assert client.append(envelope, fact_of("a:b", "done", "x" * (LARGEST_FACT - 2))).offset == 1


def test_large_facts_make_short_pages_and_all_come(client: BoundaryClient) -> None:
    for number in range(20):
        envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b")
        client.append(envelope, fact_of("a:b", "done", str(number) * 500_000))
    seen = []
    while facts := client.fetch("c", 1000).facts:
        seen += [fact.offset for fact in facts]
        client.confirm("c", facts[-1].offset)
    assert seen == list(range(1, 21))


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with boundary_server(tmp_path) as url:
        pass
    with BoundaryClient(url) as client, pytest.raises(Unavailable) as raised:
        client.fetch("c")
    assert raised.value.retryable


# ── objects of any size ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-17")
def test_an_upload_that_breaks_off_leaves_no_object(port: str, tmp_path: Path) -> None:
    with grpc.insecure_channel(port.removeprefix("http://")) as channel:
        upload = channel.stream_unary(
            f"/{SERVICE}/PutObjectStream",
            lambda message: message.to_binary(),
            pb.PutObjectResponse.from_binary,
        )

        def pieces() -> Iterator[pb.PutObjectChunk]:
            yield pb.PutObjectChunk(bucket="b", key="k")
            yield pb.PutObjectChunk(data=b"half")
            raise ConnectionError

        with pytest.raises(grpc.RpcError):
            upload(pieces(), timeout=30)
    assert Curl(port)("GetObject", {"bucket": "b", "key": "k"})[0] == 404
    assert [each for each in (tmp_path / "objects" / "names").rglob("*") if each.is_file()] == []


def test_an_upload_without_a_name_is_refused(client: BoundaryClient) -> None:
    with pytest.raises(InvalidArgument, match="bucket"):
        client.put_stream("", "k", [b"x"])


def test_uploads_of_one_key_at_once_keep_one(url: str) -> None:
    def put(number: int) -> str:
        with BoundaryClient(url) as client:
            try:
                return client.put("b", "k", bytes([number]) * 2_000_000).digest
            except Exception as error:
                return type(error).__name__

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(put, range(4)))
    assert sorted(outcome.startswith("sha256:") for outcome in outcomes) == [False, False, False, True]
    assert outcomes.count("ObjectConflict") == 3


# ── endpoints for operators ─────────────────────────────────────────────────────────────────────────────


def metrics(url: str) -> dict[str, float]:
    found = re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", page(url, "/metrics")[1], re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.req("BC-25")
def test_metrics_count_appends_duplicates_conflicts_fetches_and_confirms(
    url: str, curl: Curl, client: BoundaryClient
) -> None:
    for number in range(3):
        client.append(envelope_for(f"m{number}", from_zone="a", to_zone="b"), fact_of("a:b", "done", 1))
    envelope = envelope_for("m0", from_zone="a", to_zone="b")
    client.append(envelope, fact_of("a:b", "done", 1))
    with pytest.raises(ConflictingDuplicate):
        client.append(envelope, fact_of("a:b", "done", 2))
    client.fetch("c", 2)
    client.confirm("c", 2)
    client.put("b", "k", b"x")
    reported = metrics(url)
    assert reported["onceward_boundary_append_requests_total"] == 5
    assert reported["onceward_boundary_append_duplicates_total"] == 1
    assert reported["onceward_boundary_append_conflicts_total"] == 1
    assert reported['onceward_boundary_append_failures_total{reason="conflicting_duplicate"}'] == 1
    assert reported["onceward_boundary_fetch_requests_total"] == 1
    assert reported["onceward_boundary_fetched_facts_total"] == 2
    assert reported["onceward_boundary_confirm_requests_total"] == 1
    assert reported["onceward_boundary_put_object_requests_total"] == 1
    assert reported["onceward_boundary_append_latency_seconds_count"] == 4
    assert reported['onceward_boundary_rpc_latency_seconds_count{operation="fetch"}'] == 1
    assert reported['onceward_boundary_refused_requests_total{code="already_exists",operation="append"}'] == 1
    assert reported["onceward_boundary_frontier_offset"] == 3
    assert reported['onceward_boundary_consumer_backlog{consumer="c"}'] == 1
    assert reported['onceward_boundary_consumer_lag_seconds{consumer="c"}'] >= 0
    assert 0 <= reported["onceward_boundary_store_buffer_fill_percent"] <= 100
    old = {name: value for name, value in reported.items() if name.startswith("bsfg_")}
    new = {name: value for name, value in reported.items() if name.startswith("onceward_boundary_")}
    assert {name.replace("bsfg_", "onceward_boundary_", 1): value for name, value in old.items()} == new


@pytest.mark.req("BC-25")
def test_every_metric_of_the_specification_is_there_with_its_type(url: str) -> None:
    text = page(url, "/metrics")[1]
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert {name: types.get(name) for name in SPECIFIED} == SPECIFIED


SPECIFIED = {
    "bsfg_replication_lag_seconds": "gauge",
    "bsfg_replication_lag_high_watermark": "gauge",
    "bsfg_frontier_offset": "gauge",
    "bsfg_store_buffer_fill_percent": "gauge",
    "bsfg_fetch_requests_total": "counter",
    "bsfg_confirm_requests_total": "counter",
    "bsfg_append_requests_total": "counter",
    "bsfg_append_failures_total": "counter",
    "bsfg_append_latency_seconds": "histogram",
}


@pytest.mark.req("BC-25")
def test_the_frontier_does_not_go_back_when_facts_have_expired(url: str, client: BoundaryClient) -> None:
    client.append(envelope_for("m0", from_zone="a", to_zone="b"), fact_of("a:b", "done", 1))
    assert metrics(url)["bsfg_frontier_offset"] == 1
    client.append(envelope_for("m0", from_zone="a", to_zone="b"), fact_of("a:b", "done", 1))
    assert metrics(url)["bsfg_frontier_offset"] == 1


def test_it_says_that_it_is_alive_and_ready(url: str) -> None:
    assert page(url, "/livez") == (200, "alive\n")
    assert page(url, "/readyz") == (200, "ready\n")


def refused(url: str, method: str, path: str, content_type: str = "application/json") -> tuple[int, Any]:
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    try:
        connection.request(method, path, b"{}", {"content-type": content_type})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()


def test_a_path_that_nobody_knows_is_not_found_and_those_that_there_are_are_named(url: str) -> None:
    for path in ("/nothing", f"/{SERVICE}/DeleteFact"):
        status, error = refused(url, "POST", path)
        assert (status, error["code"]) == (404, "unimplemented")
        for word in (path, f"/{SERVICE}/AppendFact", f"/{SERVICE}/GetObjectStream", "/metrics", "/readyz"):
            assert word in error["message"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_call_by_another_method_says_that_it_is_post(url: str, method: str) -> None:
    path = f"/{SERVICE}/FetchFacts"
    assert refused(url, method, path) == (
        405,
        {"code": "unimplemented", "message": f"call {path} with POST, not {method}"},
    )
    assert refused(url, "HEAD", path) == (405, None)


@pytest.mark.parametrize(
    ("call", "kinds"),
    [
        ("FetchFacts", "application/json and application/proto"),
        ("GetObjectStream", "application/connect+json and application/connect+proto"),
    ],
)
def test_a_call_of_another_content_type_says_which_there_are(url: str, call: str, kinds: str) -> None:
    status, error = refused(url, "POST", f"/{SERVICE}/{call}", "text/plain")
    assert (status, error["code"]) == (415, "invalid_argument")
    assert f"accepts the content types {kinds}, or application/grpc" in error["message"]
    assert error["message"].endswith("not 'text/plain'")


def test_a_refusal_of_a_call_keeps_its_own_words(curl: Curl) -> None:
    status, error = curl("GetObject", {"bucket": "b", "key": "k"})
    assert (status, error["code"], error["message"]) == (404, "not_found", "there is no object b/k")
