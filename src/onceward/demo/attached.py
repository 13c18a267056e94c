"""A process that ends when the one that started it does, however that ends.

`python -m onceward.demo.attached boundary serve …` is `onceward boundary serve …`, attached.
"""

from __future__ import annotations

import os
import signal
from threading import Thread

from onceward.cli.main import main


def end_with_parent() -> None:
    """Send ourselves SIGTERM when stdin is closed: its other end is the parent's."""
    Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    # Read without sys.stdin: its lock, held for ever by this thread, would break the end of the interpreter.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main()
