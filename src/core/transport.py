"""The connections to APNs, behind httpx's transport interface: its requests, its responses, and errors of its kinds.

Every push gets its one answer or its one error, by a deadline, whatever the other side does, and the error's type says
what matters most: `NotProcessed`, so APNs surely has nothing of it and it may go again at once, or `OutcomeUnknown`.

A push waits for a stream, is begun on a connection, and is answered. Those that begin in one turn of the event loop
leave in one write. What the protocol means is http2.py's; here are sockets, time, and who waits for whom.
"""

import asyncio
import json
import re
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import httpx

from core.hpack import METHOD_POST, SCHEME_HTTPS, length_of, literal_name
from core.http2 import (
    LARGEST_FRAME,
    Answered,
    Broken,
    ClientConnection,
    ErrorCode,
    GoneAway,
    Malformed,
    Pong,
    Reset,
    SettingsChanged,
)

CHECK_SECONDS = 1.0  # for a PING after a freeze. A round trip to APNs takes less than a tenth of it
CLOSE_SECONDS = 1.0
OLDEST_SECONDS = 3600.0  # then a new one, since DNS may by now point away from a machine that is to be retired
IDLEST_SECONDS = 300.0  # AWS's NAT gateways forget a connection after 350 s, and then answer with a reset
FRUITLESS = 3  # connections in a row that ended before they gave one answer, and we stop: APNs takes it for an attack
HAPPY_EYEBALLS_SECONDS = 0.25  # RFC 8305, section 8: the head start of one address before the next is tried as well
# Octets. Nothing begins while APNs takes nothing, so what there is beyond all streams' requests are answers to a server
# that asks and does not listen.
MOST_UNSENT = 8 << 20
_SWEEP_SECONDS = 0.01  # deadlines that lie closer together are one piece of work
_LONGEST_REASON = 100


class NotProcessed(httpx.TransportError):
    """APNs surely has nothing of this push: it may go again at once."""

    reason: ClassVar[str]


class ConnectionFailed(NotProcessed, httpx.ConnectError):
    """There was no connection to send it on."""

    reason = "connection_failed"


class NotBegun(NotProcessed, httpx.PoolTimeout):
    """APNs allowed no stream for it, or took not all of it, in all the time it had."""

    reason = "timeout"


class Refused(NotProcessed, httpx.RemoteProtocolError):
    """APNs refused to look at it, twice."""

    reason = "refused"


class NotSendable(NotProcessed, httpx.LocalProtocolError):
    """HTTP/2 has no way to say it."""

    reason = "unsendable"


class OutcomeUnknown(httpx.TransportError):
    """APNs may or may not have the push: sent again, it may arrive twice."""

    reason: ClassVar[str]


class AnswerTimeout(OutcomeUnknown, httpx.ReadTimeout):
    reason = "timeout"


class ConnectionLost(OutcomeUnknown, httpx.ReadError):
    reason = "connection_lost"


class StreamReset(OutcomeUnknown, httpx.ReadError):
    reason = "stream_reset"


class BadAnswer(OutcomeUnknown, httpx.RemoteProtocolError):
    reason = "malformed_answer"


