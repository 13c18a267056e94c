"""The documentation is true: every Python block runs, and so do the first steps of a new user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text

from onceward.testing.servers import nats_server, redis_server
from spec import cli_reference
from tests.integration.docs.page import COMMANDS_RUN, REPLACED, blocks
from tests.support import ROOT, commands
from tests.support.boundary.server import boundary_server
from tests.unit.test_public_api import NAMES

DOCS = ROOT / "docs"
PAGES = [
    page
    for page in [ROOT / "README.md", DOCS / "llms.txt", *sorted(DOCS.rglob("*.md"))]
    if any(block.language == "python" for block in blocks(page.read_text("utf-8")))
]
REDIS = r"(?<=redis://)localhost:6379"
NATS = r"(?<=nats://)localhost:4222"
BOUNDARY = r"(?<=http://)127\.0\.0\.1:7700"
POSTGRESQL = r"(?<=://)\w+@localhost/\w+"
POSTGRESQL_QUEUE = rf"{POSTGRESQL}/(\w+)"
"""Replaced first: it contains the other."""
REFERENCE = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))


class PageRunner:
    """An empty directory, and servers for the addresses in a page."""

    def __init__(self, directory: Path, request: pytest.FixtureRequest) -> None:
        self.directory = directory
        self._request = request
        self._running = ExitStack()
        self._database: str | None = None

    def run(self, page: Path) -> None:
        found = page.read_text("utf-8")
        ways = {
            REDIS: self._redis,
            NATS: self._nats,
            BOUNDARY: self._boundary,
            POSTGRESQL_QUEUE: self._postgresql_queue,
            POSTGRESQL: self._postgresql,
        }
        real = {address: start() for address, start in ways.items() if re.search(address, found)}
        foreign = ("ONCEWARD_", "OTEL_", "PYTEST_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment |= {REPLACED: json.dumps(real), "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        done = commands.program(
            "tests.integration.docs.page:main",
            "page",
            str(page),
            cwd=self.directory,
            env=environment,
            strict=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _redis(self) -> str:
        """A new server each time: pages use stream names that other pages may use, too."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("ONCEWARD_TEST_REDIS_URL", raising=False)
            return _host(self._running.enter_context(redis_server()).url)

    def _nats(self) -> str:
        return _host(self._running.enter_context(nats_server(durable=True)).url)

    def _boundary(self) -> str:
        return _host(self._running.enter_context(boundary_server(self.directory / "boundary")))

    def _postgresql_queue(self) -> str:
        database, _, settings = self._postgresql().partition("?")
        return rf"{database}/\1?{settings}"

    def _postgresql(self) -> str:
        if self._database is None:
            self._database = self._create_database()
        return self._database

    def _create_database(self) -> str:
        name = f"docs_{uuid4().hex[:8]}"
        engine = create_engine(self._request.getfixturevalue("postgres_url"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        url = engine.url.set(database=name).render_as_string(hide_password=False)
        return url.partition("://")[2]

    def close(self) -> None:
        self._running.close()


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PageRunner]:
    made = PageRunner(tmp_path, request)
    yield made
    made.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_the_page_run_as_they_stand(page: Path, site: PageRunner) -> None:
    site.run(page)


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```python\n1 / 0\n```\n", 'page.md", line 2'),
        ("```python\nprint(2)  # 3\n```\n", "prints ['2'], and not '3'"),
        ("```python\ndef test_it():\n    assert False\n```\n", "in test_it"),
        (f"{COMMANDS_RUN}\n\n```console\n$ echo two\nthree\n```\n", "$ echo two"),
        (f"{COMMANDS_RUN}\n\n```console\n$ exit 1\n```\n", "$ exit 1"),
        (
            f"{COMMANDS_RUN}\n\n```console\n$ pip install 'onceward[no]'\n```\n",
            "names an extra that there is not",
        ),
    ],
)
def test_a_page_that_is_not_true_is_found_out(page: str, problem: str, site: PageRunner) -> None:
    file = site.directory / "page.md"
    file.write_text(page)
    with pytest.raises(AssertionError, match=re.escape(problem)):
        site.run(file)


@pytest.mark.parametrize("module", NAMES)
def test_the_reference_has_every_public_name(module: str) -> None:
    found = re.search(
        rf"^::: {re.escape(module)}\n(?:    options:\n)?((?:      .*\n)*)", REFERENCE, re.MULTILINE
    )
    assert found is not None, f"docs/reference has no page for {module}"
    only = re.search(r"members: \[(.*)\]", found[1])
    assert only is None or set(NAMES[module]) <= set(only[1].split(", "))


def test_every_command_states_its_exit_codes() -> None:
    found = [command for command in cli_reference.commands() if not command.is_group]
    assert len(found) > 40
    assert [command.path for command in found if "0" not in dict(command.exit_codes)] == []
    assert set(cli_reference.EXIT_CODES) <= {command.path for command in found}


def test_the_command_reference_is_up_to_date_in_every_environment(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "spec" / "cli_reference.py"), "--check"]
    terminal = {"COLUMNS": "40", "FORCE_COLOR": "1"}
    settings = {"ONCEWARD_DATABASE": "sqlite:///other.db", "ONCEWARD_BOUNDARY_URL": "http://other:1"}
    for changed in ({}, terminal, settings):
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **changed}, check=True)


def test_llms_txt_names_pages_that_there_are() -> None:
    pages = re.findall(r"\]\(([^)]+)/\)", (DOCS / "llms.txt").read_text("utf-8"))
    assert len(pages) > 20
    assert [page for page in pages if not (DOCS / f"{page}.md").is_file()] == []


def test_few_blocks_are_not_run() -> None:
    left_out = [
        page.name for page in PAGES for block in blocks(page.read_text("utf-8"))
        if block.language == "python" and not block.runs
    ]  # fmt: skip
    # Those for Django need a project of Django: `tests/integration/web/test_django.py` runs them in one.
    assert left_out == ["migrate-celery.md", "outbox-django.md", "outbox-django.md"]
