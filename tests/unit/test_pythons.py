"""The Pythons that we name are the ones that we test, and what breaks on later ones is seen on the oldest."""

from __future__ import annotations

import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import onceward

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAMED = [version for each in PROJECT["classifiers"] for version in re.findall(r"Python :: (3\.\d+)$", each)]


def test_every_place_names_the_same_versions() -> None:
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"tested on Linux with Python {NAMED[0]} to {NAMED[-1]}," in readme
    assert f"Python {NAMED[0]} or later." in readme
    assert PROJECT["requires-python"] == f">={NAMED[0]}"
    assert f"Python {NAMED[0]} or later" in (ROOT / "Makefile").read_text("utf-8")


def test_no_statement_has_numbered_placeholders() -> None:
    """With a sequence, sqlite3 of some Pythons warns of them or refuses them. Also of those that are put together."""
    names = [each.name for each in pkgutil.walk_packages(onceward.__path__, "onceward.")]
    found = [
        f"{name}.{constant}"
        for name in names
        if not name.endswith("__main__")
        for constant, value in vars(importlib.import_module(name)).items()
        if isinstance(value, str) and re.search(r"\?\d", value)
    ]
    assert found == []
    sources = [path for name in ("src", "bench", "tests") for path in (ROOT / name).rglob("*.py")]
    assert [path for path in sources if re.search(r"VALUES \(\?\d|= \?\d", path.read_text("utf-8"))] == []
