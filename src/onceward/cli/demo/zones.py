"""The two boundaries, each a real `onceward boundary serve` with its own store; the warehouse pulls from the shop."""

from __future__ import annotations

import re
import sys
from functools import cached_property
from pathlib import Path
from select import select
from types import TracebackType
from typing import Self
from urllib.request import ProxyHandler, build_opener

import msgspec

from onceward.boundary import BoundaryClient
from onceward.cli.demo.processes import Child, ChildDied, see_off_all
from onceward.cli.demo.setup import SHOP, WAREHOUSE, Setup

SERVE = [sys.executable, "-m", "onceward.cli.demo.attached", "boundary", "serve", "--listen", "127.0.0.1:0"]
LINKED = """\
zone = "{zone}"
store = "{zone}"

[[links]]
name = "{source}"
url = "{url}"
from_zones = ["{source}"]
"""
AUDITOR = "auditor"
"""The name under which the demo itself reads the logs, at the end."""
PAGE = 1000
START_PATIENCE = 60.0
ANSWER_PATIENCE = 10.0

_open = build_opener(ProxyHandler({})).open  # it is this machine; no proxy knows the way


class Cursor(msgspec.Struct):
    name: str
    offset: int


class Stats(msgspec.Struct):
    """What a boundary says of itself."""

    last: int
    """The offset of the last fact; offsets leave none out."""
    consumers: list[Cursor]

    def confirmed(self, consumer: str) -> int:
        return next((each.offset for each in self.consumers if each.name == consumer), 0)


class Zone(Child):
    def __init__(self, setup: Setup, name: str, *arguments: str) -> None:
        super().__init__(name, [*SERVE, *arguments], setup.log(name))

    @cached_property
    def url(self) -> str:
        """Known as soon as it serves."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select([stdout], [], [], START_PATIENCE)[0]:
            raise ChildDied(f"{self.name} did not serve within {START_PATIENCE:g} s")
        line = stdout.readline().decode().strip()
        if not line:
            self._process.wait()
            raise self.died()
        return line

    def stats(self) -> Stats:
        return msgspec.json.decode(self._page("/stats"), type=Stats)

    def duplicates(self) -> int:
        """Appends that were known already, as the server counts them."""
        found = re.search(rb"^bsfg_append_duplicates_total (\S+)$", self._page("/metrics"), re.MULTILINE)
        return 0 if found is None else int(float(found[1]))

    def ids(self) -> list[str]:
        """Of all facts, in the order of the log."""
        ids: list[str] = []
        with BoundaryClient(self.url) as client:
            while facts := client.fetch(AUDITOR, PAGE).facts:
                ids += [fact.message_id for fact in facts]
                client.confirm(AUDITOR, facts[-1].offset)
        return ids

    def _page(self, path: str) -> bytes:
        with _open(f"{self.url}{path}", timeout=ANSWER_PATIENCE) as answer:
            page: bytes = answer.read()
            return page


class Zones:
    """Both. Neither outlives the `with` block."""

    def __init__(self, setup: Setup, way_to_the_shop: str) -> None:
        config = Path(setup.folder) / f"{WAREHOUSE}.toml"
        config.write_text(LINKED.format(zone=WAREHOUSE, source=SHOP, url=way_to_the_shop), "utf-8")
        self._zones: list[Zone] = []
        try:
            self.shop = self._started(Zone(setup, SHOP, "--data", str(Path(setup.folder) / SHOP)))
            self.warehouse = self._started(Zone(setup, WAREHOUSE, "--config", str(config)))
        except BaseException:
            see_off_all(self._zones)
            raise

    def _started(self, zone: Zone) -> Zone:
        self._zones.append(zone)
        return zone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        see_off_all(self._zones)

    def check(self) -> None:
        for zone in self._zones:
            zone.check()
