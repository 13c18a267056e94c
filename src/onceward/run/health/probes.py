"""The pages for machines as an ASGI application, which a run serves alone and the console next to its own pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

JSON = "application/json"
PLAIN = "text/plain"


class HealthPage(NamedTuple):
    status: int
    kind: str
    body: str


ByPath = Mapping[str, Callable[[], HealthPage]]


class Probes:
    """Answers GET and HEAD. `/` says what else there is."""

    def __init__(self, pages: ByPath) -> None:
        self._pages = pages

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        page = self._page(str(scope["method"]), path)
        body = page.body.encode()
        headers = [
            (b"content-type", page.kind.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": page.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _page(self, method: str, path: str) -> HealthPage:
        if method not in ("GET", "HEAD"):
            return HealthPage(405, PLAIN, "use GET\n")
        found = self._pages.get(path)
        if found is not None:
            return found()
        there = f"the pages are {', '.join(self._pages)}"
        if path == "/":
            return HealthPage(200, PLAIN, f"{there}; start with --console for pages to click\n")
        return HealthPage(404, PLAIN, f"not found; {there}\n")
