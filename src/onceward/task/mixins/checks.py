"""Checks of a task when it is constructed: connectors to fetch from, and handlers that can run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from onceward._functions import check_function, is_async
from onceward.errors import ConfigurationError
from onceward.task.base import BaseTask
from onceward.task.call import NOT_DEFINED, REQUIRED

CONSUMER_HANDLERS = {
    "process_transaction": "",
    "handle_transaction_success": "result",
    "handle_transaction_exception": "exc",
}
"""The methods that the engine calls, and their parameter after the transaction."""
PRODUCER_HANDLERS = {
    "produce_transaction": "",
    "handle_produce_success": "result",
    "handle_produce_exception": "exc",
}
ALMOST = 0.92
"""How similar a name must be to count as misspelled: two letters of a long name."""


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


def check_handlers(task: BaseTask, handlers: Mapping[str, str]) -> None:
    """Check that handlers are named right, take the right parameters, and run when they are called."""
    missing = [
        name
        for name in handlers
        if getattr(getattr(task, name), "__func__", None) in (NOT_DEFINED | REQUIRED)
    ]
    _check_spelling(task, {*missing, *(name for name in handlers if name.startswith("handle_"))})
    for name, more in handlers.items():
        handler = getattr(task, name)
        if name in missing:
            if handler.__func__ in REQUIRED:
                raise ConfigurationError(
                    f"{task.name} does not define {name}(self, transaction); add that method"
                )
            continue
        check_function(handler, f"{task.name}.{name}", asynchronous=task.asynchronous)
        function = getattr(handler, "__func__", None)
        plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
        if task.asynchronous and plain and not is_async(handler):
            raise ConfigurationError(
                f"{task.name}.{name} is a plain `def`, but {task.name} runs in asyncio; make it `async def`"
            )
        if not task.middleware:  # which may pass other arguments
            _check_parameters(task, name, handler, more)


def _check_spelling(task: BaseTask, handlers: Iterable[str]) -> None:
    """Refuse a method whose name is almost that of a handler, unless its class or one below defines that handler."""
    meant = {_simplify(name): name for name in handlers}
    defined: set[str] = set()
    ours: list[Mapping[str, Any]] = []
    yours: list[Mapping[str, Any]] = []
    for cls in type(task).__mro__:
        (ours if cls.__module__.startswith("onceward.") else yours).append(vars(cls))
    overridden = set().union(*ours)
    for own in (vars(task), *yours):
        defined.update(own)
        for name in own:
            if name.startswith("_") or name in overridden:
                continue
            for found in get_close_matches(_simplify(name), meant, 1, ALMOST):
                if meant[found] not in defined:
                    raise ConfigurationError(
                        f"{task.name}.{name} is never called; did you mean {meant[found]}? If it is a method of your "
                        "own, rename it"
                    )


def _simplify(name: str) -> str:
    return name.removesuffix("_async").replace("_", "").lower()


def _check_parameters(task: BaseTask, name: str, handler: Callable[..., Any], more: str) -> None:
    contract = getattr(task, "contract", None) is not None
    if name == "process_transaction" and contract:
        more = "session"
    elif name == "process_transaction" and type(task).__init__ is not BaseTask.__init__:
        return  # it may still get its contract: `self.contract = …` after `super().__init__(…)`
    parameters = ["transaction", *more.split()]
    try:
        signature = inspect.signature(handler, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # unknown, as for some functions in C
    try:
        signature.bind(*parameters)
    except TypeError as error:
        hint = "; `session` needs a contract" if name == "process_transaction" and not contract else ""
        raise ConfigurationError(
            f"{task.name}.{name} must take ({', '.join(['self', *parameters])}): {error}{hint}"
        ) from None
