"""Fixtures of the whole suite. Behavior tests take `world`, so the same code runs twice: in threads and in asyncio.

Also records which requirements passed, and fails the suite if one that should pass did not.
"""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from onceward.testing import servers
from spec import conformance
from tests.support.schema import keeping_a_connection
from tests.support.world import World

TERMINAL = (
    "COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH",
    "TTY_COMPATIBLE", "TTY_INTERACTIVE",
)  # fmt: skip
for each in TERMINAL:
    os.environ.pop(each, None)
# It keeps what it finds in the environment when it is imported: in the middle of a test, that would be the test's own.
import_module("typer.rich_utils")

# Modules ask for these as plugins; others may import them before.
pytest.register_assert_rewrite("tests.support.databases", "tests.support.deadletters.site")

REQUIREMENT = "requirement"
TESTS = Path(__file__).parent
CORNERS = {"sqlite", "postgresql", "threads", "asyncio"}
MODES = ("threads", "asyncio")
DATABASES = ("sqlite", "postgresql")
TWIN = re.compile(r"\bAsync(?=[A-Z])|_async\b")
"""What the name of an asyncio class or function has, and that of its blocking twin has not."""
OF_PARTS = [TESTS / "crash", TESTS / "integration"]
"""Tests of parts together, which start processes or wait. Each part has tests of its own, in both modes and on both
databases: tests/unit and tests/conformance."""
USUAL = "not long"
"""The tests of `make test`, as an expression of marks: `addopts` in pyproject.toml."""

# A busy machine is slow, which is not a failure. `make test` draws the same examples every time, so only a change can
# fail it; `make soak` asks for the profile that explores, and draws more.
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True, max_examples=25)
settings.load_profile("suite")


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param) as made:
        yield made


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A real Valkey for the whole run, or the Redis that `every_redis` asks for. Tests use their own keys."""
    with servers.redis_server(oldest=getattr(request, "param", False)) as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL for the whole run, as a SQLAlchemy URL. Tests use their own tables."""
    # After a slow claim, messages that came back wait a little. On a busy machine any claim may be slow.
    import_module("onceward.connectors.postgresql.store").SLOW = inf
    with servers.postgres_server() as server:
        url = server.url.replace("postgresql://", "postgresql+psycopg://", 1)
        with keeping_a_connection(url):
            yield url


