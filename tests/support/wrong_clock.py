"""Real processes on a machine whose wall clock is wrong, with libfaketime. Nothing can set the other clocks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path


def _library() -> str:
    found = find_spec("libfaketime")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent / "vendor/libfaketime/src/libfaketime.so.1")


_SERVER = """
import os, time

right, unit = time.time, {"d": 86400.0, "h": 3600.0}

def wrong():
    with open(os.environ["WRONG_CLOCK"]) as file:
        offset = file.read().strip()
    return right() + (float(offset[:-1]) * unit[offset[-1]] if offset != "+0" else 0.0)

time.time = wrong
time.time_ns = lambda: int(wrong() * 1e9)
"""


class WrongClock:
    """The wall clock of processes that run with `env`. It is right until `set`, and can be set while they run."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "faketime"
        self.set("+0")

    def set(self, offset: str) -> None:
        """Such as +8d or -1h."""
        next_file = self._file.with_suffix(".next")
        next_file.write_text(f"{offset}\n")
        next_file.replace(self._file)

    @property
    def env_of_server(self) -> dict[str, str]:
        """For `onceward boundary serve`: only its Python has this clock. Envoy asks for the time while it sets up its
        memory, and libfaketime asks for memory then, so the two wait for each other; and Envoy measures its own waits
        by the monotonic clock."""
        folder = self._file.with_suffix(".d")
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(_SERVER)
        return {**os.environ, "PYTHONPATH": str(folder), "WRONG_CLOCK": str(self._file)}

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "LD_PRELOAD": _library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
