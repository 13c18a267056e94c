"""Runs a plan: the template, then one scenario after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Engine

from onceward.inbox import Event, Inbox
from onceward.inbox.evidence.code_digest import code_of
from onceward.verify import report, tables
from onceward.verify.children import PREPARING, Died, Hung, in_child
from onceward.verify.databases import Databases, databases_of, preload
from onceward.verify.intrusions import claim
from onceward.verify.plan import Plan
from onceward.verify.report import Finding, Report, Result, ScenarioResult
from onceward.verify.scenarios import NEEDS_NO_ORACLE, SCENARIOS
from onceward.verify.trial import NotApplicable, Trial, Tried

Progress = Callable[[str, "ScenarioResult | None"], None]
"""Called with a scenario's name when it begins, and again with its result."""
MOST_HANGS = 2
"""Scenarios that may hang; then there is no point in waiting for more."""


def run(plan: Plan, progress: Progress = lambda name, result: None) -> Report:
    began = time.monotonic()
    claim(plan.consumer.__module__)
    code = code_of(plan.consumer, plan.contract)
    databases = databases_of(plan.asked.database)
    with _prepared(plan, databases) as found:
        results = _scenarios(Trial(plan, databases, found), progress)
    versions = {Event.of(each).schema_version for each in (*plan.events, *plan.old)}
    return Report(
        consumer_id=plan.contract.consumer_id,
        subject=plan.subject,
        seed=plan.seed,
        backend=databases.backend,
        seconds=time.monotonic() - began,
        scenarios=tuple(results),
        code=code,
        schema_versions=tuple(sorted(versions | {plan.contract.schema_version})),
        mechanism=plan.contract.idempotency_mechanism,
        not_compared=tuple(
            f"{table.name}.{column}"
            for table in found
            for column in table.columns
            if column not in tables.compared(table, plan.asked.exclude)
        ),
    )


@contextmanager
def _prepared(plan: Plan, databases: Databases) -> Iterator[list[tables.Table]]:
    def build(engine: Engine) -> None:
        inbox = Inbox(engine)
        inbox.migrate()
        inbox.register(plan.contract)
        if plan.asked.setup is not None:
            plan.asked.setup(engine)

    try:
        found: list[tables.Table] = in_child(lambda _: databases.prepare(build), PREPARING).value()
        databases.know(found)
        preload(databases.place(), plan.asynchronous)
        yield found
    finally:
        in_child(lambda _: databases.close(), PREPARING)


def _scenarios(trial: Trial, progress: Progress) -> list[ScenarioResult]:
    results: list[ScenarioResult] = []
    hangs = 0
    for name in report.NAMES:
        progress(name, None)
        obstacle = _obstacle(trial, name, results, hangs)
        result = ScenarioResult(name, Result.SKIPPED, 0.0, note=obstacle) if obstacle else _one(trial, name)
        hangs += any(finding.text.startswith(HANGS) for finding in result.findings)
        results.append(result)
        progress(name, result)
    return results


HANGS = "it hangs"


def _obstacle(trial: Trial, name: str, results: list[ScenarioResult], hangs: int) -> str:
    if trial.plan.leaves_out(name):
        return "left out, as was asked for"
    if name in NEEDS_NO_ORACLE:
        return ""
    if results and results[0].result is not Result.PASSED:
        return "not run: there is nothing to compare with while a clean delivery fails"
    return "not run: the consumer hangs" if hangs >= MOST_HANGS else ""


def _one(trial: Trial, name: str) -> ScenarioResult:
    began = time.monotonic()
    try:
        tried = SCENARIOS[name](trial)
    except NotApplicable as reason:
        return ScenarioResult(
            name, Result.SKIPPED, time.monotonic() - began, note=f"does not apply: {reason}"
        )
    except Hung as hung:
        limit = trial.plan.asked.timeout
        text = f"{HANGS}: {hung.doing} did not come to an end within {limit:g} s. It was here"
        tried = Tried([Finding(text, tuple(hung.stack.rstrip().splitlines()))])
    except Died as death:
        tried = Tried([Finding(f"the consumer ended its process: {death}")])
    result = Result.FAILED if tried.findings else Result.PASSED
    return ScenarioResult(name, result, time.monotonic() - began, tuple(tried.findings), tried.note)
