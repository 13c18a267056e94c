"""An app, by the name that a command is given: `onceward run shop:app`."""

from __future__ import annotations

import sys

from onceward._imports import import_name
from onceward.app.app import Onceward
from onceward.errors import ConfigurationError


def load_app(target: str) -> Onceward:
    """The app that `module:name` names."""
    module, _, name = target.partition(":")
    if not name:
        raise ConfigurationError(f"{target!r} names no app; write MODULE:NAME, as in {module or 'shop'}:app")
    try:
        app = import_name(target)
    except ConfigurationError as error:
        apps = _apps_in(module)
        if not apps:
            raise
        raise ConfigurationError(f"{error}; its apps are {', '.join(apps)}") from None
    if not isinstance(app, Onceward):
        raise ConfigurationError(
            f"{target} is no app but {type(app).__name__}; name what Onceward(…) returned, as in "
            "`app = Onceward('shop')`"
        )
    return app


def _apps_in(module: str) -> list[str]:
    """By name, as far as the module could be imported."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return [name for name, value in names.items() if isinstance(value, Onceward)]
