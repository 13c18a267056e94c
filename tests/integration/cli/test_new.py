"""`onceward new`: a project that works as it is, and on Redis and PostgreSQL after changing the URLs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen
from uuid import uuid4

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from redis import Redis
from sqlalchemy import create_engine, text

from onceward.boundary.metrics import BoundaryMetrics
from onceward.cli.new import TEMPLATE
from onceward.telemetry.catalogue import METRICS
from onceward.testing.servers import redis_server
from tests.support import ROOT, commands
from tests.support.new_project import clean, do, new
from tests.support.wait import until

SOURCE = 'source = "sqlite:///orders.db"'
DATABASE = 'database = "sqlite:///shop.db"'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project as generated. Tests must not change it."""
    place = tmp_path_factory.mktemp("new") / "shop"
    result = new("shop", "--dir", place)
    assert result.exit_code == 0, result.output
    return place


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "shop"))


def make(project: Path, *targets: str) -> str:
    return do(project, "make", *targets, f"PYTHON={sys.executable}")


def onceward(project: Path, *arguments: object, **environment: str) -> str:
    done = commands.onceward(*map(str, arguments), cwd=project, env=clean() | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def charged(url: str) -> list[Any]:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return list(connection.scalars(text("SELECT cents FROM charges ORDER BY cents")))
    finally:
        engine.dispose()


ONCE = [number * 100 for number in range(1, 11)]

# ── it works ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("IN-17")
def test_its_own_make_test_passes(project: Path) -> None:
    assert "6 passed" in make(project, "test")


def test_alembic_finds_the_project_where_it_is_not_installed(project: Path) -> None:
    make(project, "migrate")
    columns = project / "shop/tables.py"
    columns.write_text(
        columns.read_text().replace(
            '    Column("cents", Integer, nullable=False),\n)',
            '    Column("cents", Integer, nullable=False),\n    Column("note", Text),\n)',
            1,
        )
    )
    alembic = Path(sys.executable).with_name("alembic")
    do(project, str(alembic), "revision", "--autogenerate", "--message", "a column for notes")
    (revision,) = (project / "migrations/versions").glob("*_a_column_for_notes.py")
    assert "op.add_column" in revision.read_text()


def test_make_test_sets_up_an_environment_of_its_own(made: Path) -> None:
    commands = do(made, "make", "-n", "test").splitlines()
    assert commands[0] == "python3 -m venv .venv"
    assert re.fullmatch(
        r"\.venv/bin/python -m pip install .*--editable '\.\[test\]' 'onceward.*'", commands[1]
    )
    assert commands[-1] == ".venv/bin/python -m pytest"


def test_it_is_clean_code(project: Path) -> None:
    do(project, sys.executable, "-m", "ruff", "check", ".")
    do(project, sys.executable, "-m", "ruff", "format", "--check", ".")


def test_as_it_is_orders_are_placed_and_charged_once_and_traced(project: Path) -> None:
    assert "10 orders placed" in make(project, "orders")
    trace_file = {"ONCEWARD_TRACE_FILE": ".onceward/spans.jsonl"}
    onceward(project, "run", "shop.app:app", "--drain", **trace_file)
    assert charged(f"sqlite:///{project}/shop.db") == ONCE
    reported = make(project, "trace")
    assert " succeeded " in reported.splitlines()[1]
    for name in ("start_producing", "in the source", "start_processing", "consumer shop-charge"):
        assert name in reported


def test_its_run_serves_the_console(project: Path) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "run", "PYTHON=python"], cwd=project, capture_output=True, text=True, check=True
    )
    assert "onceward run shop.app:app --console 127.0.0.1:8090\n" in done.stdout
    assert "console" in tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"][2]


