"""Accepts TLS connections on 127.0.0.1, in an event loop and a thread of its own."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from devtools.simulated_apns.connection import Connection

# Stopping is a few turns of the loop; more than this and it hangs, which the owner should hear of.
STOP_SECONDS = 10


class Listener:
    def __init__(self, tls: ssl.SSLContext, make_connection: Callable[[], Connection]) -> None:
        self._tls = tls
        self._make_connection = make_connection
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulated-apns", daemon=True)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._socket.settimeout(0)
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        with suppress(RuntimeError):  # the loop has ended already, by a fault that its thread has shown
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the simulated APNs did not stop within {STOP_SECONDS} s")

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._accept())

    async def _accept(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._started.set()
        with self._socket:
            async with asyncio.TaskGroup() as clients:
                while True:
                    client, _ = await self._loop.sock_accept(self._socket)
                    clients.create_task(self._attend(client))

    async def _attend(self, client: socket.socket) -> None:
        """Not asyncio's own server: before Python 3.13 that cannot cut off a client that is silent in the handshake."""
        connection = self._make_connection()
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: connection, client, ssl=self._tls)
        except OSError:  # it does not trust our CA, or left
            return
        try:
            await connection.lost.wait()
        finally:
            transport.abort()
            await connection.lost.wait()
