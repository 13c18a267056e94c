"""An exception at each boundary, then the event again. Also finds handlers that swallow an exception."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from onceward._text import quantity
from onceward.task.exceptions import UnrecordedError
from onceward.transaction import Transaction
from onceward.verify.children import Hung
from onceward.verify.failures import states_in
from onceward.verify.faults import IN_EFFECTS, STATEMENTS, DeliveryBoundary, Fault, handler_faults
from onceward.verify.report import Finding
from onceward.verify.rows import tables
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import DIFFERS, Assessment, Run, Trial, deliver_all, unsettled

MOST_WRITES = 8
"""If a handler writes more often, faults are tried at a random choice of its writes."""
MOST_QUERIES = 3
"""Those after it are not failed: a handler that reads often reads in a loop."""
MOST_FINDINGS = 4
"""Findings after which a scenario stops; more would say the same."""


def exceptions(trial: Trial) -> Assessment:
    # On SQLite a session has all locks from its beginning.
    locks = trial.most("locks") if trial.databases.backend == "postgresql" else 0
    faults = choose(trial, handler_faults(trial.most("writes"), trial.most("effects"), "raise", locks))
    faults += _with_states(trial, faults)
    queries = min(trial.most("queries"), MOST_QUERIES)
    faults += [Fault(DeliveryBoundary.QUERY_FAILS, number) for number in range(1, queries + 1)]
    findings = _unanswered(trial)
    for fault in faults:
        run = trial.perform(lambda stage, fault=fault: deliver_all(stage, trial.plan.events, fault))  # type: ignore[misc]
        findings += _findings(trial, fault, run)
        if len(findings) >= MOST_FINDINGS:
            break
    findings = findings or _in_place(trial)
    return Assessment(findings, f"at {quantity(len(faults), 'boundary', 'boundaries')}")


def _with_states(trial: Trial, faults: list[Fault]) -> list[Fault]:
    """Failures of writes and locks that the consumer's code knows by their code."""
    failing = [each for each in faults if each.boundary in STATEMENTS]
    return [
        msgspec.structs.replace(each, state=state)
        for state in states_in(trial.plan.consumer, trial.databases.backend)
        for each in failing
    ]


def _in_place(trial: Trial) -> list[Finding]:
    """An exception before the commit, and another attempt at once, as a policy with retries makes it."""
    fault = Fault(DeliveryBoundary.BEFORE_COMMIT)

    def act(stage: Stage) -> list[Delivery]:
        task = stage.instance()
        return [each for event in trial.plan.events for each in stage.settle_in_place(task, event, fault)]

    run = trial.perform(act)
    story = f"after an exception {fault}, and another attempt at once, which a policy with retries makes"
    lines, failed = trial.differences_in_order(run.rows), unsettled(story, run.value)
    if not lines:
        return failed
    text = (
        f"{story}, {DIFFERS}. With a new delivery it does not: the first attempt left state behind that belongs to its "
        "thread, task or context, such as threading.local or a ContextVar"
    )
    return [Finding(text, (*lines, *map(str, failed)))]


def _unanswered(trial: Trial) -> list[Finding]:
    """Effects that take silence for an answer, or call again as if it were a no. What else a call does then is for it
    to decide."""
    effects = trial.most("effects") if _called(trial.deliveries) else 0
    for number in range(1, effects + 1):
        fault = Fault(DeliveryBoundary.CALL_FAILS, number)
        run = trial.perform(lambda stage, fault=fault: deliver_all(stage, trial.plan.events, fault))  # type: ignore[misc]
        for each in run.value:
            for finding in _mistaken(trial, fault, each):
                return [finding]
        for event, name in trial.perform(_ReconcileInTheDark(trial.plan.events, number)).value:
            return [
                Finding(
                    f"reconcile of effect {name!r} of event {event!r} has an answer after a TimeoutError of the "
                    "provider, which has given none: Done loses the effect if it has not happened, and EffectRefused "
                    "makes it again with a new key if it has. Let the error raise, so somebody asks again later"
                )
            ]
    return []


class _ReconcileInTheDark(msgspec.Struct, frozen=True):
    """Leave an effect of each event in doubt, and give its reconcile no answer. Returns those that have one."""

    events: tuple[Transaction, ...]
    number: int

    def __call__(self, stage: Stage) -> list[tuple[str, str]]:
        task = stage.instance()
        found = []
        for event in self.events:
            stage.deliver(task, event, Fault(DeliveryBoundary.AFTER_EFFECT, self.number))
            second = stage.deliver(task, event, Fault(DeliveryBoundary.RECONCILE_FAILS, self.number))
            found += [(event.id, name) for name in second.assumed]
        return found


