"""How values look: numbers with their units, times relative with the absolute on hover, lines for a chart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from onceward._text import BEYOND_JSON, printable_lines, quantity, strip_category
from onceward.console.history import Counted
from onceward.db.errors import LockTimeoutError
from onceward.deadletters.groups import LONGEST as LONGEST_MESSAGE
from onceward.failures.states import Down

HERE = Path(__file__).parent
WIDTH, HEIGHT = 120, 28
DEEPEST = 200
"""Levels of a payload that a page shows."""
COMMAND = re.compile("`([^`<>\n]+)`")


def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=harmless,
    )
    made.filters |= {
        "ago": ago,
        "as_sent": as_sent,
        "at_step": at_step,
        "because": because,
        "brief": brief,
        "clock": clock,
        "commands": commands,
        "count": count,
        "details": details,
        "duration": duration,
        "error_of": strip_category,
        "in_contract": in_contract,
        "in_policy": in_policy,
        "in_short": in_short,
        "in_words": quantity,
        "pretty": pretty,
        "probe": probe,
        "rate": rate,
        "shortened": shortened,
        "size": size,
        "sparkline": sparkline,
    }
    return made


def harmless(value: Any) -> Any:
    """Text from outside with control characters escaped, as in a terminal: a browser hides them, or reverses text."""
    return printable_lines(value) if type(value) is str else value


def commands(value: str) -> Markup:
    """Our own words, with what is between backticks as code."""
    return Markup(COMMAND.sub(r"<code>\1</code>", str(escape(harmless(value)))))


def as_sent(value: Any) -> Markup:
    """A value that a form sends back, unchanged."""
    return escape(value)


def count(value: float | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    return f"{value:,.0f}{f' {unit}' if unit else ''}"


def rate(value: float | None) -> str:
    if value is None:
        return "unknown"
    if 0 < value < 0.05:
        return "under 0.1/s"
    return f"{value:,.1f}/s" if 0 < value < 100 else f"{value:,.0f}/s"


def details(given: Mapping[str, Any]) -> str:
    """What an entry of the audit says, in words: `letters: 9,990, filter: consumer billing …`."""
    said = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {_said(key, each)}" for key, each in value.items())
        else:
            text = _said(name, value)
        said.append(f"{name.replace('_', ' ')}: {text}")
    return " · ".join(said)


def _said(name: str, value: Any) -> str:
    if isinstance(value, float) and name == "until":
        return clock(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if name == "pid" else f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def in_contract(value: Any, name: str) -> str:
    """A field of a contract, with its unit unless its name has it."""
    if value is None or value == [] or value == {}:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name in ("gap_timeout", "lease", "tolerates"):
        return brief(value)
    return value if isinstance(value, str) else json.dumps(value)


def in_policy(value: Any, name: str) -> str:
    """A field of a policy or the source. Durations are seconds, and stay as they are written in a file."""
    is_time = name.rpartition(".")[2] in ("timeout", "transaction_timeout", "backoff", "backoff_cap")
    return f"{value:g} s" if is_time and isinstance(value, int | float) else str(value)


REASONS = {
    "max_deliveries": "it failed as often as it is delivered",
    "failed": "it failed, and another try would not help",
    "failed again": "it failed again after a redrive",
    "never ended": "it never came to an end",
    "undecodable": "its bytes cannot be read",
    "trimmed": "its source removed it too early",
}
"""Why a message became a dead letter, in words."""


def because(reason: str) -> str:
    return REASONS.get(reason, reason.replace("_", " "))


def size(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value < 1024:
        return f"{value:,.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:,.1f} {unit}"
    return f"{value / 1024:,.1f} TiB"


def duration(seconds: float | None) -> str:
    """The two largest units, rounded down."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return "under 1 s" if seconds > 0 else "0 s"
    left, parts = int(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length:
            parts.append(f"{left // length} {unit}")
            left %= length
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)


