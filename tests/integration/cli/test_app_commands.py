"""`onceward config`, `explain` and `verify` on an app, as a user runs them: in a directory with a module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from onceward.app.build import open_task
from onceward.app.lookup import load_app
from onceward.cli.main import app as commands
from onceward.inbox import UnprovenConsumerError
from tests.support.boundary.server import boundary_server
from tests.support.commands import onceward
from tests.support.disk import disk
from tests.support.every_redis import every_redis

__all__ = ["disk"]

SHOP = """
from dataclasses import dataclass

from onceward import Onceward, Transaction
from onceward.inbox import Contract, InboxSession

app = Onceward("shop", database="sqlite:///shop.db")


@dataclass
class Order:
    total: int


def tables(engine):
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charges (total INTEGER)")


contract = Contract(
    consumer_id="billing", event_types=["*"], owner_team="shop", idempotency_mechanism="one transaction"
)


@app.consumer(
    "sqlite:///orders.db",
    contract=contract,
    verification=lambda: {"events": [Transaction(payload={"total": 3})], "setup": tables},
)
def charge(order: Order, session: InboxSession) -> None:
    session.execute("INSERT INTO charges (total) VALUES (:total)", {"total": order.total})


@app.consumer("memory://mails")
def mail(order: Order) -> None: ...


@app.producer(charge)
def place(total: int) -> Order: ...


@app.producer("memory://mails")
def write(total: int) -> Order: ...
"""


@pytest.fixture
def shop(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that no other test uses, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"shop_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(SHOP)
    return name


def run(*arguments: str, **environ: str) -> Result:
    for name in [name for name in sys.modules if name.startswith("shop_")]:
        del sys.modules[name]  # as in a new process: an app reads its settings when it is created
    return CliRunner().invoke(commands, arguments, env={"COLUMNS": "250", "NO_COLOR": "1", **environ})


def from_json(result: Result, key: str) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return {row[key]: row for row in json.loads(result.stdout)}


# ── config ──────────────────────────────────────────────────────────────────────────────────────────────


def test_config_says_where_each_value_came_from_and_shows_no_password(shop: str) -> None:
    Path("onceward.toml").write_text("processes = 3")
    source = {
        "ONCEWARD_CONSUMERS__MAIL__SOURCE": "redis://:hunter2@localhost/mails",
        "ONCEWARD_PRODUCERS__WRITE__SINK": "redis://:hunter2@localhost/mails",
    }
    result = run("config", f"{shop}:app", "--json", **source, ONCEWARD_DATABASE="postgresql://u:hunter2@h/x")
    found = {name: (row["value"], row["origin"]) for name, row in from_json(result, "name").items()}
    assert found["database"] == ("postgresql://u:***@h/x", "ONCEWARD_DATABASE")
    assert found["processes"] == (3, "onceward.toml")
    assert found["grace"] == (30.0, "default")
    assert found["consumers.mail.source"] == (
        "redis://:***@localhost/mails",
        "ONCEWARD_CONSUMERS__MAIL__SOURCE",
    )
    assert found["consumers.charge.source"] == ("sqlite:///orders.db", "code")
    assert found["producers.place.sink"] == ("sqlite:///orders.db", "code"), "the source of charge"
    assert found["producers.write.sink"] == (
        "redis://:***@localhost/mails",
        "ONCEWARD_PRODUCERS__WRITE__SINK",
    )
    assert found["engine.io_guard"] == ("off", "default")
    assert "hunter2" not in result.output


def test_config_has_the_code_where_nobody_else_says_anything(shop: str) -> None:
    Path("onceward.toml").write_text("[consumers.mail.policy.loop]\nlimit = 3")
    Path(f"{shop}.py").write_text(
        SHOP.replace(
            '"memory://mails")\ndef mail', '"memory://mails", policy={"loop": {"timeout": 9}})\ndef mail'
        )
    )
    moved = "ONCEWARD_CONSUMERS__CHARGE__SOURCE"
    result = run("config", f"{shop}:app", "--json", **{moved: "sqlite:///others.db"})
    found = [
        (name, row["value"], row["origin"])
        for name, row in from_json(result, "name").items()
        if name.startswith(("consumers", "producers"))
    ]
    assert found == [
        ("consumers.charge.source", "sqlite:///others.db", moved),
        ("consumers.charge.policy.loop.batch.size", 100, "default"),
        ("consumers.charge.policy.loop.concurrency.value", 8, "default"),
        ("consumers.charge.policy.loop.mode", "continuous", "default"),
        ("consumers.mail.source", "memory://mails", "code"),
        ("consumers.mail.policy.loop.batch.size", 100, "default"),
        ("consumers.mail.policy.loop.concurrency.value", 8, "default"),
        ("consumers.mail.policy.loop.timeout", 9.0, "code"),
        ("consumers.mail.policy.loop.limit", 3, "onceward.toml"),
        ("consumers.mail.policy.loop.mode", "continuous", "default"),
        ("producers.place.sink", "sqlite:///others.db", moved),
        ("producers.write.sink", "memory://mails", "code"),
    ]


def test_config_finds_the_origin_of_a_whole_and_of_what_is_set_for_all(shop: str) -> None:
    extra = "ONCEWARD_CONSUMERS__MAIL__POLICY__STEPS__FETCH__EXTRA"
    result = run("config", f"{shop}:app", "--json", **{extra: '{"wait": 2}', "ONCEWARD_CONCURRENCY": "5"})
    found = {name: (row["value"], row["origin"]) for name, row in from_json(result, "name").items()}
    assert found["consumers.mail.policy.steps.fetch.extra.wait"] == (2, extra)
    assert found["consumers.mail.policy.loop.concurrency.value"] == (5, "ONCEWARD_CONCURRENCY")


def test_config_shows_the_code_where_a_variable_is_empty_and_follows_a_bound_method(shop: str) -> None:
    bound = """
