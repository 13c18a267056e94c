"""The gate before production: a consumer runs there only with evidence that its code keeps the contract.

Outside production nothing is checked. Evidence in a file opens it without asking the database for more; on PostgreSQL,
the isolation level is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from sqlalchemy.exc import DBAPIError

from onceward._environment import is_production
from onceward.db.transaction import DbTransaction
from onceward.inbox.contract import Contract
from onceward.inbox.errors import UnprovenConsumerError
from onceward.inbox.evidence.code_digest import module_of
from onceward.inbox.evidence.evidence import Evidence, read_evidence
from onceward.inbox.evidence.file import NO_FILE, EvidenceSettings, read_evidence_file
from onceward.inbox.evidence.proof import lacking, refusal
from onceward.inbox.stores.base import Store
from onceward.storage.privileges import is_denied

DENIED = "and this role may not read onceward_evidence"


def isolation_of(transaction: DbTransaction) -> str:
    """The isolation level of a transaction of PostgreSQL, whichever of server, role, URL and engine has set it."""
    level: str = transaction.connection.exec_driver_sql("SHOW transaction_isolation").scalar_one()
    return level


class CarriedEvidence:
    """The evidence of the file that the settings name, read and checked once."""

    def __init__(self, settings: EvidenceSettings) -> None:
        self._settings = settings

    @cached_property
    def _all(self) -> list[Evidence]:
        return read_evidence_file(self._settings)

    def of(self, consumer_id: str) -> list[Evidence]:
        return [each for each in self._all if each.consumer_id == consumer_id]

    def lacking(
        self,
        contract: Contract,
        code: Any,
        backend: str,
        recorded: list[Evidence] | None,
        isolation: str | None = None,
    ) -> str | None:
        """Return why neither the file nor what is recorded in the database proves a consumer.

        `recorded` is None as long as the database was not asked, `isolation` if the level is unknown.
        """
        carried = self.of(contract.consumer_id)
        places = [self._settings.place] if self._settings.given else []
        places += [] if recorded is None else ["this database"]
        where = f"in {' or '.join(places or ['a file'])}"
        problem = lacking(contract, code, carried, backend, where, isolation)
        if problem is None or not recorded:
            return problem
        in_database = lacking(contract, code, recorded, backend, isolation=isolation)
        return problem if carried and in_database is not None else in_database


class EvidenceGate:
    """Admits consumers with valid evidence. Queries the database at most once for each."""

    def __init__(self, store: Store, production: bool, settings: EvidenceSettings) -> None:
        self._store = store
        self._shut = production
        self._carried = CarriedEvidence(settings)
        self._passed: set[tuple[str, Any]] = set()

    @classmethod
    def from_environment(cls, store: Store, env: str | None = None) -> EvidenceGate:
        """As ONCEWARD_… variables say; without ONCEWARD_ENV, `env` does."""
        production = is_production(env)
        return cls(store, production, EvidenceSettings.from_environment() if production else NO_FILE)

    async def check(self, contract: Contract, code: Any, ask: Callable[..., Any]) -> None:
        """Raise `UnprovenConsumerError` without valid evidence. `code` is the consumer's class, or the handler."""
        if not self._shut or (contract.consumer_id, module_key(code)) in self._passed:
            return
        backend = self._store.name
        isolation = await ask(isolation_of) if backend == "postgresql" else None
        problem = self._carried.lacking(contract, code, backend, None, isolation)
        if problem is not None:
            try:
                recorded = await ask(read_evidence, self._store, contract.consumer_id)
            except DBAPIError as error:
                if not is_denied(error):
                    raise
                problem = f"{problem}; {DENIED}"
            else:
                problem = self._carried.lacking(contract, code, backend, recorded, isolation)
        if problem is not None:
            raise UnprovenConsumerError(refusal(contract, code, problem))
        self._passed.add((contract.consumer_id, module_key(code)))


def module_key(code: Any) -> Any:
    """Return a class itself, but the module of a handler, which may be a new object for each event."""
    return code if isinstance(code, type) else module_of(code)
