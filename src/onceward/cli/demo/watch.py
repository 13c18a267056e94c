"""Waiting for something to be so, and showing meanwhile how far everything is."""

from __future__ import annotations

import time
from collections.abc import Callable

from onceward.cli.demo.line import Line
from onceward.cli.demo.result import Progress
from onceward.cli.demo.screen import Screen

LOOK = 0.1
"""Seconds between two looks at the books."""
GIVE_UP_AFTER = 20.0
"""Seconds without any change after which there will be none."""


class Watch:
    """Looks at the line, shows how far it is, and waits for something to be so."""

    def __init__(self, line: Line, screen: Screen) -> None:
        self.line = line
        self.screen = screen
        self.now = line.books.progress()
        self._changed_at = time.monotonic()
        self._has_given_up = False

    def look(self) -> Progress:
        self.line.check()
        try:
            progress = self.line.books.progress()
        except OSError:
            self.line.check()  # who does not answer may just have died, and has left a log
            raise
        if progress != self.now:
            self.now, self._changed_at = progress, time.monotonic()
        self.screen.show(progress)
        return progress

    def until(self, is_so: Callable[[Progress], bool], every: float = LOOK) -> bool:
        """Whether it came to be so. When nothing changes for long it will not, and nobody waits any more."""
        while not is_so(self.look()):
            self._has_given_up |= time.monotonic() - self._changed_at > GIVE_UP_AFTER
            if self._has_given_up:
                return False
            time.sleep(every)
        return True
