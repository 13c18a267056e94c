"""`onceward explain`: what each consumer guarantees, and why not more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from onceward.cli.exit import App, AsJson, flag, refuse_mistakes
from onceward.cli.output import WIDE, clean_text, echo, print_json

if TYPE_CHECKING:
    from onceward.app import Onceward
    from onceward.inspection.guarantees import GuaranteeVerdict
    from onceward.middleware import Middleware

EXPLAIN_EXAMPLES = """
Examples:

- `onceward explain shop:app` to explain all consumers of an app

- `onceward explain shop:app --verbose` to include the middleware of each

- `onceward explain shop:app --json | jq '.[] | {consumer, guarantee}'` in scripts
"""

STYLES = {
    "may lose": "bold red",
    "unknown": "magenta",
    "at least once": "yellow",
    "effects once": "green",
    "holds": "dim",
}


def explain(
    app: App,
    verbose: Annotated[bool, flag("Also print the middleware of each consumer.", "--verbose", "-v")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each consumer guarantees, its weakest link, and how to strengthen it.

    The headline is the weakest statement that is true. It checks sources, contracts, evidence and settings, and asks
    Redis, PostgreSQL, SQLite and boundaries how durable their setup is. It reports what it cannot determine as
    unknown.

    Exit code: 0, whatever it found; 2 for wrong arguments.
    """
    from onceward.app.lookup import load_app
    from onceward.inspection.guarantee_facts import facts_of
    from onceward.inspection.guarantees import judge

    with refuse_mistakes(as_json):
        loaded = load_app(app)
        loaded.check()
        verdicts = {name: judge(facts_of(loaded, each)) for name, each in loaded.consumers.items()}
    if as_json:
        print_json([_plain(loaded, name, verdict, verbose) for name, verdict in verdicts.items()])
        return
    if not verdicts:
        echo(f"{app} has no consumers, so there is nothing to explain.")
    for name, verdict in verdicts.items():
        _show(loaded, name, verdict, verbose)


def _plain(app: Onceward, name: str, verdict: GuaranteeVerdict, verbose: bool) -> dict[str, Any]:
    chain = {"middleware": [each.name for each in _chain(app, name)]} if verbose else {}
    return {
        "consumer": name,
        "source": str(app.consumers[name].source),
        "guarantee": str(verdict.guarantee),
        "at_best": str(verdict.at_best),
        "headline": verdict.headline,
        "why": verdict.weakest.why,
        "advice": verdict.weakest.advice,
        "links": [
            {"strength": str(link.strength), "why": link.why, "advice": link.advice} for link in verdict.links
        ],
        "not_checked": list(verdict.not_checked),
        "conduct": [{"topic": topic, "what": what} for topic, what in _conduct(app, name)],
        **chain,
    }


def _show(app: Onceward, name: str, verdict: GuaranteeVerdict, verbose: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    style = STYLES[str(verdict.guarantee)]
    console.print(
        Text.assemble(
            clean_text(name, "bold"),
            clean_text(f"  {app.consumers[name].source}  "),
            clean_text(verdict.headline, style),
        )
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    for link in verdict.links:
        strength = str(link.strength)
        table.add_row(Text(strength, STYLES[strength]), clean_text(link.why))
        if link.advice:
            table.add_row("", clean_text(f"→ {link.advice}", "cyan"))
    for topic, what in _conduct(app, name):
        table.add_row(Text(topic, "dim"), clean_text(what))
    console.print(table)
    if verbose:
        console.print("  middleware, outermost first:")
        layers = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 4))
        for layer in _chain(app, name):
            layers.add_row(clean_text(layer.name), clean_text(_about(layer), "dim"))
        console.print(layers)
    console.print()


def _conduct(app: Onceward, name: str) -> list[tuple[str, str]]:
    from onceward.inspection.conduct import conduct_of

    return conduct_of(app, app.consumers[name])


def _chain(app: Onceward, name: str) -> list[Middleware | type[Middleware]]:
    """The middleware that `onceward run` puts around a consumer, outermost first."""
    from onceward.app.build import middleware_of
    from onceward.run.progress import Progress
    from onceward.task.io_guard import IoGuard
    from onceward.telemetry.engine_spans import EngineSpans

    guard = [] if app.settings.engine.io_guard == "off" else [IoGuard]
    return [EngineSpans, *guard, *middleware_of(app, app.consumers[name], Progress)]


def _about(middleware: Middleware | type[Middleware]) -> str:
    """The first line of its docstring, or its import path if it has none."""
    kind = middleware if isinstance(middleware, type) else type(middleware)
    about = (kind.__doc__ or "").strip().partition("\n")[0]
    return about if kind.__doc__ else f"{kind.__module__}:{kind.__qualname__}"
