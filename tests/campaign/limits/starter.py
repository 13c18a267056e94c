"""A process that takes starts and slots as fast as it can, and notes each in the database, until it is killed.

`python -m tests.campaign.limits.starter URL SEED`
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

from onceward._sync import run_blocking
from onceward.limits import Limit
from onceward.limits.records import Wish
from onceward.storage.database import Sql
from tests.support.limits import engine_of, records_on

KEYS = [f"customer-{number}" for number in range(40)]
AT_ONCE = 50
LIMIT = Limit(rate="1000/s", concurrency=AT_ONCE, by="customer")
SCOPE = "campaign"
ROOM = 500
_START = "INSERT INTO starts (key, due) VALUES (:key, :due)"
_BUSY = "INSERT INTO most SELECT key, count(*) FROM onceward_limit_slots WHERE scope = :scope GROUP BY key"


def start_forever(url: str, seed: int) -> None:
    """Each round frees what the last one took. What a kill leaves behind is free after its lease."""
    chance = Random(seed)
    with engine_of(url) as engine:
        records, rows = records_on(engine, LIMIT, SCOPE), Sql(engine.dialect.name)
        run_blocking(records.begin())
        held: dict[str, float | None] = {}
        while True:
            wishes = {key: Wish(chance.randint(1, AT_ONCE), 0) for key in chance.sample(KEYS, len(KEYS) // 2)}
            states = run_blocking(records.take(wishes, ROOM, held))
            grants = [grant for state in states.values() for grant in state.grants]
            held = {grant.token: None for grant in grants if grant.token is not None}
            noted = [{"key": grant.key, "due": grant.due_at} for grant in grants]

            def note(transaction: Any, noted: list[dict[str, Any]] = noted) -> None:
                rows.many(transaction, _START, noted)
                rows.run(transaction, _BUSY, scope=SCOPE)

            run_blocking(records.ports.transact(note))


if __name__ == "__main__":
    start_forever(sys.argv[1], int(sys.argv[2]))
