"""`onceward verify`, and the pytest plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from typer.testing import CliRunner, Result

from onceward.cli.main import app
from onceward.connectors import MemoryConnector
from onceward.inbox import Inbox, UnprovenConsumerError
from onceward.verify import NAMES
from tests.support import ROOT
from tests.verification import consumers
from tests.verification.consumers import EVENTS

RIGHT = "tests.verification.proven:Proven"
WRONG = "tests.verification.proven:Unproven"


def run(*arguments: str, **environment: str) -> Result:
    env = {"COLUMNS": "200", "NO_COLOR": "1", **environment}
    return CliRunner().invoke(app, ["verify", *arguments], env=env)


def signing_key(folder: Path) -> Path:
    path = folder / "evidence.key"
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The consumer's database."""
    url = f"sqlite:///{tmp_path}/shop.db"
    inbox = Inbox(create_engine(url, poolclass=NullPool))
    inbox.migrate()
    inbox.register(consumers.Right.contract)
    return url


def recorded(url: str) -> int:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM onceward_evidence")) or 0)


@pytest.mark.req("CC-001", "CC-030", "CC-068", "CC-069")
def test_verified_and_recorded_a_consumer_may_run_in_production(url: str, tmp_path: Path) -> None:
    asked = ("--env", "production", "--database", url)
    refused = run(RIGHT, *asked)
    assert refused.exit_code == 1
    assert f"onceward verify {RIGHT} --record" in refused.stdout

    out = ("--out", str(tmp_path / "evidence.json"), "--sign-key", str(signing_key(tmp_path)))
    skipped = ("order", "exceptions", "kills", "groups", "interpreters")  # those that take long
    partial = run(RIGHT, "--record", "--database", url, "--seed", "3", "--skip", ",".join(skipped), *out)
    assert partial.exit_code == 1, partial.output
    assert "evidence.json is not written: billing not proven" in partial.stdout
    assert not (tmp_path / "evidence.json").exists()
    assert "10 scenarios passed, 11 skipped" in partial.stdout
    assert f"Not proven: {', '.join(skipped)} did not run" in partial.stdout
    assert f"its verification skipped {', '.join(skipped)}" in run(RIGHT, *asked).stdout

    result = run(RIGHT, "--record", "--database", url, "--seed", "3", *out)
    assert result.exit_code == 0, result.output
    assert "Wrote the evidence of 1 consumer to" in result.stdout
    trusted = result.stdout.partition("ONCEWARD_EVIDENCE_KEYS=")[2].strip()
    carried = {"ONCEWARD_EVIDENCE": out[1], "ONCEWARD_EVIDENCE_KEYS": trusted}
    by_file = run(RIGHT, "--env", "production", **carried)
    assert (by_file.exit_code, "may run in production" in by_file.stdout) == (0, True), by_file.output
    by_file = run(RIGHT, "--env", "production", **carried | {"ONCEWARD_EVIDENCE": "/none.json"})
    assert by_file.exit_code == 2
    assert "the evidence in /none.json cannot be read: No such file" in by_file.stderr
    assert "15 scenarios passed, 6 skipped" in result.stdout
    assert "seed 3" in result.stdout
    assert "Recorded, for code" in result.stdout

    assert run(RIGHT, *asked).exit_code == 0
    from tests.verification.proven import Proven

    source = MemoryConnector()
    engine = create_engine(url)
    consumers.setup(engine)
    task = Proven({"source": source}, {"inbox": Inbox(engine, env="production")})
    assert task.consume_transactions().processed == 0
    unproven = consumers.Right({"source": source}, {"inbox": Inbox(engine, env="production")})
    with pytest.raises(UnprovenConsumerError, match=r"was of tests.verification.proven:Proven"):
        unproven.consume_transactions()


@pytest.mark.req("CC-068", "CC-069")
def test_a_file_that_does_not_prove_is_refused_by_name_before_the_database_has_tables(tmp_path: Path) -> None:
    (tmp_path / "new.db").touch()
    asked = run(
        RIGHT, "--env", "production", "--database", f"sqlite:///{tmp_path}/new.db",
        ONCEWARD_EVIDENCE='{"format": "onceward evidence 1", "evidence": []}', ONCEWARD_EVIDENCE_UNSIGNED="true",
    )  # fmt: skip
    assert asked.exit_code == 1, asked.output
    assert "consumer 'billing' does not run in production: no verification of it is" in asked.stdout


