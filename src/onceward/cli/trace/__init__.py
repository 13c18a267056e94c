"""`onceward trace`: what happened to one transaction, from a local span file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onceward._ids import same_id
from onceward._secrets import mask_url
from onceward._text import printable, quantity
from onceward.cli.dlq.options import shorten
from onceward.cli.exit import MISUSED, AsJson, argument, fail, flag, option, reason_of
from onceward.cli.output import clean_text, echo, iso_time, print_json
from onceward.cli.trace.tree import LIVES, Branch, Story, Wait, build_story, outcomes

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from onceward.telemetry.span_file import Span, SpanFile

TRACE_EXAMPLES = """
Examples:

- `ONCEWARD_TRACE_FILE=.onceward/spans.jsonl onceward run shop.app:app` to write spans

- `onceward trace last` to show the newest transaction

- `onceward trace last --failed` to show the newest that failed

- `onceward trace spans.jsonl --transaction 7f3a --json | jq .outcome` in scripts
"""

LAST = "last"
MOST_NAMED = 5
LONGEST_MESSAGE = 200
LONGEST_LINE = 10_000
"""Characters per line without a terminal, so every span is one line."""

KNOWN = ("exception.message", "messaging.")
"""Attributes that the line says in other words, or not at all."""


def trace(
    file: Annotated[
        str,
        argument(
            "FILE|last", "A span file; `last` is that of ONCEWARD_TRACE_FILE, or the newest in .onceward/."
        ),
    ] = LAST,
    transaction: Annotated[
        str | None, option("ID", "Transaction id, or the beginning of one.", show_default="the newest")
    ] = None,
    failed: Annotated[bool, flag("Only transactions that failed.", "--failed")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what happened to a transaction in all its processes: spans, retries and waits.

    With ONCEWARD_TRACE_FILE=path, `onceward run` and programs that call `onceward.telemetry.setup()` write the file. It
    contains no payloads. A file of more than 256 MiB is refused.

    Exit code: 0, or 2 if there is no such file or transaction, or the file cannot be read.
    """
    from onceward.telemetry.span_file import read

    path = _path(file, as_json)
    try:
        found = read(path)
    except (OSError, ValueError) as error:
        fail(_unreadable(path, file, error), as_json, MISUSED)
    known = outcomes(found.spans)
    chosen = _choose(found, known, transaction, failed, as_json)
    story = build_story(found.spans, chosen)
    if as_json:
        print_json(_plain(story, found))
    else:
        _show(story, found, known)


# ── choosing ────────────────────────────────────────────────────────────────────────────────────────────


def _path(file: str, as_json: bool) -> Path:
    from onceward.telemetry.span_file import FILE_VARIABLE, FOLDER, newest

    if file != LAST:
        return Path(file)
    path = newest()
    if path is None:
        fail(
            f"there is no span file in {Path.cwd() / FOLDER}; run with {FILE_VARIABLE}={FOLDER}/spans.jsonl to "
            "write one",
            as_json,
            MISUSED,
        )
    return path


def _unreadable(path: Path, file: str, error: OSError | ValueError) -> str:
    from onceward.telemetry.span_file import FILE_VARIABLE

    # What was given, not its path: a URL that became one hides no password.
    shown = path if file == LAST else mask_url(file)
    text = f"{shown} cannot be read: {reason_of(error)}"
    if file != LAST:
        return f"{text}; name a span file, or `last`"
    return (
        f"{text}; {FILE_VARIABLE} names it; to write it, set this variable for `onceward run`, or for a program "
        "that calls onceward.telemetry.setup()"
    )


def _choose(
    found: SpanFile, known: dict[str, str | None], wanted: str | None, failed: bool, as_json: bool
) -> str:
    start = same_id(wanted or "")
    candidates = [
        own
        for own, outcome in known.items()
        if (not failed or outcome == "failed") and (own.startswith(start) or same_id(own) == start)
    ]
    for own in candidates:
        if same_id(own) == start:
            return own
    if not candidates:
        which = f"transaction {wanted}" if wanted else "transaction"
        more = " that failed" if failed else ""
        fail(f"{found.path} has no {which}{more}; it has {_tally(known)}", as_json, MISUSED)
    if wanted and len(candidates) > 1:
        fail(f"{wanted} is the beginning of {_list_ids(candidates)}; give more characters", as_json, MISUSED)
    return candidates[-1]


