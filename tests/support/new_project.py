"""Projects of `onceward new`, and what a user would type there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from typer.testing import CliRunner, Result

from onceward.cli.main import app
from tests.support.wait import LIMIT


def new(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["new", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})


def clean() -> dict[str, str]:
    """A clean environment."""
    foreign = ("ONCEWARD_", "OTEL_", "PYTEST_", "MAKE", "MFLAGS")  # under another make, it prints more
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign) and name != "PYTHON"  # as in `make test PYTHON=python3.13`
    }


def do(project: Path, *command: object, **environment: str) -> str:
    """What a user would type there."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=project,
        env=clean() | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT * 2,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
