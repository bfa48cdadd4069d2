"""A TCP proxy that adds latency and nothing else.

    python latency_proxy.py UPSTREAM_PORT DELAY_MS     prints its own port

What a client sends arrives upstream DELAY_MS later, in order, whatever else is on its way: each request waits that long
and bandwidth stays as it was. Answers pass at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque

READ_BYTES = 1 << 20


class Upstream(asyncio.BufferedProtocol):
    """The connection to the server; what it sends goes to the client as fast as the client takes it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.buffer = bytearray(READ_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.client.transport.write(memoryview(self.buffer)[:nbytes])
        self.buffer = bytearray(READ_BYTES) if self.client.transport.get_write_buffer_size() else self.buffer

    def connection_lost(self, error: Exception | None) -> None:
        self.client.transport.close()


class Client(asyncio.Protocol):
    def __init__(self, port: int, delay_s: float) -> None:
        self.port, self.delay_s = port, delay_s
        self.waiting: deque[bytes] = (
            deque()
        )  # sent by the client, not yet passed on; timers may tie, a queue keeps order
        self.upstream: asyncio.Transport | None = None
        self.opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.opening = asyncio.get_running_loop().create_task(self.open())

    async def open(self) -> None:
        try:
            made, _ = await asyncio.get_running_loop().create_connection(lambda: Upstream(self), "127.0.0.1", self.port)
        except OSError:
            self.transport.close()
            return
        self.upstream = made

    def data_received(self, data: bytes) -> None:
        self.waiting.append(data)
        asyncio.get_running_loop().call_later(self.delay_s, self.pass_on)

    def pass_on(self) -> None:
        if self.upstream is None:  # connecting took longer than the delay
            asyncio.get_running_loop().call_later(0.001, self.pass_on)
        else:
            self.upstream.write(self.waiting.popleft())

    def pause_writing(self) -> None:
        if self.upstream is not None:
            self.upstream.pause_reading()

    def resume_writing(self) -> None:
        if self.upstream is not None:
            self.upstream.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.upstream is not None:
            self.upstream.close()


async def serve(port: int, delay_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Client(port, delay_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
