"""Base classes of tasks, and the state the engine keeps for each task instance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from onceward.errors import ConfigurationError
from onceward.middleware import Middleware, check_middleware
from onceward.task.deadlines import Clock, RunningAttempt
from onceward.task.guards.ids import IdsInFlight
from onceward.task.settings import EngineSettings

if TYPE_CHECKING:
    from onceward.telemetry.conventions import Destination


class Running(Protocol):
    """A running call, as its task sees it."""

    def stop(self) -> None: ...
    def hurry(self) -> None: ...
    def attempts(self) -> list[RunningAttempt]: ...
    @property
    def stuck(self) -> int: ...


class EngineState:
    """The engine's state of one task instance: running calls, requested stops, ids in flight."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ids = IdsInFlight()
        self.running: dict[int, Running] = {}
        self.stops = 0
        """How many times `stop` was called."""
        self.stops_obeyed = 0
        """How many of these stops have already ended a call."""

    def stop(self) -> None:
        # Called from signal handlers: must not lock or wait.
        self.stops += 1
        for call in list(self.running.values()):
            call.stop()


class BaseTask:
    """A task: domain logic only. Connectors and services are injected; a task neither creates nor opens them."""

    asynchronous: ClassVar[bool]
    """Whether the task runs in asyncio; if not, in threads."""
    _fetch_method: ClassVar[str]
    _other_fetch_method: ClassVar[str]

    settings: EngineSettings = EngineSettings()
    clock: Clock = Clock()
    middleware: Sequence[Middleware] = ()
    """Wraps the source and the steps of this task, outermost first."""
    destination: Destination | None = None
    """Where its messages come from or go to, for spans and metrics. An app sets it."""
    interruptible: bool = False
    """Whether `hurry` can interrupt attempts that have no time limit. Costs a little per attempt."""
    draining: bool = False
    """Whether its calls end when the source is empty, so one that has to wait must not look empty."""
    connectors: Mapping[str, Any]
    services: Mapping[str, Any]

    def __init__(
        self,
        connectors: Mapping[str, Any] | None = None,
        services: Mapping[str, Any] | None = None,
        *,
        settings: EngineSettings | None = None,
    ) -> None:
        name = type(self).__name__
        if connectors is None:
            raise ConfigurationError(
                f"{name} has no connectors; pass them: {name}(connectors={{'source': …}}). "
                "For a producer that needs none, pass connectors={}."
            )
        for kind, given in (("connectors", connectors), ("services", services or {})):
            if not isinstance(given, Mapping):
                raise ConfigurationError(
                    f"{kind} of {name} must be a dict by name, such as {{'source': …}}, not {type(given).__name__}"
                )
        if settings is not None:
            if not isinstance(settings, EngineSettings):
                raise ConfigurationError(
                    f"settings of {name} must be EngineSettings(…), not {type(settings).__name__}"
                )
            self.settings = settings
        self.connectors = dict(connectors)
        self.services = dict(services or {})
        check_middleware(self.middleware, name)
        self._ensure_checked()

    def _ensure_checked(self) -> None:
        """Check the task, once; when it is called at the latest, if its `__init__` forgets super()."""
        if "_checked" not in self.__dict__:
            self._check()
            self.__dict__["_checked"] = True

    if not TYPE_CHECKING:  # type checkers must not take it for any attribute

        def __getattr__(self, name: str) -> Any:
            if name in ("connectors", "services"):
                raise ConfigurationError(
                    f"{self.name} has no {name}: its __init__ must call super().__init__(connectors, services)"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check(self) -> None:
        """Mixins override this to check that what they need is present."""

    @property
    def name(self) -> str:
        """The name of this task in spans, metrics and log lines."""
        return type(self).__name__

    @property
    def _engine(self) -> EngineState:
        # Created on first use, so a task whose __init__ forgets super() still works. A forked child has none of the
        # threads of its parent, so nothing of it is in flight there.
        state: EngineState | None = self.__dict__.get("_engine_state")
        if state is not None and state.pid == os.getpid():
            return state
        if state is not None:
            self.__dict__.pop("_engine_state", None)
        return self.__dict__.setdefault("_engine_state", EngineState())  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the running calls: work in flight finishes, nothing new is started.

        Safe in signal handlers and from any thread; may be called repeatedly. If nothing is running, the next call
        ends before it begins.
        """
        self._engine.stop()

    def hurry(self) -> None:
        """Stop the running calls now, as if `loop.timeout` had run out, but without an error.

        Interrupts attempts that have a time limit; all of them if the task is `interruptible`. The others finish, and
        no attempt, backoff or handler follows. Transactions without an outcome are abandoned, and redelivered when
        the lease expires. Safe from any thread.
        """
        for call in list(self._engine.running.values()):
            call.hurry()

    @property
    def stuck(self) -> int:
        """How many attempts are stuck: asked to stop, given up on, and still running."""
        return sum(call.stuck for call in list(self._engine.running.values()))

    def attempts(self) -> list[RunningAttempt]:
        """The attempts that run now and can be interrupted: under a time limit, or all if it is `interruptible`."""
        return [each for call in list(self._engine.running.values()) for each in call.attempts()]

    def begun(self) -> dict[str, str]:
        """The ids of the transactions that have begun and not ended, each with its step."""
        return {id: life.step for id, life in list(self._engine.ids.holders.items())}


class Task(BaseTask):
    """A task that runs in threads."""

    _fetch_method = "fetch_transactions"
    _other_fetch_method = "fetch_transactions_async"
    asynchronous = False


class AsyncTask(BaseTask):
    """A task that runs in asyncio."""

    _fetch_method = "fetch_transactions_async"
    _other_fetch_method = "fetch_transactions"
    asynchronous = True
