"""The adapters of a lent connection of psycopg: to read, because the connection keeps what is registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from psycopg.adapt import AdaptersMap

if TYPE_CHECKING:
    from onceward.db.guests.guest import Guest


class LentAdapters(AdaptersMap):
    """A copy that refuses to change."""

    def __init__(self, adapters: AdaptersMap, guest: Guest) -> None:
        super().__init__(adapters)
        self._guest = guest

    def register_dumper(self, *_: Any) -> NoReturn:
        self._refuse()

    def register_loader(self, *_: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        self._guest.refuse(
            "registering an adapter",
            "it would outlive this event on the inbox's connection; register it on a cursor, which is yours alone",
        )
