"""TLS 1.3 with certificates on both sides: who gets a connection, how others are refused, and certificates that change
while the server runs."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from onceward.boundary import BoundaryClient, BoundaryError, envelope_for, fact_of
from onceward.boundary.certs import HOSTS
from onceward.boundary.errors import Unauthenticated
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.tls import ServerTls, Tls
from onceward.boundary.v1 import boundary_pb as pb
from onceward.errors import ConfigurationError
from tests.support.boundary.tls import (
    CLIENTS,
    DEADLINE,
    HQ,
    SERVICE,
    Connection,
    EitherClient,
    SecuredZone,
    append_message,
    authority_in,
    context_for,
    plain_toml,
)
from tests.support.wait import until

ENVELOPE = envelope_for("m1", from_zone="hq", to_zone="plant-a")
FACT = fact_of("batch:B1", "done", {})


@pytest.fixture
def site(tmp_path: Path) -> SecuredZone:
    made = SecuredZone(tmp_path / "plant-a")
    made.write()
    return made


@pytest.fixture
def hq(site: SecuredZone) -> Tls:
    return site.issue("hq-bsfg")


@pytest.fixture
def url(site: SecuredZone) -> Iterator[str]:
    with site.serving() as found:
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredZone]:
    """A server for tests that change no file."""
    made = SecuredZone(tmp_path_factory.mktemp("shared") / "plant-a")
    made.write()
    with made.serving():
        yield made


@pytest.fixture(scope="module")
def known(shared: SecuredZone) -> Tls:
    return shared.issue("hq-bsfg")


def refusals(site: SecuredZone) -> list[str]:
    return [each for each in site.messages if "TLS handshake" in each]


# ── who gets a connection ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-23")
@pytest.mark.parametrize("kind", CLIENTS)
def test_an_allowed_peer_works_with_our_clients(shared: SecuredZone, known: Tls, kind: Any) -> None:
    assert shared.url.startswith("https://127.0.0.1:")
    name = kind.__name__
    with EitherClient(kind, shared.url, known) as client:
        offset = client.append(envelope_for(name, from_zone="hq", to_zone="plant-a"), FACT).offset
        assert client.fetch("hq-receiver").facts[-1].message_id == name
        assert client.confirm("hq-receiver", offset) == offset
        assert client.put_stream("batch-files", name, [b"x" * 300_000] * 10).size == 3_000_000
        assert len(client.get("batch-files", name)[0]) == 3_000_000


@pytest.mark.req("BC-23")
def test_an_allowed_peer_works_with_grpc(shared: SecuredZone, known: Tls) -> None:
    ca, cert, key = known.read()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    with grpc.secure_channel(shared.url.removeprefix("https://"), credentials) as channel:
        append = channel.unary_unary(
            f"/{SERVICE}/AppendFact", lambda message: message.to_binary(), pb.AppendFactResponse.from_binary
        )
        envelope = pb.Envelope(message_id="grpc", from_zone="hq", to_zone="plant-a", produced_at_unix_ms=1)
        fact = pb.Fact(subject="batch:B1", predicate="done", object_json="{}")
        assert append(pb.AppendFactRequest(envelope=envelope, fact=fact), timeout=30).offset > 0
        envelope.from_zone = "plant-a"
        with pytest.raises(grpc.RpcError) as refused:
            append(pb.AppendFactRequest(envelope=envelope, fact=fact), timeout=30)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        upload = channel.stream_unary(
            f"/{SERVICE}/PutObjectStream",
            lambda message: message.to_binary(),
            pb.PutObjectResponse.from_binary,
        )
        pieces = [pb.PutObjectChunk(bucket="b", key="k"), *(pb.PutObjectChunk(data=b"x" * 1000),) * 3]
        assert upload(iter(pieces), timeout=30).size == 3000


@pytest.mark.req("BC-23")
def test_an_allowed_peer_works_with_json_over_https(shared: SecuredZone, known: Tls) -> None:
    with Connection(shared.url, context_for(known.ca, known)) as connection:
        status, answer = connection.call("AppendFact", append_message("json"))
        assert (status, answer.keys()) == (200, {"offset"})
        assert connection.get("/livez") == (200, "alive\n")


def test_one_http2_connection_takes_more_than_a_thousand_calls_at_once(
    shared: SecuredZone, known: Tls
) -> None:
    ca, cert, key = known.read()
    with grpc.secure_channel(
        shared.url.removeprefix("https://"), grpc.ssl_channel_credentials(ca, key, cert)
    ) as channel:
        fetch = channel.unary_unary(
            f"/{SERVICE}/FetchFacts", lambda message: message.to_binary(), pb.FetchFactsResponse.from_binary
        )
        request = pb.FetchFactsRequest(consumer_name="many", limit=1)
        running = [fetch.future(request, timeout=DEADLINE) for _ in range(1100)]
        assert all(len(each.result().facts) <= 1 for each in running)


def no_certificate(site: SecuredZone) -> ssl.SSLContext:
    return context_for(site.server.ca)


def wrong_ca(site: SecuredZone) -> ssl.SSLContext:
    stranger = authority_in(site.directory / "strangers").issue("hq-bsfg", "hq", HOSTS)
    return context_for(site.server.ca, stranger)


def expired(site: SecuredZone) -> ssl.SSLContext:
    return context_for(site.server.ca, site.authority.issue("hq-bsfg", "expired", HOSTS, days=-0.01))


def only_tls_1_2(site: SecuredZone) -> ssl.SSLContext:
    context = context_for(site.server.ca, site.authority.issue("hq-bsfg", "old", HOSTS))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def distrusting(site: SecuredZone) -> ssl.SSLContext:
    return context_for(authority_in(site.directory / "others").issue("x", "x", HOSTS).ca)


REFUSED = {
    no_certificate: "the peer showed no certificate",
    wrong_ca: "the peer's certificate is not accepted: unable to get local issuer certificate",
    expired: "the peer's certificate is not accepted: certificate has expired",
    only_tls_1_2: "the peer does not speak TLS 1.3",
    distrusting: "the peer ended it; perhaps it does not trust this server: bad packet length",
}


@pytest.mark.req("BC-23")
def test_who_may_not_connect_is_refused_with_one_line_that_says_why_and_a_count(
    site: SecuredZone, hq: Tls
) -> None:
    contexts = {made(site): words for made, words in REFUSED.items()}
    with site.serving() as url:
        for count, (context, words) in enumerate(contexts.items(), 1):
            with pytest.raises((OSError, http.client.HTTPException)), Connection(url, context) as connection:
                connection.call("AppendFact", append_message())
            until(lambda: bool(refusals(site)))
            [line] = refusals(site)
            assert re.fullmatch(rf"TLS handshake with 127\.0\.0\.1:\d+ failed: {re.escape(words)}", line)
            with Connection(url, context_for(hq.ca, hq)) as connection:
                assert connection.metric("bsfg_tls_handshake_errors_total") == count
                assert connection.call("FetchFacts", {"consumerName": "c", "limit": 1}) == (200, {})
            site.forget()


def test_plain_http_and_a_connection_that_is_closed_at_once_are_reported_too(
    site: SecuredZone, url: str
) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(f"{url.replace('https', 'http')}/livez", timeout=30)
    until(lambda: len(refusals(site)) == 1)
    hasty = http.client.HTTPConnection(url.removeprefix("https://"), timeout=30)
    hasty.connect()
    hasty.close()
    until(lambda: len(refusals(site)) == 2)
    assert "its URL must begin with https://" in refusals(site)[0]
    assert "closed the connection before the handshake was done" in refusals(site)[1]


@pytest.mark.parametrize("kind", CLIENTS)
def test_our_clients_refuse_a_server_of_another_name_or_ca(site: SecuredZone, hq: Tls, kind: Any) -> None:
    site.write(tls=site.issue("plant-a-bsfg", hosts=("elsewhere.example",)))
    stranger = authority_in(site.directory / "others").issue("hq-bsfg", "hq", HOSTS)
    with site.serving() as url:
        for tls in (hq, Tls(ca=stranger.ca, cert=hq.cert, key=hq.key)):
            with (
                EitherClient(kind, url, tls) as client,
                pytest.raises(BoundaryError, match="cannot be reached"),
            ):
                client.fetch("c")


@pytest.mark.parametrize("kind", CLIENTS)
def test_tls_is_for_https_and_its_files_must_be_usable(site: SecuredZone, hq: Tls, kind: Any) -> None:
    broken = site.directory / "broken.pem"
    broken.write_text("nothing")
    with pytest.raises(ConfigurationError, match="with tls the URL of a boundary must be https://HOST:PORT"):
        kind("http://127.0.0.1:7700", tls=hq)
    for files, words in (
        (Tls(ca=broken, cert=hq.cert, key=hq.key), "broken.pem has no certificates in PEM"),
        (Tls(ca=hq.ca, cert=broken, key=hq.key), "broken.pem and .* are not a certificate and its key"),
        (Tls(ca=hq.ca, cert=hq.cert, key=site.server.key), "are not a certificate and its key.*mismatch"),
        (Tls(ca=hq.ca, cert=hq.cert, key="nowhere"), "key: nowhere cannot be read: No such file"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            kind("https://127.0.0.1:7700", tls=files)
        with pytest.raises(ConfigurationError, match=words):
            ServerTls.checked(files)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(site: SecuredZone) -> None:
    locked = site.directory / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", site.server.key, "-aes256", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ConfigurationError, match=r"locked\.key is encrypted"):
        ServerTls.checked(Tls(ca=site.server.ca, cert=site.server.cert, key=locked))


def test_with_tls_and_no_table_nobody_may_call(site: SecuredZone, hq: Tls) -> None:
    site.write(peers="")
    with site.serving() as url, BoundaryClient(url, tls=hq) as client:
        with pytest.raises(Unauthenticated):
            client.append(ENVELOPE, FACT)
        assert any("has no [[peers]]: this server refuses every call" in each for each in site.messages)


# ── certificates that change, and that end ──────────────────────────────────────────────────────────────


@pytest.mark.req("BC-23")
def test_new_certificates_are_used_without_a_restart_and_what_stands_goes_on(
    site: SecuredZone, hq: Tls
) -> None:
    others = authority_in(site.directory / "others")
    theirs, hq_there = others.issue("plant-a-bsfg", "server", HOSTS), others.issue("hq-bsfg", "hq", HOSTS)
    with site.serving() as url, Connection(url, context_for(hq.ca, hq)) as standing:
        for name in ("ca", "cert", "key"):
            replace(Path(getattr(site.server, name)), Path(getattr(theirs, name)).read_text())
        until(lambda: _connects(url, context_for(hq_there.ca, hq_there)))
        with Connection(url, context_for(hq_there.ca, hq_there)) as renewed:
            assert renewed.serial != standing.serial
            assert renewed.call("AppendFact", append_message())[0] == 200
        assert standing.call("AppendFact", append_message("m2"))[0] == 200
        with (
            pytest.raises((OSError, http.client.HTTPException)),
            Connection(url, context_for(hq_there.ca, hq)) as refused,
        ):
            refused.get("/livez")
        until(lambda: any("the peer's certificate is not accepted" in each for each in refusals(site)))


def replace(path: Path, text: str) -> None:
    """Replace it at once: no reader sees half of it."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


