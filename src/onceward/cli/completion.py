"""`onceward completion`: the script with which a shell completes commands and options."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from onceward.cli.exit import argument

VARIABLE = "_ONCEWARD_COMPLETE"
"""The script sets it to ask for completions."""

COMPLETION_EXAMPLES = """
Examples:

- `f=~/.local/share/bash-completion/completions; mkdir -p $f && onceward completion bash > $f/onceward`

- `mkdir -p ~/.zfunc && onceward completion zsh > ~/.zfunc/_onceward` with
  `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc

- `mkdir -p ~/.config/fish/completions; onceward completion fish > ~/.config/fish/completions/onceward.fish`
"""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, argument("bash|zsh|fish", "Your shell.")],
) -> None:
    """Print the script that makes the tab key complete commands and options.

    It takes effect in shells started afterwards.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(get_completion_script(prog_name="onceward", complete_var=VARIABLE, shell=shell))


def is_completing() -> bool:
    """Whether a shell asks for completions; then no command will run."""
    return VARIABLE in os.environ


def one_of(*values: str) -> dict[str, Any]:
    """Help and completion for an option that takes one of a few words."""
    return {"help": f"{', '.join(values[:-1])} or {values[-1]}.", "autocompletion": lambda: list(values)}


def envs() -> list[str]:
    """The names that `--env` takes."""
    from onceward.app.settings import ENVS

    return list(ENVS)


def prepare() -> None:
    """Enable Typer's answers to a shell, which it otherwise gives only if it may install scripts itself."""
    if is_completing():
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
