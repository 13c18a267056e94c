"""Outside calls of all runs: before the dedup decision, or bypassing session and ledger."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from onceward.inbox.effects import Claim, key_of
from onceward.inbox.evidence.code_digest import code_of
from onceward.inbox.stores.types import Key
from onceward.verify.children import Watchdog, run_in_child
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery
from onceward.verify.trial import Assessment, Trial
from onceward.verify.watch import blockade, intrusions
from onceward.verify.watch.calls import KEY, MESSAGE, OutsideCall
from onceward.verify.watch.intrusions import Intrusion, Phase, during

SHORTEST_PART = 4
"""Characters. A shorter part of a key may be an event's id by chance."""
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

_REAL = " (the verification does not stop this: the file is changed)"
_READS = ". If a service only reads, name it in reads=[…]"


def early_effects(trial: Trial) -> Assessment:
    early, note = _import_again(trial)
    early += [each for each in trial.intrusions if each.phase is Phase.EARLY]
    findings = [
        Finding(
            f"before the inbox knew whether the event is new, the consumer {each.what} at {each.where}{_really(each)}; "
            "a duplicate would do it again. Move effects into process_transaction",
            where=each.where,
        )
        for each in dict.fromkeys(early)
    ]
    return Assessment(
        findings, f"import{note}, __init__, keys, upcasters, model, everything before the handler"
    )


def outside_calls(trial: Trial) -> Assessment:
    transactional = trial.plan.contract.mode == "transactional"
    advice = _ADVICE | {Phase.HANDLER: _TRANSACTIONAL if transactional else _EFFECTFUL}
    findings = [
        Finding(
            f"{_STEPS[each.phase]} {each.what} at {each.where}{_really(each)}; "
            f"{each.advice or advice[each.phase] + _READS}",
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
    findings += [finding for each in trial.deliveries for finding in _keys(each)]
    findings += _parts_of_keys(trial.deliveries, consumer)
    return Assessment(
        findings,
        "files, sockets, processes, messages, other database connections, also in other threads and tasks",
    )


def _really(intrusion: Intrusion) -> str:
    """Connections and processes are stopped. What a handler does to files is not."""
    return _REAL if any(word in intrusion.what for word in (" the file ", " the directory ")) else ""


def _keys(delivery: Delivery) -> Iterator[Finding]:
    """Effects that the provider cannot tell from a copy, or takes for one."""
    by_effect: defaultdict[str, list[OutsideCall]] = defaultdict(list)
    for call in delivery.calls:
        if call.name != MESSAGE:
            by_effect[call.effect].append(call)
    for effect, calls in by_effect.items():
        texts = [value for call in calls for value in call.arguments.values()]
        if effect in delivery.keyless and not any(delivery.event in value for value in texts):
            yield Finding(
                f"effect {effect!r} of event {delivery.event!r} calls {calls[0].name} and never reads the key that "
                "session.effect passes, so the provider cannot know a repetition after a lost answer, and acts twice. "
                "Pass the key. If the call may be repeated without harm, name the parameter _"
            )
        keyed = [call for call in calls if repr(KEY) in call.arguments.values()]
        for first, second in pairwise(keyed):
            if first.name == second.name and first.arguments != second.arguments:
                yield Finding(
                    f"effect {effect!r} of event {delivery.event!r} calls {first.name} twice with one key and other "
                    "arguments: the provider takes the second call for a copy of the first. Make each an effect of its "
                    "own, or give each its own key, such as f'{key}-2'"
                )


def _parts_of_keys(deliveries: Sequence[Delivery], consumer: str) -> Iterator[Finding]:
    """Calls whose key is a part of their effect's, which is that of another effect, or of every event, too."""
    used: dict[tuple[str, str], tuple[str, str]] = {}
    for delivery in deliveries:
        for call in delivery.calls:
            place = (delivery.event, call.effect)
            if _has_nothing_of(delivery.event, call, consumer):
                yield Finding(
                    f"effect {place[1]!r} of event {place[0]!r} calls {call.name} with the key {call.part_of_key!r}, a "
                    "part of its own that has nothing of the event, so every event has the same: the provider takes "
                    "the next one for a copy, and does nothing. Pass the whole key, or a digest of it"
                )
                return
            first = used.setdefault((call.name, call.part_of_key), place)
            if call.part_of_key and first != place:
                yield Finding(
                    f"effect {place[1]!r} of event {place[0]!r} calls {call.name} with the key {call.part_of_key!r}, a "
                    f"part of its own, and so does effect {first[1]!r} of event {first[0]!r}: the provider takes the "
                    "second for a copy of the first, and does nothing. Pass the whole key, or a digest of it"
                )
                return


def _has_nothing_of(event: str, call: OutsideCall, consumer: str) -> bool:
    """Whether all that it passes as a key is of the consumer and the effect."""
    of_all = key_of(Claim(Key(consumer, "", 0), 1), call.effect)
    part = call.part_of_key
    return len(part) >= SHORTEST_PART and part in of_all and part not in event


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