def _mistaken(trial: Trial, fault: Fault, delivery: Delivery) -> Iterator[Finding]:
    of = f"of event {delivery.event!r}"
    for name in delivery.misjudged:
        yield Finding(
            f"effect {name!r} {of} raised EffectRefused after a TimeoutError {fault}. A timeout or a lost connection "
            "is not a refusal: the provider may have done it, and the next attempt or a redrive calls again with a new "
            "key. Let it raise, and turn only the provider's own no into EffectRefused"
        )
    for call in delivery.rekeyed:
        yield Finding(
            f"effect {call.effect!r} {of} calls {call.name} again with another key after a TimeoutError {fault}: the "
            "provider may have done the first call, and takes the second for a new one. Pass the same key each time"
        )
    clean = [each for each in trial.deliveries if each.event == delivery.event and each.succeeded]
    for name in delivery.unheard:
        if any((each.said, each.effects) == (delivery.said, delivery.effects) for each in clean):
            yield Finding(
                f"effect {name!r} {of} returned after a TimeoutError {fault}, so it counts as done, and the handler "
                "goes on as if it were: nobody knows whether it happened, and nobody will try again. Let the error "
                "raise. If the call may be lost, name its parameter _; if it only reads, name the service in reads=[…]"
            )


def choose(trial: Trial, faults: list[Fault]) -> list[Fault]:
    """All faults, or those around a choice of the writes if there are many."""
    most = max((fault.number for fault in faults), default=0)
    if most <= MOST_WRITES:
        return faults
    numbers = {0, 1, most, *trial.chance.sample(range(2, most), MOST_WRITES - 2)}
    return [fault for fault in faults if fault.number in numbers]


def _findings(trial: Trial, fault: Fault, run: Run) -> list[Finding]:
    deliveries: list[Delivery] = run.value
    story = f"after an exception {fault}, and the same event again"
    lines = trial.differences_in_order(run.rows)
    swallowed = [each.event for each in deliveries if each.swallowed]
    unrecorded = [each for each in deliveries if each.error.startswith(UnrecordedError.__name__)]
    if unrecorded:
        return [
            Finding(
                f"an exception {fault} of event {unrecorded[0].event!r} was swallowed by middleware: "
                f"{unrecorded[0].error}"
            )
        ]
    if swallowed and fault.boundary in IN_EFFECTS:
        return [
            Finding(
                f"an exception {fault} of event {swallowed[0]!r} was swallowed: the handler caught it and returned, "
                "and the inbox fails such an attempt, because the effect may not have happened; let it propagate, or "
                "raise EffectRefused in the call if the provider said no",
                tuple(lines),
            )
        ]
    if lines and swallowed:
        return [
            Finding(
                f"an exception {fault} of event {swallowed[0]!r} was swallowed: the handler caught it and returned, "
                "so the event counts as done; let it propagate",
                tuple(lines),
            )
        ]
    if swallowed and fault.boundary in STATEMENTS and not fault.lasts:
        return _if_it_lasts(trial, fault)
    if not swallowed and fault.boundary is DeliveryBoundary.EFFECT_FAILS:
        for event, effect in _called(trial.deliveries) - _called(deliveries):
            return [
                Finding(
                    f"{story}, effect {effect!r} of event {event!r} counts as done, and was never called: reconcile "
                    "says so, or a fake that it asks. It must return NOT_DONE unless the provider knows the key"
                )
            ]
    failed = unsettled(story, deliveries)
    if not lines and not failed:
        return []
    text = f"{story}, {DIFFERS}"
    if not trial.differences(_in_new_processes(trial, fault)):
        text += (
            ". With a new process for each attempt it does not: the first attempt left state behind, on self, on the "
            "class or in a module"
        )
        if hasattr(trial.plan.consumer, "gets_deliveries"):
            text += ", or the handler does something else if event.deliveries is more than 1"
    return [Finding(text, (*lines, *map(str, failed)))]


def _if_it_lasts(trial: Trial, fault: Fault) -> list[Finding]:
    """The handler has tried again, with success. See whether it gives up silently if that fails, too."""
    lasting = msgspec.structs.replace(fault, lasts=True)
    try:
        run = trial.perform(lambda stage: deliver_all(stage, trial.plan.events, lasting))
    except Hung:  # it tries for longer than a delivery may take here
        return []
    return _findings(trial, lasting, run)


def _called(deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
    """The events and effects that called the outside."""
    return {(each.event, call.effect) for each in deliveries for call in each.calls}


def _in_new_processes(trial: Trial, fault: Fault) -> tables.Rows:
    database = trial.new_database()
    for event in trial.plan.events:
        trial.perform(lambda stage, event=event: stage.deliver(stage.instance(), event, fault), database)  # type: ignore[misc]
        trial.perform(lambda stage, event=event: deliver_all(stage, [event]), database)  # type: ignore[misc]
    return trial.rows_in(database)
