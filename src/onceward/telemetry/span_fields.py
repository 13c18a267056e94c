"""The fields of a user's data that spans may show: `EngineSettings.telemetry_fields`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onceward.telemetry.safety import quietly, show

LONGEST = 256
"""Characters a field may show on a span."""

_MISSING = object()


class SpanFields:
    """The fields that spans may show, by path, such as `payload.order_id` or `result.total`; the path is the key."""

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
            value = quietly(_follow, roots.get(root, _MISSING), path, default=_MISSING)
            if value is not _MISSING and value is not None:
                found[name] = value if _is_number(value) else show(value)[:LONGEST]
        return found


def _follow(value: Any, path: list[str]) -> Any:
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key, _MISSING)
        elif value is not _MISSING:
            value = getattr(value, key, _MISSING)
    return value


def _is_number(value: Any) -> bool:
    """Whether exporters can encode it as a number."""
    return isinstance(value, (bool, float)) or (isinstance(value, int) and -(2**63) <= value < 2**63)
