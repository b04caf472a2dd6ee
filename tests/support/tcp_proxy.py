"""A TCP proxy on loopback that can do to a connection what a network does: fall silent, break it, refuse it."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Self, assert_never

# Linger for no time: closing then resets the connection, as a crashed peer or a firewall would.
_RESET = struct.pack("ii", 1, 0)
_CHUNK = 64 << 10


class TcpProxy:
    """Stands before `target`, a host and port or a Unix socket; clients connect to 127.0.0.1 and `port`.

    Each verb has taken effect when it returns.
    """

    def __init__(self, target: tuple[str, int] | Path) -> None:
        self.port = 0
        self.accepted = 0  # connections there ever were
        self.bytes_to_target = 0
        self.bytes_to_client = 0
        self._target = target
        self._relays: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._flowing: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._thread.start()
        try:
            self._do(self._begin())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.refuse()
            self.cut()
        finally:
            self._end()

    @property
    def count(self) -> int:
        """Connections there are now."""
        return len(self._relays)

    def hang(self) -> None:
        """Forward nothing any more, neither data nor an end; new connections are taken and get no answer either."""
        self._do(self._hang())

    def refuse(self) -> None:
        """Take no new connection: nobody listens. Those there are go on."""
        self._do(self._refuse())

    def cut(self) -> None:
        """Reset all connections, on both sides."""
        self._do(self._cut())

    def resume(self) -> None:
        """Undo `hang` (what was held back arrives now) and `refuse` (at the same port)."""
        self._do(self._resume())

    def _do(self, verb: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(verb, self._loop).result(timeout=10)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _begin(self) -> None:
        self._flowing = asyncio.Event()
        await self._resume()

    async def _resume(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
            self.port = self._listener.sockets[0].getsockname()[1]
        self._flowing.set()

    async def _hang(self) -> None:
        self._flowing.clear()

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _cut(self) -> None:
        relays = tuple(self._relays)
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        await asyncio.sleep(0)  # a transport closes its socket one turn later

    def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        relay = asyncio.create_task(self._relay(client, to_client))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        ends = [to_client]
        close: Callable[[asyncio.StreamWriter], None] = _reset
        try:
            await self._flowing.wait()
            target, to_target = await self._connect()
            ends.append(to_target)
            for end in ends:
                end.transport.set_write_buffer_limits(0)  # what is not with the kernel yet is still in the pump's hands
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._pump_to_target(client, to_target))
                both_ways.create_task(self._pump_to_client(target, to_client))
            close = asyncio.StreamWriter.close
        except* OSError:  # one side broke, or the target takes nobody: then the other side breaks, too
            pass
        finally:
            for end in ends:
                close(end)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        match self._target:
            case Path():
                return await asyncio.open_unix_connection(self._target)
            case (host, port):
                return await asyncio.open_connection(host, port)
            case _:
                assert_never(self._target)

    async def _pump_to_target(self, client: asyncio.StreamReader, to_target: asyncio.StreamWriter) -> None:
        while data := await client.read(_CHUNK):
            await self._flowing.wait()
            self.bytes_to_target += len(data)
            to_target.write(data)
            await to_target.drain()
        await self._flowing.wait()
        to_target.write_eof()

    async def _pump_to_client(self, target: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while data := await target.read(_CHUNK):
            await self._flowing.wait()
            self.bytes_to_client += len(data)
            to_client.write(data)
            await to_client.drain()
        await self._flowing.wait()
        to_client.write_eof()


def _reset(end: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # closed already
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.transport.abort()
