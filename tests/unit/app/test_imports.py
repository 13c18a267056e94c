"""Lazy imports: `import onceward` and `onceward --help` load nothing that they do not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import onceward
from onceward.cli.main import COMMANDS, app, module_of

DRIVERS = ["redis", "psycopg", "sqlalchemy", "aiosqlite", "connectrpc", "nats", "opentelemetry.sdk"]
HEAVY = [*DRIVERS, "pydantic", "asyncio"]
ENGINE = ["onceward.task.call", "onceward.connectors", "onceward.inbox", "onceward.app"]


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh Python has loaded afterwards."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(list(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))


def test_importing_the_package_loads_no_engine_and_nothing_heavy() -> None:
    assert loaded_by("import onceward") & {*HEAVY, *ENGINE, "typer", "rich"} == set()


def test_an_app_on_sqlite_loads_no_driver_before_it_runs() -> None:
    code = "from onceward import Onceward\n@Onceward().consumer('sqlite:///o.db')\ndef charge(order): ..."
    assert loaded_by(code) & {*DRIVERS, "typer", "rich"} == set()


def test_the_list_of_commands_loads_none_of_them() -> None:
    code = (
        "import sys; sys.argv = ['onceward', '--help']\n"
        "from onceward.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass"
    )
    modules = loaded_by(code)
    places = set(map(module_of, COMMANDS)) - {"onceward.cli.completion"}
    assert modules & {*HEAVY, *ENGINE, *places} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_each_command_what_its_own_help_begins_with(name: str) -> None:
    group = typer.main.get_command(app)
    command = group.load(name)  # type: ignore[attr-defined]
    assert command.help.splitlines()[0] == COMMANDS[name]
    assert command.name == name


def test_every_public_name_can_be_had_and_no_other() -> None:
    for name in onceward.__all__:
        assert getattr(onceward, name).__name__ == name
        assert name in dir(onceward)
    with pytest.raises(AttributeError, match="module 'onceward' has no attribute 'Nothing'"):
        _ = onceward.Nothing


def test_a_misspelt_command_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onceward", "verfy"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert "verfy" in ran.stderr
