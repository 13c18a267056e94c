"""The app that ONCEWARD_APP names, with Django set up: `onceward run onceward.web.django.project:app`.

Workers are processes of their own, which import it. DJANGO_SETTINGS_MODULE must be set, as `manage.py` does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from onceward.app.app import Onceward
from onceward.app.lookup import load_app
from onceward.errors import ConfigurationError


@cache
def _load() -> Onceward:
    import django
    from django.conf import settings

    django.setup()
    target = getattr(settings, "ONCEWARD_APP", None)
    if not isinstance(target, str):
        raise ConfigurationError(
            "the settings of Django do not name the app; write ONCEWARD_APP = 'shop.events:app', with the module and "
            "the name of what Onceward(…) returned"
        )
    return load_app(target)


def __getattr__(name: str) -> Any:
    # Importing this module alone sets nothing up.
    if name == "app":
        return _load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
