"""A boundary in a simulated process, with its store in a directory, and the port by which clients reach it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward.boundary.boundary import Boundary
from onceward.boundary.client.calls import Calls
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.client.loads import AppendLine, AsyncLoads, Loads, Send, WaitingTask
from onceward.boundary.server.codecs import ReadyPage
from onceward.boundary.server.rpc import BoundaryRpc
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.boundary.stores.writes import Write, resolve
from onceward.boundary.v1 import boundary_pb as pb
from tests.simulation.loop import Process
from tests.simulation.wire import Wire, WireLost


class SimulatedStore(SqliteBoundaryStore):
    """The store without its writer's thread: writes that are handed over together are committed a moment later."""

    def __init__(self, directory: Path, process: Process, wire: Wire) -> None:
        super().__init__(directory)
        self._writes.put(None)
        self._writer.join()
        self._writes = self  # type: ignore[assignment]
        self._wire = wire
        self._process = process
        self._writing.execute("PRAGMA synchronous = OFF")
        process.last_wishes.append(self._open.close)

    def put(self, writes: list[Write]) -> None:
        self._process.start(self._commit_later(writes))

    async def _commit_later(self, writes: list[Write]) -> None:
        await self._wire.travel()
        await self._wire.crash_perhaps(self._process, "before its commit")
        self._commit(writes)
        await self._wire.crash_perhaps(self._process, "after its commit")
        resolve(writes)


class Server:
    """What clients reach: the boundary of the process that runs it now, if there is one."""

    def __init__(self, directory: Path, wire: Wire, name: str = "server") -> None:
        self._directory = directory
        self._wire = wire
        self.name = name
        self._asked: set[asyncio.Future[Any]] = set()
        self.boundary: Boundary | None = None
        self._process: Process | None = None

    async def run(self, process: Process) -> None:
        self.boundary = Boundary(SimulatedStore(self._directory, process, self._wire))
        self._rpc = BoundaryRpc(self.boundary)
        self._process = process
        process.last_wishes.append(self._disappear)

    def _disappear(self) -> None:
        self.boundary = None
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(_unavailable("the server died"))
        self._asked.clear()

    async def answer(self, method: str, request: Any) -> Any:
        if self.boundary is None or self._process is None:
            raise _unavailable("there is no server")
        asked = asyncio.get_running_loop().create_future()
        self._asked.add(asked)

        async def work() -> None:
            try:
                reply = await getattr(self._rpc, method)(request, None)
            except Exception as error:
                if not asked.done():
                    asked.set_exception(error)
            else:
                if not asked.done():
                    asked.set_result(reply)

        self._process.start(work())
        try:
            return await asked
        finally:
            self._asked.discard(asked)


REQUESTS = {
    "append_fact": pb.AppendFactRequest,
    "append_facts": pb.AppendFactsRequest,
    "fetch_facts": pb.FetchFactsRequest,
    "confirm_receipt": pb.ConfirmReceiptRequest,
    "get_object": pb.GetObjectRequest,
    "put_object": pb.PutObjectRequest,
    "remove_consumer": pb.RemoveConsumerRequest,
}


class SimulatedLoads(AsyncLoads):
    """What sends for others dies with its process."""

    def __init__(self, send: Send, process: Process) -> None:
        super().__init__(send, None)
        self._process = process

    def _send_next(self, line: AppendLine[WaitingTask], loop: asyncio.AbstractEventLoop) -> None:
        if load := line.take():
            self._process.start(self._send_loads(line, load))


class SimulatedPort:
    """How one process calls the server: as `AsyncBoundaryPort`, over the wire."""

    def __init__(self, server: Server, process: Process, wire: Wire) -> None:
        self._server = server
        self._process = process
        self._wire = wire

    def loads(self, send: Send) -> Loads:
        return SimulatedLoads(send, self._process)

    async def call(self, method: str, request: Any) -> Any:
        return await self.ask(method, request)

    async def ask(self, method: str, request: Any, grace: float = 0.0) -> Any:
        request = REQUESTS[method].from_binary(request.to_binary())
        try:
            await self._wire.send(self._process, self._server.name, method)
            reply = await self._server.answer(method, request)
            await self._wire.receive(self._process, self._server.name, method)
        except WireLost as lost:
            raise _unavailable(str(lost)) from None
        return pb.FetchFactsResponse.from_binary(reply.encoded) if type(reply) is ReadyPage else reply

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def client(server: Server, process: Process, wire: Wire) -> AsyncBoundaryClient:
    """A client whose port is simulated."""
    made = object.__new__(AsyncBoundaryClient)
    made._port = SimulatedPort(server, process, wire)  # type: ignore[assignment]
    made._calls = Calls("http://boundary", made._port)
    return made


def _unavailable(why: str) -> ConnectError:
    return ConnectError(Code.UNAVAILABLE, why)
