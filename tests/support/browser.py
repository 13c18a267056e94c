"""A real browser without a window, and what a page must not do: fail, ask other hosts, or run what a message says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:  # large, and most processes of the suite open no browser
    from playwright.sync_api import Browser, Page

from tests.support import ROOT

AXE = ROOT / "tests" / "browser" / "axe" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
INSTALL = "apt-get update && apt-get install --yes --no-install-recommends chromium"


def executable() -> str:
    """The browser that is installed, or the one that ONCEWARD_TEST_BROWSER names."""
    given = os.environ.get("ONCEWARD_TEST_BROWSER")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    assert found is not None, f"no Chromium or Chrome is installed; run: {INSTALL}"
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=executable(), args=list(FLAGS))
        try:
            yield made
        finally:
            made.close()


class Watched:
    """A page of its own session. Leaving the block fails the test if anything went wrong in the browser."""

    def __init__(self, browser: Browser, host: str, **options: Any) -> None:
        self._context = browser.new_context(**options)
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(30_000)
        self.problems: list[str] = []
        self.clicks = 0
        self._host = host
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on(
            "dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )
        self.page.on("request", self._check)

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")

    def _check(self, request: Any) -> None:
        if urlsplit(request.url).netloc != self._host:
            self.problems.append(f"asked another host: {request.url}")

    def click(self, selector: str) -> None:
        """Click as a person does, and count it."""
        self.clicks += 1
        self.page.wait_for_load_state()  # earlier, a button sends its form as a browser without scripts does
        self.page.click(selector)

    def check_page(self) -> None:
        """Fail if the page breaks a rule of WCAG A or AA, or does not fit a phone."""
        self.page.evaluate(AXE.read_text("utf-8"))
        found = self.page.evaluate(
            "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
        )
        broken = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]]
        assert broken == [], self.page.url
        size = self.page.viewport_size
        self.page.set_viewport_size({"width": 390, "height": 844})
        assert self.page.evaluate("document.documentElement.scrollWidth") <= 390, self.page.url
        if size is not None:
            self.page.set_viewport_size(size)

    def close(self) -> None:
        self._context.close()
        assert self.problems == [], self.problems


@contextmanager
def watched(browser: Browser, url: str, **options: Any) -> Iterator[Watched]:
    made = Watched(browser, urlsplit(url).netloc, **options)
    try:
        yield made
    except BaseException:
        made.problems.clear()  # the failure says more
        made.close()
        raise
    made.close()
