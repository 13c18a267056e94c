"""What goes along to another interpreter: objects by value, classes and functions by name.

A lambda in `services=…` has no name to import. Its code goes along, and it finds its globals in its module there.
"""

from __future__ import annotations

import io
import marshal
import pickle
import sys
from importlib import import_module
from types import CellType, CodeType, FunctionType
from typing import Any


def pack(thing: Any) -> bytes:
    """Raises whatever an object of the user's raises when it cannot be sent."""
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(thing)
    return file.getvalue()


class _Packer(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, FunctionType) or _is_named(thing):
            return NotImplemented
        cells = tuple(cell.cell_contents for cell in thing.__closure__ or ())
        return _rebuild, (
            marshal.dumps(thing.__code__),
            thing.__module__,
            thing.__name__,
            thing.__defaults__,
            thing.__kwdefaults__,
            cells,
        )


def _is_named(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _rebuild(code: bytes, module: str, name: str, defaults: Any, named: Any, cells: tuple[Any, ...]) -> Any:
    body: CodeType = marshal.loads(code)
    function = FunctionType(
        body, vars(import_module(module)), name, defaults, tuple(CellType(each) for each in cells)
    )
    function.__kwdefaults__ = named
    return function