def test_a_failed_scenario_ends_with_1_and_is_reported_in_words_json_and_junit(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, EVENTS[:2])))
    junit = tmp_path / "junit.xml"
    result = run(
        WRONG, "--events", str(tmp_path / "events.jsonl"), "--only", "exceptions", "--junit", str(junit),
        "--json", "--record", "--database", url,
    )  # fmt: skip
    assert result.exit_code == 1
    reported = json.loads(result.stdout)
    assert (reported["passed"], reported["recorded"]) == (False, True)
    assert [each["name"] for each in reported["scenarios"] if each["result"] == "failed"] == ["exceptions"]
    suite = ElementTree.fromstring(junit.read_text())
    assert (suite.get("tests"), suite.get("failures")) == (str(len(NAMES)), "1")
    (failure,) = suite.iter("failure")
    assert "bills: 2 rows missing" in str(failure.text)
    assert recorded(url) == 1
    asked = run(WRONG, "--env", "production", "--database", url)
    assert asked.exit_code == 1
    assert "its verification failed: exceptions" in asked.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense",), "write MODULE:NAME"),
        (("no_such_module:X",), "cannot be imported"),
        (("tests.verification.proven:Nobody",), "has no Nobody"),
        ((RIGHT, "--record"), "--record needs --database"),
        ((RIGHT, "--env", "production"), "--env needs --database"),
        (
            (RIGHT, "--record", "--database", "sqlite:////nowhere/shop.db"),
            "directory /nowhere does not exist",
        ),
        ((RIGHT, "--env", "prodction"), "--env must be one of development"),
        ((RIGHT, "--junit", "/nowhere/at/all.xml"), "directory /nowhere/at does not exist"),
        ((RIGHT, "--out", "/nowhere/at/all.json"), "directory /nowhere/at does not exist"),
        ((RIGHT, "--out", "tests"), "--out tests cannot be written: it is a directory"),
        ((RIGHT, "--out", "Makefile"), "--out Makefile is a file of another kind; name another file"),
        ((RIGHT, "--junit", "Makefile"), "--junit Makefile is a file of another kind; name another file"),
        (
            (RIGHT, "--out", "e.json", "--sign-key", "/no.key"),
            "--sign-key: the key file /no.key cannot be read",
        ),
        ((RIGHT, "--sign-key", "/no.key"), "--sign-key signs the file of --out; add --out FILE"),
        (("tests.verification.proven:Proven", "--all"), "is not an app but"),
        ((RIGHT, "--events", "/nowhere.jsonl"), "--events /nowhere.jsonl cannot be read"),
        ((RIGHT, "--events", "README.md"), "README.md:1 is not JSON"),
        ((RIGHT, "--contract", RIGHT), "is not a Contract"),
        (("tests.verification.consumers:EVENTS",), "is list, not a function of an app"),
        (("tests.verification.consumers:bill",), "needs --contract"),
        ((RIGHT, "--only", "nonsense"), "no scenario 'nonsense'"),
        ((RIGHT, "--only", "clean,nonsense"), "no scenario 'nonsense'"),
        (("tests.verification.consumers:Right",), "needs events"),
        (
            ("tests.verification.consumers:Right", "--events", "tests.verification.consumers:EVENTS"),
            "no such table",
        ),
    ],
)
def test_wrong_arguments_end_with_2(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    result = run(*arguments)
    expected = 1 if words == "no such table" else 2  # the handler fails, which is a finding
    assert result.exit_code == expected, result.output
    assert words in result.output


def test_the_database_of_a_class_may_be_named_by_a_file(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONCEWARD_DATABASE", raising=False)
    Path("onceward.toml").write_text(f'database = "{url}"')
    asked = run(RIGHT, "--env", "production")
    assert asked.exit_code == 1
    assert "does not run in production" in asked.stdout


def test_a_set_up_that_fails_is_reported(url: str) -> None:
    result = run("tests.verification.proven:BadSetup", "--database", url)
    assert result.exit_code == 2
    assert "the set-up of this consumer is broken" in result.stderr


# ── the plugin ──────────────────────────────────────────────────────────────────────────────────────────

TEST = """
from tests.verification.consumers import EVENTS, Right, Swallows, setup

def test_right(verify_consumer):
    assert verify_consumer(Right, events=EVENTS, setup=setup, only=["duplicates"]).passed

def test_swallows(verify_consumer):
    verify_consumer(Swallows, events=EVENTS, setup=setup, only=["exceptions"])
"""


def test_the_fixture_makes_a_test_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nfilterwarnings = error\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider",
         "--onceward-seed", "11", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "exceptions: an exception instead of write 1 of event 'order-1' was swallowed" in done.stdout
    assert "Reproduce with: seed=11" in done.stdout


def test_the_plugin_is_an_entry_point_of_pytest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"onceward": "onceward.testing.plugin"}
