"""A report as JUnit XML, which CI servers read: a test case for each scenario."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from onceward.testing.contract.report import Report, Result

_UNFIT = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML cannot say, not even escaped."""


def as_junit(report: Report) -> str:
    counts = [each.result for each in report.scenarios]
    suite = ElementTree.Element(
        "testsuite",
        name=f"onceward verify {report.subject}",
        tests=str(len(counts)),
        failures=str(counts.count(Result.FAILED)),
        errors="0",
        skipped=str(counts.count(Result.SKIPPED)),
        time=f"{report.seconds:.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("seed", report.seed), ("backend", report.backend), ("code", report.code.digest)):
        ElementTree.SubElement(properties, "property", name=name, value=str(value))
    for each in report.scenarios:
        case = ElementTree.SubElement(
            suite, "testcase", classname=report.subject, name=each.name, time=f"{each.seconds:.3f}"
        )
        if each.result is Result.SKIPPED:
            ElementTree.SubElement(case, "skipped", message=_fit(each.note))
        elif each.result is Result.FAILED:
            failure = ElementTree.SubElement(case, "failure", message=_fit(each.findings[0].text))
            failure.text = _fit(f"{each}\nseed {report.seed}")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _fit(text: str) -> str:
    return _UNFIT.sub("�", text)
