"""Import the object that a command names, such as `shop.billing:Bill`."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


class EndedBySignal(SystemExit):
    """A signal ends the process, perhaps while a module is imported: that is not the module's doing."""


def import_name(path: str) -> Any:
    """Import `module:name`, also from the working directory, as `python -m` does. Raises ConfigurationError."""
    from onceward._secrets import mask_url
    from onceward.errors import ConfigurationError

    module, _, name = path.partition(":")
    if name.startswith("//"):
        raise ConfigurationError(f"{mask_url(path)} is a URL; write MODULE:NAME, as in shop.billing:Bill")
    if name and ("/" in module or module.endswith(".py")):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ConfigurationError(f"{module} is a file; write its module: {dotted}:{name}")
    if not name or not all(part and part.isprintable() for part in module.split(".")):
        raise ConfigurationError(
            f"{path!r} does not name an object in a module; write MODULE:NAME, as in shop.billing:Bill"
        )
    found: Any = _import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{module} has no {name}")
        found = getattr(found, part)
    return found


def _import_module(module: str) -> ModuleType:
    from onceward.errors import ConfigurationError

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"{module} cannot be imported: there is no module {error.name!r} in {here} or among the installed "
                "packages; check the name, or run this from the directory that contains the module"
            ) from None
        raise ConfigurationError(f"{module} cannot be imported: {error}{_where(error)}") from None
    except ImportError as error:
        raise ConfigurationError(f"{module} cannot be imported: {error}{_where(error)}") from None
    except EndedBySignal:
        raise
    except SystemExit as error:  # a command would end with its code, as if it had done its work
        raise ConfigurationError(
            f"{module} cannot be imported: it ends the process ({error!r}){_where(error)}; put what a module does when "
            'it is run below `if __name__ == "__main__":`'
        ) from None


def blames_import(error: BaseException) -> bool:
    """Whether code of the user's raised it on import. If so, its traceback begins there from now on."""
    traces = error.__traceback__
    while traces is not None and traces.tb_frame.f_code is not _import_module.__code__:
        traces = traces.tb_next
    if traces is None:
        return False
    traces = traces.tb_next
    while traces is not None and "importlib" in traces.tb_frame.f_code.co_filename:
        traces = traces.tb_next
    error.__traceback__ = traces
    return True


def _where(error: BaseException) -> str:
    """The line of user code whose import failed."""
    ours = (__file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each for each in frames if each.filename not in ours and Path(each.filename).is_file()]
    return f"; see {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
