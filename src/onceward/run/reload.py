"""For development: notice when a Python file below the working directory changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

CHECK_EVERY = 0.5
"""Seconds."""


class PythonFiles:
    """Checks all of them twice a second: that needs no dependency, and a directory of code is small."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen = self._scan()

    async def next(self) -> str:
        """Wait for a change and return the path of a file that was changed, added or removed."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            now = self._scan()
            changed = {path for path, _ in self._seen.items() ^ now.items()}
            self._seen = now
            if changed:
                return os.path.relpath(min(changed), self._directory)

    def _scan(self) -> dict[str, int]:
        found = {}
        for path in _python_files(self._directory):
            try:
                found[path] = os.stat(path).st_mtime_ns
            except OSError:  # removed meanwhile
                continue
        return found


def _python_files(directory: Path) -> Iterator[str]:
    for here, below, files in os.walk(directory):
        below[:] = [name for name in below if not _is_foreign(here, name)]
        yield from (os.path.join(here, name) for name in files if name.endswith(".py"))


def _is_foreign(here: str, name: str) -> bool:
    """Hidden, generated, or a virtual environment."""
    return (
        name.startswith(".")
        or name in ("__pycache__", "node_modules")
        or os.path.exists(os.path.join(here, name, "pyvenv.cfg"))
    )
