"""A plugin of pytest: a process of the suite collects a file when it runs it, and names only files before that.

With xdist, each process would otherwise import and collect the whole suite before its first test, which takes time for
each, and memory that every fork copies.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.support import ROOT

FIRST = (ROOT / "tests/integration/verify", ROOT / "tests/browser")
"""Their tests take long, or fork often: a fork costs more the larger the process is, and a process of the suite grows.
The others follow in the order of their names, so the many short tests of `unit` are the last."""


class WholeFile(pytest.Item):
    """All tests of a file, as one item."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_marker(pytest.mark.timeout(0))  # each of its tests has its own

    def runtest(self) -> None:
        """The file has tests to run, or nothing."""

    def run(self, following: pytest.Item | None) -> None:
        tests = self._collect()
        place = self.session.items.index(self)
        for test, after in zip_longest(tests, tests[1:], fillvalue=following):
            self.session.items[place] = test  # xdist compares a report with the item that it sent
            self.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
            if self.session.shouldfail or self.session.shouldstop:
                break
        self.session.items[place] = self
        if not tests:  # what the file before it shares with this one, but not with the next, ends here
            _run(self, following)

    def _collect(self) -> list[pytest.Item]:
        gc.disable()  # a fifth of the time, and nothing of it is garbage
        try:
            module: pytest.Module = pytest.Module.from_parent(self.parent, path=self.path)
            tests = list(self.session.genitems(module))
            self.config.hook.pytest_collection_modifyitems(
                session=self.session, config=self.config, items=tests
            )
        finally:
            gc.enable()
            gc.freeze()  # so collections during the tests do not walk over what stays
        return tests


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Item:
    name = module_path.relative_to(parent.config.rootpath).as_posix()
    made: pytest.Item = WholeFile.from_parent(parent, name=name, nodeid=name, path=module_path)
    return made


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    files = [item for item in items if isinstance(item, WholeFile)]
    items[:] = [item for item in items if not isinstance(item, WholeFile)]
    yield  # whether a test is selected, its file shows when it is collected
    items[:0] = sorted(files, key=lambda file: not any(map(file.path.is_relative_to, FIRST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    if isinstance(item, WholeFile):
        item.run(nextitem)
    else:
        _run(item, nextitem)
    return True


def _run(item: pytest.Item, following: pytest.Item | None) -> None:
    """Of a test that passes, report one of five events: each takes time here, and in the process that counts them."""
    for report in runtestprotocol(item, log=False, nextitem=following):
        if not report.passed or (report.when == "call" and not isinstance(item, WholeFile)):
            item.ihook.pytest_runtest_logreport(report=report)
