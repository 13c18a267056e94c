"""Which letters are meant."""

from __future__ import annotations

from typing import Any

import msgspec

from onceward.deadletters.letter import Category, Status
from onceward.errors import ConfigurationError


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """All that is named has to fit. Nothing named means every letter."""

    consumer: str | None = None
    event_type: str | None = None
    category: Category | None = None
    status: Status | None = None
    ids: tuple[int, ...] = ()
    message_id: str | None = None
    aggregate_id: str | None = None
    older_than: float | None = None
    """Seconds since it died, at least."""
    younger_than: float | None = None
    """Seconds since it died, at most."""
    text: str | None = None
    """Somewhere in its error, whatever the case of (ASCII) letters."""

    def __post_init__(self) -> None:
        for field, kind in (("category", Category), ("status", Status)):
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                try:
                    msgspec.structs.force_setattr(self, field, kind(value))
                except ValueError:
                    raise ConfigurationError(
                        f"{field} must be one of {', '.join(kind)}, not {value!r}"
                    ) from None
        msgspec.structs.force_setattr(self, "ids", tuple(self.ids))
        for field in ("older_than", "younger_than"):
            age = getattr(self, field)
            if age is not None and not 0 <= age < float("inf"):
                raise ConfigurationError(f"{field} is a number of seconds from 0 on, not {age!r}")
        if self.text is not None and not self.text.strip():
            raise ConfigurationError("an empty text is in every error; leave it out, or name a real one")

    @property
    def is_narrow(self) -> bool:
        """Whether it names anything beside the consumer and the status: a redrive of everything is refused."""
        named = (
            self.event_type,
            self.category,
            self.message_id,
            self.aggregate_id,
            self.text,
            self.younger_than,
        )
        return bool(self.ids or self.older_than) or any(each is not None for each in named)

    def as_sql(self) -> tuple[str, dict[str, Any]]:
        """A condition, and its parameters. `{now}` is the time."""
        conditions = ["1 = 1"]
        values: dict[str, Any] = {}
        for column in ("consumer", "event_type", "category", "status", "message_id", "aggregate_id"):
            value = getattr(self, column)
            if value is not None:
                conditions.append(f"{column} = :f_{column}")
                values[f"f_{column}"] = str(value)
        if self.ids:
            conditions.append(f"id IN ({', '.join(str(int(each)) for each in self.ids)})")
        if self.older_than is not None:
            conditions.append("died_at <= {now} - CAST(:f_older AS double precision)")
            values["f_older"] = self.older_than
        if self.younger_than is not None:
            conditions.append("died_at >= {now} - CAST(:f_younger AS double precision)")
            values["f_younger"] = self.younger_than
        if self.text is not None:
            # SQLite knows the lower case of ASCII only; what has other letters is found as it is written.
            conditions.append("(lower(error) LIKE :f_lower ESCAPE '!' OR error LIKE :f_text ESCAPE '!')")
            values["f_lower"] = f"%{_escaped(self.text.lower())}%"
            values["f_text"] = f"%{_escaped(self.text)}%"
        return " AND ".join(conditions), values

    def as_dict(self) -> dict[str, Any]:
        """What is named, for people and for the record."""
        return {
            name: value for name, value in msgspec.to_builtins(self).items() if value not in (None, [], ())
        }


def _escaped(text: str) -> str:
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")
