"""The conversation with APNs: one push, one answer, and what only we can mend on the way: a stale provider token, a key
that was rotated, a connection in doubt.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

import httpx

from core.answer import Accepted, Answer, Rejected, Unanswered, Unsendable, read
from core.delivery import Environment, Push
from core.provider_token import ProviderToken
from core.request import Request, compose, topic_of
from core.secret import SecretFault, SigningKey, Unconfigured
from core.settings import BadSettings
from core.transport import NotProcessed, NotSendable, OutcomeUnknown

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 8.0
LONGEST_FLOOR = 86_400.0  # seconds: whatever APNs asks for, look again tomorrow
LARGEST_BODY = 64 * 1024  # bytes: APNs' answers have some dozens
GRACE_SECONDS = 0.5  # in which our own transport, which knows more, says first what happened
CLOSE_SECONDS = 1.0
SKEW_WORTH_TELLING_SECONDS = 60  # a token lives an hour, so a clock that is wrong by less is not what is wrong

_TIMEOUT = {"connect": CONNECT_SECONDS, "read": ANSWER_SECONDS, "write": ANSWER_SECONDS, "pool": CONNECT_SECONDS}


class Transport(Protocol):
    """An httpx transport, that can also be asked whether it is still good."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response: ...
    async def check(self) -> None: ...
    async def aclose(self) -> None: ...


@dataclass(slots=True)
class _Line:
    """A transport, and how many pushes are under way on it. One that is retired ends with the last of them."""

    transport: Transport
    under_way: int = 0
    retired: bool = False


