"""What SECURITY.md says is true of the code."""

from __future__ import annotations

import ast
import os
import re
import stat
from pathlib import Path

import pytest

from onceward.boundary.certs import Authority
from onceward.boundary.tls import client_context
from onceward.cli.boundary.serve import LISTEN
from onceward.verify import interpreters
from tests.support import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
PICKLERS = {"pickle", "marshal", "shelve", "yaml", "multiprocessing", "multiprocessing.connection"}
"""Modules that can make code of data, also `Connection.recv`."""
PICKLED = {
    "_process/child.py",  # answers of our own forks, over a pipe
    "errors.py",  # copies of our own errors
    "verify/children.py",  # the same
    "verify/fleet.py",  # the same, one for each consumer
    "verify/interpreter.py",  # questions of the verification that started it, over a socket in a private folder
    "verify/interpreters.py",  # its answers
    "verify/luggage.py",  # arguments of the verification, packed there
}


@pytest.mark.req("ST-02")
def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.req("ST-02")
def test_data_of_others_is_never_unpickled_or_evaluated() -> None:
    source = ROOT / "src" / "onceward"
    found = set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if PICKLERS & set(modules) or called in ("eval", "exec"):
                found.add(file.relative_to(source).as_posix())
    assert found == PICKLED


@pytest.mark.req("ST-02")
def test_no_other_user_can_talk_to_an_interpreter_of_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """It unpickles what it is asked."""
    monkeypatch.setattr(interpreters, "_PROGRAM", "this")  # nobody needs to answer
    before = os.umask(0)
    try:
        started = interpreters._Interpreter(1)
    finally:
        os.umask(before)
    assert started.process.stdin is not None
    started.process.stdin.close()
    started.process.wait(30)
    folder = Path(started.address).parent.stat()
    started._folder.cleanup()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.getuid())


@pytest.mark.req("ST-02")
def test_tls_is_1_3_only_and_a_boundary_listens_on_this_machine(tmp_path: object) -> None:
    assert LISTEN.startswith("127.0.0.1:")
    tls = Authority(tmp_path, days=1).issue("a", "a", ["127.0.0.1"])  # type: ignore[arg-type]
    assert client_context(tls).minimum_version.name == "TLSv1_3"
