"""The spans of one transaction in all its processes, as a tree with the waits between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from onceward.telemetry.span_file import Span

PROCESSING = "start_processing"
PRODUCING = "start_producing"
LIVES = (PROCESSING, PRODUCING)
"""The spans of a transaction in an engine, from begin to outcome."""
NOTICEABLE = 0.05
"""Seconds without a span that are worth a line."""


class Wait(msgspec.Struct, frozen=True):
    """Time in which nothing ran."""

    seconds: float
    why: str


class Branch(msgspec.Struct):
    """A span and what happened in it. `span` is None if it began but was never written."""

    span: Span | None
    parts: list[Branch | Wait]
    others: int = 0
    """Spans of other transactions that it led to."""

    @property
    def began(self) -> int:
        return self.span.began if self.span is not None else self._first().began

    @property
    def ended(self) -> int:
        return self.span.ended if self.span is not None else self._last().ended

    def _first(self) -> Branch:
        return min(_branches(self.parts), key=lambda each: each.began)

    def _last(self) -> Branch:
        return max(_branches(self.parts), key=lambda each: each.ended)


class Story(msgspec.Struct):
    """A transaction, from its first span to its last."""

    transaction_id: str
    outcome: str | None
    """succeeded, failed, postponed or abandoned when it was last processed, or produced if it never was; None if that
    has not ended yet, or never did."""
    parts: list[Branch | Wait]

    @property
    def traces(self) -> list[str]:
        return list(dict.fromkeys(span.trace for span in _spans(self.parts)))

    @property
    def began(self) -> int:
        return min(each.began for each in _branches(self.parts))

    @property
    def seconds(self) -> float:
        return (max(span.ended for span in _spans(self.parts)) - self.began) / 1e9


def outcomes(spans: Iterable[Span]) -> dict[str, str | None]:
    """Every transaction with its outcome, in the order of their last spans."""
    spans = list(spans)
    known = {(span.trace, span.id) for span in spans}
    last_seen: dict[str, int] = defaultdict(int)
    lives: dict[str, Span] = {}
    cut_off: dict[str, int] = defaultdict(int)
    for span in sorted(spans, key=lambda each: each.ended):
        own = span.attributes.get("transaction_id")
        if own is None:
            continue
        last_seen[own] = span.ended
        if span.name in LIVES:
            if span.name == PROCESSING or own not in lives or lives[own].name != PROCESSING:
                lives[own] = span
        elif (span.trace, span.parent) not in known:
            cut_off[own] = max(cut_off[own], span.began)
    return {
        own: _outcome(lives[own]) if own in lives and cut_off[own] <= lives[own].began else None
        for own in sorted(last_seen, key=lambda each: last_seen[each])
    }


def _outcome(life: Span) -> str | None:
    outcome = life.attributes.get("outcome")
    return "produced" if life.name != PROCESSING and outcome == "succeeded" else outcome


def build_story(spans: Iterable[Span], transaction_id: str) -> Story:
    spans = list({(span.trace, span.id): span for span in spans}.values())
    children: dict[tuple[str, str | None], list[Span]] = defaultdict(list)
    for span in spans:
        children[span.trace, span.parent].append(span)
    known = {(span.trace, span.id) for span in spans}

    def is_its_own(span: Span) -> bool:
        return bool(span.attributes.get("transaction_id") == transaction_id)

    def grow(span: Span, retries: dict[tuple[str, int], float]) -> Branch:
        """The span with everything below it, up to where other transactions begin."""
        retries = {**retries, **{(each.step, each.attempt): each.delay for each in span.retries}}
        below = children[span.trace, span.id]
        mine = [each for each in below if "transaction_id" not in each.attributes or is_its_own(each)]
        parts = _with_waits([grow(each, retries) for each in mine], retries, after=span)
        return Branch(span, parts, len(below) - len(mine))

    roots: list[Branch] = []
    cut_off: dict[tuple[str, str | None], list[Span]] = defaultdict(list)
    ours = {(span.trace, span.id) for span in spans if is_its_own(span)}
    for span in filter(is_its_own, spans):
        above = (span.trace, span.parent)
        if above in ours:
            continue
        if span.name in LIVES or above in known:
            roots.append(grow(span, {}))
        else:
            cut_off[above].append(span)
    roots += [Branch(None, _with_waits([grow(each, {}) for each in found], {})) for found in cut_off.values()]
    return Story(transaction_id, outcomes(spans).get(transaction_id), _with_waits(roots, {}))


def _with_waits(
    branches: list[Branch], retries: dict[tuple[str, int], float], after: Span | None = None
) -> list[Branch | Wait]:
    """Branches and waits in order of time. `after` is the span around them, which may have ended long before."""
    parts: list[Branch | Wait] = []
    before: Branch | None = None
    for branch in sorted(branches, key=lambda each: each.began):
        wait = _first_wait(after, branch) if before is None else _wait(before, branch, retries)
        parts += [branch] if wait is None else [wait, branch]
        before = branch
    return parts


def _first_wait(above: Span | None, branch: Branch) -> Wait | None:
    if above is None or branch.began <= above.ended:
        return None
    why = "in the source" if _is(branch, PROCESSING) else "until it continued"
    return Wait((branch.began - above.ended) / 1e9, why)


def _wait(before: Branch, branch: Branch, retries: dict[tuple[str, int], float]) -> Wait | None:
    seconds = (branch.began - before.ended) / 1e9
    attempt = _attempt_after(before, branch)
    if attempt is not None:
        step, number = attempt
        backoff = retries.get((step, number - 1))
        asked = "" if backoff is None else f", backoff {backoff:g} s"
        return Wait(max(seconds, 0.0), f"before attempt {number + 1} of {step}{asked}")
    if seconds <= 0:
        return None
    if _is(branch, PRODUCING):
        return Wait(seconds, "until it was sent again")
    if _is(branch, PROCESSING):
        again = _is(before, PROCESSING) or before.span is None
        return Wait(seconds, _why_again(before.span, branch.span) if again else "in the source")
    return Wait(seconds, "in which nothing was traced") if seconds >= NOTICEABLE else None


def _why_again(old: Span | None, new: Span | None) -> str:
    """Two deliveries of one message have the same sending span; two messages with the same id do not."""
    if old is None or new is None:
        return "until it was delivered again"
    if old.parent is None or new.parent is None:  # the sender was not traced
        return "until it arrived again"
    same = (old.trace, old.parent) == (new.trace, new.parent)
    return f"until it was {'delivered' if same else 'sent'} again"


def _attempt_after(before: Branch, branch: Branch) -> tuple[str, int] | None:
    """The step and number of an attempt that follows a failed one."""
    if before.span is None or branch.span is None:
        return None
    old, new = before.span.attributes, branch.span.attributes
    if "attempt" not in old or old.get("step") != new.get("step") or new.get("attempt") != old["attempt"] + 1:
        return None
    return str(new["step"]), int(new["attempt"])


def _is(branch: Branch, name: str) -> bool:
    return branch.span is not None and branch.span.name == name


def _branches(parts: Sequence[Branch | Wait]) -> list[Branch]:
    return [each for each in parts if isinstance(each, Branch)]


def _spans(parts: Sequence[Branch | Wait]) -> Iterable[Span]:
    for branch in _branches(parts):
        if branch.span is not None:
            yield branch.span
        yield from _spans(branch.parts)
