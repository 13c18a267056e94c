"""HEAD, as proxies and probes send it: a body would be read as the beginning of the next answer."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from onceward.boundary.v1.boundary_connect import BoundaryService
from tests.support.boundary.server import Served, served

PATHS = ["/livez", "/metrics", "/stats", "/nothing", f"/{BoundaryService.desc().type_name}/FetchFacts"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home: Path = tmp_path_factory.mktemp("head")
    with served(home) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_the_next_answer_on_the_connection_is_whole(server: Served, path: str) -> None:
    place = httpx.URL(server.url)
    with closing(http.client.HTTPConnection(place.host, place.port or 80, timeout=30)) as connection:
        for _ in range(3):
            connection.request("HEAD", path)
            head = connection.getresponse()
            assert head.read() == b""
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.read()
            assert (answer.status, answer.getheader("content-type")) == (
                head.status,
                head.getheader("content-type"),
            )


@pytest.mark.parametrize("path", PATHS)
def test_there_is_no_body_in_http_2_either(server: Served, path: str) -> None:
    with httpx.Client(http1=False, http2=True, timeout=30) as client:
        head = client.head(server.url + path)
        assert (head.http_version, head.content) == ("HTTP/2", b"")
        assert client.get(server.url + path).status_code == head.status_code
