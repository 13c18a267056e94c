"""The command line: what it says of itself, and what it refuses."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from onceward.cli.main import app

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env=WIDE)


def test_version_is_the_version_of_the_package() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"onceward {version('onceward')}\n")


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "demo" in result.stdout
    assert "See it work" in result.stdout


def test_help_of_the_demo_has_options_exit_codes_and_examples() -> None:
    result = run("demo", "--help")
    assert result.exit_code == 0
    for text in ("--orders", "--workers", "--seed", "--data", "--keep", "--json"):
        assert text in result.stdout
    assert "0 if it balances, 1 if it does not" in result.stdout
    assert "onceward demo --json | jq .balance" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--orders", "99"), "--orders"),
        (("--orders", "many"), "--orders"),
        (("--workers", "0"), "--workers"),
        (("--seed", "x"), "--seed"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_a_bad_argument_is_named_and_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_data_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    result = run("demo", "--data", str(tmp_path))
    assert result.exit_code == 2
    assert "is not empty" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_data_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("demo", "--data", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert "cannot be used" in result.stderr
