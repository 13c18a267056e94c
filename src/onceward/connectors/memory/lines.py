"""The lines of a queue in memory: see `onceward.connectors.lines`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from onceward._process.bell import Bell
from onceward.connectors.leases import AvailableRow


class MemoryLines:
    """The part of a store that keeps lines."""

    _messages: dict[int, Any]
    _dead: list[Any]
    _move: Callable[[Any, float], None]
    bell: Bell
    _in_lines = False
    _holds_lines = False

    def begin_lines(self, hold_dead: bool) -> None:
        self._in_lines, self._holds_lines = True, hold_dead
        self._lines: dict[str, deque[int]] = {}
        self._lined_up: set[int] = set()
        self._unlined = deque(self._messages)

    def advance_lines(self) -> None:
        dead = {each.key[0] for each in self._dead} if self._holds_lines else set()
        self._lined_up.intersection_update(self._messages)
        for name, line in list(self._lines.items()):
            if line[0] in self._messages or line[0] in dead:
                continue
            while line and line[0] not in self._messages and line[0] not in dead:
                line.popleft()
            if not line:
                del self._lines[name]
            elif line[0] in self._messages and self._messages[line[0]].visible_at == inf:
                self._move(self._messages[line[0]], 0.0)

    def newcomers(self, now: float, limit: int) -> Sequence[AvailableRow]:
        found: list[AvailableRow] = []
        while self._unlined and len(found) < limit:
            message = self._messages.get(self._unlined.popleft())
            if message is not None:
                found.append(message.as_row())
        return found

    def line_up(self, newcomers: Sequence[tuple[int, str | None]], now: float) -> Sequence[bool]:
        ready: list[bool] = []
        for key, name in newcomers:
            self._lined_up.add(key)
            message = self._messages[key]
            line = deque([key]) if name is None else self._lines.setdefault(name, deque())
            if name is not None:
                line.append(key)
            self._move(message, message.visible_at if line[0] == key else inf)
            ready.append(message.visible_at <= now)
        return ready

    def behind(self, key: str, limit: int) -> tuple[int, Sequence[bytes]]:
        waiting = [self._messages[each] for each in self._lines.get(key, ()) if each in self._messages]
        return len(waiting), [each.body for each in waiting[:limit]]

    def _left(self) -> None:
        """Messages are gone: others may come first."""
        if self._in_lines:
            self.advance_lines()
