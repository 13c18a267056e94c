"""Evidence as a file: what is accepted, and what is refused with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from onceward.errors import ConfigurationError
from onceward.inbox.evidence.code_digest import Code
from onceward.inbox.evidence.evidence import Evidence
from onceward.inbox.evidence.file import EvidenceSettings, read_evidence_file, write_evidence
from onceward.inbox.evidence.gate import CarriedEvidence
from onceward.inbox.evidence.keys import public_line, signing_key, trusted_keys
from tests.verification import consumers
from tests.verification.proofs import proof

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)

pytestmark = pytest.mark.req("CC-069")


def pem(key: Any, password: bytes | None = None) -> str:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption).decode()


def public_pem(key: Any) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "evidence.json"
    write_evidence(path, [proof()], KEY)
    return path


def read(path: Path | str, keys: str | None = public_line(KEY), unsigned: bool = False) -> list[Evidence]:
    return read_evidence_file(EvidenceSettings(str(path), keys, unsigned))


def lacking(path: Path, **settings: Any) -> str | None:
    carried = CarriedEvidence(EvidenceSettings(str(path), public_line(KEY), **settings))
    return carried.lacking(consumers.Right.contract, consumers.Right, "sqlite", None)


def test_a_signed_file_is_read_and_proves(file: Path) -> None:
    (found,) = read(file)
    assert (found.consumer_id, found.recorded_at > 0) == ("billing", True)
    assert lacking(file) is None


def test_layout_and_the_order_of_names_do_not_matter(file: Path) -> None:
    content = json.loads(file.read_text())
    turned = {name: content[name] for name in reversed(content)}
    file.write_text(json.dumps(turned, indent=7, sort_keys=True))
    assert lacking(file) is None


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *above, last = path.split("/")
        there: Any = content["evidence"][0]
        for each in above:
            there = there[int(each) if each.isdigit() else each]
        there[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("consumer_id", "refunds"),
        _set("code/digest", "0" * 64),
        _set("code/sources/tests.verification.consumers", "0"),
        _set("code/roots", []),
        _set("dependencies/python", "3.99"),
        _set("event_types", ["order", "refund"]),
        _set("terms/mode", "effectful"),
        _set("backend", "postgresql"),
        _set("tested/0/result", "skipped"),
        _set("tested", []),
        _set("schema_versions", [1, 2]),
        _set("recorded_at", 0.5),
        _set("added", True),
        lambda content: content["evidence"].append(content["evidence"][0]),
        lambda content: content["evidence"].clear(),
        lambda content: content.update(more=1),
        lambda content: content["signature"].update(ed25519="AAAA"),
    ],
)
def test_whatever_is_altered_is_noticed(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"evidence.json was altered after it was signed"):
        read(file)


@pytest.mark.parametrize(
    ("before", "name"), [('"evidence": [], ', "evidence"), ('"format": "x", ', "format")]
)
def test_a_name_that_is_there_twice_is_refused(file: Path, before: str, name: str) -> None:
    """The signature covers the last one only, and another reader of the file may take the first."""
    file.write_text("{" + before + file.read_text().lstrip()[1:])
    with pytest.raises(
        ConfigurationError, match=rf"evidence.json has '{name}' twice in one object; write it again"
    ):
        read(file)


def test_a_file_without_its_signature_is_refused_where_a_key_is_trusted(file: Path) -> None:
    content = json.loads(file.read_text())
    for stripped in ({**content, "signature": None}, {k: v for k, v in content.items() if k != "signature"}):
        file.write_text(json.dumps(stripped))
        with pytest.raises(ConfigurationError, match="is not signed, but evidence_keys demands it"):
            read(file)
        with pytest.raises(ConfigurationError, match="contradict each other"):
            read(file, unsigned=True)
    for broken in ({}, {"key": "x"}, "text", [], {"key": "x", "ed25519": 5}, {"key": "x", "ed25519": "§"}):
        file.write_text(json.dumps({**content, "signature": broken}))
        with pytest.raises(ConfigurationError, match="has a signature that cannot be read"):
            read(file)


def test_an_unsigned_file_is_accepted_only_by_an_explicit_setting(file: Path) -> None:
    write_evidence(file, [proof()], None)
    with pytest.raises(ConfigurationError, match="no public key is set; set evidence_keys"):
        read(file, keys=None)
    assert len(read(file, keys=None, unsigned=True)) == 1


@pytest.mark.req("CC-193")
def test_a_signature_that_no_key_checks_is_refused(file: Path) -> None:
    content = json.loads(file.read_text())
    _set("code/sources/tests.verification.consumers", "0")(content)
    for each in (file.read_text(), json.dumps(content)):
        file.write_text(each)
        with pytest.raises(ConfigurationError, match=r"signed by key \w{16}, and nothing checks that"):
            read(file, keys=None, unsigned=True)


def test_the_key_of_somebody_else_is_refused_and_one_of_several_is_enough(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"signed by key \w{16}, which is not trusted"):
        read(file, keys=public_line(OTHER))
    old = tmp_path / "old.pub"
    old.write_text(public_pem(OTHER) + public_pem(KEY))
    for keys in (
        f"{public_line(OTHER)}, {public_line(KEY)}",
        f"{public_line(OTHER)}\n{public_line(KEY)}",
        public_pem(OTHER) + public_pem(KEY),
        public_pem(KEY).replace("\n", "\\n"),
        f"{public_line(OTHER)} {old}",
    ):
        assert len(read(file, keys=keys)) == 1


def test_a_signature_is_not_that_of_another_key_under_its_name(file: Path) -> None:
    content = json.loads(file.read_text())
    write_evidence(file, [proof()], OTHER)
    content["signature"]["ed25519"] = json.loads(file.read_text())["signature"]["ed25519"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="altered"):
        read(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON, or cut short"),
        ("[]", "is not a file of `onceward verify --out`"),
        ('{"format": "other"}', "is not a file of `onceward verify --out`"),
        ("[" * 100_000, "is not JSON, or cut short"),
        (b"\xff\xfe", "is not JSON, or cut short"),
        ('{"team": "café"}'.encode("latin-1"), "is not JSON, or cut short"),
    ],
)
def test_a_file_that_is_something_else_is_refused(file: Path, text: str | bytes, words: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=words):
        read(file)


def test_a_file_that_is_cut_short_missing_or_a_directory_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for length in (1, len(whole) // 2, len(whole) - 3):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match="is not JSON, or cut short"):
            read(file)
    with pytest.raises(ConfigurationError, match=r"none.json cannot be read: No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "none.json")
    with pytest.raises(ConfigurationError, match=r"dangling.json cannot be read: No such file"):
        read(tmp_path / "dangling.json")
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_the_evidence_may_be_in_the_environment_itself(file: Path) -> None:
    assert read(f"\n {file.read_text()}")
    with pytest.raises(ConfigurationError, match="the evidence in ONCEWARD_EVIDENCE is not JSON"):
        read(file.read_text()[:-5])


def test_signed_evidence_of_another_format_is_refused_not_misread(file: Path) -> None:
    write_evidence(file, [msgspec.structs.replace(proof(), seed="text")], KEY)
    with pytest.raises(ConfigurationError, match="is not complete: Expected `int`"):
        read(file)


def test_evidence_about_another_consumer_or_older_code_does_not_prove(file: Path) -> None:
    write_evidence(file, [proof(consumer_id="refunds")], KEY)
    assert lacking(file) == f"no verification of it is recorded in {file}"
    old = proof(code=Code(("x",), "older", {"tests.verification.consumers": "0"}))
    write_evidence(file, [old], KEY)
    assert "its code has changed since it was verified" in str(lacking(file))
    write_evidence(file, [old, proof(), old, proof(backend="postgresql")], KEY)
    assert lacking(file) is None, "one for each database kind, and older ones, do not hurt"


@pytest.mark.parametrize("given", ["path", "text", "escaped"])
def test_a_private_key_is_a_path_or_text(tmp_path: Path, given: str) -> None:
    path = tmp_path / "evidence.key"
    path.write_text(pem(KEY))
    text = {"path": str(path), "text": pem(KEY), "escaped": pem(KEY).replace("\n", "\\n")}[given]
    assert public_line(signing_key(text, "--sign-key")) == public_line(KEY)


def test_keys_that_are_not_fit_are_refused_without_showing_them(tmp_path: Path) -> None:
    rsa = generate_private_key(65537, 1024)
    for text in (pem(KEY, b"secret"), pem(KEY)[:80], pem(rsa), public_pem(KEY)):
        with pytest.raises(ConfigurationError, match="openssl genpkey -algorithm ed25519") as caught:
            signing_key(text, "ONCEWARD_SIGNING_KEY")
        assert "BEGIN" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="key file /none cannot be read"):
        signing_key("/none", "--sign-key")
    with pytest.raises(ConfigurationError, match="is a private key, which must not leave CI"):
        trusted_keys(pem(KEY), "evidence_keys")
    for wrong in (public_pem(rsa), "ed25519:AAAA", "ed25519:§§§", public_pem(KEY)[:60]):
        with pytest.raises(ConfigurationError, match=r"is not an Ed25519 public key|cannot be read"):
            trusted_keys(wrong, "evidence_keys")
    with pytest.raises(ConfigurationError, match="evidence_keys has no key"):
        trusted_keys(" , ", "evidence_keys")


def test_the_variables_are_read_where_there_is_no_app(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EvidenceSettings.from_environment() == EvidenceSettings()
    monkeypatch.setenv("ONCEWARD_EVIDENCE", "evidence.json")
    monkeypatch.setenv("ONCEWARD_EVIDENCE_KEYS", "ed25519:x")
    assert EvidenceSettings.from_environment() == EvidenceSettings("evidence.json", "ed25519:x")
    monkeypatch.setenv("ONCEWARD_EVIDENCE_UNSIGNED", "True")
    assert EvidenceSettings.from_environment().unsigned
    monkeypatch.setenv("ONCEWARD_EVIDENCE_UNSIGNED", "maybe")
    with pytest.raises(ConfigurationError, match="must be true or false"):
        EvidenceSettings.from_environment()
