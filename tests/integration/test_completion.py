"""The tab key: the scripts, and what they are answered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("onceward")


def output(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    assert f"_ONCEWARD_COMPLETE=complete_{shell}" in output("completion", shell)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("onceward bo", {"boundary"}),
        ("onceward boundary se", {"serve"}),
        ("onceward completion ", {"bash", "zsh", "fish"}),
        ("onceward trace last --fa", {"--failed"}),
    ],
)
def test_what_may_follow_is_answered(words: str, answer: set[str]) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert set(output(_ONCEWARD_COMPLETE="complete_bash", **asked).split()) == answer
    assert answer <= set(
        output(_ONCEWARD_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words).replace('"', " ").split()
    )


def test_bash_takes_the_script_and_completes_with_it(tmp_path: Path) -> None:
    script = tmp_path / "onceward.bash"
    script.write_text(output("completion", "bash"))
    subprocess.run(["bash", "-n", script], check=True)
    pressed = f"""
        source {script}
        COMP_WORDS=(onceward bo) COMP_CWORD=1
        $(complete -p onceward | grep -o '_[a-z_]*completion') {COMMAND}
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", pressed], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "boundary\n"
