"""The operators' web page: what runs, what waits, what died, and what to do about it.

`onceward console module:app` serves it alone, `onceward run --console HOST:PORT` beside the workers, and
`app.mount("/ops", onceward.console.create(app))` inside another web application.
"""

from __future__ import annotations

from onceward.errors import ConfigurationError

try:
    import jinja2 as _jinja2  # noqa: F401
    import starlette as _starlette  # noqa: F401
except ModuleNotFoundError as _missing:
    raise ConfigurationError(
        f"the console needs {_missing.name}: pip install 'onceward[console]'"
    ) from _missing

from onceward.console.access import Access, Role, User
from onceward.console.site import create
from onceward.console.users import UsersFile

__all__ = ["Access", "Role", "User", "UsersFile", "create"]
