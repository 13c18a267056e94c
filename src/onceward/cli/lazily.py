"""Commands whose modules are loaded when they are called: `onceward --help` waits for none of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Named(NamedTuple):
    """A command that is not loaded yet."""

    place: str
    """`module:name` of a function, or of a `Typer` with commands of its own. Examples, if there are any, are in the
    module as `<COMMAND>_EXAMPLES`."""
    help: str
    """The first sentence of its help."""


class LazyGroup(TyperGroup):
    """A group that knows the names of `named`, and what was registered as usual besides."""

    named: dict[str, Named] = {}  # noqa: RUF012  filled by a subclass

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.named, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Enough of it for a list of commands."""
        if cmd_name not in self.named:
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=self.named[cmd_name].help, rich_markup_mode=self.rich_markup_mode)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.loaded(name) if name in self.named else command, rest

    def loaded(self, name: str) -> Any:
        """The command itself."""
        module_name, _, attribute = self.named[name].place.partition(":")
        module = import_module(module_name)
        found = getattr(module, attribute)
        holder = typer.Typer(rich_markup_mode=self.rich_markup_mode, pretty_exceptions_enable=False)
        holder.callback()(lambda: None)  # with it, one command is a group of one
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            examples = getattr(module, f"{name.upper()}_EXAMPLES", None)
            holder.command(name, epilog=examples)(found)
        group: Any = typer.main.get_command(holder)
        return group.commands[name]