def test_orders_that_cannot_be_placed_are_no_success(project: Path) -> None:
    settings = (project / "onceward.toml").read_text()
    (project / "onceward.toml").write_text(settings.replace(SOURCE, 'source = "redis://127.0.0.1:1/orders"'))
    command = ["make", "orders", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        command, cwd=project, env=clean(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, "make's own exit code for a failed command"
    assert "placed" not in done.stdout
    assert "place_orders: 10 of 10 messages did not reach redis://127.0.0.1:1/orders" in done.stderr


@pytest.fixture
def own_postgres(postgres_url: str) -> str:
    name = f"shop_{uuid4().hex[:8]}"
    engine = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return engine.url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)


def test_one_line_puts_producer_and_consumer_on_redis_and_one_the_rest_on_postgresql(
    project: Path, redis_url: str, own_postgres: str
) -> None:
    settings = (project / "onceward.toml").read_text()
    assert settings.count(SOURCE) == settings.count(DATABASE) == 1
    stream = f"{redis_url}/orders-{uuid4().hex}?group=charge"
    settings = settings.replace(SOURCE, f'source = "{stream}"')
    (project / "onceward.toml").write_text(settings.replace(DATABASE, f'database = "{own_postgres}"'))
    make(project, "orders")
    onceward(project, "run", "shop.app:app", "--drain")
    assert charged(own_postgres.replace("postgresql:", "postgresql+psycopg:")) == ONCE
    assert list(project.glob("*.db")) == []


@pytest.mark.req("CC-076")
def test_its_compose_file_leaves_nothing_for_explain_to_complain_about_but_the_proof(
    project: Path, own_postgres: str
) -> None:
    services = yaml.safe_load((project / "compose.yaml").read_text())["services"]
    options = re.findall(r"--(\S+) (\S+)", services["redis"]["command"])
    assert "command" not in services["postgres"], "its defaults are durable"
    with redis_server() as server:
        client = Redis.from_url(server.url)
        for name, value in options:
            client.config_set(name, value)
        client.close()
        settings = (project / "onceward.toml").read_text()
        settings = settings.replace(SOURCE, f'source = "{server.url}/orders?group=charge"')
        (project / "onceward.toml").write_text(settings.replace(DATABASE, f'database = "{own_postgres}"'))
        [found] = json.loads(onceward(project, "explain", "shop.app:app", "--json"))
    assert found["headline"] == "at least once: unproven"
    weak = [link["why"] for link in found["links"] if link["strength"] not in ("effects once", "holds")]
    assert len(weak) == 1, weak


@pytest.mark.req("CC-069")
def test_it_runs_in_production_once_it_is_proven(project: Path) -> None:
    database = ("--database", "sqlite:///shop.db")
    onceward(project, "inbox", "migrate", *database)
    written = onceward(project, "verify", "shop.app:app", "--all", "--out", "evidence.json")
    assert "Wrote the evidence of 1 consumer to evidence.json, unsigned" in written
    settings = project / "onceward.toml"
    trusted = 'evidence = "evidence.json"\nevidence_unsigned = true\n'
    settings.write_text(trusted + settings.read_text())
    onceward(
        project, "run", "shop.app:app", "--drain", "--env", "production"
    )  # otherwise it would exit with 2


# ── the files ───────────────────────────────────────────────────────────────────────────────────────────


def test_every_file_of_the_template_is_written_and_no_placeholder_is_left(made: Path) -> None:
    files = [file for file in made.rglob("*") if file.is_file()]
    assert {file.relative_to(made).as_posix() for file in files} >= {
        ".dockerignore", ".github/workflows/ci.yml", ".gitignore", "Dockerfile", "Makefile", "README.md",
        "alembic.ini", "compose.yaml", "deploy/workers.yaml", "migrations/env.py", "onceward.toml",
        "ops/prometheus.yml", "ops/grafana/dashboards/onceward.json", "pyproject.toml", "shop/__init__.py",
        "shop/app.py", "shop/web.py", "tests/test_charge.py",
    }  # fmt: skip
    assert len(files) == len([file for file in TEMPLATE.rglob("*") if file.is_file()])
    assert [file for file in files if re.search("@(name|hostname|onceward)@", file.read_text())] == []


def test_the_template_is_in_the_wheel() -> None:
    packed = {Path(file.distribution_path) for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    template = {
        Path("onceward/cli/template") / file.relative_to(TEMPLATE)
        for file in TEMPLATE.rglob("*")
        if file.is_file()
    }
    assert template <= packed


@pytest.mark.req("UI-02")
def test_the_dashboard_and_the_alerts_name_metrics_that_there_are(project: Path) -> None:
    board = json.loads((project / "ops/grafana/dashboards/onceward.json").read_text())
    shown = {
        name.removesuffix("_bucket")
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\b(?:onceward|bsfg)_\w+", target["expr"])
    }
    assert len(shown) > 20
    rules = yaml.safe_load((project / "ops/alerts.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts)
    watched = {name for rule in alerts for name in re.findall(r"\bonceward_\w+", rule["expr"])}
    assert len(watched) > 10
    watched |= set(re.findall(r"\bonceward_\w+", (project / "deploy/autoscale.yaml").read_text()))
    assert (shown | watched) - of_the_engine() - of_a_run(project) - of_the_boundary() == set()


def test_what_every_run_samples_is_not_added_up_over_runs(made: Path) -> None:
    """Two pods that see the same 100 dead letters report 100 each."""
    board = json.loads((made / "ops/grafana/dashboards/onceward.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load((made / "ops/alerts.yml").read_text())
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    sampled = re.compile(
        r"\bonceward_(source|outbox|dead_letters|database|consumer_parked|consumer_held_keys)(?![a-z])"
    )
    found = [each for each in (*shown, *alerts) if sampled.search(each)]
    assert len(found) > 8
    assert [each for each in found if re.search(r"\bsum\b", each)] == []


def of_the_engine() -> set[str]:
    """The metrics, as Prometheus names them."""
    seconds = {"s": "_seconds"}
    return {
        name.replace(".", "_") + seconds.get(metric.unit, "") + ("_total" if metric.kind == "counter" else "")
        for name, metric in METRICS.items()
    }


def of_a_run(project: Path) -> set[str]:
    command = [sys.executable, "-m", "onceward", "run", "shop.app:app", "--health", "127.0.0.1:0"]
    running = subprocess.Popen(command, cwd=project, env=clean(), stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        url = next(
            found[1] for line in running.stderr if (found := re.search(r"health at (\S+)/livez", line))
        )

        def metrics() -> str:
            page: str = urlopen(f"{url}/metrics").read().decode()
            return page if "onceward_consumer_in_flight{" in page else ""

        page = until(metrics)
        running.terminate()
        running.communicate(timeout=60)
    finally:
        running.kill()
    return types_in(page)


def of_the_boundary() -> set[str]:
    return types_in(BoundaryMetrics().text().decode())


def types_in(page: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\w+)", page, re.MULTILINE))


@pytest.mark.parametrize(
    ("reported", "requirement"),
    [
        (None, "onceward"),
        ({"url": "https://example.org/onceward.whl"}, "onceward @ https://example.org/onceward.whl"),
        (
            {"url": "https://example.org/onceward.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "onceward @ git+https://example.org/onceward.git@abc",
        ),
    ],
)
def test_its_environment_gets_onceward_from_where_this_one_came(
    reported: Any, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(reported, monkeypatch)
    assert new("shop", "--dir", tmp_path / "shop").exit_code == 0
    assert f"\nONCEWARD ?= {requirement}\n" in (tmp_path / "shop" / "Makefile").read_text()
    assert f'\nARG ONCEWARD="{requirement}"\n' in (tmp_path / "shop" / "Dockerfile").read_text()


@pytest.mark.req("IN-17")
@pytest.mark.parametrize(
    ("reported", "requirement"),
    [
        ({"url": "file:///src/onceward", "dir_info": {}}, "onceward @ file:///src/onceward"),
        (
            {"url": "file:///src/onceward", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "onceward @ git+file:///src/onceward@abc",
        ),
    ],
)
def test_a_directory_of_this_machine_is_shown_and_written_nowhere(
    reported: Any, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(reported, monkeypatch)
    result = new("shop", "--dir", tmp_path / "shop")
    assert f"export ONCEWARD='{requirement}'" in result.stdout
    for file in (tmp_path / "shop").rglob("*"):
        assert not file.is_file() or not re.search(rf"/src/onceward|file:|{tmp_path}", file.read_text()), file


def installed_from(reported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = None if reported is None else json.dumps(reported)
    origin = SimpleNamespace(read_text=lambda _: text, requires=None)
    monkeypatch.setattr(metadata, "distribution", lambda _: origin)


# ── names and places ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("my-shop", "try my_shop"),
        ("Shop", "try shop"),
        ("2shops", "try app_2shops"),
        ("größe", "try gr_e"),
        ("...", "try app"),
        ("class", "try class_app"),
        ("json", "try json_app"),
        ("onceward", "try onceward_app"),
        ("../shop", "try shop"),
    ],
)
def test_a_name_that_cannot_be_a_package_is_refused_with_a_better_one(
    name: str, better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = new(name)
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith(better)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("installed", [True, False])
def test_a_name_of_a_module_that_the_project_needs_is_refused(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = [
        "sqlalchemy",
        "uvicorn",
        "httpx",
        "pydantic_settings",
        "pytest",
        "psycopg",
        "redis",
        "nats",
        "starlette",
    ]
    if not installed:
        monkeypatch.setattr(metadata, "packages_distributions", dict)
    for name in (*needed, "alembic", "fastapi", "ops", "test", *(["dotenv", "anyio"] if installed else [])):
        result = new(name)
        assert (result.exit_code, "would shadow another module" in result.stderr) == (2, True), name
    assert list(tmp_path.iterdir()) == []


def test_the_place_is_named_after_the_project_and_may_be_there_if_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    result = new("shop")
    assert result.exit_code == 0
    assert "\n  cd shop\n" in result.stdout
    assert (tmp_path / "shop" / "shop" / "app.py").is_file()


def test_a_place_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    result = new("shop", "--dir", tmp_path)
    assert result.exit_code == 2
    assert "is not empty, and nothing in it was changed; choose another directory with --dir" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_place_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shop").touch()
    result = new("shop", "--dir", tmp_path / "shop")
    assert result.exit_code == 2
    assert "cannot be used: " in result.stderr
