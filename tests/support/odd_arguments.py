"""Calls of every command with values that nobody means, and what each call must not do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.testing import CliRunner, Result

from onceward._text import printable_lines
from onceward.cli.main import app

DATABASE = "sqlite:///inbox.db"
NOWHERE = "http://127.0.0.1:1"
ODD = (
    "",
    " ",
    "\0",
    "a\0b",
    "x" * 5000,
    "\udc80",
    "é漢🙂",
    ".",
    "..",
    "/",
    ".:.",
    ":",
    "a:b",
    "os:path",
    "good:app",
    "good:nothing",
    "--",
    "-1",
    "0",
    "9" * 30,
    "1e999",
    "nan",
    "\x1b[31m\x1b]0;t\x07",
    "\x9b31m\u202e\u2066",
    "a\nb\rc\u2028d",
    "{x}{",
    "[red]x[/]",
    "%s",
    "directory",
    "directory/missing/file",
    "bytes",
    "empty",
    "lines",
    "@bytes",
    "http://",
    "http://[::1",
    "http://h:99999",
    "http://127.0.0.1:1/\0",
    "sqlite://",
    "sqlite:///bytes",
    "sqlite:///.",
    "sqlite:///a\0b",
    "sqlite:///inbox.db?timeout=soon",
    "/proc/nothing/here",
    "sqlite:///" + "x" * 5000,
    "sqlite:///\udc80",
    "sqlite://u:p@h/x",
    "postgresql://%zz",
    "postgresql://127.0.0.1:1/x?foo=bar",
    "postgresql://127.0.0.1:99999/x",
    "nats://",
    "nats://h:99999",
    "redis://127.0.0.1:99999/s",
    "boundary+http://",
    "memory://x",
    '{"a": [',
)
"""Values for any option or argument."""

USUAL: dict[str, Any] = {
    "database": DATABASE,
    "url": NOWHERE,
    "app": "good:app",
    "target": "good:app",
    "consumer": "billing",
    "reason": "why",
    "zone": "here",
    "source": NOWHERE,
    "store": "directory",
    "letter_id": "1",
    "offset": "1",
    "since": "0",
    "task": "good:charge",
    "cause": "why",
    "file": "lines",
    "bucket": "files",
    "key": "a",
    "name": "shop",
    "directory": "made",
    "subject": "batch:1",
    "predicate": "done",
    "value": "{}",
    "from_zone": "a",
    "to_zone": "b",
    "message_id": "m",
    "shell": "bash",
}
"""Values that let a command get to its other options."""
MORE = {
    "demo": ["--orders", "1"],  # refused, so nothing runs
    "run": ["--only", "nobody"],
    "console": ["--listen", "192.0.2.1:1"],
    "boundary serve": ["--listen", "192.0.2.1:1"],  # nobody has this address
    "boundary forward": ["--once"],
    "dlq edit": ["--file", "lines"],
}
"""What keeps a command from running on."""


class Call(NamedTuple):
    path: tuple[str, ...]
    arguments: tuple[str, ...]


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by its path."""
    root: Any = typer.main.get_command(app)
    waiting = [((name,), root.load(name)) for name in root.commands]
    while waiting:
        path, command = waiting.pop()
        below = getattr(command, "commands", {})
        waiting += [((*path, name), each) for name, each in below.items()]
        if not below:
            yield path, command


def calls() -> Iterator[Call]:
    """Every parameter of every command with every odd value, and usual values in the others."""
    for path, command in commands():
        parameters = [each for each in command.params if each.name != "help"]
        for odd in parameters:
            if getattr(odd, "is_flag", False):
                continue
            for value in ODD:
                arguments: list[str] = []
                for each in parameters:
                    given = value if each is odd else USUAL.get(each.name or "")
                    if given is None or (each is not odd and not each.required and each.name != "database"):
                        continue
                    is_option = each.param_type_name == "option"
                    arguments += [each.opts[-1], given] if is_option else [given]
                more = MORE.get(" ".join(path), [])
                yield Call(path, (*arguments, *(more if odd.opts[-1] not in more[:1] else [])))


def fill(folder: Path) -> None:
    """The files that the values name."""
    (folder / "directory").mkdir()
    (folder / "bytes").write_bytes(bytes(range(256)))
    (folder / "empty").touch()
    (folder / "lines").write_text('{"a": 1}\n[1]\nnull\n"x"\n')
    (folder / "good.py").write_text(
        "from onceward import Onceward\napp = Onceward('shop')\n\n\n"
        "@app.consumer('sqlite:///orders.db')\ndef charge(order: dict) -> None: ...\n"
    )


def call(one: Call) -> Result:
    before = logging.getLogger().handlers[:]
    try:
        return CliRunner().invoke(
            app, [*one.path, *one.arguments], input="", env={"COLUMNS": "1000", "NO_COLOR": "1"}
        )
    finally:
        logging.getLogger().handlers[:] = before
        logging.captureWarnings(False)


def problem_with(result: Result) -> str | None:
    """What is wrong with how a command ended."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"raised {result.exception!r}"
    if "Traceback" in result.output:
        return "printed a traceback"
    if result.exit_code not in (0, 1, 2, 3):
        return f"ended with {result.exit_code}"
    if result.exit_code and not result.output.strip():
        return f"ended with {result.exit_code} and said nothing"
    if printable_lines(result.output) != result.output:
        return "printed control characters"
    return None
