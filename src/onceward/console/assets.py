"""The files that pages need: a browser keeps them, so a page works although the server dies while it opens."""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from onceward.console.look import HERE

FOLDER = HERE / "static"
KEPT = "max-age=31536000, immutable"


class Assets(StaticFiles):
    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, *args: Any
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, *args)
        if scope["query_string"] == f"v={version()}".encode():
            response.headers["Cache-Control"] = KEPT
        return response


@cache
def version() -> str:
    """Changes with any of them. Pages ask for files of their version."""
    digest = sha256()
    for each in sorted(FOLDER.iterdir()):
        digest.update(each.read_bytes())
    return digest.hexdigest()[:12]
