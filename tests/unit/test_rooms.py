"""The rooms of the house: the packages right below `onceward`, and the modules beside them, which are one more.

No room uses private names of another. Folders and files stay small, file names are nouns, and a class name says which
class. Each list of exceptions only shrinks: an entry that is not needed any more is an error.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

SOURCE = ROOT / "src" / "onceward"
GENERATED = SOURCE / "boundary" / "v1"
MOST_FILES = 18
P90_LINES = 320
MOST_LINES = 460
NOUNS = {"sequencing.py", "upcasting.py"}
"""They end as participles do, and are what users of the domain say."""

BESIDE = "the modules beside the rooms"
LIBRARY = "a library"
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public, for all their underscores."""

PRIVATE_USES: set[str] = set()
"""Files with the private names of other rooms that they use."""
PARTICIPLES: set[str] = set()
"""Files that are still named by a participle."""
SAME_NAMES: set[str] = {
    "Report",  # of a call, and of a verification: both are public
}
"""Class names of which there are several."""


class Module(NamedTuple):
    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def room(self) -> str:
        return room_of(self.path.relative_to(SOURCE).parts)


def own_files() -> list[Path]:
    """All but what is generated, and what `onceward new` copies."""
    return sorted(
        path
        for path in SOURCE.rglob("*.py")
        if GENERATED not in path.parents and "template" not in path.parts
    )


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return [Module(path, ast.parse(path.read_text())) for path in own_files()]


# ── private names ───────────────────────────────────────────────────────────────────────────────────────


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def definitions(tree: ast.AST) -> Iterator[str]:
    """The private names that a module gives to something: functions, classes, variables, attributes, slots."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.Constant(value=str(name)) if name.isidentifier():  # in __slots__
                yield name


def room_of(parts: Sequence[str]) -> str:
    """Of a module, by the parts of its name after `onceward`."""
    return parts[0] if parts and (SOURCE / parts[0]).is_dir() else BESIDE


def uses(module: Module) -> Iterator[tuple[str, str | None, str]]:
    """Private names of something that is not `self`: the name, the room that its owner is from if the imports and
    annotations of this module say so, and how it is written."""
    rooms = dict(imported_rooms(module.tree))
    rooms = {**annotated_rooms(module.tree, rooms), **rooms}
    for node in ast.walk(module.tree):
        match node:
            case ast.ImportFrom(module=str(source), names=names) if source.startswith("onceward."):
                for each in names:
                    if is_private(each.name):
                        yield each.name, room_of(source.split(".")[1:]), f"from {source} import {each.name}"
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(value=owner, attr=name) if is_private(name) and name not in OF_NAMED_TUPLES:
                yield name, rooms.get(ast.unparse(owner)), ast.unparse(node)


def imported_rooms(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that are imported, and the rooms they are from; a library is a room, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname or each.name, LIBRARY) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module != "typing":  # Any says nothing
            [package, *more] = str(node.module).split(".")
            for each in node.names:
                yield each.asname or each.name, room_of(more) if package == "onceward" else LIBRARY


def annotated_rooms(tree: ast.AST, rooms: dict[str, str]) -> dict[str, str]:
    """The rooms of arguments by their annotations, and of attributes that an argument is assigned to."""
    found = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.arg)
            and isinstance(node.annotation, ast.Name)
            and node.annotation.id in rooms
        ):
            found[node.arg] = rooms[node.annotation.id]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
            found.update((ast.unparse(target), found[node.value.id]) for target in node.targets)
    return found


def private_uses(modules: list[Module]) -> set[str]:
    """Where the owner is known to be from another room, and where no class or module of this room has such a name."""
    defined: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in filter(is_private, definitions(module.tree)):
            defined[name].add(module.room)
    return {
        f"{module.name}: {expression}"
        for module in modules
        for name, room, expression in uses(module)
        if (
            room not in (module.room, LIBRARY) if room else defined[name] and module.room not in defined[name]
        )
    }


def check(found: set[str], known: set[str], what: str) -> None:
    """What is found is known, and what is known is still found."""
    new, over = sorted(found - known), sorted(known - found)
    assert not new, "\n".join([f"{what}:", *new])
    assert not over, "\n".join(["no longer so; remove from the list in this file:", *over])


def test_no_room_uses_private_names_of_another(modules: list[Module]) -> None:
    check(private_uses(modules), PRIVATE_USES, "private names of another room; give it a public one for this")


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("from onceward.inbox.x import _hidden", True),
        ("from onceward.cli.y import _hidden", False),
        ("from onceward.inbox import x\nx._other", True),
        ("import os\nos._exit(1)", False),
        ("def f(a): a._hidden", True),
        ("def f(a): a.b._hidden", True),
        ("def f(a): a._unknown", False),
        ("def f(a): a._replace(x=1)", False),
        ("class A:\n    _hidden = 1\n    def f(self, a): a._hidden", False),
        ("class A:\n    def f(self): self._hidden", False),
        ("from onceward.inbox.x import X\nclass A:\n    _hidden = 1\n    def f(self, a: X): a._hidden", True),
        (
            "from onceward.inbox.x import X\nclass A:\n    _hidden = 1\n"
            "    def __init__(self, a: X): self.a = a\n    def f(self): self.a._hidden",
            True,
        ),
    ],
)
def test_how_private_uses_are_found(code: str, is_found: bool) -> None:
    owner = Module(SOURCE / "inbox" / "x.py", ast.parse("class X:\n    def _hidden(self): ...\n_other = 1"))
    user = Module(SOURCE / "cli" / "y.py", ast.parse(code))
    assert bool(private_uses([owner, user])) == is_found


# ── files and classes ───────────────────────────────────────────────────────────────────────────────────


def test_a_class_name_says_which_class(modules: list[Module]) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    found = {name for name, files in places.items() if len(files) > 1}
    new = {f"{name}: {', '.join(places[name])}" for name in found - SAME_NAMES}
    check(new | (found & SAME_NAMES), SAME_NAMES, "classes of the same name")


def test_file_names_are_nouns() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in [*own_files(), *(ROOT / "tests").rglob("*.py")]
        if re.search(r"(ing|ed)\.py$", path.name) and path.name.removeprefix("test_") not in NOUNS
    }
    check(found, PARTICIPLES, "file names that say what is done, not what it is")


def test_no_folder_has_too_many_files() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in own_files():
        counts[path.parent.relative_to(SOURCE).as_posix()] += 1
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_files_are_short() -> None:
    lines = sorted(
        (len(path.read_text().splitlines()), path.relative_to(SOURCE).as_posix()) for path in own_files()
    )
    assert [each for each in lines if each[0] > MOST_LINES] == []
    ninth_of_ten = lines[len(lines) * 9 // 10]
    assert ninth_of_ten[0] <= P90_LINES, f"split some of {lines[len(lines) * 9 // 10 :]}"