class Apns:
    """One account's connections, kept from one invocation to the next."""

    def __init__(
        self,
        *,
        urls: Mapping[Environment, str],
        key: SigningKey,
        reread: Callable[[], Awaitable[SigningKey | Unconfigured]],
        now: Callable[[], float],
        connect: Callable[[], Transport],
    ) -> None:
        """`reread` reads the secret anew, whatever is cached; `now` is the wall clock, in epoch seconds."""
        self._urls = {environment: httpx.URL(url) for environment, url in urls.items()}
        self._reread, self._now, self._connect = reread, now, connect
        self._secret = self._key = key  # what the secret holds, and what we sign with: not the same while that is bad
        self._good: SigningKey | None = None  # what APNs last accepted a push with
        self._tokens: dict[SigningKey, ProviderToken] = {}
        self._lines: dict[Environment, _Line] = {}
        self._turn = asyncio.Lock()
        self._has_reread = False
        self._checking: asyncio.Task[None] | None = None

    async def begin(self, key: SigningKey) -> None:
        """Begin a drain: with the key that the secret holds now, on connections that outlived their being frozen.

        Those are being looked at while the drain claims; the first push waits for it.
        """
        self._has_reread = False
        if key != self._secret:
            self._secret = key
            await self._sign_with(key)
        if self._lines:
            self._checking = asyncio.create_task(_check([line.transport for line in self._lines.values()]))

    async def end(self) -> None:
        """End a drain: nothing may be half done when the function is frozen."""
        await self._checked()

    async def close(self) -> None:
        """Close every connection."""
        await self._checked()
        for environment, line in list(self._lines.items()):
            await self._retire(environment, line)

    @property
    def uses_former_key(self) -> bool:
        """Whether APNs has refused the key that the secret holds, so that the last good one is used."""
        return self._key != self._secret

    def topic(self, push: Push) -> str:
        """Give the apns-topic that the push will carry."""
        return topic_of(push, self._key.topic)

    async def push(self, push: Push) -> Answer:
        """Push it. Once more if APNs finds fault with our provider token and we can mend it on the spot.

        All of it takes no longer than one push may: `CONNECT_SECONDS` and `ANSWER_SECONDS`.
        """
        end_by = asyncio.get_running_loop().time() + CONNECT_SECONDS + ANSWER_SECONDS
        key = self._key
        bearer, answer, skew = await self._try(push, key, end_by)
        if isinstance(answer, Rejected) and await self._is_mended(answer, key, bearer):
            key = self._key
            _, answer, skew = await self._try(push, key, end_by)
        if isinstance(answer, Accepted):
            self._good = key
        return self._explained(answer, key, skew)

    async def _try(self, push: Push, key: SigningKey, end_by: float) -> tuple[str, Answer, float | None]:
        """Push it with this key. Returns the provider token, the answer, and how far our clock is ahead of APNs'."""
        environment = push.device.environment
        bearer = self._token(key).bearer(self._now())  # outside: a key that cannot sign is no fault of the row's
        try:
            match compose(push, key.topic):
                case Unsendable() as unsendable:
                    return bearer, unsendable, None
                case Request(path, headers, body):
                    request = httpx.Request(
                        "POST",
                        self._urls[environment],  # parsed once, since a URL a push costs more than the push
                        headers=[
                            ("content-length", str(len(body))),
                            ("host", self._urls[environment].netloc.decode()),
                            *headers,
                            ("authorization", bearer),
                        ],
                        stream=httpx.ByteStream(body),
                        extensions={"target": path.encode("ascii"), "timeout": _TIMEOUT},
                    )
        except Exception as fault:  # noqa: BLE001  one row's fault is that row's alone, whatever it is
            # The kind and not the text, which may quote the token or the payload.
            return "", Unsendable("unsendable", f"No request could be made of it ({type(fault).__name__})."), None
        return bearer, *await self._send(environment, request, end_by)

    async def _is_mended(self, answer: Rejected, key: SigningKey, bearer: str) -> bool:
        """Find another provider token or another key, with which a second try is worth it. One does it for all."""
        match answer.reason:
            case "ExpiredProviderToken":
                token = self._token(key)
                return key != self._key or token.bearer(self._now()) != bearer or token.replace(self._now())
            case "InvalidProviderToken":
                async with self._turn:
                    return key != self._key or await self._has_another_key()
            case _:
                return False

    async def _has_another_key(self) -> bool:
        """Read the secret again, since it may have been rotated; else go back to the key that was good until now."""
        if self._has_reread:
            return False
        self._has_reread = True
        with suppress(SecretFault):
            found = await self._reread()
            if isinstance(found, SigningKey) and found != self._key:
                self._secret = found
                await self._sign_with(found)
                return True
        if self._good is not None and self._good != self._key:
            await self._sign_with(self._good)
            return True
        return False

    async def _sign_with(self, key: SigningKey) -> None:
        self._key = key
        # A connection belongs to the team that first pushed on it. All are let go before the first is waited for.
        lines, self._lines = self._lines, {}
        await asyncio.gather(*(self._retire(environment, line) for environment, line in lines.items()))

    def _token(self, key: SigningKey) -> ProviderToken:
        if key not in self._tokens:
            self._tokens[key] = ProviderToken(key)
        return self._tokens[key]

    def _explained(self, answer: Answer, key: SigningKey, skew: float | None) -> Answer:
        """Add what we know: when another token may be minted, and whether our clock is wrong."""
        if not isinstance(answer, Rejected):
            return answer
        match answer.reason:
            case "TooManyProviderTokenUpdates":
                return replace(answer, floor=max(answer.floor, self._token(key).replaceable_in(self._now())))
            case "ExpiredProviderToken" | "InvalidProviderToken" if (
                skew is not None and abs(skew) > SKEW_WORTH_TELLING_SECONDS
            ):
                return replace(
                    answer,
                    note=f"Our clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} APNs': mend it.",
                )
            case _:
                return answer

    async def _send(
        self, environment: Environment, request: httpx.Request, end_by: float
    ) -> tuple[Answer, float | None]:
        await self._checked()
        line = self._lines.get(environment)
        if line is None:
            line = self._lines[environment] = _Line(self._connect())
        line.under_way += 1
        good = False
        try:
            async with asyncio.timeout_at(end_by + GRACE_SECONDS):
                response = await line.transport.handle_async_request(request)
                try:
                    body = await _body(response)
                finally:
                    await response.aclose()
            answer = _answer(response, body)
            good = not _spoils(answer)
            return answer, _skew(response, self._now())
        except NotSendable as fault:
            good = True
            return Unsendable(fault.reason, str(fault)), None
        except NotProcessed as fault:
            return Unanswered(fault.reason, str(fault), maybe_processed=False), None
        except OutcomeUnknown as fault:
            return Unanswered(fault.reason, str(fault)), None
        # What other transports raise. Their words may quote the URL, and with it the device token.
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
            return Unanswered("connection_failed", "No connection to APNs could be made.", maybe_processed=False), None
        except (httpx.TimeoutException, TimeoutError):
            error = f"APNs did not answer within {ANSWER_SECONDS:g} s; it may have the push."
            return Unanswered("timeout", error), None
        except Exception:  # noqa: BLE001  whatever breaks in a connection, this push has its answer and others go on
            return Unanswered("connection_lost", "The connection to APNs was lost; it may have the push."), None
        finally:
            line.under_way -= 1
            if not good:
                await self._retire(environment, line)
            elif line.retired and not line.under_way:
                await _close(line.transport)

    async def _checked(self) -> None:
        if self._checking is not None:
            await asyncio.wait([self._checking])
            self._checking = None

    async def _retire(self, environment: Environment, line: _Line) -> None:
        """Begin nothing more on it. What is under way there may still be answered."""
        line.retired = True
        if self._lines.get(environment) is line:
            del self._lines[environment]
        if not line.under_way:
            await _close(line.transport)


