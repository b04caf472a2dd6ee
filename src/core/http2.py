"""One HTTP/2 connection, seen from the client that pushes: octets in, events out. No socket, no clock, no waiting.

As much of RFC 9113 as a client needs that asks many small questions and has no use for anything a server begins. What a
server may do is understood; what it may not do is one of two things: the fault of one stream, which is reset and
reported, or of the connection, which then says GOAWAY and is `Broken`. Section numbers are RFC 9113's.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from core.hpack import LARGEST_LIST, NO_TABLE, Decoder, Field, HpackError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST_FRAME = 16_384  # section 4.2: what everybody takes; neither side of ours goes beyond
DEFAULT_WINDOW = 65_535  # section 6.9.2
LARGEST_WINDOW = LAST_STREAM = 2**31 - 1

# A body is read as far as its stream's window goes, which we never widen: no answer of APNs' has a hundredth of it.
LARGEST_BODY = DEFAULT_WINDOW
CONNECTION_WINDOW = 1 << 20  # octets that the server may send on all streams before we have taken them
MOST_STREAMS = 1000  # at once, whatever the server allows. APNs has said 1,000 for years
MOST_CONTINUATIONS = 64  # frames; empty ones cost a server nothing

_FRAME = struct.Struct(">HBBBL")  # section 4.1: length in 24 bits, type, flags, stream
_LONG = struct.Struct(">L")
_SETTING = struct.Struct(">HL")

DATA, HEADERS, _PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
PRIORITY_FIELDS = 0x20

ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 2, 3, 4, 5, 6


class ErrorCode(IntEnum):
    """Section 7."""

    NO_ERROR = 0x00
    PROTOCOL_ERROR = 0x01
    INTERNAL_ERROR = 0x02
    FLOW_CONTROL_ERROR = 0x03
    SETTINGS_TIMEOUT = 0x04
    STREAM_CLOSED = 0x05
    FRAME_SIZE_ERROR = 0x06
    REFUSED_STREAM = 0x07
    CANCEL = 0x08
    COMPRESSION_ERROR = 0x09
    CONNECT_ERROR = 0x0A
    ENHANCE_YOUR_CALM = 0x0B
    INADEQUATE_SECURITY = 0x0C
    HTTP_1_1_REQUIRED = 0x0D


@dataclass(frozen=True, slots=True)
class Answered:
    """The final answer. Its body may be cut off, at `LARGEST_BODY` or where the stream ended too early."""

    stream_id: int
    status: int
    headers: Sequence[Field]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """The server ended the stream without its answer. `so_far` is as much of that as had come, if the status had."""

    stream_id: int
    code: int
    so_far: Answered | None


@dataclass(frozen=True, slots=True)
class Malformed:
    """The server's answer makes no sense (section 8.1.1). The connection still does."""

    stream_id: int
    why: str


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The server takes no more streams here, and has not looked at the `unprocessed` (section 6.8)."""

    code: int
    debug: bytes
    unprocessed: Sequence[int]


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Also said of the first ones."""


