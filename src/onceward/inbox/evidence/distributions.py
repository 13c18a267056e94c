"""Installed distributions: which one a module comes from, and what identifies its content.

The content of a pure Python distribution is known from its RECORD, so a local package that never changes its version
is noticed. Compiled ones differ from machine to machine; their version has to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

PYTHON = "python"
ENGINE = ("onceward", "sqlalchemy")
DRIVERS = {"postgresql": ("psycopg",)}
"""By database kind. SQLite's comes with Python."""

_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_standard(spec: ModuleSpec) -> bool:
    """Whether a module belongs to Python itself."""
    places = places_of(spec)
    return not places or any(_is_in_standard(place) for place in places)


def _is_in_standard(place: Path) -> bool:
    return any(
        place.is_relative_to(root) and not any(part in _INSTALLED for part in place.relative_to(root).parts)
        for root in _STANDARD
    )


def places_of(spec: ModuleSpec) -> list[Path]:
    """Its file, or its folders; none if it is built in."""
    found = [spec.origin] if spec.has_location and spec.origin else [*(spec.submodule_search_locations or ())]
    return [Path(place).resolve() for place in found]


def distributions_of(name: str, spec: ModuleSpec) -> list[str]:
    """Return the distributions that have installed this module; none for source that is not installed, or editable."""
    named = _packages(_stamps()).get(name.partition(".")[0], ())
    return [each for each in dict.fromkeys(map(_plain, named)) if _has(each, spec, alone=len(named) == 1)]


def _has(name: str, spec: ModuleSpec, *, alone: bool) -> bool:
    found = _distribution(name)
    if found is None:
        return False
    root = Path(str(found.locate_file(""))).resolve()
    inside = [place.relative_to(root).as_posix() for place in places_of(spec) if place.is_relative_to(root)]
    if alone or not inside:
        return bool(inside)
    files = [str(each) for each in found.files or ()]  # they share a top-level name
    return any(file == place or file.startswith(f"{place}/") for place in inside for file in files)


def versions_in_use(packages: Iterable[str], backend: str) -> dict[str, str]:
    """Return what identifies each of these distributions, all that they require, and what runs every consumer.

    `python -O` is another Python: it leaves out the `assert` statements of a handler.
    """
    found = {PYTHON: "{}.{}".format(*sys.version_info) + ("", " -O", " -OO")[min(sys.flags.optimize, 2)]}
    todo = [*ENGINE, *DRIVERS.get(backend, ()), *packages]
    while todo:
        name = _plain(todo.pop())
        dist = _distribution(name)
        if name not in found and dist is not None:
            found[name] = _identity(dist)
            todo += [] if name in ENGINE else _requirements(dist)
    return dict(sorted(found.items()))


def _identity(dist: Distribution) -> str:
    record = dist.read_text("RECORD")
    pure = "Root-Is-Purelib: true" in (dist.read_text("WHEEL") or "")
    if record is None or not pure or _is_editable(dist):
        return dist.version
    rows = [line for line in record.splitlines() if ".py," in line and not line.startswith("..")]
    digest = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()
    return f"{dist.version} ({digest[:12]})"


def _is_editable(dist: Distribution) -> bool:
    try:
        return bool(json.loads(dist.read_text("direct_url.json") or "{}")["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):
        return False


def _requirements(dist: Distribution) -> list[str]:
    """The names of what it requires, without extras."""
    needed = (each.partition(";") for each in dist.requires or ())
    names = (_NAME.match(name) for name, _, marker in needed if "extra" not in marker)
    return [name[0] for name in names if name]


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _stamps() -> tuple[tuple[str, float], ...]:
    """Changes whenever something is installed. Other files do not count: the working directory is on the path, too, and
    SQLite creates and removes files there all the time."""
    return tuple(stamp for place in sys.path for stamp in _stamps_in(place or "."))


def _stamps_in(place: str) -> list[tuple[str, float]]:
    try:
        if not os.path.isdir(place):
            return [(place, os.stat(place).st_mtime)]
        with os.scandir(place) as entries:
            return [
                (each.path, each.stat().st_mtime)
                for each in entries
                if each.name.endswith((".dist-info", ".egg-info"))
            ]
    except OSError:
        return [(place, 0.0)]  # it does not exist, or is being changed


@lru_cache(2)
def _packages(_: tuple[tuple[str, float], ...]) -> Mapping[str, Sequence[str]]:
    """Distributions by top-level name. Takes a fifth of a second."""
    return packages_distributions()
