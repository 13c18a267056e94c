"""What a task is given before it runs, and what the engine keeps for each task instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from onceward.errors import ConfigurationError
from onceward.middleware import Middleware, check_middleware
from onceward.task.deadlines import Clock
from onceward.task.settings import EngineSettings
from onceward.task.slots import IdsInFlight


class Running(Protocol):
    """A call that runs, as its task sees it."""

    def stop(self) -> None: ...
    def hurry(self) -> None: ...
    @property
    def stuck(self) -> int: ...


class EngineState:
    """The engine's memory of one task instance: what runs, what was asked to stop, which ids are in flight."""

    def __init__(self) -> None:
        self.ids = IdsInFlight()
        self.running: dict[int, Running] = {}
        self.stops = 0
        """How often `stop` was called."""
        self.stops_obeyed = 0
        """Up to which of them calls have come and gone."""

    def stop(self) -> None:
        # Runs in signal handlers: no lock, nothing that waits.
        self.stops += 1
        for call in list(self.running.values()):
            call.stop()


class BaseTask:
    """Connectors and services, injected. Domain logic only: a task builds none of them and opens nothing."""

    _fetch_method: ClassVar[str]
    _other_fetch_method: ClassVar[str]
    _asynchronous: ClassVar[bool]

    settings: EngineSettings = EngineSettings()
    clock: Clock = Clock()
    middleware: Sequence[Middleware] = ()
    """What goes around the source and the steps of this task, outermost first."""
    interruptible: bool = False
    """Whether `hurry` can cut off attempts that have no time limit. Costs a little for each attempt."""
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
                f"{name} has no connectors; give it some: {name}(connectors={{'source': …}}). "
                "A producer that needs none says so with connectors={}."
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
        self._check()

    def _check(self) -> None:
        """Mixins look here whether what they need is there."""

    @property
    def name(self) -> str:
        """What spans, metrics and log lines call this task."""
        return type(self).__name__

    @property
    def _engine(self) -> EngineState:
        # Built on first use, so a task that overrides __init__ and forgets super() still works.
        state: EngineState | None = self.__dict__.get("_engine_state")
        return self.__dict__.setdefault("_engine_state", EngineState()) if state is None else state

    def stop(self) -> None:
        """End the calls that run now: what is in flight finishes, nothing more is started.

        Safe from a signal handler and from any thread, and as often as you like. Called while nothing
        runs, it ends the next call before it begins.
        """
        self._engine.stop()

    def hurry(self) -> None:
        """Have the time of what is in flight run out now, as if `loop.timeout` had. For calls that have been stopped.

        Only an attempt under some time limit can be cut off, or any if the task is `interruptible`. Its transaction is
        abandoned, and comes again when its lease has run out. Safe from any thread.
        """
        for call in list(self._engine.running.values()):
            call.hurry()

    @property
    def stuck(self) -> int:
        """How many attempts are stuck now: asked to stop, given up on, and still running."""
        return sum(call.stuck for call in list(self._engine.running.values()))


class Task(BaseTask):
    """A task that runs in threads."""

    _fetch_method = "fetch_transactions"
    _other_fetch_method = "fetch_transactions_async"
    _asynchronous = False


class AsyncTask(BaseTask):
    """A task that runs in asyncio."""

    _fetch_method = "fetch_transactions_async"
    _other_fetch_method = "fetch_transactions"
    _asynchronous = True
