"""The conversation with APNs: a few connections, and on each one push at a time.

One at a time, since httpx's HTTP/2 can wait for ever, past its own time-outs, when APNs lowers its limit of concurrent
streams below what is in flight. And a deadline of our own round each push, since nothing here may wait without one.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import httpx

from core.answer import Answer, Unanswered, Unbegun, Unsendable, read
from core.delivery import Environment, Push
from core.provider_token import ProviderToken
from core.request import Request, compose
from core.settings import BadSettings

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 8.0
LANES = 4  # connections an environment: 4 pushes in flight. More gain little, and APNs dislikes many
LARGEST_BODY = 64 * 1024  # bytes: APNs' answers have some dozens
CLOSE_SECONDS = 1.0

_TIMEOUT = {"connect": CONNECT_SECONDS, "read": ANSWER_SECONDS, "write": ANSWER_SECONDS, "pool": CONNECT_SECONDS}


class Stream(Protocol):
    """The network stream that httpx hands out with a response."""

    def get_extra_info(self, info: str) -> object: ...


class Apns:
    """One signing key's connections, kept from one invocation to the next."""

    def __init__(
        self,
        *,
        urls: Mapping[Environment, str],
        topic: str,
        token: ProviderToken,
        now: Callable[[], float],
        connect: Callable[[], httpx.AsyncBaseTransport],
    ) -> None:
        self._urls, self._topic, self._token, self._now = urls, topic, token, now
        self._lanes = {environment: [_Lane(connect) for _ in range(LANES)] for environment in urls}

    async def push(
        self,
        pushes: Sequence[Push],
        may_begin: Callable[[], Awaitable[bool]],
        answered: Callable[[Push, Answer], None],
    ) -> None:
        """Push all of them. Each gets one answer, as soon as it is there."""
        queues: dict[Environment, deque[Push]] = {environment: deque() for environment in self._urls}
        for push in pushes:
            queues[push.device.environment].append(push)

        async def work(lane: _Lane, queue: deque[Push]) -> None:
            while queue:
                push = queue.popleft()
                answered(push, await self._push(lane, push) if await may_begin() else Unbegun())

        workers = [
            asyncio.create_task(work(lane, queue))
            for environment, queue in queues.items()
            for lane in self._lanes[environment][: len(queue)]
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(lane.close() for lanes in self._lanes.values() for lane in lanes))

    async def _push(self, lane: "_Lane", push: Push) -> Answer:
        try:
            match compose(push, self._topic):
                case Unsendable() as unsendable:
                    return unsendable
                case Request(path, headers, body):
                    authorization = ("authorization", self._token.bearer(self._now()))
                    request = httpx.Request(
                        "POST",
                        self._urls[push.device.environment] + path,
                        headers=[*headers, authorization],
                        content=body,
                        extensions={"timeout": _TIMEOUT},
                    )
        except Exception as fault:  # noqa: BLE001  one row's fault is that row's alone, whatever it is
            # The kind and not the text, which may quote the token or the payload.
            return Unsendable("unsendable", f"No request could be made of it ({type(fault).__name__}).")
        return await lane.push(request)


class _Lane:
    """One connection, opened when it is needed and thrown away on doubt."""

    def __init__(self, connect: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._connect = connect
        self._transport: httpx.AsyncBaseTransport | None = None
        self._stream: Stream | None = None  # of the last response: tells whether the connection is still good

    async def push(self, request: httpx.Request) -> Answer:
        if self._transport is not None and self._is_stale():
            await self.close()
        reused = self._transport is not None
        try:
            return await self._try(request)
        except httpx.WriteError:
            if not reused:
                return _lost()
        # A connection from an earlier invocation took nothing any more, so APNs has nothing of this push.
        try:
            return await self._try(request)
        except httpx.WriteError:
            return _lost()

    async def _try(self, request: httpx.Request) -> Answer:
        if self._transport is None:
            self._transport = self._connect()
        good = False
        try:
            async with asyncio.timeout(CONNECT_SECONDS + ANSWER_SECONDS):
                response = await self._transport.handle_async_request(request)
                try:
                    body = await _read(response)
                finally:
                    await response.aclose()
                self._stream = response.extensions.get("network_stream")
            # After a 500 that follows a new provider token a connection was seen to stay broken.
            good = response.status_code < 500
            return read(response.status_code, body)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return Unanswered("connection_failed", "No connection to APNs could be made.")
        except (httpx.TimeoutException, TimeoutError):
            return Unanswered("timeout", f"APNs did not answer within {ANSWER_SECONDS:g} s; it may have the push.")
        except httpx.WriteError:
            raise
        except Exception:  # noqa: BLE001  whatever breaks in a connection, this push has its answer and others go on
            return _lost()
        finally:
            if not good:
                await self.close()

    def _is_stale(self) -> bool:
        """Whether something waits to be read on an idle connection: its end, or the word that it is to end."""
        return self._stream is None or bool(self._stream.get_extra_info("is_readable"))

    async def close(self) -> None:
        transport, self._transport, self._stream = self._transport, None, None
        if transport is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await transport.aclose()


def _lost() -> Unanswered:
    return Unanswered("connection_lost", "The connection to APNs was lost; it may have the push.")


async def _read(response: httpx.Response) -> bytes:
    body = b""
    assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101  what an async transport returns
    async for chunk in response.stream:
        body += chunk
        if len(body) > LARGEST_BODY:
            break
    return body


def tls(ca_file: str | None) -> ssl.SSLContext:
    """Check certificate and host name on every connection to APNs, always. `ca_file` is one more CA to trust."""
    context = httpx.create_ssl_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as fault:  # ssl.SSLError is one, too
            raise BadSettings(
                f"APNS_CA_FILE ({ca_file}) cannot be used: {fault.strerror or fault}; it must be a file of PEM"
                " certificates, or be left unset"
            ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    return context


def transport(context: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
    """One HTTP/2 connection. Without an expiry, since the next use is 30 s away and we look before we use it."""
    return httpx.AsyncHTTPTransport(
        verify=context,
        http1=False,
        http2=True,
        limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None),
        trust_env=False,
    )
