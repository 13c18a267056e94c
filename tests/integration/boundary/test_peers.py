"""The table of peers: who is known by a certificate, what each may do, and how others are refused."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.certs import HOSTS
from onceward.boundary.errors import BoundaryError, PermissionDenied, Unauthenticated
from onceward.boundary.server.access import Certificate, Peer, Peers
from onceward.boundary.tls import Tls
from onceward.errors import ConfigurationError
from tests.support.boundary.tls import (
    CLIENTS,
    HQ,
    Connection,
    EitherClient,
    SecuredZone,
    append_message,
    context_for,
)
from tests.support.wait import until

FACT = fact_of("batch:B1", "done", {})
LAB = '[[peers]]\nidentity = "lab-bsfg"\nzone = "lab"\nfrom_zones = ["lab", "plant-b"]\nto_zones = ["hq", "plant-a"]\n'


@pytest.fixture
def site(tmp_path: Path) -> SecuredZone:
    made = SecuredZone(tmp_path / "plant-a")
    made.write(HQ + LAB)
    return made


@pytest.fixture
def hq(site: SecuredZone) -> Tls:
    return site.issue("hq-bsfg")


@pytest.fixture
def lab(site: SecuredZone) -> Tls:
    return site.issue("lab-bsfg")


@pytest.fixture
def url(site: SecuredZone) -> Iterator[str]:
    with site.serving() as found:
        yield found


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredZone]:
    made = SecuredZone(tmp_path_factory.mktemp("standing") / "plant-a")
    made.write(HQ + LAB)
    with made.serving():
        yield made


@pytest.fixture(scope="module")
def known(standing: SecuredZone) -> Tls:
    return standing.issue("hq-bsfg")


@pytest.fixture
def shared(standing: SecuredZone) -> SecuredZone:
    """A server for tests that append no fact and change no file."""
    standing.forget()
    return standing


def counted(site: SecuredZone, peer: Tls, reason: str) -> float:
    with Connection(site.url, context_for(peer.ca, peer)) as connection:
        return connection.metric(f'bsfg_auth_failures_total{{reason="{reason}"}}')


def reported(site: SecuredZone) -> list[str]:
    return [each for each in site.messages if " refused: " in each]


# ── who is known ────────────────────────────────────────────────────────────────────────────────────────


def calls(client: Any) -> list[Any]:
    envelope = envelope_for("m1", from_zone="hq", to_zone="plant-a")
    return [
        lambda: client.append(envelope, FACT),
        lambda: client.fetch("c"),
        lambda: client.confirm("c", 1),
        lambda: client.put("batch-files", "k", b"small"),
        lambda: client.put_stream("batch-files", "k", [b"x" * 300_000] * 10),
        lambda: client.get("batch-files", "k"),
    ]


@pytest.mark.req("BC-23")
@pytest.mark.parametrize("kind", CLIENTS)
def test_an_identity_that_is_not_in_the_table_is_refused_with_every_call(
    shared: SecuredZone, known: Tls, kind: Any
) -> None:
    url, before = shared.url, counted(shared, known, "unknown_identity")
    stranger = shared.authority.issue("stranger", f"stranger-{kind.__name__}", HOSTS)
    with EitherClient(kind, url, stranger) as client:
        for call in calls(client):
            with pytest.raises(
                Unauthenticated, match="the certificate of 'stranger', 'localhost' does not belong to a peer"
            ):
                call()
    with Connection(url, context_for(known.ca, stranger)) as connection:
        message = {"bucket": "batch-files", "key": "k"}
        assert connection.call("GetObject", message)[1]["code"] == "unauthenticated"
        assert [connection.get(path)[0] for path in ("/metrics", "/stats")] == [401, 401]
        assert [connection.get(path)[0] for path in ("/livez", "/readyz")] == [200, 200]
    assert len(reported(shared)) == 9
    assert all("'stranger'" in each and "127.0.0.1:" in each for each in reported(shared))
    assert counted(shared, known, "unknown_identity") == before + 9
    with Connection(url, context_for(known.ca, known)) as connection:
        assert connection.get("/stats")[0] == 200
        assert connection.call("FetchFacts", {"consumerName": "c", "limit": 1}) == (200, {})


@pytest.mark.parametrize("identity", ["HQ-bsfg", "hq-bsfg.", "hq-bsfg ", "hq", "hq_bsfg"])
def test_identities_are_compared_letter_by_letter(shared: SecuredZone, identity: str) -> None:
    almost = shared.authority.issue(identity, f"almost-{identity.strip()}-{len(identity)}", HOSTS)
    with BoundaryClient(shared.url, tls=almost) as client, pytest.raises(Unauthenticated):
        client.fetch("c")


@pytest.mark.req("BC-23")
def test_who_is_taken_out_of_the_table_is_refused_on_the_connection_that_stands(
    site: SecuredZone, url: str, hq: Tls
) -> None:
    with Connection(url, context_for(hq.ca, hq)) as connection:
        assert connection.call("AppendFact", append_message())[0] == 200
        site.write(LAB)
        until(lambda: connection.call("AppendFact", append_message())[0] == 401)
        code = connection.call("FetchFacts", {"consumerName": "c", "limit": 1})[1]["code"]
        assert code == "unauthenticated"
        assert (
            "the certificate of 'hq-bsfg', 'localhost' does not belong to a peer of this boundary"
            in reported(site)[0]
        )
        site.write(HQ)
        until(lambda: connection.call("AppendFact", append_message())[0] == 200)


def test_a_broken_configuration_leaves_the_table_as_it_is(site: SecuredZone, url: str, hq: Tls) -> None:
    site.write(LAB.replace("zone =", "zune =", 1))
    until(lambda: any("has no key 'zune'" in each for each in site.messages))
    with BoundaryClient(url, tls=hq) as client:
        client.fetch("c")


def test_a_broken_certificate_does_not_keep_a_peer_in_the_table(site: SecuredZone, url: str, hq: Tls) -> None:
    with Connection(url, context_for(hq.ca, hq)) as connection:
        Path(site.server.cert).write_text("broken")
        until(lambda: any("keeping the previous configuration" in each for each in site.messages))
        site.write(LAB)
        until(lambda: connection.call("AppendFact", append_message())[0] == 401)


def test_what_cannot_change_while_the_server_runs_is_reported(site: SecuredZone, url: str, hq: Tls) -> None:
    site.write(HQ, more='listen = "127.0.0.1:1"\nstrict_consumers = true')
    until(lambda: any("strict_consumers has changed" in each for each in site.messages))
    assert any("listen has changed, which requires a restart" in each for each in site.messages)
    site.config.write_text('zone = "plant-a"\n')
    until(lambda: any("adding or removing [tls] requires a restart" in each for each in site.messages))
    with BoundaryClient(url, tls=hq) as client:
        client.fetch("c")


# ── what each may do ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-23")
@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("from_zone", "to_zone", "field", "words"),
    [
        ("plant-a", "plant-a", "envelope.from_zone", "'hq-bsfg' may not append facts from zone 'plant-a'"),
        ("HQ", "plant-a", "envelope.from_zone", "'hq-bsfg' may not append facts from zone 'HQ'"),
        ("hq", "plant-b", "envelope.to_zone", "'hq-bsfg' may not append facts for zone 'plant-b'"),
        ("hq", "hq", "envelope.to_zone", "'hq-bsfg' may not append facts for zone 'hq'"),
    ],
)
def test_a_zone_that_the_peer_may_not_speak_of_or_to_is_refused(
    shared: SecuredZone,
    known: Tls,
    kind: Any,
    from_zone: str,
    to_zone: str,
    field: str,
    words: str,
) -> None:
    reason = field.removeprefix("envelope.")
    before = counted(shared, known, reason)
    with EitherClient(kind, shared.url, known) as client:
        with pytest.raises(PermissionDenied, match=words) as refused:
            client.append(envelope_for("m1", from_zone=from_zone, to_zone=to_zone), FACT)
        assert refused.value.field == field
        assert not client.fetch("c").facts
    [line] = reported(shared)
    assert line.startswith("AppendFact from 127.0.0.1:")
    assert line.endswith(words)
    assert counted(shared, known, reason) == before + 1


@pytest.mark.req("BC-53", "BC-23")
@pytest.mark.parametrize("kind", CLIENTS)
def test_of_several_facts_each_needs_its_own_permission(
    site: SecuredZone, url: str, hq: Tls, kind: Any
) -> None:
    zones = [("hq", "plant-a"), ("plant-a", "plant-a"), ("hq", "hq"), ("hq", "plant-a")]
    given = [
        (envelope_for(f"m{number}", from_zone=origin, to_zone=target), FACT)
        for number, (origin, target) in enumerate(zones)
    ]
    with EitherClient(kind, url, hq) as client:
        outcomes = client.append_all(given)
        assert [each.offset for each in (outcomes[0], outcomes[3])] == [1, 2]
        assert [type(each) for each in outcomes[1:3]] == [PermissionDenied, PermissionDenied]
        assert [each.field for each in outcomes[1:3]] == ["envelope.from_zone", "envelope.to_zone"]
        assert [each.message_id for each in client.fetch("c").facts] == ["m0", "m3"]
    assert [line.partition(" from ")[0] for line in reported(site)] == ["AppendFacts", "AppendFacts"]
    assert counted(site, hq, "from_zone") == counted(site, hq, "to_zone") == 1


def test_a_relay_may_speak_for_several_zones(url: str, lab: Tls) -> None:
    with BoundaryClient(url, tls=lab) as client:
        for number, (origin, target) in enumerate(
            [("lab", "hq"), ("plant-b", "hq"), ("plant-b", "plant-a")], 1
        ):
            envelope = envelope_for(f"m{number}", from_zone=origin, to_zone=target)
            assert client.append(envelope, FACT).offset == number


@pytest.mark.req("BC-23")
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_name_that_is_bound_to_one_peer_is_not_anothers(
    site: SecuredZone, url: str, hq: Tls, lab: Tls, kind: Any
) -> None:
    with EitherClient(kind, url, hq) as owner, EitherClient(kind, url, lab) as other:
        owner.append(envelope_for("m1", from_zone="hq", to_zone="plant-a"), FACT)
        for call in (lambda: other.fetch("hq-receiver"), lambda: other.confirm("hq-receiver", 1)):
            with pytest.raises(PermissionDenied, match="which is reserved for another peer") as refused:
                call()
            assert refused.value.field == "consumer_name"
        assert [each.offset for each in owner.fetch("hq-receiver").facts] == [1]
        assert owner.confirm("hq-receiver", 1) == 1
        assert [each.offset for each in other.fetch("nobodys").facts] == [1]
        assert [each.offset for each in owner.fetch("nobodys").facts] == [1]
    assert len(reported(site)) == 2
    assert "'lab-bsfg' may not use the consumer name 'hq-receiver'" in reported(site)[0]
    with Connection(url, context_for(hq.ca, hq)) as connection:
        assert connection.metric('bsfg_auth_failures_total{reason="consumer"}') == 2


def test_a_request_without_an_envelope_is_malformed_not_denied(shared: SecuredZone, known: Tls) -> None:
    with Connection(shared.url, context_for(known.ca, known)) as connection:
        assert (
            connection.call("AppendFact", {"fact": append_message()["fact"]})[1]["code"] == "invalid_argument"
        )


# ── the table alone ─────────────────────────────────────────────────────────────────────────────────────


def certificate(name: str = "", *others: tuple[str, str], days: float = 1) -> Certificate:
    kinds = {"DNS": x509.DNSName, "URI": x509.UniformResourceIdentifier, "IP Address": _ip}
    now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
    names = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    builder = (
        x509.CertificateBuilder(x509.Name([]), names, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now + timedelta(days=days))
    )
    if others:
        found = [kinds[kind](value) for kind, value in others]
        builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    header = f'Hash=00;Cert="{quote(pem.decode(), safe="")}"'.encode()
    return Certificate.of({"headers": [(b"x-forwarded-client-cert", header)], "client": ("1.2.3.4", 5)})


def _ip(text: str) -> x509.IPAddress:
    return x509.IPAddress(ipaddress.ip_address(text))


def test_an_identity_is_the_common_name_or_a_dns_name_or_a_uri_and_no_address() -> None:
    peers = Peers(
        [Peer(identity=each, zone=each) for each in ("cn", "dns.example", "spiffe://x/y", "10.0.0.1")]
    )
    assert peers.identify(certificate("cn", ("DNS", "localhost"))).zone == "cn"
    assert peers.identify(certificate("other", ("DNS", "dns.example"))).zone == "dns.example"
    assert peers.identify(certificate("", ("URI", "spiffe://x/y"))).zone == "spiffe://x/y"
    assert peers.identify(certificate("cn", ("DNS", "cn"))).zone == "cn"
    for unknown in (certificate("x", ("IP Address", "10.0.0.1")), certificate(), certificate("*")):
        with pytest.raises(Unauthenticated, match="does not belong to a peer"):
            peers.identify(unknown)


def test_a_certificate_of_several_peers_is_nobodys() -> None:
    peers = Peers([Peer(identity="a", zone="a"), Peer(identity="b", zone="b")])
    with pytest.raises(Unauthenticated, match="of 'a', 'b' belongs to several peers") as refused:
        peers.identify(certificate("a", ("DNS", "b")))
    assert refused.value.reason == "ambiguous_identity"


def test_a_certificate_that_ends_while_its_connection_stands_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="has expired"):
        Peers([Peer(identity="a", zone="a")]).identify(certificate("a", days=-0.01))


def test_without_zones_a_peer_speaks_for_its_own_and_to_none() -> None:
    reader = Peer(identity="a", zone="a")
    peers = Peers([reader])
    for origin, target in (("a", "b"), ("b", "a"), ("a", "a")):
        with pytest.raises(PermissionDenied):
            peers.check_zones(reader, origin, target)
    peers.check_zones(Peer(identity="a", zone="a", to_zones=("b",)), "a", "b")
    with pytest.raises(BoundaryError):
        peers.check_zones(Peer(identity="a", zone="a", from_zones=(), to_zones=("b",)), "a", "b")


def test_several_peers_can_share_a_name() -> None:
    one, two, three = (Peer(identity=each, zone="z", consumers=("c",)) for each in "abc")
    peers = Peers([one, two])
    peers.check_consumer(one, "c")
    peers.check_consumer(two, "c")
    with pytest.raises(PermissionDenied):
        peers.check_consumer(three, "c")


def test_two_peers_of_one_identity_are_refused_and_change_nothing() -> None:
    peers = Peers([Peer(identity="a", zone="a")])
    with pytest.raises(ConfigurationError, match="two peers have the identity 'b'"):
        peers.replace([Peer(identity="b", zone="x"), Peer(identity="b", zone="y")])
    assert peers.identify(certificate("a")).zone == "a"
