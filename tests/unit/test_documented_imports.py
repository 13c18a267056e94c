"""What the documentation, the template and the demo import: promised names, from the root where it has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import onceward
from tests.support import ROOT
from tests.unit.test_public_api import NAMES

SOURCE = ROOT / "src" / "onceward"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEMPLATE = sorted((SOURCE / "cli" / "template").rglob("*.py.in"))
DEMO = sorted((SOURCE / "demo").glob("*.py"))

DOCUMENTED = {
    "onceward": ["telemetry", "testing"],
    "onceward.app.build": ["open_task"],
    "onceward.boundary.links.manager": ["LinkSettings", "Links"],
    "onceward.boundary.strategies": ["LatestPerKey", "OncePerId", "idempotent_outcome"],
    "onceward.boundary.tls": ["Tls"],
    "onceward.connectors.codec": ["decode", "encode_all"],
    "onceward.connectors.lease_rules": ["Bury", "LeaseRules"],
    "onceward.connectors.memory": ["MemoryConnector"],
    "onceward.deadletters.burial": ["burial_of"],
    "onceward.deadletters.source": ["WithDeadLetters"],
    "onceward.inbox": ["NOT_DONE"],
    "onceward.task.exceptions": ["NotSentException"],
    "onceward.telemetry": ["LogFields"],
    "onceward.testing.connectors": ["ConnectorConformance"],
    "onceward.testing.outcomes": ["check_idempotent_outcome"],
    "onceward.testing.servers": ["postgres_server", "redis_server"],
    "onceward.transaction": ["Settlement", "Verdict"],
    "onceward.verify": ["verify_consumer"],
    "onceward.web.fastapi": ["AppDatabase"],
}
"""Names that only the documentation promises. Every page runs in the tests, so they are where it says."""


class Import(NamedTuple):
    file: Path
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}: from {self.module} import {self.name}"


def imports(file: Path) -> Iterator[Import]:
    """Those that a reader sees: not what a page checks in a comment."""
    text = re.sub(r"<!--.*?-->", "", file.read_text("utf-8"), flags=re.DOTALL)
    for module, names in re.findall(
        r"^\s*from (onceward(?:\.\w+)*) import (\([^)]*\)|.*)$", text, re.MULTILINE
    ):
        for name in re.findall(r"(\w+)(?: as \w+)?", names.partition("#")[0]):
            yield Import(file, module, name)


@pytest.mark.parametrize("file", [*PAGES, *TEMPLATE, *DEMO], ids=lambda file: file.name)
def test_names_of_the_root_are_imported_from_there(file: Path) -> None:
    deep = [
        str(each) for each in imports(file) if each.module != "onceward" and each.name in onceward.__all__
    ]
    assert deep == []


def test_documentation_and_template_import_only_promised_names() -> None:
    # `onceward.connectors` promises its `__all__`, to packages that add a connector.
    from onceward import connectors

    promised = {(module, name) for names in (NAMES, DOCUMENTED) for module in names for name in names[module]}
    promised |= {("onceward.connectors", name) for name in connectors.__all__}
    found = {each[1:]: each for file in [*PAGES, *TEMPLATE] for each in imports(file)}
    assert [str(found[each]) for each in sorted(found.keys() - promised)] == []
    only_here = {(module, name) for module in DOCUMENTED for name in DOCUMENTED[module]}
    assert only_here - found.keys() == set(), "not in the documentation any more; remove it here"
