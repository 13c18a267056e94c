"""Finding what the command line names in somebody's code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def loaded(path: str) -> Any:
    """What `module:name` names. The working directory counts, as it does for `python -m`."""
    from onceward.task.exceptions import ConfigurationError

    module, _, name = path.partition(":")
    if not name:
        raise ConfigurationError(
            f"{path!r} names nothing in a module; write MODULE:NAME, as in shop.billing:Bill"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise ConfigurationError(f"{module} cannot be imported: {error}") from None
    except AttributeError:
        raise ConfigurationError(f"{module} has no {name}") from None
    return found
