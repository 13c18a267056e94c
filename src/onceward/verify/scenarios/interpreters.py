"""kill -9 in one process, then the event again in another interpreter, which has imported everything again.

Forked processes share what an import has computed, and the hash values of strings. Workers in production do not. An
effect must have the same name and key even if the copy comes on another day, to another host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from onceward._text import quantity
from onceward.verify.elsewhere import copy_of
from onceward.verify.faults import DeliveryBoundary, Fault
from onceward.verify.interpreters import HASH_SEEDS, conversation
from onceward.verify.report import Finding
from onceward.verify.rows import tables
from onceward.verify.rows.messages import MESSAGES, ids_of
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, NotChecked, SharedDatabase, Trial, other_keys, unsettled
from onceward.verify.watch.calls import KEY, LIKE_A_KEY, MESSAGE, OutsideCall

Place = tuple[str, str, str, int]
"""Of a call: event, effect, name and number."""
Arguments = Mapping[str, str]
_CAUSES = "hash(), the order of a set, an id or time made at import, the process id, or a counter in a module"


def interpreters(trial: Trial) -> Assessment:
    findings: list[Finding] = []
    for seed in HASH_SEEDS:
        crashes = seed == HASH_SEEDS[0]
        rows, deliveries = _deliver(trial, seed, crashes)
        failed = unsettled("there", deliveries)
        if failed:
            # What a test or a start has set after the import is not there, so this may be right.
            raise NotChecked(f"in another interpreter the events do not succeed: {failed[0].text}")
        story = "after kill -9, and the same event again in another interpreter"
        if not crashes:
            story = "delivered in another interpreter"
        findings = _compare_rows(trial, story, rows) + _compare_calls(trial, story, deliveries)
        findings += _compare_keyed(trial, story, deliveries)
        findings += _compare_messages(trial, story, deliveries)
        findings += other_keys(trial.deliveries, deliveries)
        if findings:
            break
    note = f"{quantity(len(HASH_SEEDS), 'interpreter')}, one of them after kill -9"
    if (trial.most("effects") or trial.oracle[MESSAGES]) and not findings:
        findings = _elsewhere(trial)
        note += "; effects and messages also of a copy on another day and host"
    return Assessment(findings, note)


def _elsewhere(trial: Trial) -> list[Finding]:
    """Kill a process after its first effect, and deliver a copy of the event later and elsewhere.

    Rows may name the day; effects must be the same, or the provider gets another call.
    """
    story = "after kill -9, and a copy of the event on another day and host"
    rows, deliveries = _deliver(trial, HASH_SEEDS[0], crashes=True, elsewhere=True)
    failed = unsettled("there", deliveries)
    if failed:
        raise NotChecked(f"on another day and host the events do not succeed: {failed[0].text}")
    there, here = rows[tables.EFFECTS], trial.oracle[tables.EFFECTS]
    if there == here:
        findings = _compare_calls(trial, story, deliveries) + _compare_messages(trial, story, deliveries)
        findings += _compare_keyed(trial, story, deliveries)
        return findings + _compare_sends(trial, story, rows)
    lines = [f"{_effect(row)} is missing" for row in here - there]
    lines += [f"{_effect(row)} is there instead" for row in there - here]
    return [
        Finding(
            f"{story}, its effects differ, so the provider gets another call with another key. Name an effect by what "
            "it does and by the event's id and payload, not by created_at, the time, the day, the host or the process",
            tuple(lines),
        )
    ]


def _compare_sends(trial: Trial, story: str, rows: tables.Rows) -> list[Finding]:
    """Messages of the outbox. What they say may name the day; their ids may not."""
    here, there = (ids_of(each, trial.plan.options.exclude) for each in (trial.oracle, rows))
    if here == there:
        return []
    lines = [f"message {id!r} is missing" for id in sorted(here - there)]
    lines += [f"message {id!r} is there instead" for id in sorted(there - here)]
    return [
        Finding(
            f"{story}, its messages have other ids or another number, so their consumer takes copies for other "
            "messages. Leave id out, or make it of the event's id and payload, not of created_at, the time, the day, "
            "the host or the process",
            tuple(lines),
        )
    ]


def _effect(row: tuple[str, ...]) -> str:
    tracking_id, name, state = row
    return f"effect {name!r} of event {tracking_id!r}, {'in doubt' if state == 'intended' else state},"


def _deliver(
    trial: Trial, seed: int, crashes: bool, elsewhere: bool = False
) -> tuple[tables.Rows, list[Delivery]]:
    database = trial.new_database()
    trial.perform(lambda stage: None, database)  # makes it fresh
    deliveries: list[Delivery] = []
    with conversation(seed, trial.plan, database, elsewhere=elsewhere) as other:
        for event in trial.plan.events:
            if crashes:
                _crash(trial, event.id, database)
            deliveries += other.deliver(copy_of(event) if elsewhere else event)
        return trial.learn(*other.rows(trial.tables)), deliveries


def _crash(trial: Trial, event_id: str, database: SharedDatabase) -> None:
    """Begin an event in a process that is killed after its first effect, or before its commit."""
    effects = any(each.effects for each in trial.deliveries if each.event == event_id)
    boundary = DeliveryBoundary.AFTER_EFFECT if effects else DeliveryBoundary.BEFORE_COMMIT
    event = next(each for each in trial.plan.events if each.id == event_id)

    def begin(stage: Stage) -> None:
        stage.settle(stage.instance(), event, Fault(boundary, int(effects), "kill"))

    trial.perform_until_killed(begin, database)


def _compare_rows(trial: Trial, story: str, rows: tables.Rows) -> list[Finding]:
    lines = trial.differences_in_order(rows)
    if not lines:
        return []
    columns = tables.differing_columns(trial.oracle, rows, trial.tables, trial.plan.options.exclude)
    leave_out = f", or leave them out with exclude={columns}" if columns else ""
    text = (
        f"{story}, the rows differ: something depends on the process, such as {_CAUSES}. Take such values from the "
        f"event{leave_out}"
    )
    return [Finding(text, tuple(lines))]


# ── what a provider would see ───────────────────────────────────────────────────────────────────────────


def _compare_calls(trial: Trial, story: str, deliveries: Sequence[Delivery]) -> list[Finding]:
    """Calls without the key of the effect, whose own key is another one each time."""
    first, again, there = map(_calls, (trial.deliveries, trial.again, deliveries))
    findings = []
    for place, call in first.items():
        event, effect, name, _ = place
        if place not in there or call.has_key or name == MESSAGE:
            continue
        other, twin = there[place].arguments, again.get(place, call).arguments
        varying = [each for each in _varying(event, call.arguments, twin, other) if each in other]
        if varying:
            lines = [f"{each}: {call.arguments[each]:.80} became {other[each]:.80}" for each in varying]
            text = (
                f"{story}, effect {effect!r} of event {event!r} calls {name} with another {' and '.join(varying)} and "
                f"without the key that session.effect passes, so the provider cannot know that it is the same call. "
                f"Pass that key; what changed depends on the process, such as {_CAUSES}"
            )
            findings.append(Finding(text, tuple(lines)))
    return findings


def _compare_keyed(trial: Trial, story: str, deliveries: Sequence[Delivery]) -> Iterator[Finding]:
    """Calls with the key of the effect, if they add something to it that differs, or change places with each other."""
    first, there = _calls(trial.deliveries), _calls(deliveries)
    for place, call in first.items():
        event, effect, name, _ = place
        if place not in there or not call.has_key or name == MESSAGE:
            continue
        mine, other = call.arguments, there[place].arguments
        with_key = [each for each, value in mine.items() if KEY in value and LIKE_A_KEY.search(each)]
        if with_key and not any(KEY in value and other.get(each) == value for each, value in mine.items()):
            lines = [f"{each}: {mine[each]:.80} became {other.get(each, 'nothing'):.80}" for each in with_key]
            yield Finding(
                f"{story}, effect {effect!r} of event {event!r} calls {name} with another key: what it adds to the key "
                "that session.effect passes differs, so the provider cannot know that it is the same call. Pass that "
                "key as it is, or add something fixed to it",
                tuple(lines),
            )
        elif (taken := _taken_from(place, mine, other, first)) is not None:
            yield Finding(
                f"{story}, effect {effect!r} of event {event!r} makes the call of {name} that effect {taken!r} made "
                "before. So after a crash one call is made twice, with two keys, and another is never made. Name an "
                "effect by what it is about, such as its item, and not by its place in a set",
                tuple(f"{each}: {mine[each]:.80} became {other[each]:.80}" for each in _changed(mine, other)),
            )
            return


def _taken_from(
    place: Place, mine: Arguments, other: Arguments, first: Mapping[Place, OutsideCall]
) -> str | None:
    """The effect of the same event whose call this is now."""
    event, effect, name, _ = place
    if not _changed(mine, other):
        return None
    same = (each for each, call in first.items() if call.arguments == other and each[::2] == (event, name))
    return next((each[1] for each in same if each[1] != effect), None)


def _changed(mine: Arguments, other: Arguments) -> list[str]:
    return [each for each, value in mine.items() if each in other and other[each] != value]


def _compare_messages(trial: Trial, story: str, deliveries: Sequence[Delivery]) -> list[Finding]:
    """Messages of effects that have another id each time: their consumer takes the copy for another message."""
    first, there = _calls(trial.deliveries), _calls(deliveries)
    return [
        Finding(
            f"{story}, effect {effect!r} of event {event!r} sends a message with another id, so its consumer takes "
            "the copies for two messages. Give it the key, Transaction(id=key, payload=…), or send it with "
            "session.send, which commits with the event",
            (f"id: {call.arguments['id']} became {there[place].arguments['id']}",),
        )
        for place, call in first.items()
        for event, effect, name, _ in [place]
        if name == MESSAGE and place in there and there[place].arguments != call.arguments
    ]


def _varying(event: str, arguments: Arguments, twin: Arguments, other: Arguments) -> Iterator[str]:
    """Arguments that make another call of it.

    The time of the call, or the id of a worker, may change beside a key of the consumer's own.
    """
    has_own_key = any(event in value for name, value in arguments.items() if other.get(name) == value)
    for name, value in arguments.items():
        of_interpreter = twin.get(name) == value and not has_own_key
        if other.get(name) != value and (of_interpreter or LIKE_A_KEY.search(name)):
            yield name


def _calls(deliveries: Sequence[Delivery]) -> dict[Place, OutsideCall]:
    numbers: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    found: dict[Place, OutsideCall] = {}
    for delivery in deliveries:
        for call in delivery.calls:
            place = (delivery.event, call.effect, call.name)
            found[*place, numbers[place]] = call
            numbers[place] += 1
    return found
