"""One worker process: `python -m onceward.demo.worker SETUP URL NAME`.

It consumes from the boundary at the URL until it gets SIGTERM or its parent is gone. It logs to stderr, and writes its
report to stdout.

All workers fetch under one name, so each sees every order. They do not divide the work for speed, but stand in for each
other: the inbox gives an order to one of them, and reports it to the others as in flight or done.
"""

from __future__ import annotations

import logging
import signal
import sys

import msgspec

from onceward import Inbox
from onceward._process.lifeline import end_with_parent
from onceward.boundary import BoundaryClient
from onceward.connectors.boundary import BoundaryConnector
from onceward.deadletters import DeadLetters
from onceward.deadletters.source import WithDeadLetters
from onceward.demo import ledger
from onceward.demo.carrier import Carrier
from onceward.demo.journal import JournaledConnector
from onceward.demo.setup import CONSUMER, MAX_DELIVERIES, Setup
from onceward.demo.tasks import ShipOrder, consuming


def main(encoded_setup: str, url: str, name: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    setup = msgspec.json.decode(encoded_setup, type=Setup)
    engine = ledger.open_engine(setup.ledger)
    inbox = Inbox(engine)
    inbox.set_gate(production=False)  # a demo needs no proof, wherever it is shown
    with BoundaryClient(url) as client:
        facts = BoundaryConnector(client, CONSUMER, max_deliveries=MAX_DELIVERIES, redelivery_delay=0.2)
        orders = WithDeadLetters(facts, DeadLetters(engine), consumer=CONSUMER)
        task = ShipOrder(
            connectors={"orders": JournaledConnector(orders, setup.journal, name)},
            services={"inbox": inbox, "carrier": Carrier(setup.seconds_per_check), "packer": name},
        )
        signal.signal(signal.SIGTERM, lambda *_: task.stop())
        end_with_parent()
        report = task.consume_transactions(consuming(setup))
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