def brief(seconds: float | None) -> str:
    """A short time, which may be well below a second."""
    if seconds is None:
        return "unknown"
    return (
        f"{seconds * 1000:.3g} ms"
        if seconds < 1
        else duration(seconds)
        if seconds >= 60
        else f"{seconds:.3g} s"
    )


def at_step(flight: Mapping[str, Any]) -> str:
    """Where a message in flight is."""
    if "step" not in flight:  # a run of an earlier release
        return "unknown"
    if flight["step"] is None:
        return "fetched, not begun"
    if not flight["attempt"]:
        return f"between attempts of {flight['step']}"
    seconds = flight.get("attempt_seconds")
    since = f", for {duration(seconds)}" if seconds is not None and seconds >= 1 else ""
    return f"{flight['step']}, attempt {flight['attempt']}{since}"


def probe(down: Down) -> str:
    """When it is looked whether an outage is over."""
    if down.probing:
        return "a probe is under way"
    return f"next probe in {duration(down.due_in)}" if down.due_in >= 1 else "a probe is due"


def moment(value: datetime | float | str | None) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return value
    if isinstance(value, str):
        return datetime.fromisoformat(value)
    return datetime.fromtimestamp(value, UTC)


def ago(value: datetime | float | str | None) -> Markup:
    found = moment(value)
    if found is None:
        return Markup("never")
    seconds = (datetime.now(UTC) - found).total_seconds()
    text = (
        f"{duration(seconds)} ago"
        if seconds >= 1
        else "just now"
        if seconds > -1
        else f"in {duration(-seconds)}"
    )
    return Markup('<time datetime="{}" title="{}">{}</time>').format(found.isoformat(), clock(found), text)


def clock(value: datetime | float | str | None) -> str:
    found = moment(value)
    return "never" if found is None else found.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def in_short(problem: str | None) -> str:
    """What a worker waits for. The error of a lock is for developers, so operators get plain words instead."""
    if (problem or "").startswith(LockTimeoutError.__name__):
        return "another transaction has locked the database"
    return problem or ""


def shortened(message: str) -> str:
    """The message of a group, with a sign that it goes on if it was cut."""
    return f"{message}…" if len(message) >= LONGEST_MESSAGE else message


def pretty(value: Any) -> str:
    """JSON for people, which a browser shows as it is."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return BEYOND_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def is_too_deep(value: Any) -> bool:
    """Whether a value has more levels than a page shows. How many Python can walk down depends on its version."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list, tuple))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def sparkline(minutes: Sequence[Counted]) -> Markup:
    """The last hour as bars, failures on top; an image with a text alternative."""
    if not minutes:
        return Markup('<span class="muted">no data yet</span>')
    highest = max((each.succeeded + each.failed for each in minutes), default=0)
    done, failed = sum(each.succeeded for each in minutes), sum(each.failed for each in minutes)
    words = f"{done:,} succeeded and {failed:,} failed in the last {quantity(len(minutes), 'minute')}"
    bars = [Markup('<rect class="base" x="0" y="{}" width="{}" height="1"/>').format(HEIGHT - 1, WIDTH)]
    step = WIDTH / 60
    for index, each in enumerate(minutes):
        at = WIDTH - (len(minutes) - index) * step
        top = 0.0
        for kind, number in (("ok", each.succeeded), ("bad", each.failed)):
            tall = HEIGHT * number / highest if highest else 0.0
            if tall:
                tall = max(tall, 1.0)
                bars.append(
                    Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                        kind, at, HEIGHT - top - tall, step * 0.8, tall
                    )
                )
                top += tall
    return Markup(
        '<svg class="spark" role="img" viewBox="0 0 {} {}" width="{}" height="{}" aria-label="{}"><title>{}</title>'
        "{}</svg>"
    ).format(WIDTH, HEIGHT, WIDTH, HEIGHT, words, words, escape(Markup("").join(bars)))
