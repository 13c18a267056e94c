"""Shell completion: the scripts, and the suggestions they get."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onceward.deadletters import Category, Status
from tests.support import ROOT, commands

COMMAND = Path(sys.executable).with_name("onceward")


def output(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
    done = commands.onceward(*arguments, cwd=cwd or Path.cwd(), env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, "")
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


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("onceward dlq list --status ", set(Status)),
        ("onceward dlq list --category ", set(Category)),
        ("onceward dlq redrive --cause-category ", set(Category)),
        ("onceward dlq redrive --re", {"--redrive-id"}),
        ("onceward run shop:app --env pro", {"production", "prod"}),
        (
            "onceward verify shop:charge --only dup",
            {f"duplicates{more}" for more in ("", "-at-once", "-in-processes")},
        ),
        ("onceward run shop:app --log-format ", {"json", "console"}),
    ],
)
def test_values_are_offered_and_no_database_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, answer: set[str]
) -> None:
    monkeypatch.delenv("ONCEWARD_DATABASE", raising=False)
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert set(output(_ONCEWARD_COMPLETE="complete_bash", cwd=tmp_path, **asked).split()) == answer


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".local/share/bash-completion/completions/onceward"),
        ("zsh", ".zfunc/_onceward"),
        ("fish", ".config/fish/completions/onceward.fish"),
    ],
)
def test_the_command_of_the_page_makes_the_folder(tmp_path: Path, shell: str, file: str) -> None:
    page = (ROOT / "docs" / "how-to" / "completion.md").read_text()
    (line,) = re.findall(rf"^\| {shell} \| `([^`]+)`", page, re.MULTILINE)
    home = {"HOME": str(tmp_path), "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", line], env={**os.environ, **home}, timeout=60, check=True)
    assert "onceward" in (tmp_path / file).read_text()


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
