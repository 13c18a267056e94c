"""Another day, another hour, another host: what a copy of an event may meet when it comes again.

Only in a process that is forked for one conversation, before the consumer's modules are imported. The clock of the
database is not changed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import socket
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from onceward.transaction import Transaction


def another_day(now: datetime) -> timedelta:
    """The time until another month, day of the month, hour and minute, and from a weekday to a weekend or back."""
    found = timedelta(days=32, hours=1, minutes=1, seconds=1)
    while ((now + found).weekday() < 5) is (now.weekday() < 5):
        found += timedelta(days=1)
    return found


LATER = another_day(datetime.now())
HOST = "another-host"
NODE = 0x0242AC110002
"""The number of its network card."""
_CLOCKS = ("CLOCK_REALTIME", "CLOCK_REALTIME_COARSE", "CLOCK_TAI")
"""What tells the time of day, not how long something took."""
_NOW: Any = vars(datetime)["now"]


def copy_of(event: Transaction) -> Transaction:
    """The same event, sent again: it has the same id and payload, and was created later."""
    return msgspec.structs.replace(event, created_at=event.created_at + LATER)


def go_elsewhere() -> None:
    """Have this process believe that it is later, and on another host."""
    real, seconds = time.time, LATER.total_seconds()
    time.time = lambda: real() + seconds
    time.time_ns = lambda: int(time.time() * 1e9)
    clocks = [getattr(time, name) for name in _CLOCKS if hasattr(time, name)]
    gettime, gettime_ns = time.clock_gettime, time.clock_gettime_ns
    time.clock_gettime = lambda clock: gettime(clock) + (seconds if clock in clocks else 0)
    time.clock_gettime_ns = lambda clock: gettime_ns(clock) + (int(seconds * 1e9) if clock in clocks else 0)
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, _with_now(getattr(time, name)))
    strftime = time.strftime
    time.strftime = lambda form, *given: strftime(form, *(given or (time.localtime(),)))
    _replace("now", lambda cls, tz=None: _NOW.__get__(None, cls)(tz) + LATER)
    _replace("utcnow", lambda cls: cls.now(UTC).replace(tzinfo=None))
    here = os.uname()
    os.uname = lambda: os.uname_result((here[0], HOST, *here[2:]))
    platform.node = socket.gethostname = lambda: HOST
    getfqdn = socket.getfqdn
    socket.getfqdn = lambda name="": getfqdn(name) if name else HOST
    uuid.getnode = lambda: NODE
    os.environ.update({name: HOST for name in ("HOSTNAME", "HOST") if name in os.environ})


def _with_now(real: Any) -> Any:
    return lambda seconds=None: real(time.time() if seconds is None else seconds)


def _replace(name: str, function: Any) -> None:
    """Replace a class method of `datetime` itself: another class would not do for type hints and `isinstance`."""
    attributes: dict[str, Any] = gc.get_referents(vars(datetime))[0]
    attributes[name] = classmethod(function)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime))
