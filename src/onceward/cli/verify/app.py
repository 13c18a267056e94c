"""`onceward verify --all`: every consumer of an app at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import msgspec

from onceward._files.private import NewFile
from onceward._text import quantity
from onceward.cli.exit import FAILED, MISUSED
from onceward.cli.output import echo, print_json, print_table, progress_bars
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.app import Onceward
    from onceward.verify.fleet import Examination


def examine_all(app: Onceward, given: dict[str, Any], as_json: bool) -> list[Examination]:
    """Verify them, with a bar for each that runs or has run."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from onceward.verify import NAMES
    from onceward.verify.fleet import examine_app

    columns = ("{task.description}", BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bars(as_json, *columns, TextColumn("{task.fields[at]}", style="dim")) as bars:
        shown: dict[str, Any] = {}

        def watch(consumer: str, scenario: str, done: int) -> None:
            if consumer not in shown:
                shown[consumer] = bars.add_task(consumer, total=len(NAMES), at="")
            over = done == len(NAMES)
            bars.update(shown[consumer], completed=done, at="" if over else scenario)
            if over:
                bars.stop_task(shown[consumer])

        return examine_app(app, watch=watch, **given)


def show_all(
    app: Onceward,
    found: Sequence[Examination],
    began: float,
    kept: bool,
    as_json: bool,
    needs_proof: bool,
) -> int:
    """Print the table, then what failed; return the exit code. `needs_proof`: to have passed is not enough."""
    passed = all(each.passed for each in found)
    proven = all(each.report is not None and each.report.proves for each in found)
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {"passed": passed, "recorded": kept, "seconds": seconds, "consumers": list(map(_as_json, found))}
        )
    else:
        print_table(
            [_row(each) for each in found],
            {name: name for name in ("consumer", "result", "passed", "failed", "skipped", "seconds")},
            "",
        )
        for each in found:
            if each.problem:
                echo(f"{each.consumer}: not verified: {each.problem}", "")
            elif not each.passed or not (each.report and each.report.proves):
                echo(*str(each.report).split("\n"), "")
        _show_verdict(app, found, seconds, kept)
    if any(each.problem for each in found):
        return MISUSED
    return 0 if (proven if needs_proof else passed) else FAILED


def _show_verdict(app: Onceward, found: Sequence[Examination], seconds: float, kept: bool) -> None:
    good = sum(each.passed for each in found)
    recorded = "; recorded" if kept else ""
    echo(f"{good} of {quantity(len(found), 'consumer')} passed in {seconds:.1f} s{recorded}")
    without = [each.name for each in app.consumers.values() if each.contract is None]
    if without:
        echo(f"Not verified, because they have no contract: {', '.join(without)}")


def _as_json(each: Examination) -> dict[str, Any]:
    report = {} if each.report is None else msgspec.to_builtins(each.report)
    proves = each.report is not None and each.report.proves
    verdict = {"passed": each.passed, "proves": proves, "problem": each.problem or None}
    return {"consumer": each.consumer, **verdict, **report}


def _row(each: Examination) -> dict[str, Any]:
    if each.report is None:
        counts: dict[str, Any] = dict.fromkeys(("passed", "failed", "skipped", "seconds"))
        return {"consumer": each.consumer, "result": "not verified", **counts}
    results = [scenario.result.value for scenario in each.report.scenarios]
    counts = {name: results.count(name) for name in ("passed", "failed", "skipped")}
    result = "passed" if each.passed else "FAILED"
    return {"consumer": each.consumer, "result": result, **counts, "seconds": f"{each.report.seconds:.1f}"}


def write_junit(file: Path, found: Sequence[Examination]) -> None:
    """A suite for each consumer."""
    from onceward.verify.report import as_junit

    suites = ElementTree.Element("testsuites")
    for each in found:
        if each.report is not None:
            suites.append(ElementTree.fromstring(as_junit(each.report)))
        else:
            suite = ElementTree.SubElement(suites, "testsuite", name=each.consumer, tests="1", errors="1")
            case = ElementTree.SubElement(suite, "testcase", classname=each.consumer, name="verify")
            ElementTree.SubElement(case, "error", message=each.problem)
    replace_junit(file, ElementTree.tostring(suites, encoding="unicode", xml_declaration=True))


def check_junit(file: Path) -> None:
    """Refuse a place that cannot be written, or where there is something else than an older report."""
    if not file.absolute().parent.is_dir():
        raise ConfigurationError(f"--junit {file} cannot be written: directory {file.parent} does not exist")
    if file.is_file():
        with file.open("rb") as known:
            if known.read(5) not in (b"", b"<?xml"):
                raise ConfigurationError(f"--junit {file} is a file of another kind; name another file")


def replace_junit(file: Path, text: str) -> None:
    with NewFile(file, replace=True, public=True) as written:
        written.write(text.encode())
