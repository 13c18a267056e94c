"""The registered consumers. A consumer that is not registered does not run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from onceward.inbox.contract import Contract
from onceward.inbox.errors import UnregisteredConsumerError
from onceward.inbox.evidence.gate import EvidenceGate
from onceward.inbox.ports import InboxPorts
from onceward.inbox.stores.base import Store
from onceward.storage import migrations
from onceward.storage.database import check_tables
from onceward.storage.privileges import writing_our_tables
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.inbox"))


class Registry:
    def __init__(self, store: Store, ports: InboxPorts, gate: EvidenceGate) -> None:
        self._store = store
        self._ports = ports
        self.gate = gate
        self._checked: set[str] = set()
        self._role_checked = False

    async def migrate(self, back_to: int | None) -> list[str]:
        if back_to is None:
            return await self._ports.transact(migrations.apply, self._store)
        self._checked.clear()
        return await self._ports.transact(migrations.revert, self._store, back_to)

    async def check_tables(self) -> None:
        await self._ports.look(check_tables, self._store)

    async def register(self, contract: Contract) -> None:
        """Record the contract, replacing an earlier one."""
        with writing_our_tables():
            await self._ports.transact(self._store.register, contract.consumer_id, contract.as_row())

    async def unregister(self, consumer_id: str) -> bool:
        self._checked.discard(consumer_id)
        return await self._ports.transact(self._store.unregister, consumer_id)

    async def consumers(self) -> list[dict[str, Any]]:
        return await self._ports.look(self._store.consumers)

    async def check(self, contract: Contract, code: Any, transact: Callable[..., Any] | None = None) -> None:
        """Raise if the consumer is not registered, if this is production and its code is not verified, or if the role
        of the connection cannot do what an inbox needs.

        Queries the database once per consumer. `code` is its class, or the handler. `transact` runs the queries inside
        a session that is already open: a second session might wait for it forever.
        """
        ask = transact or self._ports.transact
        if contract.consumer_id not in self._checked:
            await self._check_registered(contract, ask)
        await self.gate.check(contract, code, ask)
        if not self._role_checked:
            await ask(self._store.check_role)
            self._role_checked = True

    async def _check_registered(self, contract: Contract, ask: Callable[..., Any]) -> None:
        await ask(check_tables, self._store)
        registered = {row["consumer_id"]: row["contract"] for row in await ask(self._store.consumers)}
        if contract.consumer_id not in registered:
            known = ", ".join(registered) or "none"
            raise UnregisteredConsumerError(
                f"consumer {contract.consumer_id!r} is not registered (registered: {known}), so it does not run; "
                "call inbox.register(contract) when you deploy it"
            )
        changed = _differences(registered[contract.consumer_id], contract.as_row())
        if changed:
            _log.warning(
                "consumer %s: contract differs from the registered one in %s; re-register it",
                contract.consumer_id,
                ", ".join(changed),
            )
        self._checked.add(contract.consumer_id)


def _differences(registered: dict[str, Any], running: dict[str, Any]) -> list[str]:
    plain = json.loads(json.dumps(running))
    return sorted(name for name in plain if registered.get(name) != plain[name])
