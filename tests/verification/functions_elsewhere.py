"""Functions that another module makes consumers of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

INSERT = "INSERT INTO bills VALUES (:id)"


def write_bill(order: dict[str, Any], session: Any) -> None:
    session.execute(INSERT, order)


def make_handler() -> Callable[..., None]:
    def handle(order: dict[str, Any], session: Any) -> None:
        session.execute(INSERT, order)

    return handle


class Shop:
    def bill(self, order: dict[str, Any], session: Any) -> None:
        session.execute(INSERT, order)
