"""One worker process: `python -m onceward.demo.worker SETUP URL NAME`.

It consumes from the boundary at the URL until it gets SIGTERM, or until whoever started it is gone. Its log goes to
stderr, and the report of its work to stdout.

All workers fetch under one name, so each sees every order. They do not share the work out for speed, they stand in for
each other: the inbox lets one of them have the order, and tells the others that it is in hand or done.
"""

from __future__ import annotations

import logging
import signal
import sys

import msgspec

from onceward.boundary import BoundaryClient
from onceward.connectors.boundary import BoundaryConnector
from onceward.deadletters import DeadLetters
from onceward.deadletters.source import WithDeadLetters
from onceward.demo import ledger
from onceward.demo.attached import end_with_parent
from onceward.demo.carrier import Carrier
from onceward.demo.journal import JournaledConnector
from onceward.demo.setup import CONSUMER, MAX_DELIVERIES, Setup
from onceward.demo.tasks import ShipOrder, consuming
from onceward.inbox import Inbox


def main(encoded_setup: str, url: str, name: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    setup = msgspec.json.decode(encoded_setup, type=Setup)
    engine = ledger.open_engine(setup.ledger)
    with BoundaryClient(url) as client:
        facts = BoundaryConnector(client, CONSUMER, max_deliveries=MAX_DELIVERIES, redelivery_delay=0.2)
        orders = WithDeadLetters(facts, DeadLetters(engine), consumer=CONSUMER)
        task = ShipOrder(
            connectors={"orders": JournaledConnector(orders, setup.journal, name)},
            services={"inbox": Inbox(engine), "carrier": Carrier(setup.seconds_per_check), "packer": name},
        )
        signal.signal(signal.SIGTERM, lambda *_: task.stop())
        end_with_parent()
        report = task.consume_transactions(consuming(setup))
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
