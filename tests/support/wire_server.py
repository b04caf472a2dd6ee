"""An HTTP/2 server over TLS on loopback that does just what a test's script says, frame by frame, right or wrong."""

import asyncio
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import hpack
from hpack.struct import HeaderTuple
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from devtools.simulated_apns.certificates import Authority

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

type Script = Callable[[Peer], Awaitable[None]]


@cache
def authority() -> Authority:
    return Authority.generate()


def trusting() -> ssl.SSLContext:
    """Make a client's context that trusts the servers here, and nobody else."""
    return ssl.create_default_context(cadata=authority().pem().decode())


@cache
def _server_context(alpn: Sequence[str]) -> ssl.SSLContext:
    with tempfile.TemporaryDirectory() as directory:
        context = authority().server_context(Path(directory))
    context.set_alpn_protocols(list(alpn))
    return context


@dataclass(frozen=True, slots=True)
class Request:
    stream_id: int
    block: bytes
    fields: tuple[HeaderTuple, ...]
    body: bytes

    @property
    def headers(self) -> dict[bytes, bytes]:
        return {bytes(name): bytes(value) for name, value in self.fields}

    @property
    def path(self) -> str:
        return self.headers[b":path"].decode()


class Peer:
    """One client's connection, from the server's end. What it says is read when the script asks for it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number  # 0 is the first connection that the server took
        self.frames: list[Frame] = []  # all that were read
        self.decoder = hpack.Decoder()
        self._reader, self._writer = reader, writer
        self._halves: dict[int, tuple[bytes, tuple[HeaderTuple, ...], bytes]] = {}

    async def greet(self, **settings: int) -> None:
        """Read the preface, and say SETTINGS."""
        await self.preface()
        self.settings(**settings)

    async def preface(self) -> None:
        assert await self._reader.readexactly(len(PREFACE)) == PREFACE

    async def frame(self) -> Frame:
        """Read one more. Raises EOFError or ConnectionError when the client has gone."""
        frame, length = Frame.parse_frame_header(memoryview(await self._reader.readexactly(9)))
        frame.parse_body(memoryview(await self._reader.readexactly(length)))
        self.frames.append(frame)
        return frame

    async def until[F: Frame](self, kind: type[F]) -> F:
        while True:
            frame = await self.frame()
            if isinstance(frame, kind) and not (isinstance(frame, SettingsFrame) and "ACK" not in frame.flags):
                return frame

    async def request(self) -> Request:
        """Read until one more request is whole. PINGs are answered meanwhile."""
        while True:
            frame = await self.frame()
            match frame:
                case HeadersFrame():
                    fields = tuple(self.decoder.decode(frame.data, raw=True))
                    self._halves[frame.stream_id] = frame.data, fields, b""
                case DataFrame():
                    block, fields, body = self._halves[frame.stream_id]
                    self._halves[frame.stream_id] = block, fields, body + frame.data
                case PingFrame() if "ACK" not in frame.flags:
                    self.send(PingFrame(0, frame.opaque_data, flags=("ACK",)))
                    continue
                case RstStreamFrame():
                    self._halves.pop(frame.stream_id, None)
                    continue
                case _:
                    continue
            if "END_STREAM" in frame.flags:
                return Request(frame.stream_id, *self._halves.pop(frame.stream_id))

    async def requests(self, count: int) -> list[Request]:
        return [await self.request() for _ in range(count)]

    async def end(self) -> None:
        """Read until the client has gone."""
        with suppress(EOFError, ConnectionError, ssl.SSLError):
            while True:
                await self.frame()

    def send(self, *frames: Frame | bytes) -> None:
        self._writer.write(b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames))

    async def drain(self) -> None:
        await self._writer.drain()

    def settings(self, **settings: int) -> None:
        values = {getattr(SettingsFrame, name.upper()): value for name, value in settings.items()}
        self.send(SettingsFrame(0, settings=values))

    def answer(self, request: Request, status: int = 200, body: bytes = b"") -> None:
        block = b"\x88" if status == 200 else b"\x08\x03%d" % status
        if body:
            self.send(
                HeadersFrame(request.stream_id, block, flags=("END_HEADERS",)),
                DataFrame(request.stream_id, body, flags=("END_STREAM",)),
            )
        else:
            self.send(HeadersFrame(request.stream_id, block, flags=("END_HEADERS", "END_STREAM")))

    def go_away(self, last_stream_id: int, code: int = 0, debug: bytes = b"") -> None:
        self.send(GoAwayFrame(0, last_stream_id, code, debug))

    def close(self) -> None:
        self._writer.close()

    def cut(self) -> None:
        self._writer.transport.abort()


async def answer_all(peer: Peer, **settings: int) -> None:
    """Do as APNs does on a good day."""
    await peer.greet(**settings)
    while True:
        peer.answer(await peer.request())


class WireServer:
    """What a script raises that is not the client's leaving, the test's end raises again."""

    def __init__(
        self,
        script: Script = answer_all,
        *,
        alpn: Sequence[str] = ("h2",),
        host: str = "127.0.0.1",
        port: int = 0,
        tls: bool = True,
    ) -> None:
        self.peers: list[Peer] = []
        self.port = port
        self._script, self._host = script, host
        self._tls = _server_context(tuple(alpn)) if tls else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[Exception] = []

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._attend, self._host, self.port, ssl=self._tls, backlog=512)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.peers:
            peer.cut()
        for _turn in range(3):  # turns of the loop, in which asyncio closes the sockets
            await asyncio.sleep(0)
        # A fault of the script's explains the failure of the test, so it goes first.
        if self._faults:
            raise self._faults[0]

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(len(self.peers), reader, writer)
        self.peers.append(peer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._script(peer)
        except (EOFError, ConnectionError, ssl.SSLError):
            pass
        except asyncio.CancelledError:
            return
        except Exception as fault:  # noqa: BLE001  raised again at the end
            self._faults.append(fault)
            peer.cut()
        finally:
            self._tasks.discard(task)


class Tap:
    """Passes octets on to a server, and counts the TLS records in which the client's data came."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.records: list[int] = []  # the length of each

    @property
    def url(self) -> str:
        return f"https://localhost:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._attend, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)

        async def return_all() -> None:
            while octets := await there.read(1 << 16):
                writer.write(octets)

        self._tasks |= {asyncio.create_task(return_all()), *([t] if (t := asyncio.current_task()) else [])}
        try:
            while True:
                head = await reader.readexactly(5)
                length = int.from_bytes(head[3:])
                back.write(head + await reader.readexactly(length))
                if head[0] == 23:  # application data; in TLS 1.3 the end of the handshake looks like it, too
                    self.records.append(length)
        except (EOFError, asyncio.CancelledError):
            pass
        finally:
            back.close()
            writer.close()
