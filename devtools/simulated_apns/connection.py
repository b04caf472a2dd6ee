"""One HTTP/2 connection, seen from the server. It owns the protocol engine and knows nothing of what is answered, or
why: it hands over each whole request and sends what it is asked to send.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from devtools.simulated_apns.rules import Request


class Office(Protocol):
    """Who decides what is answered. Called in the thread of the connections' loop."""

    def connected(self) -> int:
        """Give a number to the connection of a client that is through with TLS."""

    def received(self, connection: "Connection", stream_id: int, request: Request) -> None:
        """See to a request that is there as a whole."""

    def violated(self, connection: "Connection", error: ProtocolError) -> None:
        """Note how the client broke HTTP/2; the connection is being closed."""


@dataclass(slots=True)
class Incoming:
    headers: list[tuple[bytes, bytes]]
    body: bytearray


class Connection(asyncio.Protocol):
    number = 0

    def __init__(self, office: Office, *, max_concurrent_streams: int) -> None:
        self._office = office
        self.engine = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.engine.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        self.max_concurrent_streams = max_concurrent_streams
        self.lost = asyncio.Event()
        self._incoming: dict[int, Incoming] = {}
        self._unsent: dict[int, bytes] = {}
        self._timers: set[asyncio.TimerHandle] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio has set TCP_NODELAY by itself.
        self.transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            self.transport.abort()
            return
        self.number = self._office.connected()
        self.engine.initiate_connection()
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Everything that one chunk brings is answered with one write."""
        try:
            events = self.engine.receive_data(data)
        except ProtocolError as error:
            self._office.violated(self, error)
            self.flush()  # unless the very preface was wrong, the engine has a GOAWAY to send
            self.transport.close()
            return
        for event in events:
            if self.transport.is_closing():
                return
            self._handle(event)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's signature)
        for timer in self._timers:
            timer.cancel()
        self.lost.set()

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReceived(stream_id=int(stream_id)):
                headers = [(bytes(name), bytes(value)) for name, value in event.headers]
                self._incoming[stream_id] = Incoming(headers, bytearray())
            case DataReceived(stream_id=int(stream_id)):
                self._incoming[stream_id].body += event.data
                self.engine.acknowledge_received_data(event.flow_controlled_length, stream_id)
            case StreamEnded(stream_id=int(stream_id)):
                self._office.received(self, stream_id, _request(self._incoming.pop(stream_id)))
            case WindowUpdated() | RemoteSettingsChanged():
                for stream_id in tuple(self._unsent):
                    self._send_body(stream_id)
            case ConnectionTerminated():
                self.transport.close()

    def flush(self) -> None:
        if data := self.engine.data_to_send():
            self.transport.write(data)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do it now or later; not at all if the client leaves before."""
        if not seconds:
            act()
            return

        def fire() -> None:
            self._timers.discard(timer)
            act()
            self.flush()

        timer = asyncio.get_running_loop().call_later(seconds, fire)
        self._timers.add(timer)

    def respond(self, stream_id: int, status: int, headers: list[tuple[str, str]], body: bytes = b"") -> None:
        with suppress(ProtocolError):  # the client has reset the stream meanwhile
            self.engine.send_headers(stream_id, [(":status", str(status)), *headers], end_stream=not body)
            if body:
                self._unsent[stream_id] = body
                self._send_body(stream_id)

    def _send_body(self, stream_id: int) -> None:
        """As much of it as the client's windows admit."""
        with suppress(ProtocolError):  # the client has reset the stream meanwhile
            while body := self._unsent[stream_id]:
                room = min(self.engine.local_flow_control_window(stream_id), self.engine.max_outbound_frame_size)
                if room <= 0:
                    return
                self._unsent[stream_id] = body[room:]
                self.engine.send_data(stream_id, body[:room], end_stream=len(body) <= room)
        del self._unsent[stream_id]

    def reset(self, stream_id: int, code: int) -> None:
        with suppress(ProtocolError):  # the client has reset the stream meanwhile
            self.engine.reset_stream(stream_id, code)

    def hang_up(self) -> None:
        """Cut the connection, after what was answered to others."""
        self.flush()
        self.transport.abort()

    def allow_streams(self, limit: int) -> None:
        self.max_concurrent_streams = limit
        self.engine.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: limit})


def _request(incoming: Incoming) -> Request:
    # Not every client sends UTF-8; what it sends instead must survive, so that its bytes can be counted.
    headers = [(name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in incoming.headers]
    pseudo = dict(header for header in headers if header[0].startswith(":"))
    return Request(
        method=pseudo[":method"],
        path=pseudo.get(":path", ""),  # CONNECT has none
        headers=tuple(header for header in headers if not header[0].startswith(":")),
        body=bytes(incoming.body),
    )
