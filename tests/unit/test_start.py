"""What the first line of a program costs: which modules it loads, not how long that takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "asyncio", "connectrpc", "ctypes", "msgspec", "nats", "opentelemetry", "psycopg", "pydantic", "redis", "rich",
    "sqlalchemy", "sqlite3", "typer",
)  # fmt: skip
"""What takes long to load, or is an extra that need not be there."""
DRIVERS = ("connectrpc", "nats", "opentelemetry.sdk", "psycopg", "redis", "rich", "sqlalchemy", "typer")


def loaded(statement: str) -> set[str]:
    """The modules that a new interpreter has after this statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def among(modules: set[str], heavy: tuple[str, ...]) -> set[str]:
    return {each for each in heavy if any(name == each or name.startswith(f"{each}.") for name in modules)}


@pytest.mark.req("PF-01")
def test_import_onceward_loads_nothing_but_itself() -> None:
    modules = loaded("import onceward")
    assert among(modules, HEAVY) == set()
    assert {each for each in modules if each.startswith("onceward")} == {"onceward"}


@pytest.mark.req("PF-01")
def test_declaring_an_app_loads_no_driver() -> None:
    program = """
from onceward import Onceward
app = Onceward("shop")

@app.consumer("redis://localhost/orders")
def charge(order: dict) -> None: ...
"""
    assert among(loaded(program), (*DRIVERS, "pydantic_settings")) == set()


@pytest.mark.req("PF-01")
def test_the_command_line_loads_no_engine_for_its_help() -> None:
    modules = loaded("import onceward.cli.main")
    assert among(modules, ("asyncio", "msgspec", "opentelemetry", "pydantic", "redis", "sqlalchemy")) == set()


HELP = """
import sys
from onceward.cli.main import main
sys.argv = ["onceward", "--help"]
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.req("PF-01")
def test_the_help_loads_nothing_that_highlights_source_code() -> None:
    assert among(loaded(HELP), ("pygments", "rich.syntax", "rich.traceback")) == set()


def test_source_code_can_be_highlighted_after_the_help_was_shown() -> None:
    program = f"""{HELP}
from rich.console import Console
from rich.markdown import Markdown
Console(width=60).print(Markdown("~~~python\\nprint(1)\\n~~~"))
import rich.syntax, rich.traceback
assert rich.traceback.Traceback.__module__ == "rich.traceback"
"""
    assert "pygments" in among(loaded(program), ("pygments",))


@pytest.mark.req("PF-01")
def test_a_run_without_a_database_loads_no_sqlalchemy(tmp_path: Path) -> None:
    program = f"""
import onceward.cli.run, onceward.run.run, onceward.run.worker
from onceward import Onceward
from onceward.app.build import open_task
from onceward.run.run import check
app = Onceward("shop")

@app.consumer("sqlite:///{tmp_path}/orders.db")
def charge(order: dict) -> None: ...

check(app)
with open_task(app, app.consumers["charge"]):
    assert app.engines.pools() == []
"""
    assert among(loaded(program), ("sqlalchemy",)) == set()
