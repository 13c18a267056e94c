"""A producer and a consumer in separate processes, with spans in the file of ONCEWARD_TRACE_FILE.

python -m tests.integration.cli.trace_worker produce|consume|fail QUEUE

`fail`: the first attempt fails, and the second is an hour away, so a test can kill the process before it.
"""

from __future__ import annotations

import sys

from onceward import ConsumerTask, ProducerTask, Transaction, telemetry
from onceward.connectors.sqlite import SqliteConnector
from tests.support.world import consuming, retry

ID = "order-1"


class Place(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None:
        self.connectors["queue"].dispatch_transactions([transaction])


class Charge(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        pass


class Fail(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        raise ConnectionError("the bank does not answer")


def main(role: str, path: str) -> None:
    handle = telemetry.setup()
    queue = SqliteConnector(path, lease=1.0)
    if role == "produce":
        Place({"queue": queue}).produce_transactions([Transaction(id=ID, payload={"card": "card of nobody"})])
    elif role == "consume":
        Charge({"source": queue}).consume_transactions()
    else:
        Fail({"source": queue}).consume_transactions(consuming(process=retry(2, backoff=3600.0)))
    handle.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