def pytest_configure(config: pytest.Config) -> None:
    # A suite that runs in the background inherits an ignored SIGINT, and passes it on to its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Traceability(config), "onceward-traceability")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_left_out(item)]
    for others in (
        _other_corners,
        _other_halves,
        _other_twins,
        _other_cases,
    ):  # each looks at what those before leave
        for item in list(others(items)):
            item.add_marker("long")
    if not any("::" in argument for argument in config.args):  # otherwise these may be some cases of a test
        _check_usual_cases(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    report = yield
    # Travels with the report from the process that ran the test to the one that reports the totals.
    report.user_properties.extend((REQUIREMENT, id_) for id_ in sorted(_claims(item)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    result = yield
    item._report_sections.clear()  # they are in the report
    return result


def _is_left_out(item: pytest.Item) -> bool:
    """Whether the item has all the parameters in a `without` of its test: such a case proves nothing."""
    return any(_parameters(item).issuperset(marker.args) for marker in item.iter_markers("without"))


def _other_corners(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of integration tests in four corners, databases times modes: all but one, so each has about a quarter of them.

    The tests of sessions in `tests/unit/db` stay in all four.
    """
    found: defaultdict[tuple[str, ...], dict[tuple[str, ...], pytest.Item]] = defaultdict(dict)
    for item in items:
        parameters = _parameters(item)
        corner = CORNERS & parameters
        if len(corner) == 2 and item.path.is_relative_to(TESTS / "integration"):
            test = (item.nodeid.partition("[")[0], *sorted(parameters - CORNERS))
            found[test][tuple(sorted(corner))] = item
    for test, by_corner in found.items():
        if len(by_corner) == 4:
            kept = sorted(by_corner)[crc32("".join(test).encode()) % 4]
            yield from (item for corner, item in by_corner.items() if corner != kept)


def _other_halves(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests of parts in two modes, or on two databases: one of the two, so about half of them keep each."""
    left_out: set[pytest.Item] = set()
    for either in (MODES, DATABASES):
        found: defaultdict[tuple[str, ...], dict[str, pytest.Item]] = defaultdict(dict)
        for item in items:
            parameters = _parameters(item)
            which = next((each for each in either if each in parameters), None)
            if which and item not in left_out and _is_usual_of_parts(item):
                test = (item.nodeid.partition("[")[0], *sorted(parameters - set(either)))
                found[test][which] = item
        left_out.update(
            by_which[either[crc32("".join(test).encode()) % 2]]
            for test, by_which in found.items()
            if len(by_which) == 2
        )
    yield from left_out


def _other_twins(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests of parts with a blocking class or function and with its asyncio twin, by their names: one of the two."""
    found: defaultdict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        parameters = _parameters(item)
        if parameters and not parameters & {*MODES} and _is_usual_of_parts(item):
            alike = (TWIN.sub("", each) for each in parameters)
            found[item.nodeid.partition("[")[0], *sorted(alike)].append(item)
    for test, twins in found.items():
        if len(twins) == 2 and len({bool(TWIN.search(item.name)) for item in twins}) == 2:
            yield twins[crc32("".join(test).encode()) % 2]


def _other_cases(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests that name their usual cases: all others."""
    for item in items:
        usual = item.get_closest_marker("usual")
        if usual and not any(_is_case(item, name) for name in usual.args):
            yield item


def _check_usual_cases(items: list[pytest.Item]) -> None:
    """A name that is not one of a case, or only of cases that other rules leave out, could leave out the whole test."""
    found: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("usual"):
            found[item.nodeid.partition("[")[0]].append(item)
    for test, cases in found.items():
        for name in next(cases[0].iter_markers("usual")).args:
            if not any(_is_case(item, name) for item in cases):
                raise pytest.UsageError(f"{test} has no case {name!r}, which `usual` names")
        if all(item.get_closest_marker("long") for item in cases):
            raise pytest.UsageError(f"{test} has no case left: all that `usual` names are long")


def _is_case(item: pytest.Item, name: str) -> bool:
    """Whether the name is the parameters of this case, or some of them that are next to each other."""
    return f"-{name}-" in f"-{_case(item)}-"


def _is_usual_of_parts(item: pytest.Item) -> bool:
    return not item.get_closest_marker("long") and any(map(item.path.is_relative_to, OF_PARTS))


def _parameters(item: pytest.Item) -> set[str]:
    return set(_case(item).split("-")) if hasattr(item, "callspec") else set()


def _case(item: pytest.Item) -> str:
    return str(item.callspec.id) if hasattr(item, "callspec") else ""


def _claims(item: pytest.Item) -> set[str]:
    return {id_ for marker in item.iter_markers("req") for id_ in marker.args}


class Traceability:
    """At the end of the suite, fail if a requirement that is not pending has no test that passed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.update(str(id_) for name, id_ in report.user_properties if name == REQUIREMENT)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_whole_suite() and session.exitstatus == pytest.ExitCode.OK and self.unproven():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._is_whole_suite() and (unproven := self.unproven()):
            terminalreporter.section("requirement lines without a passing test", red=True)
            terminalreporter.line(", ".join(unproven))

    def unproven(self) -> list[str]:
        known = {id_ for entries in conformance.requirements().values() for id_ in entries}
        return sorted(known - conformance.pending() - self._passed)

    def _is_whole_suite(self) -> bool:
        config = self._config
        if hasattr(config, "workerinput"):
            return False  # one of several processes; the one that started them reports the totals
        selects = config.option.keyword or config.option.markexpr != USUAL or config.option.deselect
        return config.args == config.getini("testpaths") and not selects and not config.option.collectonly