class Till:
    def refund(self, order: dict) -> None: ...

till = Till()
app.consumer("memory://refunds")(till.refund)
app.producer(till.refund)(lambda: None)
"""
    Path(f"{shop}.py").write_text(SHOP + bound)
    result = run("config", f"{shop}:app", "--json", ONCEWARD_CONSUMERS__REFUND__SOURCE="")
    found = {name: (row["value"], row["origin"]) for name, row in from_json(result, "name").items()}
    assert found["consumers.refund.source"] == ("memory://refunds", "code")
    assert found["producers.<lambda>.sink"] == ("memory://refunds", "code")


def test_config_without_an_app_shows_what_environment_and_files_say(shop: str) -> None:
    result = run("config", ONCEWARD_DATABASE="postgresql://u:hunter2@h/x")
    assert result.exit_code == 0
    assert "postgresql://u:***@h/x" in result.stdout
    assert "ONCEWARD_DATABASE" in result.stdout


@pytest.mark.parametrize(
    ("target", "environ", "problem"),
    [
        ("{shop}:app", {"ONCEWARD_DATABSE": "x"}, "ONCEWARD_DATABSE"),
        ("{shop}:app", {"ONCEWARD_CONSUMERS__CHRAGE__SOURCE": "memory://x"}, "no consumer is named 'chrage'"),
        ("{shop}:app", {"ONCEWARD_PRODUCERS__PALCE__SINK": "memory://x"}, "no producer is named 'palce'"),
        ("{shop}:charge", {}, "is not an app but function"),
        ("{shop}", {}, "write MODULE:NAME"),
        ("nowhere_at_all:app", {}, "nowhere_at_all cannot be imported"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_2(
    shop: str, target: str, environ: dict[str, str], problem: str
) -> None:
    for command in ("config", "explain", "balance"):
        result = run(command, target.format(shop=shop), **environ)
        assert result.exit_code == 2
        assert problem in result.stderr


def test_an_import_that_fails_within_a_module_is_said_with_its_line(shop: str) -> None:
    helper = shop.replace("shop_", "helper_")
    Path(f"{helper}.py").write_text("one = 1\nimport nonsense_module\n")
    Path(f"{shop}.py").write_text(f"import {helper}\n")
    for command in ("config", "run"):
        reported = run(command, f"{shop}:app").stderr
        assert f"No module named 'nonsense_module'; see {Path.cwd() / helper}.py:2" in reported


@pytest.mark.parametrize("ending", ["raise SystemExit", "import sys; sys.exit(0)", "exit('done')"])
def test_a_module_that_ends_the_process_on_import_does_not_look_like_a_success(
    shop: str, ending: str
) -> None:
    Path(f"{shop}.py").write_text(f"one = 1\n{ending}\n")
    for command in ("config", "explain", "balance", "run", "verify"):
        result = run(command, f"{shop}:app")
        assert result.exit_code == 2
        assert "it ends the process (SystemExit(" in result.stderr
        assert f"{shop}.py:2; put what a module does when it is run below" in result.stderr


# ── explain ─────────────────────────────────────────────────────────────────────────────────────────────


def explained(shop: str, **environ: str) -> dict[str, Any]:
    return from_json(run("explain", f"{shop}:app", "--json", **environ), "consumer")


def test_explain_tells_each_guarantee_its_weakest_link_and_what_would_mend_it(shop: str) -> None:
    found = explained(shop)
    assert found["charge"]["headline"] == "at least once: unproven"
    assert any("one SQLite transaction" in link["why"] for link in found["charge"]["links"])
    assert found["mail"]["guarantee"] == "may lose"
    assert "lost with the process" in found["mail"]["why"]
    text = run("explain", f"{shop}:app").stdout
    assert "charge  sqlite:///orders.db  at least once: unproven" in text
    assert f"→ run `onceward verify {shop}:charge --record`" in text


def test_explain_names_a_consumer_as_verify_finds_it(shop: str) -> None:
    made = """

