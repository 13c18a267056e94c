"""Processes that handlers started and left behind when their worker was cut off.

The messages of a worker that was killed are delivered again. What their handlers started would still run then, beside
its successor. A worker leads its own process group, so the group has them, except those that left it on purpose
(`start_new_session=True`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

ASKED = 2.0
"""Seconds from SIGTERM to SIGKILL."""
KILLED_WITHIN = 1.0
"""Seconds to wait for killed ones."""
LOOK_EVERY = 0.05
PROCESSES = Path("/proc")


async def end_leftovers(group: int, patience: float = ASKED) -> bool:
    """End what is left of the process group of a leader that has ended. Returns whether there was anything."""
    if not _has_members(group):
        return False
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, KILLED_WITHIN)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        give_up = time.monotonic() + seconds
        while _has_members(group) and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_EVERY)
        if not _has_members(group):
            break
    return True


def _has_members(group: int) -> bool:
    """Whether there are any that can be ended.

    No process gets the number of a group that still has members. So if one has it, the group is empty, and the number
    means that other process.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            continue  # the first process of a container inherits them
    try:
        os.kill(group, 0)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    else:
        return False
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return not PROCESSES.is_dir() or any(
        _is_running_in(group, each) for each in PROCESSES.glob("[0-9]*/stat")
    )


def _is_running_in(group: int, file: Path) -> bool:
    """Whether a process is of this group and no zombie, which only waits for somebody to reap it."""
    try:
        state, _, its_group = file.read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False  # it has ended
    return int(its_group) == group and state not in "ZX"
