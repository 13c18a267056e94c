"""Runs a page of the documentation from top to bottom: `python -m tests.integration.docs.page PAGE`.

It runs in the current directory, with a real server for every address in REPLACED. The blocks of a page:

    ```python                       runs after the blocks above it, in one namespace; functions test_… are called, and
                                    the comment behind a print(…) must be its output
    ```python title="shop.py"       is written to that file, like toml and every other block with a title
    ```diff title="shop.py"         changes lines of that file
    ```console                      if the page contains COMMANDS_RUN, `$` commands run and must print the lines below;
                                    … matches anything
    <!-- python                     runs, but is hidden from readers: a block's setup, or a check after it
    <!-- not run: reason -->        the next block does not run
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from packaging.requirements import Requirement

REPLACED = "DOCS_REPLACED"
"""A variable with JSON: replacements for addresses in the page."""
COMMANDS_RUN = "<!-- commands are run -->"

BLOCK = re.compile(
    r"^(?P<not_run><!-- not run: [^\n]+ -->\n+)?"
    r"(?:^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^ *```$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    line: int
    """The line of the page where its code begins."""
    language: str
    title: str | None
    text: str
    runs: bool


def blocks(page: str) -> Iterator[Block]:
    for found in BLOCK.finditer(page):
        hidden = found["hidden"]
        text = found["text"] if hidden is None else hidden
        line = page.count("\n", 0, found.start("text" if hidden is None else "hidden"))
        language = found["language"] or "python"
        yield Block(line, language, found["title"], textwrap.dedent(text), found["not_run"] is None)


class Run:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._page = path.read_text("utf-8")
        module = sys.modules["page"] = ModuleType("page")
        self._names = vars(module)
        self._loop = asyncio.Runner()

    def all(self) -> None:
        with self._loop:
            for block in blocks(replaced(self._page)):
                do = self._how(block)
                if do is not None and block.runs:
                    do(block)

    def _how(self, block: Block) -> Callable[[Block], None] | None:
        if block.title is not None:
            return self._change if block.language == "diff" else self._write
        if block.language == "python":
            return self._execute
        return self._type if block.language == "console" and COMMANDS_RUN in self._page else None

    def _write(self, block: Block) -> None:
        assert block.title is not None
        Path(block.title).write_text(block.text, "utf-8")

    def _change(self, block: Block) -> None:
        assert block.title is not None
        old, new = ("".join(re.findall(rf"^\{sign}(.*\n)", block.text, re.MULTILINE)) for sign in "-+")
        file = Path(block.title)
        before = file.read_text("utf-8")
        assert before.count(old) == 1, f"{block.title} has not once what line {block.line} removes"
        file.write_text(before.replace(old, new), "utf-8")

    def _execute(self, block: Block) -> None:
        code = compile(
            "\n" * block.line + block.text, self._path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        known, printed = set(self._names), io.StringIO()
        with redirect_stdout(printed):
            result = eval(code, self._names)
            if inspect.iscoroutine(result):
                self._loop.run(result)
            for name in [name for name in self._names if name not in known and name.startswith("test_")]:
                self._names[name]()
        for promised in re.findall(r"^ *print\(.*\)  # (.*)$", block.text, re.MULTILINE):
            lines = printed.getvalue().splitlines()
            assert promised in lines, f"the block at line {block.line} prints {lines}, and not {promised!r}"

    def _type(self, block: Block) -> None:
        for command, promised in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
            if command.startswith("pip install "):
                check_installed(command)
                continue
            done = subprocess.run(
                ["sh", "-c", command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            reported = f"$ {command}\n{done.stdout}"
            assert done.returncode == 0, reported
            assert re.fullmatch(pattern(promised), squeezed(done.stdout)), f"{reported}\nand not\n{promised}"


def replaced(page: str) -> str:
    for address, real in json.loads(os.environ[REPLACED]).items():
        page = re.sub(address, real, page)
    return page


def squeezed(output: str) -> str:
    """The width of a table depends on its contents."""
    lines = (" ".join(re.sub("[─━]+", "─", line).split()) for line in output.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def pattern(promised: str) -> str:
    lines = re.escape(squeezed(promised)).split("\\\n")
    return "".join("(?:.*\n)*?" if line == "…" else line.replace("…", ".*") + "\n" for line in lines[:-1])


def check_installed(command: str) -> None:
    """It is installed here already, from a clone; check that its extras name what the page needs."""
    requirement = Requirement(command.removeprefix("pip install ").strip("'"))
    known = metadata(requirement.name).get_all("Provides-Extra") or []
    assert requirement.extras <= set(known), f"{requirement} names an extra that there is not"


def main() -> None:
    Run(Path(sys.argv[1])).all()


if __name__ == "__main__":
    main()
