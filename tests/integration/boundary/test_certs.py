"""`onceward boundary certs`, and a server process that uses them: its configuration, its options, and its callers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from typer.testing import CliRunner, Result

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.certs import Authority
from onceward.boundary.tls import Tls
from onceward.cli.main import app
from tests.integration.boundary.test_serve import refused
from tests.support import ROOT
from tests.support.processes import LoggedProcess
from tests.support.wait import until

COMMAND = [sys.executable, "-m", "onceward", "boundary"]
DEADLINE = 60.0
CONFIG = """
zone = "plant-a"
store = "facts"

[tls]
ca = "certs/ca.pem"
cert = "certs/plant-a.pem"
key = "certs/plant-a.key"

[[peers]]
identity = "hq-bsfg"
zone = "hq"
to_zones = ["plant-a"]

[[peers]]
identity = "scada"
zone = "plant-a"
to_zones = ["hq"]
"""

OWN = ("--subject", "batch:B2", "--predicate", "done", "--object", "1", "--message-id", "m2")
OWN += ("--from-zone", "plant-a", "--to-zone", "hq")


def certs(*arguments: Any, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["boundary", "certs", *map(str, arguments)], env=env)


def called(command: str, *arguments: str, env: dict[str, str]) -> Result:
    return CliRunner().invoke(app, ["boundary", command, *arguments], env=env)


def test_it_makes_a_ca_and_a_certificate_for_each_zone(tmp_path: Path) -> None:
    made = certs(
        tmp_path / "certs", "--zone", "plant-a", "--zone", "hq", "--host", "plant.example", "--days", "10"
    )
    assert made.exit_code == 0
    assert "For development only" in made.stdout
    names = {each.name for each in (tmp_path / "certs").iterdir()}
    assert names == {"ca.pem", "ca.key", "plant-a.pem", "plant-a.key", "hq.pem", "hq.key"}
    for each in (tmp_path / "certs").glob("*.key"):
        assert each.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "certs").stat().st_mode & 0o777 == 0o700
    certificate = x509.load_pem_x509_certificate((tmp_path / "certs" / "plant-a.pem").read_bytes())
    [name] = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == "plant-a-bsfg"
    places = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert places.get_values_for_type(x509.DNSName) == ["localhost", "plant.example"]
    assert [str(each) for each in places.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert 9 <= (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days <= 10


def test_it_says_for_machines_what_it_made(tmp_path: Path) -> None:
    made = json.loads(certs(tmp_path, "--zone", "hq", "--json").stdout)
    place = {
        each: str(tmp_path / f"{name}")
        for each, name in (("cert", "hq.pem"), ("key", "hq.key"), ("ca", "ca.pem"))
    }
    assert made == [{"identity": "hq-bsfg", **place, "is_new": True}]


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "hq.key").write_text("keep me")
    result = certs(tmp_path, "--zone", "plant-a", "--zone", "hq")
    assert result.exit_code == 2
    assert "hq.key exists without hq.pem, and nothing is overwritten" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["hq.key"]
    assert (tmp_path / "hq.key").read_text() == "keep me"


def test_zones_and_applications_are_added_to_a_ca_later_and_what_is_there_stays(tmp_path: Path) -> None:
    certs(tmp_path, "--zone", "plant-a")
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    again = certs(tmp_path, "--zone", "plant-a", "--zone", "hq", "--peer", "billing")
    assert again.exit_code == 0, again.stderr
    assert "plant-a.key (already there, unchanged)" in again.stdout
    after = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"hq.pem", "hq.key", "billing.pem", "billing.key"}
    ca = x509.load_pem_x509_certificate(after["ca.pem"])
    added = x509.load_pem_x509_certificate(after["billing.pem"])
    added.verify_directly_issued_by(ca)
    assert added.not_valid_after_utc <= ca.not_valid_after_utc
    assert added.subject.rfc4514_string() == "CN=billing"
    usage = added.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    nothing_new = json.loads(certs(tmp_path, "--peer", "billing", "--json").stdout)
    assert [(each["identity"], each["is_new"]) for each in nothing_new] == [("billing", False)]


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        ({"ca.key": None}, ["--zone", "lab"], "ca.pem exists without ca.key"),
        (
            {"ca.key": None, "ca.pem": None},
            ["--zone", "hq"],
            "has certificates, but not the ca.pem and ca.key",
        ),
        ({"ca.key": "hq.key"}, ["--zone", "lab"], "ca.key is not the key of"),
        ({"ca.pem": "hq.key"}, ["--zone", "lab"], "ca.pem cannot be read as a certificate"),
        ({"ca.key": "hq.pem"}, ["--zone", "lab"], "ca.key cannot be read as a key"),
        ({"hq.pem": "ca.pem"}, ["--zone", "hq"], "hq.pem belongs to 'onceward development CA'"),
        ({}, ["--peer", "hq"], "hq.pem belongs to 'hq-bsfg', and nothing is overwritten"),
    ],
)
def test_a_directory_to_which_nothing_can_be_added_is_refused_and_stays(
    tmp_path: Path, spoil: dict[str, str | None], arguments: list[str], words: str
) -> None:
    certs(tmp_path, "--zone", "hq")
    for name, other in spoil.items():
        if other is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes((tmp_path / other).read_bytes())
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    result = certs(tmp_path, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_certificate_of_another_ca_and_a_ca_that_has_expired_are_refused(tmp_path: Path) -> None:
    certs(tmp_path / "one", "--zone", "hq")
    certs(tmp_path / "two", "--zone", "lab")
    for name in ("lab.pem", "lab.key"):
        (tmp_path / "one" / name).write_bytes((tmp_path / "two" / name).read_bytes())
    assert "lab.pem was not issued by the CA in" in certs(tmp_path / "one", "--zone", "lab").stderr
    (tmp_path / "old").mkdir()
    Authority(tmp_path / "old", days=-1)
    assert "ca.pem has expired" in certs(tmp_path / "old", "--zone", "hq").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name at least one zone or peer"),
        (["--zone", "hq", "--peer", "hq"], "'hq' cannot be both a zone and a peer"),
        (["--peer", "a/b"], "peer 'a/b' cannot be a file name"),
        (["--zone", "../etc"], "zone '../etc' cannot be a file name"),
        (["--zone", "ca"], "zone 'ca' cannot be a file name"),
        (["--zone", "hq", "--host", "a b"], "--host must be a host name or an IP address, not 'a b'"),
        (["--zone", "hq", "--days", "0"], "--days must be 1 or more, and at most 36500, not 0"),
        (["--zone", "hq", "--days", "999999999"], "at most 36500, not 999999999"),
    ],
)
def test_what_it_cannot_make_is_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = certs(tmp_path / "certs", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert not (tmp_path / "certs").exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = certs(tmp_path / "file" / "below", "--zone", "hq")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


# ── a server with them ──────────────────────────────────────────────────────────────────────────────────


@contextmanager
def served(directory: Path, *options: str, config: str = "boundary.toml") -> Iterator[Server]:
    made = Server(directory, options, config)
    try:
        yield made
    finally:
        made.kill()


class Server(LoggedProcess):
    def __init__(self, directory: Path, options: tuple[str, ...], config: str) -> None:
        command = [*COMMAND, "serve", "--config", str(directory / config), *options]
        super().__init__(command, directory / f"{config}.log", stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()


@pytest.mark.req("BC-23")
def test_a_server_by_its_configuration_serves_its_peers_and_our_commands_know_certificates(
    tmp_path: Path,
) -> None:
    certs(tmp_path / "certs", "--zone", "plant-a", "--zone", "hq", "--zone", "lab", "--peer", "scada")
    (tmp_path / "boundary.toml").write_text(CONFIG)

    def files(zone: str) -> dict[str, str]:
        place = tmp_path / "certs"
        return {
            "ONCEWARD_BOUNDARY_CA": str(place / "ca.pem"),
            "ONCEWARD_BOUNDARY_CERT": str(place / f"{zone}.pem"),
            "ONCEWARD_BOUNDARY_KEY": str(place / f"{zone}.key"),
        }

    with served(tmp_path, "--listen", "127.0.0.1:0") as server:
        assert server.url.startswith("https://127.0.0.1:")
        hq = {"ONCEWARD_BOUNDARY_URL": server.url, **files("hq")}
        tls = Tls(**{each: hq[f"ONCEWARD_BOUNDARY_{each.upper()}"] for each in ("ca", "cert", "key")})
        with BoundaryClient(server.url, tls=tls) as client:
            envelope = envelope_for("m1", from_zone="hq", to_zone="plant-a")
            assert client.append(envelope, fact_of("batch:B1", "done", {})).offset == 1
        fetched = called("fetch", "--consumer", "c", "--json", env=hq)
        assert "m1" in fetched.stdout
        assert called("append", *OWN, env=hq | files("scada")).stdout == "Appended at offset 2.\n"
        assert (
            called("append", *OWN, env=hq).exit_code == 1
        )  # only the zone's own producer may append in its name
        assert json.loads(called("stats", "--json", env=hq).stdout)["last"] == 2
        stranger = hq | files("lab")
        for command in (["fetch", "--consumer", "c"], ["stats"]):
            result = called(*command, env=stranger)
            assert result.exit_code == 1
        half = called("fetch", "--consumer", "c", env=hq | {"ONCEWARD_BOUNDARY_KEY": ""})
        assert (half.exit_code, "together: ONCEWARD_BOUNDARY_KEY is not set" in half.stderr) == (2, True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE) == 0
    assert (tmp_path / "facts" / "boundary.db").exists()
    [refusal, _] = [each for each in server.lines if each.get("outcome") == "unauthenticated"]
    assert "'lab-bsfg'" in refusal["message"]


def test_the_two_zones_of_the_security_page_work_with_their_own_producers_and_consumers(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "how-to" / "boundary-security.md").read_text()
    [making] = re.findall(r"^onceward boundary certs (.*)$", page, re.MULTILINE)
    assert certs(tmp_path / "certs", *making.split()[1:]).exit_code == 0
    plant, hq = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    def files(name: str) -> Tls:
        place = tmp_path / "certs"
        return Tls(ca=place / "ca.pem", cert=place / f"{name}.pem", key=place / f"{name}.key")

    (tmp_path / "plant-a.toml").write_text(plant)
    anywhere = ("--listen", "127.0.0.1:0")
    with served(tmp_path, *anywhere, config="plant-a.toml") as first:
        (tmp_path / "hq.toml").write_text(hq.replace("https://127.0.0.1:7700", first.url))
        with served(tmp_path, *anywhere, config="hq.toml") as second:
            with BoundaryClient(first.url, tls=files("scada")) as scada:
                envelope = envelope_for("m1", from_zone="plant-a", to_zone="hq")
                scada.append(envelope, fact_of("batch:B1", "done", {}))
            with BoundaryClient(second.url, tls=files("billing")) as billing:
                until(lambda: billing.fetch("billing").facts)
                assert billing.confirm("billing", 1) == 1


def test_options_win_over_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "boundary.toml").write_text(
        'listen = "192.0.2.1:1"\nstore = "facts"\nstrict_consumers = true\n'
    )
    data = tmp_path / "elsewhere"
    with served(tmp_path, "--listen", "127.0.0.1:0", "--store", f"{data}") as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert (data / "boundary.db").exists()
        assert not (tmp_path / "facts").exists()


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("zune = 1", (), "boundary.toml: the file has no key 'zune'"),
        ('[tls]\nca = "x"\ncert = "y"\nkey = "z"', (), "x cannot be read: No such file"),
        ("", ("--data", "a", "--store", "b"), "--data and --store exclude each other"),
        ("", ("--store", "mysql://x"), "'mysql' is not the scheme of a store"),
        (
            'zone = "z"\n[[links]]\nname = "a"\nurl = "nowhere"',
            (),
            "boundary.toml: [[links]] number 1 ('a') url: the URL of a boundary must be http://HOST:PORT",
        ),
    ],
)
def test_a_server_that_is_configured_wrongly_does_not_start(
    tmp_path: Path, text: str, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / "boundary.toml").write_text(f'listen = "127.0.0.1:0"\nstore = "facts"\n{text}')
    assert words in refused("--config", str(tmp_path / "boundary.toml"), *options)
