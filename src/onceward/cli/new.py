"""`onceward new`: a small working project to start from."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from onceward._secrets import mask_url
from onceward._text import printable
from onceward.cli.exit import MISUSED, argument, fail, option, reason_of
from onceward.cli.output import echo

NEW_EXAMPLES = """
Examples:

- `onceward new shop && cd shop && make test` to prove that nothing is charged twice

- `onceward new shop --dir services/shop` to create it elsewhere
"""

NEXT = """Created {name} in {target}. Next steps:

  cd {quoted}{local}
  make test      # proves that nothing is charged twice
  make orders    # places some orders
  make run       # charges them

See README.md for the rest."""

LOCAL = """
  export ONCEWARD={requirement}  # this one is not from an index"""

TEMPLATE = Path(__file__).parent / "template"
ENDING = ".in"
"""Suffix of template files, so no tool takes them for code of this package."""
NAMED_OTHERWISE = {"nats", "test"}
"""Modules that need not be installed, and that no list names: of nats-py, and the tests of Python itself."""


def new(
    name: Annotated[str, argument("NAME", "Name of the project and its Python package.")],
    directory: Annotated[
        Path | None, option("DIR", "A new or empty directory to create it in.", "--dir", show_default="NAME")
    ] = None,
) -> None:
    """Create a small project: a web service, a consumer with a contract and its proof, migrations, an image, CI.

    It runs on SQLite; one URL in its onceward.toml moves it to Redis. Dashboards and alert rules are there, too.

    Exit code: 0, or 2 for a name or a directory that cannot be used.
    """
    problem = _problem_with(name)
    if problem:
        fail(problem, as_json=False, code=MISUSED)
    target = directory or Path(name)
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(target)):
        fail(f"{target} is a URL, and not a directory; check --dir", as_json=False, code=MISUSED)
    try:
        if target.is_dir() and any(target.iterdir()):
            fail(
                f"{target} is not empty, and nothing in it was changed; choose another directory with --dir",
                as_json=False,
                code=MISUSED,
            )
        for path, text in _files(name):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text, "utf-8")
    except (OSError, ValueError) as error:
        fail(
            f"{target} cannot be used: {reason_of(error)}; choose another directory with --dir",
            as_json=False,
            code=MISUSED,
        )
    shown, quoted = printable(str(target)), printable(shlex.quote(str(target)))
    origin = _origin()
    local = LOCAL.format(requirement=shlex.quote(f"onceward @ {origin}")) if _is_local(origin) else ""
    echo(*NEXT.format(name=name, target=shown, quoted=quoted, local=local).split("\n"))


def _problem_with(name: str) -> str | None:
    """Why the name cannot be used for a package, with a better one; None if it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name, re.ASCII):
        name = mask_url(name)
        better = re.sub(r"[^a-z0-9]+", "_", name.lower(), flags=re.ASCII).strip("_")
        better = better if better[:1].isalpha() else f"app_{better}".rstrip("_")
        return (
            f"{name!r} cannot be the name of a Python package: use lowercase letters, digits and _, starting with a "
            f"letter; try {better}"
        )
    if keyword.iskeyword(name):
        return f"{name!r} is a Python keyword; try {name}_app"
    if name in sys.stdlib_module_names or name in _taken():
        return f"{name!r} would shadow another module; try {name}_app"
    return None


def _taken() -> set[str]:
    """The folders of a new project, and the modules that it or onceward may import, installed or not."""
    import tomllib
    from importlib.metadata import packages_distributions, requires

    project = tomllib.loads((TEMPLATE / f"pyproject.toml{ENDING}").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    required = [
        *(requires("onceward") or ()),
        *project["dependencies"],
        *(each for extra in extras for each in extra),
    ]
    modules = {re.split(r"[^\w.-]", each, maxsplit=1)[0].lower().replace("-", "_") for each in required}
    folders = {each.name for each in TEMPLATE.iterdir() if each.is_dir()} - {"package"}
    return modules | folders | NAMED_OTHERWISE | packages_distributions().keys()


def _files(name: str) -> Iterator[tuple[Path, str]]:
    hostname = name.replace("_", "-").strip("-")  # what images and Kubernetes allow
    words = {"@name@": name, "@hostname@": hostname, "@onceward@": _requirement()}
    for file in sorted(TEMPLATE.rglob(f"*{ENDING}")):
        text = file.read_text("utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        yield _place(file.relative_to(TEMPLATE), name), text


def _place(path: Path, name: str) -> Path:
    """`package/app.py.in` is NAME/app.py, and `dot-gitignore.in` is .gitignore."""
    parts = [name if part == "package" else part.replace("dot-", ".", 1) for part in path.parts]
    return Path(*parts).with_suffix("")


def _requirement() -> str:
    """The requirement that installs this onceward. Without its origin if that is a directory: others do not have it."""
    origin = _origin()
    return f"onceward @ {origin}" if origin and not _is_local(origin) else "onceward"


def _is_local(origin: str) -> bool:
    return re.match(r"(\w+\+)?file:", origin) is not None


def _origin() -> str:
    """The URL that this onceward was installed from; empty if from an index."""
    import json
    from importlib.metadata import distribution

    recorded = distribution("onceward").read_text("direct_url.json")
    if recorded is None:
        return ""
    origin = json.loads(recorded)
    vcs = origin.get("vcs_info")
    return f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else str(origin["url"])
