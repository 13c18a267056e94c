"""Envoy's own interface, on a socket in a private directory: which port it has, what it loaded, and its end."""

from __future__ import annotations

import asyncio
import http.client
import socket
from pathlib import Path

import msgspec

PATIENCE = 10.0
CHECK_EVERY = 0.02


class Admin:
    def __init__(self, runtime: Path) -> None:
        self._path = str(runtime / "admin")

    async def port(self) -> int:
        """Return the port, once connections are accepted."""
        while True:
            try:
                if (await self._ask("GET", "/ready"))[0] == 200:
                    [found] = msgspec.json.decode((await self._ask("GET", "/listeners?format=json"))[1])[
                        "listener_statuses"
                    ]
                    return int(found["local_address"]["socket_address"]["port_value"])
            except OSError:
                pass  # it does not answer yet
            await asyncio.sleep(CHECK_EVERY)

    async def count(self, name: str) -> int:
        """Return a statistic; 0 if there is none."""
        _, text = await self._ask("GET", f"/stats?filter=^{name}$")
        return int(text.rpartition(b" ")[2] or 0)

    async def stop_accepting(self) -> None:
        """Close the port, and every connection after its next answer."""
        await self._ask("POST", "/drain_listeners")
        await self._ask("POST", "/healthcheck/fail")

    async def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        return await asyncio.to_thread(self._ask_blocking, method, path)

    def _ask_blocking(self, method: str, path: str) -> tuple[int, bytes]:
        connection = _UnixConnection(self._path)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"Envoy answered with {error!r}") from error
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("envoy", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
