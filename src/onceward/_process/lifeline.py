"""A process that ends with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
from threading import Thread


def end_with_parent() -> None:
    """Send SIGTERM to this process when stdin closes: the parent holds its other end."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    # Not sys.stdin: this thread would hold its lock forever and break the interpreter's shutdown.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
