"""`manage.py onceward run`, and others: onceward's commands, for the app of this project."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

TARGET = "onceward.web.django.project:app"
COMMANDS = ("run", "relay", "explain", "balance", "console", "verify")
"""Commands whose first argument is an app."""
USAGE = f"manage.py onceward migrate, or one of {', '.join(COMMANDS)} with the options of that command"


class OncewardCommand(BaseCommand):  # type: ignore[misc]
    help = f"Run a command of onceward for the app that ONCEWARD_APP names: {USAGE}"

    def run_from_argv(self, argv: list[str]) -> None:
        """Options belong to onceward's command, so Django does not parse them."""
        rest = argv[2:]
        if not rest or rest[0] in ("-h", "--help"):
            self.stdout.write(self.help)
            return
        try:
            self.handle(*rest)
        except CommandError as error:
            self.stderr.write(str(error))
            sys.exit(error.returncode)

    def handle(self, *arguments: Any, **_: Any) -> None:
        from onceward.errors import ConfigurationError

        name, *rest = arguments or ("",)
        if name != "migrate" and name not in COMMANDS:
            raise CommandError(f"there is no command {name!r} here: {USAGE}", returncode=2)
        try:
            from onceward.web.django.project import app
        except ConfigurationError as error:
            raise CommandError(str(error), returncode=2) from error
        if name != "migrate":
            from onceward.cli.main import main

            sys.argv = ["onceward", name, TARGET, *map(str, rest)]
            main()
            return
        from onceward.inbox import Inbox

        engine = app.create_engine()
        try:
            applied = Inbox(engine).migrate()
        finally:
            engine.dispose()
        self.stdout.write(f"{len(applied)} migrations applied" if applied else "nothing to do")


Command = OncewardCommand  # the name that Django looks for