def promise(name):
    return Contract(
        consumer_id=name, event_types=["*"], owner_team="shop", idempotency_mechanism="one transaction"
    )


def make(name):
    verified = {"events": [Transaction(payload={"total": 3})], "setup": tables}

    @app.consumer("sqlite:///made.db", name=name, contract=promise(name), verification=verified)
    def handle(order: Order, session: InboxSession) -> None:
        session.execute("INSERT INTO charges (total) VALUES (:total)", {"total": order.total})


make("made")
app.consumer("sqlite:///again.db", name="again", contract=promise("again"))(charge)
"""
    Path(f"{shop}.py").write_text(SHOP + made)
    found = explained(shop)
    for name in ("made", "charge", "again"):
        assert f"run `onceward verify {shop}:app.consumers.{name} --record`" in str(found[name]["links"])
    verified = run("verify", f"{shop}:app.consumers.made", "--only", "clean")
    assert verified.exit_code == 0, verified.stderr


def test_explain_makes_no_files(shop: str, tmp_path: Path) -> None:
    explained(shop)
    run("balance", f"{shop}:app")
    assert {each.name for each in tmp_path.glob("*.db*")} == set()


@every_redis
def test_explain_asks_redis_how_durable_it_is(
    shop: str, redis_url: str, request: pytest.FixtureRequest
) -> None:
    server, file = (
        ("Redis 6.2", "redis.conf") if "redis6.2" in request.node.name else ("Valkey 9", "valkey.conf")
    )
    mail = explained(shop, ONCEWARD_CONSUMERS__MAIL__SOURCE=f"{redis_url}/mails")["mail"]
    assert mail["guarantee"] == "may lose"
    assert mail["why"].startswith(server)
    assert "keeps no append-only file" in mail["why"]
    assert mail["advice"] == f"set appendonly yes and appendfsync always in {file}"
    assert any(link["strength"] == "at least once" and "no contract" in link["why"] for link in mail["links"])


@pytest.mark.req("CC-123")
def test_explain_finds_a_stream_that_expires_and_a_database_that_cannot_be_one(
    shop: str, redis_url: str
) -> None:
    name = uuid.uuid4().hex
    with Redis.from_url(redis_url) as redis:
        redis.xadd(name, {"a": "b"})
        redis.expire(name, 3600)
    source = Path(f"{shop}.py")
    source.write_text(source.read_text().replace("sqlite:///shop.db", "sqlite:////dev/null"))
    found = explained(shop, ONCEWARD_CONSUMERS__MAIL__SOURCE=f"{redis_url}/{name}")
    assert any("the stream expires in" in link["why"] for link in found["mail"]["links"])
    assert found["charge"]["headline"] == "unknown: database cannot be opened"
    source.write_text(source.read_text().replace("sqlite:////dev/null", "sqlite:///shop.db?synchronous=off"))
    refused = run("explain", f"{shop}:app")
    assert (refused.exit_code, "unknown setting synchronous; remove it" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "guarantee", "why"),
    [
        ("", "at least once", "unproven"),
        ("options=-csynchronous_commit%3Doff", "may lose", "synchronous_commit=off"),
    ],
)
def test_explain_asks_postgresql_how_durable_it_is(
    shop: str, postgres_url: str, options: str, guarantee: str, why: str
) -> None:
    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}{options}"
    source = Path(f"{shop}.py")
    source.write_text(
        source.read_text().replace('Onceward("shop", database="sqlite:///shop.db")', "Onceward('shop')")
    )
    charge = explained(shop, ONCEWARD_DATABASE=url)["charge"]
    assert charge["not_checked"] == []
    assert charge["guarantee"] == guarantee
    assert why in charge["why"]


def test_explain_says_what_it_could_not_reach(shop: str, tmp_path: Path) -> None:
    away = {"ONCEWARD_CONSUMERS__CHARGE__SOURCE": "redis://:hunter2@127.0.0.1:1/orders"}
    with boundary_server(tmp_path / "boundary") as url:
        source = f"boundary+{url}?consumer=mail"
        found = explained(shop, **away, ONCEWARD_CONSUMERS__MAIL__SOURCE=source)
        assert found["mail"]["not_checked"] == []
        stored = "the boundary's store is a directory, with an fsync before each answer"
        assert any(stored in link["why"] for link in found["mail"]["links"])
        text = run("explain", f"{shop}:app", **away).stdout
    assert "unknown, at best at least once: unproven" in text
    assert "cannot query Redis at 127.0.0.1:1/0" in found["charge"]["not_checked"][0]
    assert "hunter2" not in text + str(found)
    gone = explained(shop, ONCEWARD_CONSUMERS__MAIL__SOURCE=source)["mail"]
    assert "cannot read http://" in gone["not_checked"][0]


KEYED = """
from onceward import Contract, Onceward, Transaction, hours

