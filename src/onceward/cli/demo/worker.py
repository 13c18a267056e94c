"""One worker process: `python -m onceward.cli.demo.worker SETUP NAME`.

It consumes until it gets SIGTERM, or until whoever started it is gone. Its log goes to stderr, and the report
of its work to stdout.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from threading import Thread

import msgspec

from onceward.cli.demo.cards import Cards
from onceward.cli.demo.journal import JournaledConnector
from onceward.cli.demo.ledger import Ledger
from onceward.cli.demo.setup import Setup
from onceward.cli.demo.tasks import ApplyOrder, consuming


def main(encoded_setup: str, name: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    setup = msgspec.json.decode(encoded_setup, type=Setup)
    with setup.open_queue() as queue:
        task = ApplyOrder(
            connectors={"queue": JournaledConnector(queue, setup.journal, name)},
            services={"cards": Cards(setup.seconds_per_check), "ledger": Ledger(setup.ledger)},
        )
        signal.signal(signal.SIGTERM, lambda *_: task.stop())
        Thread(target=_stop_when_alone, args=(task,), daemon=True).start()
        report = task.consume_transactions(consuming(setup))
    sys.stdout.buffer.write(msgspec.json.encode(report))


def _stop_when_alone(task: ApplyOrder) -> None:
    # The other end of stdin is the parent's, and is closed when it dies, however it dies. Read without
    # sys.stdin: its lock, held for ever by this thread, would break the end of the interpreter.
    while os.read(0, 1024):
        pass
    task.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
