"""Settings of an app: which value wins, where it came from, and errors about wrong ones."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from onceward._environment import VARIABLE, is_production
from onceward.app.settings import AppSettings, Resolved, resolve
from onceward.errors import ConfigurationError
from onceward.task.settings import EngineSettings


def write(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)


def resolved(directory: Path, environ: dict[str, str] | None = None, **keywords: Any) -> Resolved:
    return resolve(keywords, environ or {}, directory)


@pytest.mark.req("RN-06")
def test_the_environment_wins_over_the_file_that_over_the_project_that_over_the_code_that_over_the_default(
    tmp_path: Path,
) -> None:
    def now(environ: dict[str, str] | None = None, **keywords: Any) -> tuple[Any, str]:
        found = resolved(tmp_path, environ, **keywords)
        return found.settings.processes, {name: origin for name, _, origin in found.rows()}["processes"]

    assert now() == (1, "default")
    assert now(processes=5) == (5, "keyword")
    write(tmp_path, "pyproject.toml", "[tool.onceward]\nprocesses = 2")
    assert now(processes=5) == (2, "pyproject.toml")
    write(tmp_path, "onceward.toml", "processes = 3")
    assert now(processes=5) == (3, "onceward.toml")
    assert now({"ONCEWARD_PROCESSES": "4"}) == (4, "ONCEWARD_PROCESSES")
    assert now({"ONCEWARD_PROCESSES": "4"}, processes=5) == (4, "ONCEWARD_PROCESSES")
    assert now({"ONCEWARD_PROCESSES": "4"}, processes=None) == (4, "ONCEWARD_PROCESSES")


@pytest.mark.req("IN-20")
def test_the_environment_wins_over_dotenv_that_over_a_secret_and_that_over_the_file(tmp_path: Path) -> None:
    def now(**environ: str) -> tuple[int, str]:
        found = resolved(tmp_path, environ)
        return found.settings.processes, found.origins["processes"]

    write(tmp_path, "onceward.toml", "processes = 2")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    write(secrets, "onceward_processes", "3\n")
    assert now() == (2, "onceward.toml")
    assert now(ONCEWARD_SECRETS_DIR=str(secrets)) == (3, f"{secrets}/onceward_processes")
    write(tmp_path, ".env", "export ONCEWARD_PROCESSES='4'  # four\nONCEWARD_SECRETS_DIR=secrets\nOTHER=x")
    assert now() == (4, ".env: ONCEWARD_PROCESSES")
    assert now(ONCEWARD_PROCESSES="5") == (5, "ONCEWARD_PROCESSES")


@pytest.mark.req("IN-20")
def test_secrets_and_dotenv_have_nested_names(tmp_path: Path) -> None:
    write(tmp_path, "onceward.toml", "[consumers.Charge-Orders]\nsource = 'memory://file'\ncommit = 'each'")
    write(tmp_path, ".env", "ONCEWARD_ENGINE__STUCK_GRACE=5\nONCEWARD_SECRETS_DIR=.")
    write(tmp_path, "ONCEWARD_CONSUMERS__CHARGE_ORDERS__SOURCE", "memory://secret")
    found = resolved(tmp_path)
    assert found.settings.engine.stuck_grace == 5.0
    changed = found.of_consumer("Charge-Orders")
    assert (changed.source, changed.commit) == ("memory://secret", "each")


@pytest.mark.req("IN-20")
def test_dotenv_changes_no_variable_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    write(tmp_path, ".env", f"{VARIABLE}=production")
    assert resolved(tmp_path).settings.env == "production"
    assert VARIABLE not in os.environ


@pytest.mark.req("IN-20")
@pytest.mark.parametrize("name", [".env", "onceward.toml", "pyproject.toml", "onceward_database"])
def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigurationError, match=f"/{re.escape(name)} is a directory, not a file"):
        resolved(tmp_path, {"ONCEWARD_SECRETS_DIR": "."})


@pytest.mark.req("IN-20")
def test_a_virtual_environment_named_dotenv_is_no_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / ".env").mkdir()
    write(tmp_path, ".env/pyvenv.cfg", "")
    assert resolved(tmp_path).origins == {}


@pytest.mark.req("IN-20")
def test_secrets_may_be_links_into_a_hidden_directory(tmp_path: Path) -> None:
    mount = tmp_path / "..2026_11_18"
    mount.mkdir()
    write(mount, "onceward_processes", "3")
    (tmp_path / "..data").symlink_to(mount.name)  # as Kubernetes mounts them
    (tmp_path / "onceward_processes").symlink_to("..data/onceward_processes")
    assert resolved(tmp_path, {"ONCEWARD_SECRETS_DIR": "."}).settings.processes == 3


@pytest.mark.req("IN-20")
def test_a_directory_of_secrets_may_have_other_files(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    (secrets / "..data").mkdir(parents=True)  # as Kubernetes mounts them
    for name in ("tls.key", "ONCEWARD_SIGNING_KEY"):
        write(secrets, name, "x")
    assert resolved(tmp_path, {"ONCEWARD_SECRETS_DIR": "secrets"}).origins == {}


@pytest.mark.req("IN-20")
@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({".env": "ONCEWARD_DATABSE=x"}, ".env: ONCEWARD_DATABSE: databse: no such setting"),
        ({".env": "\nONCEWARD_DATABASE='x"}, ".env, line 2: not a variable; write NAME=value"),
        ({".env": "ONCEWARD_SECRETS_DIR=gone"}, "gone cannot be read: No such file or directory"),
        ({".env": "ONCEWARD_SECRETS_DIR=.", "ONCEWARD_DATABSE": "x"}, "/ONCEWARD_DATABSE: databse: no such setting"),
    ],
)  # fmt: skip
def test_a_wrong_line_of_dotenv_or_a_wrong_secret_is_named(
    files: dict[str, str], problem: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        write(tmp_path, name, text)
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        resolved(tmp_path)


@pytest.mark.req("IN-22")
def test_a_variable_has_a_list_or_a_table_as_json(tmp_path: Path) -> None:
    write(tmp_path, "onceward.toml", "[consumers.charge]\ncommit = 'each'")
    write(tmp_path, ".env", """ONCEWARD_CONSUMERS='{"charge": {"policy": {"loop": {"limit": 3}}}}'""")
    variables = {
        "ONCEWARD_CONSUMERS__CHARGE__SOURCE": "memory://variable",
        "ONCEWARD_ENGINE__TELEMETRY_FIELDS": '["payload.id"]',
        "ONCEWARD_CONSOLE_REDACT": '["email", "card.*"]',
    }
    found = resolved(tmp_path, variables)
    charge = found.of_consumer("charge")
    assert (charge.source, charge.policy, charge.commit) == (
        "memory://variable",
        {"loop": {"limit": 3}},
        "each",
    )
    assert found.settings.engine.telemetry_fields == ("payload.id",)
    assert found.settings.console_redact == ["email", "card.*"]
    assert resolved(tmp_path, {"ONCEWARD_CONSOLE_REDACT": "email, card.*"}).settings.console_redact == [
        "email",
        "card.*",
    ]
    assert found.origins == {
        "consumers.charge.commit": "onceward.toml",
        "consumers.charge.policy.loop.limit": ".env: ONCEWARD_CONSUMERS",
        "consumers.charge.source": "ONCEWARD_CONSUMERS__CHARGE__SOURCE",
        "engine.telemetry_fields": "ONCEWARD_ENGINE__TELEMETRY_FIELDS",
        "console_redact": "ONCEWARD_CONSOLE_REDACT",
    }


@pytest.mark.req("IN-20")
def test_a_secret_may_be_a_link_out_of_its_directory(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    write(tmp_path, "elsewhere", "sqlite:///x.db")
    (secrets / "onceward_database").symlink_to(tmp_path / "elsewhere")
    assert resolved(tmp_path, {"ONCEWARD_SECRETS_DIR": "secrets"}).settings.database == "sqlite:///x.db"


@pytest.mark.req("RN-06")
def test_a_variable_changes_one_field_of_a_table_that_the_code_gives(tmp_path: Path) -> None:
    found = resolved(
        tmp_path,
        {"ONCEWARD_ENGINE__STUCK_GRACE": "5"},
        engine=EngineSettings(stuck_grace=9, io_guard="warn"),
    )
    assert (found.settings.engine.stuck_grace, found.settings.engine.io_guard) == (5.0, "warn")


def test_every_setting_has_a_row(tmp_path: Path) -> None:
    rows = [name.partition(".")[0] for name, _, _ in resolved(tmp_path).rows()]
    assert list(dict.fromkeys(rows)) == list(AppSettings.model_fields)


def test_a_consumer_is_changed_by_a_nested_variable_and_a_table_together(tmp_path: Path) -> None:
    write(
        tmp_path, "onceward.toml", "[consumers.charge]\nsource = 'memory://a'\npolicy = {loop = {limit = 3}}"
    )
    found = resolved(tmp_path, {"ONCEWARD_CONSUMERS__CHARGE__SOURCE": "memory://b"})
    changed = found.of_consumer("charge")
    assert (changed.source, changed.policy) == ("memory://b", {"loop": {"limit": 3}})
    assert ("consumers.charge.policy.loop.limit", 3, "onceward.toml") in found.rows()
    assert ("consumers.charge.source", "memory://b", "ONCEWARD_CONSUMERS__CHARGE__SOURCE") in found.rows()


def test_a_variable_finds_a_consumer_with_capitals_and_hyphens(tmp_path: Path) -> None:
    found = resolved(tmp_path, {"ONCEWARD_CONSUMERS__CHARGE_ORDERS__SOURCE": "memory://b"})
    assert found.of_consumer("Charge-Orders").source == "memory://b"
    found.check_names("consumers", ["Charge-Orders"])


@pytest.mark.req("RN-06")
@pytest.mark.parametrize("name", ["Charge-Orders", "chargeOrders", "charge_orders"])
def test_a_variable_wins_over_a_table_however_the_table_spells_the_name(name: str, tmp_path: Path) -> None:
    write(
        tmp_path,
        "onceward.toml",
        f"""
        [consumers.{name}]
        source = "memory://file"
        policy.loop.batch.size = 3
        [producers.{name}]
        sink = "memory://file"
        """,
    )
    variable = name.upper().replace("-", "_")
    environ = {
        f"ONCEWARD_CONSUMERS__{variable}__SOURCE": "memory://variable",
        f"ONCEWARD_PRODUCERS__{variable}__SINK": "memory://variable",
    }
    found = resolved(tmp_path, environ)
    assert found.of_consumer(name).source == "memory://variable"
    assert found.of_consumer(name).policy == {"loop": {"batch": {"size": 3}}}
    assert found.of_producer(name).sink == "memory://variable"
    assert found.origins[f"consumers.{name}.source"] == f"ONCEWARD_CONSUMERS__{variable}__SOURCE"


@pytest.mark.req("RN-06")
def test_a_file_that_sets_the_concurrency_of_one_consumer_wins_over_a_variable_for_all(
    tmp_path: Path,
) -> None:
    """A consumer that must run one message at a time stays so, however a machine is tuned."""
    write(tmp_path, "onceward.toml", "consumers.charge.policy.loop.concurrency.value = 1")
    found = resolved(tmp_path, {"ONCEWARD_CONCURRENCY": "8"})
    assert found.settings.concurrency == 8
    assert found.of_consumer("charge").policy == {"loop": {"concurrency": {"value": 1}}}


def test_settings_of_a_consumer_that_there_is_not_are_refused_with_their_origin(tmp_path: Path) -> None:
    found = resolved(tmp_path, {"ONCEWARD_CONSUMERS__CHRAGE__SOURCE": "memory://b"})
    with pytest.raises(
        ConfigurationError, match=r"CHRAGE__SOURCE: no consumer is named 'chrage'; known: charge"
    ):
        found.check_names("consumers", ["charge"])


def test_a_producer_is_changed_by_a_variable_or_a_table(tmp_path: Path) -> None:
    write(tmp_path, "onceward.toml", "[producers.place]\nsink = 'memory://a'")
    assert resolved(tmp_path).of_producer("place").sink == "memory://a"
    found = resolved(tmp_path, {"ONCEWARD_PRODUCERS__PLACE__SINK": "memory://b"})
    assert found.of_producer("Place").sink == "memory://b"
    assert ("producers.place.sink", "memory://b", "ONCEWARD_PRODUCERS__PLACE__SINK") in found.rows()
    given = {"place": {"sink": "memory://c"}, "other": {"sink": "memory://d"}}
    coded = resolved(tmp_path, producers=given)
    assert coded.of_producer("place").sink == "memory://a", "the file wins over the code"
    assert coded.of_producer("other").sink == "memory://d"
    assert found.of_producer("other").sink is None
    found.check_names("producers", ["place"])
    with pytest.raises(ConfigurationError, match=r"PLACE__SINK: no producer is named 'place'; known: none"):
        found.check_names("producers", [])


def test_the_engine_has_settings_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "onceward.toml", "[engine]\ntelemetry_fields = ['payload.id']")
    found = resolved(tmp_path, {"ONCEWARD_ENGINE__STUCK_GRACE": "5"}, engine={"io_guard": "warn"})
    assert found.settings.engine == EngineSettings(
        stuck_grace=5.0, io_guard="warn", telemetry_fields=("payload.id",)
    )
    origins = {name: origin for name, _, origin in found.rows() if name.startswith("engine.")}
    assert origins == {
        "engine.stuck_grace": "ONCEWARD_ENGINE__STUCK_GRACE",
        "engine.io_guard": "keyword",
        "engine.telemetry_fields": "onceward.toml",
        "engine.interrupt": "default",
    }


def test_what_an_app_reads_of_the_engine_a_task_reads_too(tmp_path: Path) -> None:
    environ = {"ONCEWARD_DATABASE": "sqlite:///shop.db", "ONCEWARD_ENGINE__STUCK_GRACE": "5"}
    assert resolved(tmp_path, environ).settings.engine == EngineSettings.from_env(
        "ONCEWARD_ENGINE__", environ
    )


@pytest.mark.parametrize("text", ["", "none", "null"])
def test_an_empty_variable_means_none(text: str, tmp_path: Path) -> None:
    assert resolved(tmp_path, {"ONCEWARD_DATABASE": text}).settings.database is None
    assert resolved(tmp_path, {"ONCEWARD_CONCURRENCY": text}).settings.concurrency is None


WRONG: list[tuple[dict[str, str], str]] = [
    (
        {"ONCEWARD_DATABSE": "x"},
        "ONCEWARD_DATABSE: databse: no such setting; the settings are database, env",
    ),
    ({"ONCEWARD_DATABASE__URL": "x"}, "ONCEWARD_DATABASE__URL: database__url: no such setting"),
    (
        {"ONCEWARD_CONSUMERS": '{"charge": {"sorce": "x"}}'},
        "ONCEWARD_CONSUMERS: consumers.charge.sorce: no such",
    ),
    ({"ONCEWARD_PROCESSES": "many"}, "ONCEWARD_PROCESSES: processes: "),
    ({"ONCEWARD_PROCESSES": "0"}, "ONCEWARD_PROCESSES: processes: "),
    ({"ONCEWARD_LOG_FORMAT": "xml"}, "ONCEWARD_LOG_FORMAT: log_format: Input should be 'console' or 'json'"),
    ({"ONCEWARD_CONSUMERS": "x"}, "ONCEWARD_CONSUMERS: consumers: "),
    (
        {"ONCEWARD_CONSUMERS__CHARGE__SORCE": "x"},
        "ONCEWARD_CONSUMERS__CHARGE__SORCE: consumers.charge.sorce: no such setting; the settings are source, policy",
    ),
    (
        {"ONCEWARD_PRODUCERS__PLACE__SOURCE": "x"},
        "ONCEWARD_PRODUCERS__PLACE__SOURCE: producers.place.source: no such setting; the settings are sink",
    ),
    (
        {"ONCEWARD_ENGINE__STUCK": "5"},
        "ONCEWARD_ENGINE__STUCK: engine.stuck: no such setting; the settings are stuck_grace, io_guard",
    ),
    ({"ONCEWARD_ENGINE__STUCK_GRACE": "-1"}, "ONCEWARD_ENGINE__STUCK_GRACE: engine.stuck_grace: "),
    ({"ONCEWARD_ENGINE__TELEMETRY_FIELDS": "payload.id"}, "ONCEWARD_ENGINE__TELEMETRY_FIELDS: engine."),
]


@pytest.mark.parametrize(("environ", "problem"), WRONG)
def test_a_wrong_variable_is_named(environ: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        resolved(tmp_path, environ)
    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize("order", [1, -1])
def test_a_value_where_another_layer_has_a_table_is_refused(order: int, tmp_path: Path) -> None:
    both = {"ONCEWARD_CONSUMERS__CHARGE": "x", "ONCEWARD_CONSUMERS__CHARGE__SOURCE": "memory://a"}
    with pytest.raises(
        ConfigurationError, match=r"consumers\.charge is a (table|value) here but not elsewhere"
    ):
        resolved(tmp_path, dict(list(both.items())[::order]))


@pytest.mark.parametrize(
    "name",
    [
        "ONCEWARD_TEST_REDIS_URL",
        "ONCEWARD_BOUNDARY_URL",
        "ONCEWARD_TRACE_FILE",
        "ONCEWARD_SERVICE_HOST",
        "ONCEWARD_PORT",
        "ONCEWARD_WORKER_SERVICE_PORT_HTTP",
        "ONCEWARD_WORKER_PORT_80_TCP_ADDR",
        "OTHER",
    ],
)
def test_variables_of_other_parts_and_of_kubernetes_are_none_of_our_business(
    name: str, tmp_path: Path
) -> None:
    assert resolved(tmp_path, {name: "x"}).origins == {}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("onceward.toml", "databse = 'x'", "onceward.toml: databse: no such setting"),
        ("onceward.toml", "processes = ", "onceward.toml is not valid TOML"),
        ("pyproject.toml", "[tool.onceward]\nprocesses = 'x'", "pyproject.toml: processes: "),
        ("pyproject.toml", "[tool]\nonceward = 3", "pyproject.toml: tool.onceward is not a table"),
    ],
)
def test_a_wrong_file_is_named(name: str, text: str, problem: str, tmp_path: Path) -> None:
    write(tmp_path, name, text)
    with pytest.raises(ConfigurationError) as refused:
        resolved(tmp_path)
    assert problem in str(refused.value)


def test_a_project_without_our_table_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, "pyproject.toml", "[project]\nname = 'x'")
    assert resolved(tmp_path).origins == {}


def test_a_keyword_that_there_is_not_is_refused_and_no_value_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keyword: databse: no such setting") as refused:
        resolved(tmp_path, databse="postgresql://u:hunter2@h/x")
    assert "hunter2" not in str(refused.value)


def test_the_gate_and_the_app_go_by_the_same_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "production")
    monkeypatch.chdir(tmp_path)
    assert is_production(None)
    assert is_production(resolve({}).settings.env)
    assert is_production(resolve({"env": "staging"}).settings.env), "the code does not weaken the environment"