def _connects(url: str, context: ssl.SSLContext) -> bool:
    try:
        with Connection(url, context):
            return True
    except OSError:
        return False


@pytest.mark.req("BC-43")
def test_a_link_in_plain_text_that_a_reload_adds_is_warned_of_once(site: SecuredZone) -> None:
    def reload(*links: tuple[str, str]) -> list[str]:
        """Return which links it warns of."""
        site.forget()
        more = "".join(f'{{ name = "{name}", url = "{url}" }}, ' for name, url in links)
        replace(site.config, plain_toml(site.server, zone=site.zone, more=f"links = [{more}]"))
        until(lambda: any("reloaded " in each for each in site.messages))
        return [each.split()[1] for each in site.messages if "uses http:// beside [tls]" in each]

    plain, secured = ("a", "http://127.0.0.1:1"), ("b", "https://127.0.0.1:1")
    with site.serving():
        assert reload(secured) == []
        assert reload(secured, plain) == ["a"]
        assert reload(plain) == []
        assert reload(plain, ("b", "http://127.0.0.1:1")) == ["b"]
        assert reload() == []
        assert reload(plain) == ["a"]


@pytest.mark.usual("cert")
@pytest.mark.parametrize("broken", ["cert", pytest.param("key", marks=pytest.mark.long), "ca"])
def test_a_broken_file_changes_nothing_is_reported_once_and_can_be_fixed(
    site: SecuredZone, hq: Tls, broken: str
) -> None:
    path = Path(getattr(site.server, broken))
    good, context = path.read_text(), context_for(hq.ca, hq)

    def errors() -> list[str]:
        return [each["message"] for each in site.lines if each["level"] == "error"]

    with site.serving() as url:
        replace(path, "-----BEGIN NOTHING-----")
        until(lambda: bool(errors()))
        assert re.search(rf"{re.escape(str(path))}.*keeping the previous configuration", errors()[0])
        with Connection(url, context) as connection:
            assert connection.call("AppendFact", append_message())[0] == 200
        replace(path, good)
        until(lambda: any("reloaded " in each for each in site.messages))
        assert len(errors()) == 1


