"""The documentation names the servers that the suites run on."""

from __future__ import annotations

import pytest
import redis

from tests.support import ROOT
from tests.support.every_redis import every_redis

pytestmark = every_redis


@pytest.mark.req("ST-04")
def test_the_page_about_redis_names_this_server(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        info = client.info("server")
    product = "Valkey" if "valkey_version" in info else "Redis"
    major, minor = str(info.get("valkey_version", info["redis_version"])).split(".")[:2]
    assert f"{product} {major}.{minor}" in (ROOT / "docs" / "how-to" / "redis.md").read_text()
