"""Checks of a task when it is constructed: connectors to fetch from, and handlers that can run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from onceward._functions import check_function, is_async
from onceward.errors import ConfigurationError
from onceward.task.base import BaseTask
from onceward.task.call import REQUIRED

CONSUMER_HANDLERS = ("process_transaction", "handle_transaction_success", "handle_transaction_exception")
PRODUCER_HANDLERS = ("produce_transaction", "handle_produce_success", "handle_produce_exception")


def check_consumer(task: BaseTask) -> None:
    """Check the handlers, and that there is a connector to fetch from. Raises ConfigurationError."""
    check_handlers(task, CONSUMER_HANDLERS)
    if any(callable(getattr(connector, task._fetch_method, None)) for connector in task.connectors.values()):
        return
    kind = "asynchronous" if task.asynchronous else "synchronous"
    for name, connector in task.connectors.items():
        if callable(getattr(connector, task._other_fetch_method, None)):
            cls = type(connector).__name__
            other = f"Async{cls}" if task.asynchronous else cls.removeprefix("Async")
            raise ConfigurationError(
                f"{task.name} is {kind}, but its connector {name!r} ({cls}) has only {task._other_fetch_method}; "
                f"pass one with {task._fetch_method} (perhaps {other}), or use "
                f"{'ConsumerTask' if task.asynchronous else 'AsyncConsumerTask'}"
            )
    have = ", ".join(f"{name!r} ({type(each).__name__})" for name, each in task.connectors.items()) or "none"
    raise ConfigurationError(
        f"{task.name} has nothing to consume from: none of its connectors ({have}) has {task._fetch_method}(batch_size)"
    )


def check_handlers(task: BaseTask, names: Iterable[str]) -> None:
    """Check that the main handler exists, and that calling a handler runs its code."""
    for name in names:
        handler = getattr(task, name)
        if getattr(handler, "__func__", None) in REQUIRED:
            raise ConfigurationError(
                f"{task.name} does not define {name}(self, transaction); add that method"
            )
        check_function(handler, f"{task.name}.{name}", asynchronous=task.asynchronous)
        function = getattr(handler, "__func__", None)
        plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
        if task.asynchronous and plain and not is_async(handler):
            raise ConfigurationError(
                f"{task.name}.{name} is a plain `def`, but {task.name} runs in asyncio; make it `async def`"
            )
