"""What we depend on: young packages have an upper bound, and the hashed list has the pinned versions."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support import ROOT

PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def pinned(file: str) -> dict[str, str]:
    return {canonicalize_name(name): found for name, found in PINNED.findall((ROOT / file).read_text())}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = chain(project["dependencies"], *project["optional-dependencies"].values())
    return [each for each in map(Requirement, texts) if each.name != "onceward"]


@pytest.mark.req("ST-03")
def test_a_package_before_its_version_1_has_an_upper_bound() -> None:
    versions = pinned("constraints.txt")
    unbounded = {
        each.name
        for each in declared()
        if Version(versions.get(canonicalize_name(each.name), "1")) < Version("1")
        and not any(bound.operator in ("<", "<=", "~=", "==") for bound in each.specifier)
    }
    assert unbounded == set()


@pytest.mark.req("ST-03")
def test_what_is_installed_is_within_the_bounds() -> None:
    outside = []
    for each in declared():
        try:
            found = version(each.name)
        except PackageNotFoundError:  # an extra that the tests do not need, or another platform
            continue
        if not each.specifier.contains(found, prereleases=True):
            outside.append(f"{each} but {found} is installed")
    assert outside == []


@pytest.mark.req("ST-03")
def test_the_hashed_list_has_the_pinned_versions_one_hash_each_and_names_no_registry() -> None:
    text = (ROOT / "constraints.hashed.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert "://" not in text
    versions = pinned("constraints.txt")
    differs = {
        name for name, found in pinned("constraints.hashed.txt").items() if versions.get(name) != found
    }
    assert differs == set()