app = Onceward("shop", database="sqlite:///shop.db")
contract = Contract(
    consumer_id="ship", event_types=["*"], owner_team="t", idempotency_mechanism="keys", mode="effectful"
)


@app.consumer("sqlite:///parcels.db", contract=contract)
def ship(order: dict, session) -> None:
    session.effect("ship", lambda key: key, key_valid_for=hours(24))


@app.producer(ship)
def place():
    yield Transaction(payload={}, metadata={"event_type": "placed"})
"""


@pytest.mark.req("CC-075")
def test_explain_compares_how_long_keys_are_valid_with_how_long_a_dead_letter_waits(shop: str) -> None:
    keyed = f"keyed_{shop}"
    Path(f"{keyed}.py").write_text(KEYED)
    text = run("explain", f"{keyed}:app").stdout
    assert "key validity unknown" in text
    assert "unknown until the first effect" in text, "the handler says it already"
    app = load_app(f"{keyed}:app")
    app.produce(app.producers["place"].function)
    with open_task(app, app.consumers.ship) as task:
        task.consume_transactions(app.consumers.ship.policy)
    text = run("explain", f"{keyed}:app").stdout
    assert "calls may repeat, with a key, keys shorter than dead letters wait, unproven" in text
    assert "the other side remembers keys for 1 day, but a dead letter can wait 90" in text


# ── verify ──────────────────────────────────────────────────────────────────────────────────────────────


def verified(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In another process, to reload changed code."""
    return onceward("verify", *arguments, cwd=Path.cwd(), env=os.environ)


@pytest.mark.req("CC-068")
def test_a_function_is_verified_runs_in_production_and_does_not_when_its_code_has_changed(shop: str) -> None:
    assert run("inbox", "migrate", "--database", "sqlite:///shop.db").exit_code == 0
    app = load_app(f"{shop}:app")
    app.override("test", env="production")
    task = open_task(app, app.consumers.charge)
    with pytest.raises(UnprovenConsumerError), task as unproven:
        unproven.consume_transactions()
    partial = verified(f"{shop}:charge", "--record", "--only", "duplicates")
    assert partial.returncode == 1
    assert "did not run, and a partial verification does not open production" in partial.stdout
    refused = verified(f"{shop}:charge", "--env", "production")
    assert refused.returncode == 1
    assert "its verification skipped" in refused.stdout
    proof = verified(f"{shop}:charge", "--record")
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert f"{shop}:charge (consumer 'billing'" in proof.stdout
    assert verified(f"{shop}:app.consumers.charge", "--env", "production").returncode == 0
    with open_task(app, app.consumers.charge) as proven:
        assert proven.consume_transactions().failed == 0
    source = Path(f"{shop}.py")
    source.write_text(source.read_text().replace('"total": order.total}', '"total": order.total + 1}'))
    refused = verified(f"{shop}:charge", "--env", "production")
    assert refused.returncode == 1
    assert "its code has changed since it was verified" in refused.stdout
    assert f"onceward verify {shop}:charge --record" in refused.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (":app", "is an app; write onceward verify {shop}:app --all, or verify one of {shop}:charge"),
        (":app.consumers", "write onceward verify {shop}:app --all, or verify one of {shop}:charge"),
        ("", "write MODULE:NAME, as in shop.billing:Bill; you can verify {shop}:charge"),
        (":nobody", "has no nobody; you can verify {shop}:charge"),
        (":mail", "{shop}:mail has no contract, so there is nothing to prove; write @app.consumer("),
        (":tables", "{shop}:tables is not a consumer of an app; a handler of inbox.process needs --contract"),
        (":contract", "{shop}:contract is Contract, not a function of an app"),
    ],
)
def test_what_cannot_be_verified_is_refused_with_what_to_write(shop: str, name: str, says: str) -> None:
    result = run("verify", f"{shop}{name}")
    assert result.exit_code == 2
    assert says.format(shop=shop) in result.stderr


@pytest.mark.parametrize(
    ("environment", "name"), [({}, "shop"), ({"ONCEWARD_DATABASE": "sqlite:///elsewhere.db"}, "elsewhere")]
)
def test_a_function_is_verified_in_the_database_that_its_app_runs_with(
    shop: str, environment: dict[str, str], name: str
) -> None:
    asked = run("verify", f"{shop}:charge", "--env", "production", **environment)
    assert asked.exit_code == 2
    assert (
        f"/{name}.db does not exist; check the URL, or create it with `onceward inbox migrate" in asked.stderr
    )
