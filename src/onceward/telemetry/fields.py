"""The fields of the work that spans may show, because they were named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST = 256
_MISSING = object()


class Fields:
    """Paths such as `payload.order_id`, `metadata.tenant` or `result.total`; the name is the attribute's key."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._paths = [(name, name.split(".")) for name in names]

    def __bool__(self) -> bool:
        return bool(self._paths)

    def of_transaction(self, transaction: Any) -> dict[str, Any]:
        return self._read({"payload": transaction.payload, "metadata": transaction.metadata})

    def of_result(self, result: Any) -> dict[str, Any]:
        return self._read({"result": result})

    def _read(self, roots: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (root, *path) in self._paths:
            value = roots.get(root, _MISSING)
            for key in path:
                value = _step(value, key)
            if value is not _MISSING and value is not None:
                found[name] = value if isinstance(value, (bool, int, float)) else str(value)[:LONGEST]
        return found


def _step(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(key, _MISSING)
    return getattr(value, key, _MISSING) if value is not _MISSING else _MISSING
