"""The plugin of `make test` loses no test and no failure: what it prints is what pytest prints without it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import ROOT

FILES = {
    "first/test_results.py": """
        import pytest

        @pytest.fixture(scope="session")
        def shared():
            yield
            assert not "the end of the session"

        def test_right(shared): pass

        @pytest.mark.parametrize("number", range(3))
        def test_some_are_wrong(number): assert number == 1
    """,
    "first/test_none.py": "def test_of_another_name(): pass",
    "first/test_broken.py": "import no_such_module",
    "second/test_none.py": "",
    "second/test_class.py": """
        class TestClass:
            def test_right(self): pass
            def test_wrong(self): assert False
    """,
}


@pytest.mark.parametrize("processes", ["0", "1"])
def test_every_result_of_every_file_is_reported(tmp_path: Path, processes: str) -> None:
    for name, text in FILES.items():  # the last has no test, so the session ends in it
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
    outcomes = [
        pytest_outcomes(tmp_path, *options)
        for options in (
            ["--continue-on-collection-errors"],
            ["-p", "tests.support.whole_files", "--numprocesses", processes, "--dist", "loadscope"],
        )
    ]
    assert outcomes[0] == outcomes[1]
    passed, failed, errors = outcomes[0]
    assert (len(passed), len(failed), errors) == (3, 3, 2)


def pytest_outcomes(folder: Path, *options: str) -> tuple[list[str], list[str], int]:
    """What passed and failed, and how many errors there were elsewhere."""
    selected = ["-k", "right or wrong", "-rA", "--rootdir", str(folder), "-o", "pythonpath=", str(folder)]
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--import-mode=importlib",
            *options,
            *selected,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    passed, failed, errors = (
        sorted(re.findall(rf"^{outcome} (\S+)", ran.stdout, re.MULTILINE))
        for outcome in ("PASSED", "FAILED", "ERROR")
    )
    return passed, failed, len(errors)