async def _check(transports: list[Transport]) -> None:
    await asyncio.gather(*(transport.check() for transport in transports), return_exceptions=True)


async def _close(transport: Transport) -> None:
    with suppress(Exception):
        async with asyncio.timeout(CLOSE_SECONDS):
            await transport.aclose()


async def _body(response: httpx.Response) -> bytes:
    body = b""
    assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101  what an async transport returns
    async for chunk in response.stream:
        body += chunk
        if len(body) > LARGEST_BODY:
            break
    return body


_SPOILING = {"TooManyProviderTokenUpdates", "IdleTimeout"}


def _spoils(answer: Answer) -> bool:
    """Whether the connection is of no more use.

    After a 500, and after a provider token has expired, connections were seen to refuse whatever came next. And what a
    key is good for, topics and environment, is settled when the connection is made, so that what is mended at Apple's
    counts on a new one only: hence after every 403, of which a drain has one.
    """
    return isinstance(answer, Rejected) and (answer.status == 403 or answer.status >= 500 or answer.reason in _SPOILING)


def _answer(response: httpx.Response, body: bytes) -> Answer:
    answer = read(response.status_code, body)
    if isinstance(answer, Rejected) and (floor := _retry_after(response)):
        return replace(answer, floor=floor)
    return answer


def _retry_after(response: httpx.Response) -> float:
    """Apple documents no Retry-After. Should one come, it is taken at its word, up to a day."""
    said = response.headers.get("retry-after", "")
    if said.isascii() and said.isdigit() and len(said) < 10:
        return min(float(said), LONGEST_FLOOR)
    with suppress(
        KeyError, ValueError
    ):  # the other form: a date, to be read by the clock that APNs dates its answer by
        return min(max((_instant(said) - _instant(response.headers["date"])).total_seconds(), 0.0), LONGEST_FLOOR)
    return 0.0


def _skew(response: httpx.Response, now: float) -> float | None:
    try:
        return now - _instant(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None


def _instant(date: str) -> datetime:
    """Read an HTTP date, or raise ValueError."""
    try:
        instant = parsedate_to_datetime(date)
    except OverflowError:  # a zone beyond any number
        raise ValueError("no HTTP date") from None
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)


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