def test_a_certificate_that_ends_soon_is_warned_about_and_is_a_metric(site: SecuredZone, hq: Tls) -> None:
    site.write(tls=site.issue("plant-a-bsfg", days=29.5))
    with site.serving() as url, Connection(url, context_for(hq.ca, hq)) as connection:
        [line] = [each for each in site.messages if "expires" in each]
        assert re.search(r"plant-a-bsfg\.pem expires in \d+ days: replace it", line)
        left = connection.metric('bsfg_certificate_expiry_seconds{certificate="own"}')
        assert 29 * 86400 < left < 30 * 86400
        assert connection.metric('bsfg_certificate_expiry_seconds{certificate="ca"}') > 300 * 86400


def test_a_certificate_that_has_ended_is_an_error_in_the_log(
    site: SecuredZone, caplog: pytest.LogCaptureFixture
) -> None:
    ServerTls(BoundaryMetrics()).report(site.issue("plant-a-bsfg", days=-1))
    assert [each for each in caplog.messages if "plant-a-bsfg.pem has expired" in each]


# ── zones ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-23")
def test_a_link_between_two_servers_shows_its_own_certificate(
    site: SecuredZone, hq: Tls, tmp_path: Path
) -> None:
    receiver = SecuredZone(tmp_path / "hq", "hq", site.authority)
    with site.serving() as source:
        link = f'[[links]]\nname = "from-plant-a"\nurl = "{source}"\nconsumer = "hq-receiver"\n'
        receiver.write(HQ.replace('"plant-a"', '"hq"') + link)
        with receiver.serving() as target, BoundaryClient(target, tls=hq) as reader:
            producer = site.issue("producer")
            site.write(HQ + '[[peers]]\nidentity = "producer"\nzone = "plant-a"\nto_zones = ["hq"]\n')
            with BoundaryClient(source, tls=producer) as client:
                envelope = envelope_for("m1", from_zone="plant-a", to_zone="hq")
                until(lambda: _is_appended(client, envelope))
            until(lambda: [each.message_id for each in reader.fetch("c").facts] == ["m1"])


