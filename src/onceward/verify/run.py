"""Runs a plan: builds the template database, then runs one scenario after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Engine

from onceward._functions import check_result
from onceward.inbox import Event, Inbox
from onceward.inbox.commits.group import commit_of
from onceward.inbox.evidence.code_digest import code_of
from onceward.inbox.evidence.distributions import versions_in_use
from onceward.inbox.evidence.evidence import terms_of
from onceward.inbox.evidence.proof import types_without_sample
from onceward.inbox.evidence.scenarios import INTERPRETERS, NAMES
from onceward.verify import interpreters
from onceward.verify.children import PREPARING, Died, Hung, preload, run_in_child
from onceward.verify.databases import Databases, databases_of, preload_driver
from onceward.verify.plan import VerificationPlan
from onceward.verify.report import NOT_CHECKED, Finding, ScenarioResult, ScenarioStatus, VerificationReport
from onceward.verify.rows import schema
from onceward.verify.scenarios import NEEDS_NO_ORACLE, SCENARIOS
from onceward.verify.trial import Assessment, NotApplicable, NotChecked, Trial
from onceward.verify.watch.intrusions import blame, claim_package

Progress = Callable[[str, "ScenarioResult | None"], None]
"""Called with a scenario's name when it begins, and again with its result."""
MOST_HANGS = 2
"""After this many scenarios that hang, the others are not run."""
HANGS = "it hangs"


def run(plan: VerificationPlan, progress: Progress = lambda name, result: None) -> VerificationReport:
    began = time.monotonic()
    claim_package(plan.consumer.__module__)
    blame(plan.consumer)
    preload()
    if not plan.leaves_out(INTERPRETERS):
        interpreters.start()
    code = code_of(plan.consumer, plan.contract)
    databases = databases_of(plan.options.database)
    with _template(plan, databases) as found:
        isolation = run_in_child(lambda _: databases.isolation(), PREPARING).value()
        results = _run_scenarios(Trial(plan, databases, found), progress)
    types = sorted({Event.of(each).event_type for each in plan.events})
    versions = {Event.of(each).schema_version for each in (*plan.events, *plan.old)}
    return VerificationReport(
        consumer_id=plan.contract.consumer_id,
        subject=plan.subject,
        seed=plan.seed,
        backend=databases.backend,
        isolation=isolation,
        commit=commit_of(plan.consumer, plan.contract, databases.backend),
        seconds=time.monotonic() - began,
        scenarios=tuple(results),
        code=code,
        schema_versions=tuple(sorted(versions | {plan.contract.schema_version})),
        mechanism=plan.contract.idempotency_mechanism,
        event_types=tuple(types),
        missing_types=types_without_sample(plan.contract, types),
        terms=terms_of(plan.contract),
        dependencies=versions_in_use(code.packages, databases.backend),
        not_compared=tuple(
            f"{table.name}.{column}"
            for table in found
            for column in table.columns
            if column not in schema.compared_columns(table, plan.options.exclude)
        ),
    )


@contextmanager
def _template(plan: VerificationPlan, databases: Databases) -> Iterator[list[schema.Table]]:
    """Build the template database, yield its tables, and remove all databases at the end."""

    def build(engine: Engine) -> None:
        inbox = Inbox(engine)
        inbox.migrate()
        inbox.register(plan.contract)
        if plan.options.setup is not None:
            check_result(plan.options.setup(engine), plan.options.setup)

    try:
        found: list[schema.Table] = run_in_child(lambda _: databases.prepare(build), PREPARING).value()
        databases.learn(found)
        preload_driver(databases.next_url(), plan.asynchronous)
        yield found
    finally:
        databases.close()


def _run_scenarios(trial: Trial, progress: Progress) -> list[ScenarioResult]:
    results: list[ScenarioResult] = []
    hangs = 0
    for name in NAMES:
        progress(name, None)
        reason = _reason_to_skip(trial, name, results, hangs)
        result = (
            ScenarioResult(name, ScenarioStatus.SKIPPED, 0.0, note=reason)
            if reason
            else _run_scenario(trial, name)
        )
        hangs += any(finding.text.startswith(HANGS) for finding in result.findings)
        results.append(result)
        progress(name, result)
    return results


def _reason_to_skip(trial: Trial, name: str, results: list[ScenarioResult], hangs: int) -> str:
    """Why the scenario is not run; empty if it is."""
    if trial.plan.leaves_out(name):
        return "left out on request"
    if name in NEEDS_NO_ORACLE:
        return ""
    if results and results[0].result is not ScenarioStatus.PASSED:
        return "not run: a clean delivery fails, so there is nothing to compare with"
    return "not run: the consumer hangs" if hangs >= MOST_HANGS else ""


def _run_scenario(trial: Trial, name: str) -> ScenarioResult:
    began = time.monotonic()
    try:
        found = SCENARIOS[name](trial)
    except NotApplicable as reason:
        return ScenarioResult(
            name,
            ScenarioStatus.SKIPPED,
            time.monotonic() - began,
            note=f"does not apply: {reason}",
            applies=False,
        )
    except NotChecked as reason:
        note = f"{NOT_CHECKED}{reason}"
        return ScenarioResult(name, ScenarioStatus.SKIPPED, time.monotonic() - began, note=note)
    except Hung as hung:
        text = f"{HANGS}: {hung.what}; it was here"
        found = Assessment([Finding(text, tuple(hung.stack.rstrip().splitlines()))])
    except Died as death:
        found = Assessment([Finding(f"the consumer ended its process: {death}")])
    status = ScenarioStatus.FAILED if found.findings else ScenarioStatus.PASSED
    return ScenarioResult(name, status, time.monotonic() - began, tuple(found.findings), found.note)
