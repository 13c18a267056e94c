"""What the pages show: the state of the run, samples, guarantees and balance, and the stores behind them.

Everything that takes long is read in threads of its own, and pages show the last answer with its age.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import urlopen

from onceward.app.app import Consumer, Onceward
from onceward.app.build import consumer_id, task_class
from onceward.app.rehearsal import task_for_dry_runs
from onceward.connectors.reports import ServerUnreachable
from onceward.console.history import Counted, History
from onceward.console.redaction import Redaction
from onceward.deadletters import DeadLetters
from onceward.errors import ConfigurationError, OncewardError
from onceward.inspection.balance import Balance
from onceward.inspection.counts import account_of, balance_of
from onceward.inspection.guarantee_facts import facts_of
from onceward.inspection.guarantees import GuaranteeVerdict, judge
from onceward.inspection.holds import Holds, read_holds
from onceward.outbox.queries import OutboxQueries
from onceward.run.samples import Samples
from onceward.run.supervisor import EndAnswer, ProcessEnd
from onceward.storage.database import MissingTablesError

if TYPE_CHECKING:
    from sqlalchemy import Engine

STATE_EVERY = 2.0
"""Seconds between two looks at the run."""
CHECK_EVERY = 120.0
"""Seconds between two balances, at least; they read all messages of a source."""
START_PATIENCE = 15.0
"""Seconds that the first of them waits for a worker."""
SHARE = 50
"""What the console asks is followed by a pause of so many times what it took, at least."""
FRESH = 30.0
"""Seconds for which a balance is good enough for viewers."""
SOON = 3.0
"""Seconds that a page waits for a balance."""

COUNT_PATIENCE = 1.0
"""Seconds that an action waits for the new number of dead letters."""

RunState = Mapping[str, Any]
"""What `/progress` of a run says."""
EndWorker = Callable[[int, str, ProcessEnd, Callable[[], Coroutine[None, None, None]]], EndAnswer]
"""`Supervisor.end_worker`."""


class CheckAnswer(StrEnum):
    """What became of the wish to check a consumer."""

    DONE = "check_done"
    FRESH = "check_fresh"
    """The last one is recent enough."""
    BUSY = "check_busy"
    """Another one runs."""
    LONG = "check_long"
    """It takes longer than a page waits."""


class ConsumerCheck(NamedTuple):
    """What `explain` and `balance` last said about a consumer."""

    at: float
    seconds: float = 0.0
    """How long it took."""
    guarantee: GuaranteeVerdict | None = None
    balance: Balance | None = None
    problem: str | None = None


class Backstage:
    """One for each console. Start it once; `stop` ends its threads."""

    def __init__(
        self,
        app: Onceward,
        *,
        samples: Samples | None = None,
        state: Callable[[], RunState] | None = None,
        runs: Sequence[str] = (),
        redact: Sequence[str] = (),
        trace_url: str | None = None,
        loaded_at: float | None = None,
        end_worker: EndWorker | None = None,
    ) -> None:
        self.app = app
        self.end_worker = end_worker
        """None if the workers are out of reach."""
        self._loaded_at = time.time() if loaded_at is None else loaded_at
        """When the code of the app was loaded."""
        self.redaction = Redaction(redact)
        self.history = History()
        self.checked: dict[str, ConsumerCheck] = {}
        self.trace_url = trace_url
        self.samples = samples or Samples(app, app.consumers.values(), app.settings.sample_every)
        self._samples_here = samples is None
        self._state = state
        self._runs = tuple(runs)
        self.states: list[RunState] = []
        """Of the runs that answered the last time."""
        self.silent: list[str] = []
        """Why others did not."""
        self.holds: Holds | None = None
        """What holds consumers, as the database last said; None if that is not known."""
        self.checking: tuple[str, float] | None = None
        """The consumer that is checked now, and since when."""
        self._one_check = threading.Lock()
        self._engine: Engine | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Begin to sample. Does nothing the second time."""
        with self._lock:
            if self._started:
                return
            self._started = True
        if self._samples_here:
            self.samples.start()
        self._look_at_runs()
        self._repeat(self._look_at_runs, STATE_EVERY, 0)
        self._repeat(self.look_at_holds, STATE_EVERY, SHARE)
        self._repeat(self._check, CHECK_EVERY, SHARE)

    def stop(self) -> None:
        self._stopped.set()
        if self._samples_here:
            self.samples.stop()
        if self._engine is not None:
            self._engine.dispose()

    # ── stores ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = self.app.create_engine()
            return self._engine

    @property
    def has_database(self) -> bool:
        return self.app.settings.database is not None

    @property
    def letters(self) -> DeadLetters:
        return DeadLetters(self.engine)

    @property
    def outbox(self) -> OutboxQueries:
        return OutboxQueries(self.engine)

    def lacks_tables(self) -> bool:
        """Whether a new app has not created its tables yet, or a new release not all of them."""
        from onceward.inbox import Inbox

        try:
            Inbox(self.engine).check_tables()
        except MissingTablesError:
            return True
        return False

    def consumer_of(self, letters_of: str) -> Consumer | None:
        """The consumer whose letters these are."""
        return next((each for each in self.app.consumers.values() if consumer_id(each) == letters_of), None)

    def name_of(self, letters_of: str) -> str:
        """What the app calls the consumer whose letters these are; another app may have it."""
        found = self.consumer_of(letters_of)
        return letters_of if found is None else found.name

    def task_of(self, letters_of: str) -> Any:
        """A task for dry runs. Raises ConfigurationError if there can be none."""
        consumer = self.consumer_of(letters_of)
        if consumer is None:
            raise ConfigurationError(
                f"{self.app.name} has no consumer {letters_of!r}, so nothing here can try its letters"
            )
        if consumer.contract is None:
            raise ConfigurationError(
                f"{consumer.name} has no contract, so a dry run could not be rolled back; redrive a few letters first"
            )
        return task_for_dry_runs(task_class(consumer), self.engine, self.app)

    def changed_file(self, letters_of: str) -> str | None:
        """The file of the consumer, if it has changed since: dry runs here use the code that was loaded."""
        consumer = self.consumer_of(letters_of)
        try:
            file = None if consumer is None else inspect.getsourcefile(inspect.unwrap(consumer.function))
            changed = file is not None and os.stat(file).st_mtime > self._loaded_at
        except (OSError, TypeError):  # it is gone, or was never in a file
            return None
        return os.path.basename(file) if changed and file is not None else None

    # ── the runs ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def knows_runs(self) -> bool:
        return self._state is not None or bool(self._runs)

    def status(self, consumer: str) -> list[dict[str, Any]]:
        """What each worker says about a consumer."""
        return [
            {**each, **{name: worker.get(name) for name in ("worker", "pid", "process", "ending", "live")}}
            for state in self.states
            for worker in state["workers"]
            for each in worker["consumers"]
            if each["consumer"] == consumer
        ]

    def restarts(self, consumer: str) -> bool:
        """Whether a worker that ran the consumer has ended, and its run starts another one."""
        return any(
            state["stage"] == "running"
            and (worker["pid"] is None or worker.get("starting"))
            and consumer in worker.get("earlier", {})
            for state in self.states
            for worker in state["workers"]
        )

    def starts(self) -> bool:
        """Whether a worker has not said yet what it runs."""
        return any(worker.get("starting") for worker in self.workers())

    def workers(self) -> list[dict[str, Any]]:
        return [worker for state in self.states for worker in state["workers"]]

    def look_at_own_run(self) -> None:
        """Have what the run beside this console says now, not two seconds ago."""
        if self._state is not None:
            self.states = [self._state(), *self.states[1:]]

    def _look_at_runs(self) -> None:
        states, silent = [], []
        if self._state is not None:
            states.append(self._state())
        for url in self._runs:
            try:
                with urlopen(f"{url.rstrip('/')}/progress", timeout=2.0) as answer:
                    found = json.load(answer)
                    found["workers"], found["stage"]
                    states.append({**found, "run": url})
            except (OSError, ValueError, LookupError, TypeError) as error:
                silent.append(f"{url} does not answer: {error}")
        self.states, self.silent = states, silent
        counts: dict[str, dict[Hashable, Counted]] = {}
        for state in states:
            for worker in state["workers"]:
                for name, done in _done_by(worker).items():
                    counts.setdefault(name, {})[state.get("run"), worker["worker"]] = done
        self.history.add(counts)

    def look_at_holds(self) -> Holds | None:
        """Ask the database what holds consumers now."""
        database = self.app.settings.database
        try:
            self.holds = None if database is None else read_holds(database)
        except ServerUnreachable:  # the samples say why
            self.holds = None
        return self.holds

    def note_change_of_letters(self) -> None:
        """Count dead letters again after an action of this console, so the next page has the new number."""
        self.samples.refresh_database(COUNT_PATIENCE)

    # ── guarantees and balance ──────────────────────────────────────────────────────────────────────────

    def check_soon(self, name: str, *, again: bool) -> CheckAnswer:
        """Check a consumer, unless another check runs: they read all messages of a source, and every viewer may ask.
        Without `again`, a recent one is enough."""
        last = self.checked.get(name)
        if not again and last is not None and time.time() - last.at < max(FRESH, last.seconds * SHARE):
            return CheckAnswer.FRESH
        if not self._one_check.acquire(timeout=SOON if again else 0):
            return CheckAnswer.BUSY
        done = threading.Event()

        def run() -> None:
            try:
                self._strike(name)
            finally:
                self._one_check.release()
                done.set()

        threading.Thread(target=run, name="onceward-console", daemon=True).start()
        return CheckAnswer.DONE if done.wait(SOON) else CheckAnswer.LONG

    def check(self, name: str) -> None:
        """Ask `explain` and `balance` about a consumer, after other checks."""
        with self._one_check:
            self._strike(name)

    def _strike(self, name: str) -> None:
        began, self.checking = time.monotonic(), (name, time.time())
        consumer = self.app.consumers[name]
        try:
            guarantee = judge(facts_of(self.app, consumer))
            balance = balance_of(account_of(self.app, consumer))
            checked = ConsumerCheck(time.time(), time.monotonic() - began, guarantee, balance)
        except Exception as error:  # noqa: BLE001  shown on the page; the next try may succeed
            said = str(error) if isinstance(error, OncewardError) else f"{type(error).__name__}: {error}"
            checked = ConsumerCheck(time.time(), time.monotonic() - began, problem=said)
        finally:
            self.checking = None
        self.checked[name] = checked

    def _check(self) -> None:
        self._await_workers()
        for name in self.app.consumers:
            if not self._stopped.is_set():
                self.check(name)

    def _await_workers(self) -> None:
        """The workers of a new run create its tables first; before, there is nothing to say about them."""
        until = time.monotonic() + START_PATIENCE
        while self._state is not None and time.monotonic() < until and not self._stopped.wait(0.2):
            if any(worker.get("ready") for worker in self.workers()):
                return

    def _repeat(self, work: Callable[[], object], every: float, share: float) -> None:
        def loop() -> None:
            while not self._stopped.is_set():
                began = time.monotonic()
                try:
                    work()
                except Exception as error:  # noqa: BLE001  shown on the page; the next try may succeed
                    self.silent = [f"{type(error).__name__}: {error}"]
                self._stopped.wait(max(every, (time.monotonic() - began) * share))

        threading.Thread(target=loop, name="onceward-console", daemon=True).start()


def _done_by(worker: Mapping[str, Any]) -> dict[str, Counted]:
    """What a worker has done, with its earlier processes: also for consumers that moved to another one since."""
    done = {name: Counted(**each) for name, each in worker.get("earlier", {}).items()}
    for each in worker["consumers"]:
        before = done.get(each["consumer"], Counted())
        done[each["consumer"]] = before.plus(Counted(each["succeeded"], each["failed"]))
    return done
