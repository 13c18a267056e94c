"""What variables set in a model. pydantic-settings reads their names and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

NESTED = "__"
"""Between the names of a table and its field."""


class Variables(EnvSettingsSource):
    """The fields that these variables set, whose names have no prefix: `LOOP__LIMIT=3`, and JSON for lists and tables.

    A name that the model does not have is among them, so the model refuses it.
    """

    def __init__(self, model: type[BaseModel], variables: Mapping[str, str]) -> None:
        super().__init__(cast("type[BaseSettings]", model), env_nested_delimiter=NESTED)
        self.env_vars = {name.lower(): text for name, text in variables.items()}

    def __call__(self) -> dict[str, Any]:
        known = super().__call__()
        unknown = {
            name: text for name, text in self.env_vars.items() if name.partition(NESTED)[0] not in known
        }
        return {**unknown, **known}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """What is not JSON stays text: the model says what is wrong with it, or splits it."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value
