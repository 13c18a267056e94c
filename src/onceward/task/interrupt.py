"""Ask a thread to stop what it is doing, by an exception raised inside it.

CPython delivers such an exception when the thread next runs Python code: a pure Python loop stops at once, a
blocking call in C only when it returns. It can also arrive after the work it was meant for has ended, so
whoever may be interrupted calls `absorb` before going on.
"""

from __future__ import annotations

import ctypes

from onceward.task.exceptions import AttemptInterrupted

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int

_clear_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


def interrupt(thread_ident: int) -> None:
    """Raise `AttemptInterrupted` in that thread, soon."""
    _set_async_exc(thread_ident, AttemptInterrupted)


def absorb(thread_ident: int) -> None:
    """Called by the thread itself: afterwards no interrupt is on its way. May raise the one that was."""
    _clear_async_exc(thread_ident, None)
