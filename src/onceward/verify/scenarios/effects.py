"""Outside calls of all runs: before the dedup decision, or bypassing session and ledger."""

from __future__ import annotations

import importlib
import sys

from onceward.inbox.evidence.code_digest import code_of
from onceward.verify.children import Watchdog, run_in_child
from onceward.verify.report import Finding
from onceward.verify.trial import Assessment, Trial
from onceward.verify.watch import blockade, intrusions
from onceward.verify.watch.intrusions import Intrusion, Phase, during

_STEPS = {
    Phase.HANDLER: "the handler",
    Phase.SUCCESS: "handle_transaction_success",
    Phase.FAILURE: "handle_transaction_exception",
}
_TRANSACTIONAL = (
    "with mode='transactional' in the contract, this is neither rolled back nor kept from happening twice. Set "
    "mode='effectful' and do it in session.effect(…)"
)
_EFFECTFUL = "this bypasses the ledger and has no idempotency key. Do it in session.effect(…)"
_ADVICE = {
    Phase.SUCCESS: "this runs after the commit, so a crash in between loses it. Do it in session.effect(…) in "
    "process_transaction, with mode='effectful' in the contract",
    Phase.FAILURE: "a failed event comes again, and so does this; a crash loses it. Log the error, or do this in "
    "session.effect(…) in process_transaction",
}

_READS = ". If a service only reads, name it in reads=[…]"


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
    advice = _ADVICE | {Phase.HANDLER: _TRANSACTIONAL if transactional else _EFFECTFUL}
    findings = [
        Finding(
            f"{_STEPS[each.phase]} {each.what} at {each.where}; {each.advice or advice[each.phase] + _READS}",
            where=each.where,
        )
        for each in trial.intrusions
        if each.phase in _STEPS
    ]
    known = {finding.where for finding in findings}
    consumer = trial.plan.contract.consumer_id
    findings += [
        each.finding(consumer) for each in trial.blocked if each.effect is not None or each.where not in known
    ]
    return Assessment(
        findings,
        "files, sockets, processes, messages, other database connections, also in other threads and tasks",
    )


def _import_again(trial: Trial) -> tuple[list[Intrusion], str]:
    """Import the consumer's modules again in a child, and return their outside calls and a note."""
    modules = [
        name for name in code_of(trial.plan.consumer, trial.plan.contract).modules if name in sys.modules
    ]

    def work(watchdog: Watchdog) -> tuple[list[Intrusion], str]:
        blockade.install(trial.databases.next_url(), trial.plan.options.allow, [])
        # Packages come before their modules, which are looked up there.
        for name in modules:
            del sys.modules[name]
        with during(Phase.EARLY):
            for name in modules:
                watchdog.pet(f"the import of {name}")
                try:
                    importlib.import_module(name)
                except BaseException as error:  # noqa: BLE001  some modules cannot be imported twice
                    return _early(), f" (not of {name}: {type(error).__name__})"
        return _early(), ""

    found: tuple[list[Intrusion], str] = run_in_child(work, trial.plan.options.timeout).value()
    return found


def _early() -> list[Intrusion]:
    known = {each.where for each in intrusions.seen}
    blocked = [each for each in blockade.seen if each.where not in known]
    return intrusions.seen + [
        Intrusion(Phase.EARLY, f"tried to call {each.target}", each.where or "an unknown line")
        for each in blocked
    ]
