"""Find the app that a command names: `onceward run shop:app`."""

from __future__ import annotations

import sys

from onceward._imports import import_name
from onceward.app.app import Onceward
from onceward.errors import ConfigurationError


def load_app(target: str) -> Onceward:
    """Import the app that `module:name` names. Raises ConfigurationError if there is none."""
    module, _, name = target.partition(":")
    if not name:
        raise ConfigurationError(
            f"{target!r} does not name an app; write MODULE:NAME, as in {module or 'shop'}:app"
        )
    try:
        app = import_name(target)
    except ConfigurationError as error:
        apps = _apps_in(module)
        if not apps:
            raise
        raise ConfigurationError(f"{error}; its apps are {', '.join(apps)}") from None
    if not isinstance(app, Onceward):
        raise ConfigurationError(
            f"{target} is not an app but {type(app).__name__}; name what Onceward(…) returned, as in "
            "`app = Onceward('shop')`"
        )
    return app


def _apps_in(module: str) -> list[str]:
    """Names of the apps in a module, as far as it could be imported."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return [name for name, value in names.items() if isinstance(value, Onceward)]
