"""What was done at the wrong time in any run: before the dedup decision, or past session and ledger."""

from __future__ import annotations

import importlib
import sys

from onceward.inbox.evidence.code_digest import code_of
from onceward.verify import intrusions
from onceward.verify.children import Watchdog, in_child
from onceward.verify.intrusions import Phase, Sight, during
from onceward.verify.report import Finding
from onceward.verify.trial import Trial, Tried


def early_effects(trial: Trial) -> Tried:
    sights, note = _at_import(trial)
    sights += [sight for sight in trial.sights if sight.phase is Phase.EARLY]
    findings = [
        Finding(
            f"before it was known whether the event is new, the consumer {sight.what} at {sight.where}; a copy of the "
            "event would do it again. Effects belong into process_transaction",
            where=sight.where,
        )
        for sight in dict.fromkeys(sights)
    ]
    return Tried(findings, f"import{note}, __init__, upcasters, model, and all up to the handler")


def outside_calls(trial: Trial) -> Tried:
    transactional = trial.plan.contract.mode == "transactional"
    advice = (
        "the contract says mode='transactional', so it is neither undone with the transaction nor kept from happening "
        "twice. Say mode='effectful' and do it in session.effect(…)"
        if transactional
        else "it is in no ledger and has no key. Do it in session.effect(…)"
    )
    findings = [
        Finding(
            f"the handler {sight.what} at {sight.where}; {advice}. What only reads is named in reads=[…]",
            where=sight.where,
        )
        for sight in trial.sights
        if sight.phase is Phase.HANDLER
    ]
    return Tried(findings, "files, sockets, processes, other database connections")


def _at_import(trial: Trial) -> tuple[list[Sight], str]:
    """Import the consumer's modules once more, in a child, and see what that does."""
    modules = [
        name for name in code_of(trial.plan.consumer, trial.plan.contract).modules if name in sys.modules
    ]

    def work(watchdog: Watchdog) -> tuple[list[Sight], str]:
        intrusions.install([])
        # Packages first, because what is in them is looked for there.
        for name in modules:
            del sys.modules[name]
        with during(Phase.EARLY):
            for name in modules:
                watchdog.pet(f"the import of {name}")
                try:
                    importlib.import_module(name)
                except BaseException as error:  # noqa: BLE001  some modules cannot be imported twice
                    return intrusions.sights, f" (not of {name}: {type(error).__name__})"
        return intrusions.sights, ""

    found: tuple[list[Sight], str] = in_child(work, trial.plan.asked.timeout).value()
    return found
