"""What of a payload is shown: fields whose names match a rule are hidden, however deep they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from onceward._secrets import names_secret

HIDDEN = "••• hidden"
USUAL = ("*card*number*", "card", "cvv", "cvc", "iban", "ssn", "*account*number*", "pin")
"""Rules that always hold, next to names of passwords and tokens."""


class Redaction:
    """Rules are names or paths with wildcards, ignoring case: `email`, `customer.*`, `*.phone`."""

    def __init__(self, rules: Sequence[str] = ()) -> None:
        self._rules = tuple(rule.lower() for rule in (*USUAL, *rules))

    def of(self, value: Any, path: str = "") -> Any:
        """Return the value with what the rules hide."""
        if isinstance(value, Mapping):
            return {
                name: HIDDEN if self._hides(str(name), path) else self.of(each, _join(path, str(name)))
                for name, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.of(each, path) for each in value]
        return value

    def restore(self, edited: Any, original: Any, path: str = "") -> Any:
        """Put back what was hidden and has not been edited."""
        if isinstance(edited, Mapping) and isinstance(original, Mapping):
            return {
                name: original[name]
                if each == HIDDEN and name in original and self._hides(str(name), path)
                else self.restore(each, original.get(name), _join(path, str(name)))
                for name, each in edited.items()
            }
        if isinstance(edited, list) and isinstance(original, (list, tuple)) and len(edited) == len(original):
            return [self.restore(one, other, path) for one, other in zip(edited, original, strict=True)]
        return edited

    def hides(self, field: str) -> bool:
        """Whether a rule hides a field, named with dots from the payload on."""
        path, _, name = field.rpartition(".")
        return self._hides(name, path)

    def _hides(self, name: str, path: str) -> bool:
        lower, whole = name.lower(), _join(path, name).lower()
        return names_secret(name) or any(
            fnmatchcase(lower, rule) or fnmatchcase(whole, rule) for rule in self._rules
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
