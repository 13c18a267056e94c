"""Outside calls of all runs: before the dedup decision, or bypassing session and ledger."""

from __future__ import annotations

import importlib
import sys

from onceward.inbox.evidence.code_digest import code_of
from onceward.verify import intrusions
from onceward.verify.children import Watchdog, run_in_child
from onceward.verify.intrusions import Intrusion, Phase, during
from onceward.verify.report import Finding
from onceward.verify.trial import Assessment, Trial


def early_effects(trial: Trial) -> Assessment:
    early, note = _import_again(trial)
    early += [each for each in trial.intrusions if each.phase is Phase.EARLY]
    findings = [
        Finding(
            f"before the inbox knew whether the event is new, the consumer {each.what} at {each.where}; a duplicate "
            "would do it again. Move effects into process_transaction",
            where=each.where,
        )
        for each in dict.fromkeys(early)
    ]
    return Assessment(findings, f"import{note}, __init__, upcasters, model, everything before the handler")


def outside_calls(trial: Trial) -> Assessment:
    transactional = trial.plan.contract.mode == "transactional"
    advice = (
        "with mode='transactional' in the contract, this is neither rolled back nor kept from happening twice. Set "
        "mode='effectful' and do it in session.effect(…)"
        if transactional
        else "this bypasses the ledger and has no idempotency key. Do it in session.effect(…)"
    )
    findings = [
        Finding(
            f"the handler {each.what} at {each.where}; {advice}. If a service only reads, name it in reads=[…]",
            where=each.where,
        )
        for each in trial.intrusions
        if each.phase is Phase.HANDLER
    ]
    return Assessment(findings, "files, sockets, processes, other database connections")


def _import_again(trial: Trial) -> tuple[list[Intrusion], str]:
    """Import the consumer's modules again in a child, and return their outside calls and a note."""
    modules = [
        name for name in code_of(trial.plan.consumer, trial.plan.contract).modules if name in sys.modules
    ]

    def work(watchdog: Watchdog) -> tuple[list[Intrusion], str]:
        intrusions.install([])
        # Packages come before their modules, which are looked up there.
        for name in modules:
            del sys.modules[name]
        with during(Phase.EARLY):
            for name in modules:
                watchdog.pet(f"the import of {name}")
                try:
                    importlib.import_module(name)
                except BaseException as error:  # noqa: BLE001  some modules cannot be imported twice
                    return intrusions.seen, f" (not of {name}: {type(error).__name__})"
        return intrusions.seen, ""

    found: tuple[list[Intrusion], str] = run_in_child(work, trial.plan.options.timeout).value()
    return found