def _is_appended(client: BoundaryClient, envelope: Any) -> bool:
    """Wait until the server has read the new peer."""
    try:
        return client.append(envelope, FACT).offset == 1
    except Unauthenticated:
        return False


def test_a_server_with_tls_stops_though_a_client_keeps_its_connection(site: SecuredZone, hq: Tls) -> None:
    with site.serving() as url:
        standing = BoundaryClient(url, tls=hq)
        standing.append(ENVELOPE, FACT)
        assert site.stop() == 0
    standing.close()


# ── who a peer is ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-35")
def test_what_a_peer_says_of_itself_is_not_believed_and_the_key_is_in_no_file(
    site: SecuredZone, hq: Tls
) -> None:
    stranger = site.issue("stranger")
    forged = f'Hash=00;Cert="{quote(Path(hq.cert).read_text(), safe="")}"'
    with site.serving() as url, Connection(url, context_for(hq.ca, stranger)) as connection:
        for name in ("x-forwarded-client-cert", "X-Forwarded-Client-Cert"):
            assert connection.get("/stats", {name: forged})[0] == 401
        [private] = site.runtime.iterdir()
        assert sorted(each.name for each in private.iterdir()) == ["admin", "envoy.json"]
        assert "PRIVATE KEY" not in (private / "envoy.json").read_text()
        assert site.stop() == 0
        assert list(site.runtime.iterdir()) == []


def test_a_server_that_fails_after_it_became_envoy_says_why_and_exits_with_2(site: SecuredZone) -> None:
    with site.serving():
        second = subprocess.run(site.command, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert (second.returncode, second.stdout) == (2, "")
    [line] = second.stderr.splitlines()
    assert json.loads(line)["level"] == "critical"
    assert "another process, such as a server, uses" in line


@pytest.mark.req("BC-28")
def test_who_does_not_finish_the_handshake_or_its_headers_in_time_is_closed(
    site: SecuredZone, hq: Tls
) -> None:
    site.write(more='[limits]\nheaders = "1s"\n')
    with site.serving() as url:
        host, port = url.removeprefix("https://").split(":")
        with socket.create_connection((host, int(port)), DEADLINE) as silent:
            assert silent.recv(1) == b""
        until(lambda: bool(refusals(site)))
        assert refusals(site)[0].endswith("failed: the peer took too long")
        with (
            socket.create_connection((host, int(port)), DEADLINE) as plain,
            context_for(hq.ca, hq).wrap_socket(plain, server_hostname=host) as slow,
        ):
            slow.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\nX-A:")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