def _tally(known: dict[str, str | None]) -> str:
    failed = [own for own, outcome in known.items() if outcome == "failed"]
    text = quantity(len(known), "transaction")
    return f"{text}, {len(failed):,} failed: {_list_ids(failed)}" if failed else f"{text}, none failed"


def _list_ids(ids: list[str]) -> str:
    """The newest ids, newest first."""
    more = ", …" if len(ids) > MOST_NAMED else ""
    return ", ".join(ids[: -MOST_NAMED - 1 : -1]) + more


# ── for people ──────────────────────────────────────────────────────────────────────────────────────────


def _show(story: Story, found: SpanFile, known: dict[str, str | None]) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    style = {"succeeded": "green", "produced": "green", "failed": "bold red"}.get(
        story.outcome or "", "yellow"
    )
    tree = Tree(
        Text.assemble(
            (printable(story.transaction_id), "bold"),
            "  ",
            (printable(story.outcome or "not ended"), style),
            f"  {_duration(story.seconds)}  ",
            (printable(f"trace {', '.join(story.traces)}"), "dim"),
        )
    )
    _grow(tree, story.parts)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LONGEST_LINE
    console.print(tree)
    echo("", f"{found.path}: {_tally(known)}")
    if found.unreadable:
        echo(f"Skipped {quantity(found.unreadable, 'line')} that could not be read")


def _grow(tree: Tree, parts: list[Branch | Wait]) -> None:
    from rich.text import Text

    for part in parts:
        if isinstance(part, Wait):
            tree.add(clean_text(f"… {_duration(part.seconds)} {part.why}", "yellow"))
            continue
        below = tree.add(_label(part))
        _grow(below, part.parts)
        if part.others:
            below.add(Text(f"+ {quantity(part.others, 'span')} of other transactions", "dim"))


def _label(branch: Branch) -> Text:
    from rich.text import Text

    span = branch.span
    if span is None:
        return Text("not ended: its process was killed or is still working on it", "bold yellow")
    label = clean_text(span.name, "bold red" if span.failed else "bold")
    label.append(f"  {_duration(span.seconds)}", "default")
    for text, style in (_problem(span), (_details(span), "dim")):
        if text:
            label.append(clean_text(f"  {text}", style))
    return label


def _problem(span: Span) -> tuple[str, str]:
    if not span.failed:
        return "", ""
    from onceward.telemetry.redaction import redact

    category = span.attributes.get("category", "failed")
    message = redact(span.attributes.get("exception.message", ""))  # other programs write spans, too
    return f"{category}: {shorten(message, LONGEST_MESSAGE)}", "red"


def _details(span: Span) -> str:
    """The attributes that matter, without those of the policy, which every span has."""
    has = span.attributes
    details = []
    if "attempt" in has and has.get("max_attempts") != 1:
        details.append(f"attempt {has['attempt'] + 1} of {has.get('max_attempts', '?')}")
    details += [f"{name} {has[name]}" for name in ("consumer", "event_type", "outcome") if has.get(name)]
    if has.get("duplicate"):
        details.append("duplicate")
    details += [
        f"{name}={value}" for name, value in has.items() if "." in name and not name.startswith(KNOWN)
    ]
    if span.name in LIVES:
        details += [str(has.get("task", "")), f"process {span.process}"]
        if span.service and not span.service.startswith("unknown_service"):
            details.append(f"service {span.service}")
    return ", ".join(filter(None, details))


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


# ── for machines ────────────────────────────────────────────────────────────────────────────────────────


def _plain(story: Story, found: SpanFile) -> dict[str, Any]:
    return {
        "file": str(found.path),
        "transaction_id": story.transaction_id,
        "outcome": story.outcome,
        "traces": story.traces,
        "began": iso_time(story.began / 1e9),
        "seconds": story.seconds,
        "parts": [_plain_part(part) for part in story.parts],
        "unreadable_lines": found.unreadable,
    }


def _plain_part(part: Branch | Wait) -> dict[str, Any]:
    if isinstance(part, Wait):
        return {"wait": part.seconds, "why": part.why}
    parts = [_plain_part(each) for each in part.parts]
    span = part.span
    if span is None:
        return {"span": None, "parts": parts}
    return {
        "span": span.name,
        "trace_id": span.trace,
        "span_id": span.id,
        "began": iso_time(span.began / 1e9),
        "seconds": span.seconds,
        "failed": span.failed,
        "process": span.process,
        "service": span.service,
        "attributes": span.attributes,
        "other_transactions": part.others,
        "parts": parts,
    }
