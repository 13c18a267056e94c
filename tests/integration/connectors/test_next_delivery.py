"""After a failed delivery the log says what happens next."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward.connectors import MemoryConnector, SqliteConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.transaction import Settlement, Transaction, Verdict

SYSTEM = TransactionException("down", ExceptionCategory.SYSTEM)
BUSINESS = TransactionException("refused", ExceptionCategory.BUSINESS)


def open_source(kind: str, directory: Path, redis_url: str) -> Any:
    if kind == "redis":
        return RedisStreamsConnector(redis_url, uuid4().hex, max_deliveries=2)
    if kind == "sqlite":
        return SqliteConnector(directory / "orders.db", max_deliveries=2)
    return MemoryConnector(max_deliveries=2)


@pytest.mark.req("RN-07")
@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SYSTEM, r"transaction t1: delivery 1 of 2 failed; it will be redelivered in (0\.[89]\d*|1) s"),
        (BUSINESS, r"transaction t1: delivery 1 failed; it is now a dead letter \(failed\)"),
    ],
)
def test_the_log_says_what_happens_next(
    kind: str,
    error: TransactionException,
    says: str,
    tmp_path: Path,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = open_source(kind, tmp_path, redis_url)
    source.dispatch_transactions([Transaction(id="t1"), Transaction(id="t2")])
    failed, done = source.fetch_transactions(2)
    with caplog.at_level(logging.INFO):
        source.settle_transactions(
            [Settlement(failed, Verdict.FAILED, error), Settlement(done, Verdict.DONE)]
        )
    [record] = caplog.records
    assert re.fullmatch(says, record.getMessage())
    source.close()
