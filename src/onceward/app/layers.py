"""The places that settings are read from: code, files, secrets, .env and the environment."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from onceward.errors import ConfigurationError

PREFIX = "ONCEWARD_"
SECRETS_DIR = "ONCEWARD_SECRETS_DIR"
"""Names a directory with a file for each secret, as Docker and Kubernetes mount them."""
FOREIGN = ("ONCEWARD_TEST_", "ONCEWARD_BOUNDARY_", "ONCEWARD_TRACE_", "ONCEWARD_SIGNING_KEY", SECRETS_DIR)
"""Variables that belong to other parts of onceward."""
INJECTED = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT(_\d+_\w+)?$")
"""Variables that Kubernetes adds to every container for a service named onceward-something."""


class Layer(NamedTuple):
    origin: str
    values: dict[str, Any]
    of_variable: bool = False
    """Whether a variable's name says which setting it is: without capitals and hyphens."""


def layers(keywords: Mapping[str, Any], environ: Mapping[str, str], directory: Path) -> Iterator[Layer]:
    """From the weakest to the strongest."""
    given = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in keywords.items()
        if value is not None
    }
    yield Layer("keyword", given)
    yield from _tables(directory)
    dotenv = _dotenv(directory / ".env")
    secrets_dir = environ.get(SECRETS_DIR) or dotenv.get(SECRETS_DIR)
    if secrets_dir:
        yield from _secrets(directory / secrets_dir)
    yield from _variables(dotenv, ".env: ")
    yield from _variables(environ)


def _variables(variables: Mapping[str, str], place: str = "") -> Iterator[Layer]:
    for name, text in variables.items():
        if name.startswith(PREFIX) and not name.startswith(FOREIGN) and not INJECTED.search(name):
            yield _variable(f"{place}{name}", name, text)


def _variable(origin: str, name: str, text: str) -> Layer:
    """Each variable is read alone, because pydantic-settings does not tell which one a value came from."""
    from onceward._variables import Variables
    from onceward.app.settings import AppSettings

    values = Variables(AppSettings, {name.removeprefix(PREFIX): text})()
    return Layer(origin, values, of_variable=True)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────


def _tables(directory: Path) -> Iterator[Layer]:
    project, own = _toml(directory / "pyproject.toml"), _toml(directory / "onceward.toml")
    tools = project.get("tool", {})
    section = tools.get("onceward", {}) if isinstance(tools, dict) else {}
    if not isinstance(section, dict):
        raise ConfigurationError("pyproject.toml: tool.onceward is not a table; write [tool.onceward]")
    yield Layer("pyproject.toml", section)
    yield Layer("onceward.toml", own)


def _toml(file: Path) -> dict[str, Any]:
    if not _is_there(file):
        return {}
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None


def _dotenv(file: Path) -> dict[str, str]:
    """The variables of a .env file. Only settings are taken from it; the process's environment stays as it is."""
    if not _is_there(file):
        return {}
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    text = _text(file)
    for binding in parse_stream(StringIO(text)):
        if binding.error:
            before, written = binding.original.line, binding.original.string
            line = before + written[: len(written) - len(written.lstrip())].count("\n")
            raise ConfigurationError(f"{file}, line {line}: not a variable; write NAME=value")
    found = dotenv_values(stream=StringIO(text))
    return {name: value for name, value in found.items() if value is not None}


def _secrets(directory: Path) -> Iterator[Layer]:
    """One setting from each file whose name is that of a variable, in capitals or not."""
    try:
        files = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigurationError(f"{SECRETS_DIR}: {directory} cannot be read: {error.strerror}") from None
    for file in files:
        name = file.name.upper()
        if name.startswith(PREFIX) and not name.startswith(FOREIGN) and _is_there(file):
            yield _variable(str(file), name, _text(file).strip())


def _is_there(file: Path) -> bool:
    """Whether there is such a file. A directory in its place is an error, but .env may be a virtual environment."""
    if file.is_dir() and not (file / "pyvenv.cfg").exists():
        raise ConfigurationError(f"{file} is a directory, not a file")
    return file.is_file()


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