@dataclass(frozen=True, slots=True)
class Pong:
    payload: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The server broke the protocol: the connection is of no use to anybody. Always the last event."""

    code: ErrorCode
    why: str


type Event = Answered | Reset | Malformed | GoneAway | SettingsChanged | Pong | Broken


@dataclass(frozen=True, slots=True)
class Dropped:
    """What is known of a stream that we gave up."""

    sent: bool  # all of it. If not, the server never had a whole request
    so_far: Answered | None


class _ConnectionError(Exception):
    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class _StreamError(Exception):
    def __init__(self, why: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(why)
        self.code = code


class _Stream:
    __slots__ = ("body", "credit", "declared", "headers", "received", "sent", "status", "unsent")

    def __init__(self) -> None:
        self.status = 0  # until the final one has come
        self.headers: Sequence[Field] = ()
        self.declared: int | None = None  # content-length
        self.body: list[bytes] = []
        self.received = 0  # octets that count for flow control
        self.unsent = b""
        self.sent = 0
        self.credit = 0  # what WINDOW_UPDATE has added to INITIAL_WINDOW_SIZE

    def so_far(self, stream_id: int) -> Answered | None:
        return self.answer(stream_id) if self.status else None

    def answer(self, stream_id: int) -> Answered:
        return Answered(stream_id, self.status, self.headers, b"".join(self.body))


class ClientConnection:
    def __init__(self) -> None:
        self._out: list[bytes] = [
            PREFACE,
            _frame(
                SETTINGS,
                0,
                0,
                _SETTING.pack(ENABLE_PUSH, 0) + _SETTING.pack(MAX_HEADER_LIST_SIZE, LARGEST_LIST),
            ),
            _frame(WINDOW_UPDATE, 0, 0, _LONG.pack(CONNECTION_WINDOW - DEFAULT_WINDOW)),
        ]
        self._unread = b""
        self._decoder = Decoder()
        self._streams: dict[int, _Stream] = {}
        self._half_sent: dict[int, _Stream] = {}  # those of them whose body still waits for a window
        self._block: list[bytes] | None = None  # a header block that CONTINUATION is to complete
        self._block_stream = self._block_flags = 0
        self._receivable = CONNECTION_WINDOW
        self._sendable = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW  # of the streams that we send on
        self.last_stream_id = -1  # of those that we began
        self.greeted = False  # whether the server's SETTINGS have come, which have to be the first that it says
        self.ended = False  # whether either side has said that no stream is to begin any more
        self.broken = False
        # Section 5.1.2 allows any number until SETTINGS say otherwise. APNs allows one, so one it is.
        self.limit = 1

    @property
    def has_room(self) -> bool:
        """Whether a stream may begin, and at least the first octet of its body may follow."""
        return not self.ended and self._sendable > 0 and not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether there are as many streams as the server allows."""
        return len(self._streams) >= self.limit or self.last_stream_id >= LAST_STREAM - 1

    def data_to_send(self) -> bytes:
        data = b"".join(self._out)
        self._out.clear()
        return data

    def request(self, block: bytes, body: bytes) -> int:
        """Begin a stream, which has to have room."""
        assert self.has_room  # noqa: S101  whoever calls has looked
        if self.last_stream_id < 0:
            block = NO_TABLE + block
        stream_id = self.last_stream_id = self.last_stream_id + 2
        stream = self._streams[stream_id] = _Stream()
        length = len(body)
        out = self._out
        if not length:
            out += (_header(len(block), HEADERS, END_HEADERS | END_STREAM, stream_id), block)
        elif length <= self._sendable and length <= self._initial_window and length <= LARGEST_FRAME:
            self._sendable -= length
            stream.sent = length
            out += (
                _header(len(block), HEADERS, END_HEADERS, stream_id),
                block,
                _header(length, DATA, END_STREAM, stream_id),
                body,
            )
        else:
            out += (_header(len(block), HEADERS, END_HEADERS, stream_id), block)
            stream.unsent = body
            self._half_sent[stream_id] = stream
            self._send_bodies()
        return stream_id

    def drop(self, stream_id: int) -> Dropped:
        """Give up a stream (section 5.4.2). Whatever still comes of it is read and forgotten."""
        stream = self._streams[stream_id]
        self._reset(stream_id, ErrorCode.CANCEL)
        return Dropped(not stream.unsent, stream.so_far(stream_id))

    def ping(self, payload: bytes) -> None:
        self._out.append(_frame(PING, 0, 0, payload))

    def close(self) -> None:
        """Say politely that this was all."""
        if not self.broken:
            self._go_away(ErrorCode.NO_ERROR)

    def receive(self, data: bytes) -> list[Event]:
        events: list[Event] = []
        if self.broken:
            return events
        try:
            self._read(self._unread + data if self._unread else data, events)
        except _ConnectionError as fault:
            self.broken = True
            self._go_away(fault.code)
            events.append(Broken(fault.code, str(fault)))
        return events

    def _read(self, data: bytes, events: list[Event]) -> None:
        at, end = 0, len(data)
        while end - at >= 9:
            high, low, kind, flags, stream_id = _FRAME.unpack_from(data, at)
            length = high << 8 | low
            if length > LARGEST_FRAME:
                raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a frame larger than we allow")
            after = at + 9 + length
            if after > end:
                break
            payload = data[at + 9 : after]
            at = after
            self._frame(kind, flags, stream_id & LAST_STREAM, payload, events)
        self._unread = data[at:]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        if self._block is not None and (kind != CONTINUATION or stream_id != self._block_stream):  # section 6.10
            raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self.greeted and (kind != SETTINGS or flags & ACK):  # section 3.4
            raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "it did not begin with SETTINGS")
        try:
            if kind == HEADERS:
                self._on_headers(flags, stream_id, payload, events)
            elif kind == DATA:
                self._on_data(flags, stream_id, payload, events)
            elif kind == CONTINUATION:
                self._on_continuation(flags, payload, events)
            elif kind == RST_STREAM:
                self._on_reset(stream_id, payload, events)
            elif kind == SETTINGS:
                self._on_settings(flags, stream_id, payload, events)
            elif kind == PING:
                self._on_ping(flags, stream_id, payload, events)
            elif kind == GOAWAY:
                self._on_goaway(stream_id, payload, events)
            elif kind == WINDOW_UPDATE:
                self._on_window_update(stream_id, payload)
            elif kind == PUSH_PROMISE:  # section 8.4: we have said ENABLE_PUSH 0
                raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE, though we take none")
            # PRIORITY is outdated (section 5.3.2), and what nobody knows is to be passed over (section 5.5).
        except _StreamError as fault:
            self._reset(stream_id, fault.code)
            events.append(Malformed(stream_id, str(fault)))

    def _on_headers(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        """Section 6.2."""
        if stream_id not in self._streams:
            self._require_begun(stream_id)
        if flags & (PADDED | PRIORITY_FIELDS):
            payload = _unpad(flags, payload)
            if flags & PRIORITY_FIELDS:
                if len(payload) < 5:
                    raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS shorter than their priority")
                payload = payload[5:]
        if flags & END_HEADERS:
            self._on_block(flags, stream_id, payload, events)
        else:
            self._block, self._block_stream, self._block_flags = [payload], stream_id, flags

    def _on_continuation(self, flags: int, payload: bytes, events: list[Event]) -> None:
        """Section 6.10."""
        block = self._block
        if block is None:
            raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        block.append(payload)
        if len(block) > MOST_CONTINUATIONS or sum(map(len, block)) > LARGEST_LIST:
            raise _ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a header block without end")
        if flags & END_HEADERS:
            self._block = None
            self._on_block(self._block_flags, self._block_stream, b"".join(block), events)

    def _on_block(self, flags: int, stream_id: int, block: bytes, events: list[Event]) -> None:
        """Section 8.1: any number of interim answers, the final one, and trailers after its body."""
        try:
            # Also of a stream that is no more: the block changes what later blocks mean.
            fields = self._decoder.decode(block)
        except HpackError as fault:
            raise _ConnectionError(ErrorCode.COMPRESSION_ERROR, str(fault)) from None
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if fields is None:
            raise _StreamError("more headers than we read")
        if stream.status:
            if not flags & END_STREAM:
                raise _StreamError("a second answer")
            _check_fields(fields)
        else:
            status = _status(fields)
            del fields[0]
            declared = _check_fields(fields)
            if status < 200:
                if status == 101 or flags & END_STREAM:  # section 8.6, 8.1
                    raise _StreamError("an interim answer that is the last")
                return
            stream.status, stream.headers, stream.declared = status, fields, declared
        if flags & END_STREAM:
            self._finish(stream_id, stream, events)

    def _on_data(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        """Section 6.1, and the receiver's half of section 6.9."""
        length = len(payload)
        self._receivable -= length
        if self._receivable < 0:
            raise _ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than we gave room for")
        if self._receivable < CONNECTION_WINDOW // 2:
            self._out.append(_frame(WINDOW_UPDATE, 0, 0, _LONG.pack(CONNECTION_WINDOW - self._receivable)))
            self._receivable = CONNECTION_WINDOW
        if flags & PADDED:
            payload = _unpad(flags, payload)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._require_begun(stream_id)
            return
        if not stream.status:
            raise _StreamError("a body before its headers")
        stream.received += length
        if stream.received > DEFAULT_WINDOW:
            raise _StreamError("more DATA than we gave room for", ErrorCode.FLOW_CONTROL_ERROR)
        if payload:
            stream.body.append(payload)
        if flags & END_STREAM:
            self._finish(stream_id, stream, events)
        elif stream.received == DEFAULT_WINDOW:
            # It waits for a window, and we have enough: the status is the answer.
            self._reset(stream_id, ErrorCode.CANCEL)
            events.append(stream.answer(stream_id))

    def _finish(self, stream_id: int, stream: _Stream, events: list[Event]) -> None:
        answer = stream.answer(stream_id)
        if stream.declared is not None and stream.declared != len(answer.body) and stream.status not in (204, 304):
            raise _StreamError("a body of another length than it said")  # section 8.1.1
        if stream.unsent:
            self._reset(stream_id, ErrorCode.NO_ERROR)  # section 8.1: it has heard enough of our body
        else:
            del self._streams[stream_id]
        events.append(answer)

    def _on_reset(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        """Section 6.4."""
        if len(payload) != 4:
            raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of another size than 4")
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            self._require_begun(stream_id)
            return
        self._half_sent.pop(stream_id, None)
        events.append(Reset(stream_id, _LONG.unpack(payload)[0], stream.so_far(stream_id)))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        """Section 6.5. They hold from now on, and we say so."""
        if stream_id:
            raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if payload:
                raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledged with a payload")
            return
        if len(payload) % 6:
            raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of no multiple of 6 octets")
        if not self.greeted:
            self.greeted, self.limit = True, MOST_STREAMS
        for setting, value in _SETTING.iter_unpack(payload):
            if setting == MAX_CONCURRENT_STREAMS:
                self.limit = min(value, MOST_STREAMS)
            elif setting == INITIAL_WINDOW_SIZE:
                # Section 6.9.2: of the streams there are, too.
                most = max((stream.credit - stream.sent for stream in self._half_sent.values()), default=0)
                if value > LARGEST_WINDOW or value + most > LARGEST_WINDOW:
                    raise _ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
                self._initial_window = value
            elif setting == ENABLE_PUSH and value:  # section 6.5.2: not a server's to allow
                raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH from a server")
            elif setting == MAX_FRAME_SIZE and not LARGEST_FRAME <= value < 1 << 24:  # we stay with the least
                raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
            # HEADER_TABLE_SIZE is nothing to an encoder without a table, and what nobody knows is to be passed over.
        self._out.append(_frame(SETTINGS, ACK, 0, b""))
        self._send_bodies()
        events.append(SettingsChanged())

    def _on_ping(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        """Section 6.7."""
        if stream_id:
            raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "PING of another size than 8")
        if flags & ACK:
            events.append(Pong(payload))
        else:
            self._out.append(_frame(PING, ACK, 0, payload))

    def _on_goaway(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        """Section 6.8. It may come again, with a lower number: a polite server's first has the highest there is."""
        if stream_id:
            raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of less than 8 octets")
        self.ended = True
        last_processed = _LONG.unpack_from(payload)[0] & LAST_STREAM
        unprocessed = [begun for begun in self._streams if begun > last_processed]
        for begun in unprocessed:
            del self._streams[begun]
            self._half_sent.pop(begun, None)
        events.append(GoneAway(_LONG.unpack_from(payload, 4)[0], payload[8:], unprocessed))

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        """Section 6.9."""
        if len(payload) != 4:
            raise _ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another size than 4")
        increment = _LONG.unpack(payload)[0] & LARGEST_WINDOW
        if not stream_id:
            self._sendable += increment
            if not increment:
                raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            if self._sendable > LARGEST_WINDOW:
                raise _ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "WINDOW_UPDATE by too much")
        elif stream := self._streams.get(stream_id):
            stream.credit += increment
            if not increment:
                raise _StreamError("WINDOW_UPDATE by nothing")
            if self._initial_window + stream.credit - stream.sent > LARGEST_WINDOW:
                raise _StreamError("WINDOW_UPDATE by too much", ErrorCode.FLOW_CONTROL_ERROR)
        else:
            self._require_begun(stream_id)
        self._send_bodies()

    def _send_bodies(self) -> None:
        """Send as much as the windows allow, the oldest first (section 6.9.1)."""
        for stream_id, stream in tuple(self._half_sent.items()):
            while stream.unsent:
                window = min(self._sendable, self._initial_window + stream.credit - stream.sent, LARGEST_FRAME)
                if window <= 0:
                    break
                part, stream.unsent = stream.unsent[:window], stream.unsent[window:]
                self._sendable -= len(part)
                stream.sent += len(part)
                self._out.append(_frame(DATA, 0 if stream.unsent else END_STREAM, stream_id, part))
            else:
                del self._half_sent[stream_id]

    def _require_begun(self, stream_id: int) -> None:
        """Pass over what comes of a stream that is no more; a stream that never was is an error (section 5.1)."""
        if stream_id > self.last_stream_id or stream_id % 2 == 0:
            raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "a frame of a stream that never began")

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        del self._streams[stream_id]
        self._half_sent.pop(stream_id, None)
        self._out.append(_frame(RST_STREAM, 0, stream_id, _LONG.pack(code)))

    def _go_away(self, code: ErrorCode) -> None:
        self.ended = True
        self._out.append(_frame(GOAWAY, 0, 0, _LONG.pack(0) + _LONG.pack(code)))  # of its streams, we began none


def _header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _FRAME.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return _header(len(payload), kind, flags, stream_id) + payload


def _unpad(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _ConnectionError(ErrorCode.PROTOCOL_ERROR, "a frame of nothing but padding")
    return payload[1 : len(payload) - payload[0]]


def _status(fields: Sequence[Field]) -> int:
    """Section 8.3.2: the one pseudo-header of an answer, and before all others."""
    if fields:
        name, value = fields[0]
        if name == b":status" and len(value) == 3 and value.isdigit() and b"100" <= value < b"600":
            return int(value)
    raise _StreamError("an answer without a status")


def _check_fields(fields: Sequence[Field]) -> int | None:
    """Section 8.2.1 and 8.2.2: refuse what no intermediary could pass on. Gives the content-length, if there is one."""
    declared = None
    for name, value in fields:
        if not _is_name(name) or b"\n" in value or b"\r" in value or b"\0" in value:
            raise _StreamError("a header that is none")
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18 or (declared is not None and declared != int(value)):
                raise _StreamError("a content-length that is none")
            declared = int(value)
    return declared


_CONNECTION_SPECIFIC = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}


@lru_cache(maxsize=128)  # a server has a few, and says them with every answer
def _is_name(name: bytes) -> bool:
    return (
        bool(name)
        and all(0x21 <= octet <= 0x7E and not 0x41 <= octet <= 0x5A and octet != 0x3A for octet in name)
        and name not in _CONNECTION_SPECIFIC
    )
