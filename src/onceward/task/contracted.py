"""The seam for consumers with a contract: what their inbox puts around the source and the main step.

The engine knows no database. A task that has a `contract` names an inbox among its services, and the inbox serves
the calls of that task. `onceward.inbox` has the implementations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.task.base import BaseTask
    from onceward.task.source import Source
    from onceward.transaction import Transaction

SERVICE = "inbox"
"""The name of the service."""


class Served(Protocol):
    """One call of a consumer, under its contract."""

    def begin(self) -> Any:
        """Refuse a consumer that may not run. Awaited in asyncio."""
        ...

    def process(self, transaction: Transaction, /) -> Any:
        """The main step: the task's method inside a session, or DUPLICATE. Awaited in asyncio."""
        ...

    def end(self) -> Any:
        """Write down what was fetched and never begun. Awaited in asyncio; never raises."""
        ...

    def around(self, source: Source) -> Source:
        """The source, with what is fetched and given back written down."""
        ...


def serve(task: BaseTask) -> Served | None:
    """How the task's inbox serves it; None for a task without a contract."""
    if getattr(task, "contract", None) is None:
        return None
    inbox = task.services.get(SERVICE)
    kind = "AsyncInbox" if task._asynchronous else "Inbox"
    if inbox is None:
        raise ConfigurationError(
            f"{task.name} has a contract, so it needs an inbox: give it services={{'{SERVICE}': {kind}(engine)}}"
        )
    serve_task = getattr(inbox, "serve", None)
    if serve_task is None or inbox.asynchronous != task._asynchronous:
        raise ConfigurationError(
            f"the service {SERVICE!r} of {task.name} must be an {kind}, not {type(inbox).__name__}"
        )
    served: Served = serve_task(task)
    return served
