"""Every behaviour test takes `world` and so runs twice, in threads and in asyncio, from one text.

Also here: the bookkeeping of which requirement lines passed, for test_traceability.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from onceward.testing import servers
from tests.world import World

CLAIMED = pytest.StashKey[set[str]]()
PASSED = pytest.StashKey[set[str]]()
WHOLE_SUITE = pytest.StashKey[bool]()


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param) as made:
        yield made


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis for the whole run. Tests use keys of their own."""
    with servers.redis_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL for the whole run, as a SQLAlchemy URL. Tests use tables of their own."""
    with servers.postgres_server() as server:
        yield server.url.replace("postgresql://", "postgresql+psycopg://", 1)


def pytest_configure(config: pytest.Config) -> None:
    # A suite that is run in the background inherits an ignored SIGINT, and hands it on to its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[CLAIMED] = set()
    config.stash[PASSED] = set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        config.stash[CLAIMED].update(_claims(item))
    selects = config.option.keyword or config.option.markexpr or config.option.deselect
    config.stash[WHOLE_SUITE] = config.args == config.getini("testpaths") and not selects
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[PASSED].update(_claims(item))
    return report


def _claims(item: pytest.Item) -> set[str]:
    return {id_ for marker in item.iter_markers("req") for id_ in marker.args}
