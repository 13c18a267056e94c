"""What all tests of the console share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onceward.console.backstage import Backstage


@pytest.fixture(autouse=True)
def no_console_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server of a console stops its threads; here is none, and they would ask the database until the suite ends."""
    made: list[Backstage] = []
    start = Backstage.start

    def noted_start(stage: Backstage) -> None:
        made.append(stage)
        start(stage)

    monkeypatch.setattr(Backstage, "start", noted_start)
    yield
    for stage in made:
        stage.stop()