@dataclass(slots=True, eq=False)
class _Push:
    block: bytes = field(repr=False)  # holds both tokens
    body: bytes = field(repr=False)
    answer: asyncio.Future[Answered] = field(repr=False)
    begin_by: float
    end_by: float
    deadline: float  # of the two, or earlier, the one that counts now
    link: "_Link | None" = None  # the connection that it is on
    stream_id: int = 0
    heard_before: int = 0  # octets that had come on it when this push began
    refused: bool = False

    def fail(self, error: httpx.TransportError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def settle(self, so_far: Answered | None, error: httpx.TransportError) -> None:
        """Settle what ended too early. A 200 says all without its end; a rejection without its reason does not."""
        if self.answer.done():
            return
        if so_far is not None and so_far.status == 200:
            self.answer.set_result(so_far)
        else:
            self.answer.set_exception(error)


class ApnsTransport(httpx.AsyncBaseTransport):
    """All pushes to one origin, on one connection, or on a few if one does not allow enough streams.

    A push that waits has `connect_seconds` and half of `answer_seconds` until it has to begin; from then on it has
    `answer_seconds`; and both together never take more than the sum. So what waited long still has half of the time for
    its answer.
    """

    def __init__(
        self,
        *,
        ssl_context: ssl.SSLContext,
        connect_seconds: float = 3.0,
        answer_seconds: float = 8.0,
        max_connections: int = 2,
        on_goaway: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Take a context that verifies. `on_goaway` hears the reasons that APNs gives for ending a connection.

        `now` is a wall clock: others may stand still while the function is frozen, and connections age meanwhile.
        """
        if ssl_context.verify_mode is not ssl.CERT_REQUIRED or not ssl_context.check_hostname:
            raise ValueError("the TLS context has to verify certificate and host name")
        if ssl_context.minimum_version < ssl.TLSVersion.TLSv1_2:
            raise ValueError("the TLS context has to refuse what is older than TLS 1.2")
        ssl_context.set_alpn_protocols(["h2"])
        self._tls = ssl_context
        self._connect_seconds, self._answer_seconds = connect_seconds, answer_seconds
        self._max_connections = max_connections
        self._on_goaway, self._now = on_goaway, now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host, self._port, self._netloc = "", 443, b""
        self._authority = b""
        self._waiting: OrderedDict[_Push, None] = OrderedDict()
        self._links: list[_Link] = []
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._enough = False  # one more connection was wanted and could not be made
        self._fruitless = 0
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Push. The response comes with its body, at most 64 KiB of it, as `content`.

        Cheapest are requests with one `httpx.URL` for all, their path as the extension `target`, and their body as
        `stream`: parsing a URL costs more than all that is done here.
        """
        loop = asyncio.get_running_loop()
        if request.url.netloc != self._netloc or loop is not self._loop:
            self._settle_down(request.url, loop)
        if self._closed:
            raise ConnectionFailed("The transport is closed.")
        try:
            body = request.content
        except httpx.RequestNotRead:
            body = await request.aread()
        now = loop.time()
        begin_by = now + self._connect_seconds + self._answer_seconds / 2
        end_by = now + self._connect_seconds + self._answer_seconds
        push = _Push(self._block(request), body, loop.create_future(), begin_by, end_by, begin_by)
        self._waiting[push] = None
        self._pump()
        if push.link is None:
            self.arm(push.deadline)
        try:
            return _Response(await push.answer)
        except asyncio.CancelledError:
            self._abandon(push)
            raise
        finally:
            del push  # its error's traceback holds this frame: a cycle, if the frame held its error

    async def check(self) -> None:
        """Look after what a freeze may have left of the connections: for the start of an invocation.

        Those that do not answer a PING go, silently. So do the old and the long idle, with a GOAWAY.
        """
        self._enough = False
        now = self._now()
        idle = []
        for link in tuple(self._links):
            # A clock that was set back says nothing of age.
            young = 0 <= now - link.since < OLDEST_SECONDS and 0 <= now - link.heard_at < IDLEST_SECONDS
            if not young:
                link.retire()
            elif not link.retired and not link.pushes:
                idle.append(link)
        await asyncio.gather(*(link.check() for link in idle))

    async def renew(self) -> None:
        """Begin nothing more on the connections there are; what is under way may end. The next push has a new one."""
        for link in tuple(self._links):
            link.retire()

    async def aclose(self) -> None:
        """Say GOAWAY and close, within `CLOSE_SECONDS`. Pushes still under way get their error."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        links = tuple(self._links)
        for link in links:
            link.lose(ConnectionLost("The connection was closed before APNs answered; it may have the push."))
        self._fail_waiting("The transport was closed.")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if links:
            await asyncio.wait([link.gone for link in links], timeout=2 * CLOSE_SECONDS)

    def _settle_down(self, url: httpx.URL, loop: asyncio.AbstractEventLoop) -> None:
        """Learn, from the first request, where all of them go."""
        if self._loop is None:
            if url.scheme != "https":
                raise httpx.UnsupportedProtocol("APNs is spoken to over https only.")
            self._loop, self._netloc = loop, url.netloc
            self._host, self._port = url.raw_host.decode("ascii"), url.port or 443
            self._authority = literal_name(b":authority") + length_of(url.netloc) + url.netloc
        elif loop is not self._loop:
            raise RuntimeError("a transport's connections live in one event loop: make one for each")
        else:
            raise ValueError("a transport's connections lead to one host: make one for each")

    def _block(self, request: httpx.Request) -> bytes:
        """Write the header block (RFC 9113, section 8.3.1)."""
        path = request.extensions.get("target") or request.url.raw_path
        if _unsayable(path):
            raise NotSendable("The path has a line break, a NUL, or a space at either end.")
        method = request.method
        parts = [
            METHOD_POST
            if method == "POST"
            else literal_name(b":method") + length_of(method.encode()) + method.encode(),
            SCHEME_HTTPS,
            self._authority,
            _PATH,
            length_of(path),
            path,
        ]
        for name, value in request.headers.raw:
            if begin := _begin_field(name):
                if _unsayable(value):
                    raise NotSendable("A header has a line break, a NUL, or a space at either end.")
                parts += (begin, length_of(value), value)
        block = b"".join(parts)
        if len(block) >= LARGEST_FRAME:
            raise NotSendable(f"The headers take {len(block)} octets; less than {LARGEST_FRAME} fit a frame.")
        return block

    def _pump(self) -> None:
        """Begin what may begin, and see that what has to wait does not wait for nothing."""
        waiting = self._waiting
        for link in self._links:
            while waiting and link.has_room:
                link.begin(waiting.popitem(last=False)[0])
        if not waiting or self._connecting is not None or self._closed:
            return
        usable = [link for link in self._links if not link.retired]
        if usable:
            if self._enough or len(usable) >= self._max_connections or not all(link.is_too_little for link in usable):
                return
        elif self._fruitless >= FRUITLESS:
            self._fruitless = 0
            self._fail_waiting(f"{FRUITLESS} connections to APNs in a row ended before it answered anything.")
            return
        assert self._loop is not None  # noqa: S101  somebody waits
        self._connecting = self._loop.create_task(self._connect(self._loop))

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open one more connection; the name is resolved anew, and all its addresses are tried."""
        link: _Link | None = None
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, link = await loop.create_connection(
                    lambda: _Link(self, loop, self._now),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS,
                    ssl_shutdown_timeout=CLOSE_SECONDS,
                )
                link.require_http2()
                self._links.append(link)
                self._pump()  # the first push goes together with our preface
                await link.greeted
        except Exception as fault:  # noqa: BLE001  whatever it is, those who wait for this have to hear of it
            why = _why(fault, self._connect_seconds)
            if link is not None:
                silence = f"APNs said nothing in the {self._connect_seconds:g} s for connecting; it may have the push."
                link.lose(AnswerTimeout(silence), politely=link in self._links)
            if all(link.retired for link in self._links):
                self._fail_waiting(why)
            else:
                self._enough = True
        finally:
            self._connecting = None
        self._pump()

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            self._waiting.popitem(last=False)[0].fail(ConnectionFailed(why))

    def _abandon(self, push: _Push) -> None:
        """Forget a push whose caller does."""
        self._waiting.pop(push, None)
        if push.link is not None:
            push.link.drop(push)
            self._pump()

    def again(self, pushes: Iterable[_Push]) -> None:
        """Send again what was surely not processed, before all that waits; it has waited longest."""
        for push in reversed(list(pushes)):
            push.link = None
            push.deadline = push.begin_by
            self._waiting[push] = None
            self._waiting.move_to_end(push, last=False)
            self.arm(push.deadline)

    def gone_away(self, reason: str) -> None:
        self._on_goaway(reason)

    def fruitful(self) -> None:
        self._fruitless = 0

    def fruitless(self) -> None:
        self._fruitless += 1

    def changed(self) -> None:
        if self._waiting:
            self._pump()

    def lost(self, link: "_Link") -> None:
        with suppress(ValueError):  # never got as far as to be one of ours
            self._links.remove(link)
        self.changed()

    def arm(self, deadline: float) -> None:
        assert self._loop is not None  # noqa: S101  a push has come
        if self._timer is not None:
            if self._timer.when() <= deadline + _SWEEP_SECONDS:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline + _SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        assert self._loop is not None  # noqa: S101  it called
        self._timer = None
        now = self._loop.time()
        for push in [push for push in self._waiting if push.deadline <= now]:
            del self._waiting[push]
            push.fail(NotBegun("APNs took no more pushes in the time that this one had; nothing of it was sent."))
        for link in tuple(self._links):
            link.expire(now, self._answer_seconds)
        self._pump()
        pending = [push.deadline for link in self._links for push in link.pushes.values()]
        pending += [push.deadline for push in self._waiting]
        if pending:
            self.arm(min(pending))

    def deadline_of(self, push: _Push, now: float) -> float:
        return min(now + self._answer_seconds, push.end_by)


class _Response(httpx.Response):
    """One whose body is there. Asking httpx to read it off a stream of one part would be a tenth of a push's cost."""

    def __init__(self, answered: Answered) -> None:
        super().__init__(
            answered.status,
            headers=answered.headers,
            stream=httpx.ByteStream(answered.body),
            extensions={"http_version": b"HTTP/2"},
        )
        self._body = answered.body

    @property
    def content(self) -> bytes:
        return self._body


class _Link(asyncio.Protocol):
    """One connection, from the end of its TLS handshake on."""

    def __init__(self, owner: ApnsTransport, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        self.engine = ClientConnection()
        self.pushes: dict[int, _Push] = {}  # by stream
        self.retired = False  # nothing more begins here
        self.answers = 0
        self.since = self.heard_at = now()
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._owner, self._loop, self._now = owner, loop, now
        self._transport: asyncio.Transport
        self._heard = 0  # octets
        self._written = 0  # the last stream that the operating system, or TLS before it, has been given
        self._writing = False
        self._congested = False
        self._pong: asyncio.Future[None] | None = None
        self._farewell = ""

    @property
    def has_room(self) -> bool:
        return not self.retired and not self._congested and self.engine.has_room

    @property
    def is_too_little(self) -> bool:
        """Whether more connections would help. APNs allows one stream, and some hundred soon after its first answer."""
        return self.engine.is_full and self.answers > (self.engine.limit <= 1)

    def require_http2(self) -> None:
        if self._transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            raise _NotHttp2Error

    def begin(self, push: _Push) -> None:
        push.link, push.deadline = self, self._owner.deadline_of(push, self._loop.time())
        self._owner.arm(push.deadline)
        push.heard_before = self._heard
        push.stream_id = stream_id = self.engine.request(push.block, push.body)
        self.pushes[stream_id] = push
        self._write_soon()

    def drop(self, push: _Push) -> None:
        if self.pushes.pop(push.stream_id, None) is not None:
            self.engine.drop(push.stream_id)
            self._after_work()

    def expire(self, now: float, answer_seconds: float) -> None:
        """Give up what APNs has not answered in time."""
        silent = False
        for stream_id, push in [(i, push) for i, push in self.pushes.items() if push.deadline <= now]:
            del self.pushes[stream_id]
            dropped = self.engine.drop(stream_id)
            push.settle(
                dropped.so_far,
                AnswerTimeout(f"APNs did not answer within {answer_seconds:g} s; it may have the push.")
                if dropped.sent
                else NotBegun("APNs did not take all of the push in the time that it had, so it has no whole one."),
            )
            silent = silent or push.heard_before == self._heard
        if silent:
            # Not a word since then: others may still be answered here, but nothing new should have to hope for it.
            self.retire()
        self._after_work()

    async def check(self) -> None:
        self._pong = self._loop.create_future()
        self.engine.ping(b"how now?")
        self._write_soon()
        await asyncio.wait([self._pong, self.gone], timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not self._pong.done():
            self.lose(ConnectionLost("The connection to APNs was dead; it may have the push."), politely=False)
        self._pong = None

    def retire(self) -> None:
        """Begin nothing more here, and close when the last push has ended."""
        self._retire()
        self._after_work()

    def lose(self, error: httpx.TransportError, *, politely: bool = True) -> None:
        """End it now. What was written to it gets the error, and the rest another connection."""
        self._retire()
        unwritten = self._fail_all(error)
        if politely and not unwritten:
            self._close()
        else:
            self._transport.abort()  # without the requests that go elsewhere now

    def _retire(self) -> None:
        if not self.retired and self.engine.last_stream_id > 0 and not self.answers:
            self._owner.fruitless()
        self.retired = True

    def _fail_all(self, error: httpx.TransportError) -> bool:
        unwritten = []
        for stream_id, push in self.pushes.items():
            if stream_id > self._written:
                unwritten.append(push)
            else:
                # An exception each: what is raised twice has two tracebacks.
                push.settle(self.engine.drop(stream_id).so_far, type(error)(str(error)))
        self.pushes.clear()
        self._owner.again(unwritten)
        return bool(unwritten)

    def _after_work(self) -> None:
        if self.retired and not self.pushes:
            self._close()
        else:
            self._write_soon()

    def _close(self) -> None:
        if not self._transport.is_closing():
            self.engine.close()
            self._write()
            self._transport.close()

    def _write_soon(self) -> None:
        """Write once for all that this turn of the loop has to say."""
        if not self._writing:
            self._writing = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._writing = False
        data = self.engine.data_to_send()
        if data and not self._transport.is_closing():
            if self._transport.get_write_buffer_size() > MOST_UNSENT:
                self.lose(ConnectionLost("APNs took nothing any more; it may have the push."), politely=False)
                return
            self._written = self.engine.last_stream_id
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  what TLS over TCP gives
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += len(data)
        self.heard_at = self._now()
        for event in self.engine.receive(data):
            match event:
                case Answered():
                    self.answers += 1
                    self._owner.fruitful()
                    push = self.pushes.pop(event.stream_id)
                    if not push.answer.done():
                        push.answer.set_result(event)
                case Reset():
                    self._reset(self.pushes.pop(event.stream_id), event)
                case Malformed():
                    push = self.pushes.pop(event.stream_id)
                    push.fail(BadAnswer(f"APNs' answer makes no sense ({event.why}); it may have the push."))
                case GoneAway():
                    self._gone_away(event)
                case SettingsChanged():
                    if not self.greeted.done():
                        self.greeted.set_result(None)
                case Pong():
                    if self._pong is not None and not self._pong.done():
                        self._pong.set_result(None)
                case Broken():
                    self.lose(ConnectionLost(f"APNs broke the protocol ({event.why}); it may have the push."))
        self._owner.changed()
        self._after_work()

    def _reset(self, push: _Push, event: Reset) -> None:
        if event.code == ErrorCode.REFUSED_STREAM and event.so_far is None:
            if push.answer.done():
                return
            if not push.refused:
                push.refused = True
                self._owner.again([push])
            else:
                push.fail(Refused("APNs refused to look at the push, twice."))
        else:
            code = ErrorCode(event.code).name if event.code in ErrorCode else f"code {event.code}"
            push.settle(event.so_far, StreamReset(f"APNs reset the push ({code}); it may have it."))

    def _gone_away(self, event: GoneAway) -> None:
        self._farewell = _reason_of(event)
        self._owner.gone_away(self._farewell)
        self._owner.again(self.pushes.pop(stream_id) for stream_id in event.unprocessed)
        self.retire()

    def pause_writing(self) -> None:
        self._congested = True

    def resume_writing(self) -> None:
        self._congested = False
        self._owner.changed()

    def connection_lost(self, _: Exception | None) -> None:
        after = f", after it said {self._farewell}," if self._farewell else ""
        self._retire()
        self._fail_all(
            ConnectionLost(f"The connection to APNs was lost{after} before the answer; it may have the push.")
        )
        for waiter in (self.greeted, self.gone):
            if not waiter.done():
                waiter.set_result(None)
        self._owner.lost(self)


class _NotHttp2Error(Exception):
    pass


def _why(fault: Exception, seconds: float) -> str:
    match fault:
        case TimeoutError():
            return f"No connection to APNs could be made within {seconds:g} s."
        case ssl.SSLCertVerificationError():
            return f"APNs' certificate is not to be trusted: {fault.verify_message}."
        case ssl.SSLError():
            return f"No TLS connection to APNs could be made: {fault.reason}."
        case socket.gaierror():
            return f"APNs' host name was not found: {fault.strerror}."
        case _NotHttp2Error():
            return "What answers at APNs' address does not speak HTTP/2."
        case OSError():
            return f"No connection to APNs could be made: {fault.strerror or fault}."
        case _:
            return f"No connection to APNs could be made ({type(fault).__name__})."


def _reason_of(event: GoneAway) -> str:
    """APNs' own word, as it stands in a rejection, too; else what else it said, as far as a log line should hold it."""
    try:
        said = json.loads(event.debug)["reason"]
    except (ValueError, LookupError, TypeError, RecursionError):
        said = event.debug.decode("utf-8", "replace")
    text = "".join(c for c in str(said)[:_LONGEST_REASON] if c.isprintable()).strip()
    return text or (ErrorCode(event.code).name if event.code in ErrorCode else f"code {event.code}")


_PATH = literal_name(b":path")

# RFC 9113, section 8.2.2; and what stands in `:authority`.
_NOT_SAID = frozenset(
    {b"host", b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te"},
)
_unsayable = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z").search


@lru_cache(maxsize=128)
def _begin_field(name: bytes) -> bytes:
    """Begin a header. Nothing for those that HTTP/2 has no use for."""
    name = name.lower()
    if not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9a-z-]+", name):
        raise NotSendable("A header has a name that is none.")
    return b"" if name in _NOT_SAID else literal_name(name)
