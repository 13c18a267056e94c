"""Finding what a command names in somebody's code."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def import_name(path: str) -> Any:
    """What `module:name` names. The working directory counts, as it does for `python -m`."""
    from onceward.errors import ConfigurationError

    module, _, name = path.partition(":")
    if not name or not module:
        raise ConfigurationError(
            f"{path!r} names nothing in a module; write MODULE:NAME, as in shop.billing:Bill"
        )
    if "/" in module or module.endswith(".py"):
        name_of_module = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ConfigurationError(f"{module} is a file; write its module: {name_of_module}:{name}")
    found: Any = _imported(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{module} has no {name}")
        found = getattr(found, part)
    return found


def _imported(module: str) -> ModuleType:
    from onceward.errors import ConfigurationError

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"{module} cannot be imported: there is no module {error.name!r} in {here}, nor among the installed "
                "packages; mend the name, or run this where the module is"
            ) from None
        raise ConfigurationError(f"{module} cannot be imported: {error}{_where(error)}") from None
    except ImportError as error:
        raise ConfigurationError(f"{module} cannot be imported: {error}{_where(error)}") from None


def _where(error: ImportError) -> str:
    """The line of somebody's code that could not import something."""
    ours = (__file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each for each in frames if each.filename not in ours and Path(each.filename).is_file()]
    return f"; see {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
