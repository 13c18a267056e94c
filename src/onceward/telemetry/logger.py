"""Onceward's own log lines. They carry the log fields, and never hold up or fail the work they report on.

In threads the lines are emitted by `log_thread`, in the context of the code that logs. In asyncio they are emitted at
once: a handler that blocks there blocks the event loop anyway.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from onceward._text import printable, printable_lines
from onceward.telemetry.log_thread import log_thread, run_safely
from onceward.telemetry.logs import STANDARD, current_fields
from onceward.telemetry.redaction import format_error, redact, scrub

AGAIN_AFTER = 60.0
"""Seconds until the traceback of the same kind of failure is logged again."""
REMEMBERED = 256
"""Kinds of failures to remember. Beyond this the oldest is forgotten, and logged again."""
LINKS = 16
"""How many errors of a chain make up its kind. Chains may be circular."""


class OwnLogger:
    """Stands in front of a `logging.Logger`. The same methods, none of which raises."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        # Partials, because `log` looks for the line that logs in the frame before its own.
        self.debug = partial(self.log, logging.DEBUG)
        self.info = partial(self.log, logging.INFO)
        self.warning = partial(self.log, logging.WARNING)
        self.error = partial(self.log, logging.ERROR)
        self.exception = partial(self.log, logging.ERROR, exc_info=True)
        self.critical = partial(self.log, logging.CRITICAL)

    def isEnabledFor(self, level: int) -> bool:
        # Unlike `Logger.isEnabledFor`, this takes no lock, and calls nothing that a class of the user can override.
        logger: logging.Logger | None = self._logger
        if self._logger.disabled or level <= self._logger.manager.disable:
            return False
        while logger is not None:
            if logger.level:
                return level >= logger.level
            logger = logger.parent
        return True

    def post(
        self,
        level: int,
        message: str,
        *args: Any,
        context: contextvars.Context,
        fields: dict[str, Any] | None = None,
    ) -> None:
        """Log soon, in this context. In threads this takes no lock that user code can hold, and waits for nothing."""
        if self.isEnabledFor(level):
            context = context.copy()  # the original may be in use
            line = Line(self._logger, level, message, args, None, None, sys._getframe(1))
            line.fields = context.run(current_fields) if fields is None else fields
            do_soon(lambda: context.run(line.emit))

    def log(
        self,
        level: int,
        message: str,
        *args: Any,
        exc_info: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not self.isEnabledFor(level):
            return
        line = Line(self._logger, level, message, args, exc_info, extra, sys._getframe(1))
        if _in_event_loop():
            run_safely(line.emit)
        else:
            context = contextvars.copy_context()
            log_thread.run(lambda: context.run(line.emit))


def do_soon(job: Callable[[], object]) -> None:
    """Run telemetry that may call user code: in threads in the log thread, in asyncio now. Raises nothing."""
    if _in_event_loop():
        run_safely(job)
    else:
        log_thread.post(job)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Line:
    """One line: everything about the moment and the place that logs it, but no record yet."""

    def __init__(
        self,
        logger: logging.Logger,
        level: int,
        message: str,
        args: tuple[Any, ...],
        exc_info: Any,
        extra: Mapping[str, Any] | None,
        caller: FrameType,
    ) -> None:
        self._logger = logger
        self._what = (level, caller.f_code.co_filename, caller.f_lineno, message, args)
        self._function = caller.f_code.co_name
        if isinstance(exc_info, BaseException):
            exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
        elif exc_info and not isinstance(exc_info, tuple):
            exc_info = sys.exc_info()
        self._exc_info = exc_info or None
        self._extra = extra or {}
        self._at = time.time()
        self._thread = threading.current_thread()
        self.fields: dict[str, Any] | None = None

    def emit(self) -> None:
        level, file, number, message, args = self._what
        record = self._logger.makeRecord(
            self._logger.name,
            level,
            file,
            number,
            message,
            tuple(map(_redact_argument, args)),
            self._exc_info,
            self._function,
            None,
            None,
        )
        if self._exc_info is not None and self._exc_info[1] is not None:
            # What a `logging.Formatter` shows. Other handlers get the error itself, which is scrubbed.
            record.exc_text = printable_lines(format_error(self._exc_info[1]))
        late = record.created - self._at
        record.created = self._at
        record.msecs = float(int((self._at - int(self._at)) * 1000))
        record.relativeCreated -= late * 1000
        record.thread, record.threadName = self._thread.ident, self._thread.name
        # Not as `extra`: logging refuses fields that a record factory of the user has already set.
        record.__dict__.update((name, value) for name, value in self._extra.items() if name not in STANDARD)
        for name, value in (current_fields() if self.fields is None else self.fields).items():
            if name not in self._extra:
                record.__dict__[name] = value
        self._logger.handle(record)


def _redact_argument(value: Any) -> Any:
    """Return an argument of a line without the values that an error quotes, and without control characters."""
    if isinstance(value, BaseException):
        scrub(value)
        value = str(value)
    return printable(redact(value)) if isinstance(value, str) else value


class Tracebacks:
    """Decides which failures of a call are logged with a traceback: each kind once, and again only after a while.

    When a database is down, every message fails for the same reason. Each failure gets its log line; a thousand
    identical tracebacks would hide everything else.
    """

    def __init__(self) -> None:
        self._shown: dict[Any, float] = {}
        self._lock = threading.Lock()

    def to_show(self, error: BaseException | None, now: float) -> BaseException | None:
        """Return the error if its traceback is to be logged, None if one of its kind just was."""
        if error is None:
            return None
        kind = kind_of(error)
        with self._lock:
            if now - self._shown.get(kind, now - AGAIN_AFTER) < AGAIN_AFTER:
                return None
            self._shown.pop(kind, None)  # reinsert as the newest
            if len(self._shown) >= REMEMBERED:
                del self._shown[next(iter(self._shown))]
            self._shown[kind] = now
        return error


def kind_of(error: BaseException) -> tuple[Any, ...]:
    """The type of an error and the line that raised it, for it and every error that led to it.

    Without the rest of the traceback, which grows each time the same object is raised again.
    """
    kind: list[Any] = []
    links = [error]
    while links and len(kind) < LINKS:
        link = links.pop()
        line, last = None, link.__traceback__
        while last is not None:
            line, last = (last.tb_frame.f_code.co_filename, last.tb_lineno), last.tb_next
        kind.append((type(link), line))
        if isinstance(link, BaseExceptionGroup):
            links.extend(link.exceptions)
        earlier = link.__cause__ if link.__suppress_context__ else link.__context__
        if earlier is not None:
            links.append(earlier)
    return tuple(kind)
