"""The policy of an app's consumer without one, and with a part of one."""

from __future__ import annotations

from typing import Any

import pytest

from onceward import ConsumerPolicy, Onceward


def policy_of(given: Any, *, asynchronous: bool = False, **settings: Any) -> ConsumerPolicy:
    app = Onceward("shop", **settings)
    if asynchronous:

        @app.consumer("memory://orders", policy=given)
        async def charge(order: int) -> None: ...

    else:

        @app.consumer("memory://orders", policy=given)
        def charge(order: int) -> None: ...

    return app.consumers["charge"].policy


@pytest.mark.req("PF-02")
@pytest.mark.parametrize(("asynchronous", "slots"), [(False, 8), (True, 64)])
def test_an_app_has_defaults_for_use(asynchronous: bool, slots: int) -> None:
    loop = policy_of(None, asynchronous=asynchronous).loop
    assert (loop.mode, loop.batch.size, loop.concurrency.value) == ("continuous", 100, slots)


@pytest.mark.req("PF-02")
def test_what_code_and_settings_say_wins() -> None:
    loop = policy_of({"loop": {"mode": "batch", "batch": {"size": 7}, "concurrency": {"max": 4}}}).loop
    assert (loop.mode, loop.batch.size, loop.concurrency.value) == ("batch", 7, 1)
    assert policy_of({"loop": {"limit": 3}}, concurrency=5).loop.concurrency.value == 5
    assert policy_of(ConsumerPolicy()).loop.concurrency.value == 8
    assert policy_of({"steps": {"process": {"retry": {"max_attempts": 3}}}}).loop.batch.size == 100
