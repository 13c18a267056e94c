"""The command line: its help, and the arguments it refuses."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from onceward._text import quantity
from onceward.cli.main import app, main
from onceward.demo.screen import READ_NEXT

# Wide enough for any path: otherwise the box around an error would wrap its lines.
WIDE = {"COLUMNS": "1000", "NO_COLOR": "1"}


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dlq", "show", "x"), "'ID': 'x' should be a valid integer"),
        (("run", "shop:app", "--processes", "two"), "'--processes': 'two' should be a valid integer"),
        (("run", "shop:app", "--processes", "0"), "'--processes': '0' should be greater than or equal to 1"),
        (("verify", "shop:charge", "--timeout", "long"), "'--timeout': 'long' should be a valid number"),
        (("rnu",), "No such command 'rnu'. Did you mean 'run'?"),
        (("dlq", "lst"), "No such command 'lst'. Did you mean 'list'?"),
    ],
)
def test_a_mistyped_word_is_named_with_what_is_wanted(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("command", [(), ("dlq", "redrive"), ("trace",), ("boundary", "serve")])
def test_a_flag_is_shown_without_a_type(command: tuple[str, ...]) -> None:
    reported = run(*command, "--help").stdout
    assert "--help" in reported
    assert "<bool>" not in reported


def test_things_are_counted_in_words() -> None:
    assert [quantity(number, "row") for number in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert quantity(2, "boundary", "boundaries") == "2 boundaries"


def test_what_the_demo_names_to_read_is_there() -> None:
    assert Path(READ_NEXT.removeprefix("Read next: ").partition(",")[0]).is_file()


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


def test_what_the_users_code_raises_on_import_is_reported_without_our_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raises_on_import.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["onceward", "explain", "raises_on_import:app"])
    with pytest.raises(SystemExit) as ended:
        main()
    text = capsys.readouterr().err
    assert ended.value.code == 1
    assert text.endswith("ZeroDivisionError: division by zero\nyour code cannot be imported: see above\n")
    assert text.count("  File ") == 1
