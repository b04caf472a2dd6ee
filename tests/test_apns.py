"""The sender against the simulated APNs: real HTTP/2, real TLS, real signatures."""

import asyncio
import base64
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest
from h2.exceptions import ProtocolError

from core.answer import Accepted, Answer, Rejected, Unanswered, Unsendable
from core.apns import Apns, Transport, tls
from core.delivery import Environment, Push
from core.secret import SecretFault, SigningKey, Unconfigured
from core.transport import (
    AnswerTimeout,
    ApnsTransport,
    ConnectionFailed,
    ConnectionLost,
    NotBegun,
    NotSendable,
    Refused,
    StreamReset,
)
from devtools.simulated_apns import Authority, Credentials, Hangup, Ok, Reject, Reset, Silence, SimulatedApns
from devtools.simulated_apns.connection import Connection
from devtools.simulated_apns.listener import Listener
from devtools.simulated_apns.rules import Request
from tests.support.deliveries import a_delivery, a_push
from tests.support.tcp_proxy import TcpProxy

PATIENCE = 30.0  # for a story; the longest that one push may take is 11 s
SANDBOX = Environment.SANDBOX
MINUTE = 60.0
START = 1_799_992_800.0  # a full half hour


@dataclass(frozen=True, slots=True)
class Apple:
    """Production and sandbox, below one root and with one key."""

    production: SimulatedApns
    sandbox: SimulatedApns


@pytest.fixture
def apple() -> Iterator[Apple]:
    with SimulatedApns() as production:
        shared = {"credentials": production.credentials, "authority": production.authority}
        with SimulatedApns(environment="sandbox", **shared) as sandbox:  # type: ignore[arg-type]  # a dict of both kinds
            yield Apple(production, sandbox)
            assert production.violations + sandbox.violations == []


def a_key() -> SigningKey:
    """Make one that Apple does not know."""
    credentials = Credentials.generate()
    return SigningKey(
        team_id=credentials.team_id,
        key_id=credentials.key_id,
        private_key=credentials.private_key(),
        topic="com.example.app",
    )


@dataclass(slots=True)
class Secret:
    """What reading the secret again finds, and how often it was read."""

    holds: SigningKey | Unconfigured | SecretFault
    read: int = 0

    async def reread(self) -> SigningKey | Unconfigured:
        self.read += 1
        await asyncio.sleep(0)  # as it takes its time
        if isinstance(self.holds, SecretFault):
            raise self.holds
        return self.holds


@dataclass(slots=True)
class Clock:
    """The wall's, and it stands still."""

    now: float = START

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def client(
    apple: Apple,
    *,
    production_url: str | None = None,
    ca_file: Path | None = None,
    now: Callable[[], float] = time.time,
    key: SigningKey | None = None,
    secret: Secret | None = None,
    connect: Callable[[ssl.SSLContext], Transport] = lambda context: ApnsTransport(ssl_context=context),
) -> AsyncIterator[Apns]:
    context = tls(str(ca_file or apple.production.ca_file))
    key = key or SigningKey(**apple.production.secret())
    apns = Apns(
        urls={
            Environment.PRODUCTION: production_url or apple.production.url,
            Environment.SANDBOX: apple.sandbox.url,
        },
        key=key,
        reread=(secret or Secret(key)).reread,
        now=now,
        connect=lambda: connect(context),
    )
    try:
        yield apns
    finally:
        await apns.close()


async def push_all(apns: Apns, pushes: Sequence[Push]) -> dict[int, Answer]:
    """Push, all at once."""
    answers = await asyncio.gather(*(apns.push(push) for push in pushes))
    return {push.delivery.id: answer for push, answer in zip(pushes, answers, strict=True)}


async def answers_of(apple: Apple, pushes: list[Push], production_url: str) -> dict[int, Answer]:
    """Push with a new client."""
    async with client(apple, production_url=production_url) as apns:
        return await push_all(apns, pushes)


async def until(ready: Callable[[], bool]) -> None:
    while not ready():  # noqa: ASYNC110  what is waited for happens in another thread, which tells nobody
        await asyncio.sleep(0.01)


def tell(story: Callable[[], Awaitable[None]]) -> None:
    """Run a story, bounded in time, and see that it leaves no task behind."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await story()
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    asyncio.run(bounded())


def pushed(apple: Apple, pushes: list[Push]) -> dict[int, Answer]:
    """Push with a new client, and that is all."""
    answers: dict[int, Answer] = {}

    async def story() -> None:
        async with client(apple) as apns:
            answers.update(await push_all(apns, pushes))

    tell(story)
    return answers


def pushes_to(*numbers: int, environment: Environment = Environment.PRODUCTION) -> list[Push]:
    return [a_push(number, environment=environment) for number in numbers]


def token_of(number: int) -> str:
    return a_push(number).device.token


def claims(push_or_bearer: str) -> dict[str, object]:
    """Read the claims of an `authorization`."""
    claimed = json.loads(base64.urlsafe_b64decode(push_or_bearer.split(".")[1] + "=="))
    assert isinstance(claimed, dict)
    return claimed


def key_of(bearer: str) -> object:
    return json.loads(base64.urlsafe_b64decode(bearer.removeprefix("bearer ").split(".")[0] + "=="))["kid"]


@dataclass(slots=True)
class Eccentric:
    """A server that speaks HTTP/2 and answers as Apple's never would by itself: `behave` is told of each request."""

    behave: Callable[[Connection, int], None]
    connections: int = 0
    requests: list[int] = field(default_factory=list)  # the connection each came on

    def connected(self) -> int:
        self.connections += 1
        return self.connections

    def received(self, connection: Connection, stream_id: int, request: Request) -> None:  # noqa: ARG002  the Office's signature
        self.requests.append(connection.number)
        self.behave(connection, stream_id)

    def violated(self, connection: Connection, error: ProtocolError) -> None:
        pytest.fail(f"{connection.number}: {error}")

    @contextmanager
    def at(self, authority: Authority, directory: Path) -> Iterator[str]:
        listener = Listener(authority.server_context(directory), lambda: Connection(self, max_concurrent_streams=1000))
        listener.start()
        try:
            yield f"https://127.0.0.1:{listener.port}"
        finally:
            listener.stop()


# Answers.


def test_a_push_arrives_as_it_was_composed_and_signed(apple: Apple) -> None:
    delivery = a_delivery(
        1,
        payload='{"aps": {"alert": "Grüß Gott: 😀"}}'.encode(),
        push_type="background",
        collapse_id="chat 7",
        expires_at=1_900_000_000,
    )

    assert pushed(apple, [a_push(1, delivery)]) == {1: Accepted()}

    (received,) = apple.production.journal
    assert received.token == token_of(1)
    assert received.apns_id == str(delivery.apns_id)
    assert received.body == '{"aps":{"alert":"Grüß Gott: 😀"}}'.encode()
    assert {name: value for name, value in received.headers.items() if name.startswith("apns-")} == {
        "apns-topic": "com.example.app",
        "apns-push-type": "background",
        "apns-priority": "5",
        "apns-id": str(delivery.apns_id),
        "apns-collapse-id": "chat 7",
        "apns-expiration": "1900000000",
    }
    assert received.headers["authorization"].startswith("bearer ey")


def test_every_push_gets_its_own_answer_whatever_the_order_they_come_in(apple: Apple) -> None:
    expected: dict[int, Answer] = {}
    for number in range(1, 25):
        after = 0.05 * (number % 3)
        match number % 4:
            case 0:
                apple.production.answer(token_of(number), Reject(400, f"Shiny{number}", after=after))
                expected[number] = Rejected(400, f"Shiny{number}")
            case 1:
                died = datetime(2026, 3, 1, 12, 0, number, 123_000, tzinfo=UTC)
                apple.production.answer(token_of(number), Reject(410, "Unregistered", timestamp=died, after=after))
                expected[number] = Rejected(410, "Unregistered", died)
            case _:
                apple.production.answer(token_of(number), Ok(after=after))
                expected[number] = Accepted()

    assert pushed(apple, pushes_to(*range(1, 25))) == expected


def test_nothing_to_push_opens_no_connection(apple: Apple) -> None:
    async def story() -> None:
        async with client(apple) as apns:
            await apns.begin(SigningKey(**apple.production.secret()))
            await apns.begin(a_key())

    tell(story)
    assert apple.production.connections == 0


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"\xff", b"[" * 5000])
def test_an_answer_that_is_not_apples_is_one_all_the_same(apple: Apple, body: bytes) -> None:
    apple.production.answer(token_of(1), Reject(502, "", body=body))

    assert pushed(apple, pushes_to(1, 2)) == {1: Rejected(502, "status_502"), 2: Accepted()}


def test_a_body_without_end_is_read_no_further_than_any_of_apples_could_reach(apple: Apple) -> None:
    endless = b'{"padding":"' + b"x" * 3_000_000 + b'","reason":"BadTopic"}'
    apple.production.answer(token_of(1), Reject(400, "", body=endless))

    assert pushed(apple, pushes_to(*range(1, 12))) == {
        1: Rejected(400, "status_400"),  # had it read all, it would know the reason
        **{number: Accepted() for number in range(2, 12)},
    }


@pytest.mark.parametrize(
    ("retry_after", "floor"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("86400", 86_400.0),
        ("86401", 86_400.0),  # a day is long enough for whatever it is
        ("999999999", 86_400.0),
        ("9999999999", 0.0),  # no number of seconds that anybody could mean
        ("-5", 0.0),
        ("1.5", 0.0),
        ("1e3", 0.0),
        ("soon", 0.0),
        ("Fri, 15 Jan 2027 08:00:00 GMT", 0.0),  # a date, and no telling by which clock
        ("", 0.0),
    ],
)
def test_a_retry_after_is_a_floor_and_what_is_no_number_of_seconds_is_none(
    apple: Apple, retry_after: str, floor: float
) -> None:
    apple.production.answer(token_of(1), Reject(503, "ServiceUnavailable", headers=(("retry-after", retry_after),)))

    assert pushed(apple, pushes_to(1)) == {1: Rejected(503, "ServiceUnavailable", floor=floor)}


@pytest.mark.parametrize(
    ("retry_after", "floor"),
    [
        ("Fri, 15 Jan 2027 08:02:00 GMT", 120.0),
        ("Fri, 15 Jan 2027 08:02:00 -0000", 120.0),  # a zone that is not known is UTC, wherever this machine stands
        ("Fri, 15 Jan 2027 07:59:00 GMT", 0.0),
        ("Mon, 18 Jan 2027 08:00:00 GMT", 86_400.0),
        ("Fri, 99 Jan 2027 08:00:00 GMT", 0.0),
        ("Fri, 15 Jan 2027 08:02:00 +9999999999999999999", 0.0),
        ("120", 120.0),
    ],
)
def test_a_retry_after_that_is_a_date_is_read_by_apns_own_clock(apple: Apple, retry_after: str, floor: float) -> None:
    date = "Fri, 15 Jan 2027 08:00:00 GMT"
    apple.production.answer(
        token_of(1), Reject(503, "ServiceUnavailable", headers=(("date", date), ("retry-after", retry_after)))
    )

    assert pushed(apple, pushes_to(1)) == {1: Rejected(503, "ServiceUnavailable", floor=floor)}


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize(
    "date", ["", "yesterday", "Mon, 99 Jan 2027 08:00:00 GMT", "Mon, 01 Jan 2024 00:00:00 +9999999999999999999"]
)
def test_a_date_that_is_none_costs_nobody_an_answer(apple: Apple, tmp_path: Path, status: int, date: str) -> None:
    def respond(connection: Connection, stream_id: int) -> None:
        connection.respond(stream_id, status, [("date", date)])

    async def story() -> None:
        with Eccentric(respond).at(apple.production.authority, tmp_path) as url:
            answers = await answers_of(apple, pushes_to(1), url)
        assert answers == {1: Accepted() if status == 200 else Rejected(503, "status_503")}

    tell(story)


# Connections.


def test_there_is_one_connection_an_environment_and_all_pushes_are_under_way_on_it_at_once(apple: Apple) -> None:
    apple.production.answer_all(Silence())
    apple.sandbox.answer_all(Silence())

    async def story() -> None:
        async with client(apple) as apns:
            pushes = pushes_to(*range(1, 41)) + pushes_to(*range(101, 121), environment=SANDBOX)
            pushing = asyncio.create_task(push_all(apns, pushes))
            for server, count in ((apple.production, 40), (apple.sandbox, 20)):
                await asyncio.to_thread(server.wait_for_pushes, count, 5)  # none of them was given up before
                assert server.connections == 1
            pushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pushing

    tell(story)


def test_the_environment_that_is_not_pushed_to_is_not_connected_to(apple: Apple) -> None:
    pushed(apple, pushes_to(1))

    assert (apple.production.connections, apple.sandbox.connections) == (1, 0)


def test_each_environment_gets_its_own_pushes_and_no_others(apple: Apple) -> None:
    apple.sandbox.answer(token_of(5), Reject(400, "BadDeviceToken"))

    answers = pushed(apple, pushes_to(1, 2, 3) + pushes_to(4, 5, environment=SANDBOX))

    assert answers == {
        1: Accepted(), 2: Accepted(), 3: Accepted(), 4: Accepted(), 5: Rejected(400, "BadDeviceToken"),
    }  # fmt: skip
    assert {push.token for push in apple.production.journal} == {token_of(1), token_of(2), token_of(3)}
    assert {push.token for push in apple.sandbox.journal} == {token_of(4), token_of(5)}


def test_one_environment_never_waits_for_the_other(apple: Apple) -> None:
    apple.production.answer_all(Silence())

    async def story() -> None:
        async with client(apple) as apns:
            silent = asyncio.create_task(push_all(apns, pushes_to(*range(1, 9))))
            await asyncio.to_thread(apple.production.wait_for_pushes, 8, PATIENCE)
            answers = await push_all(apns, pushes_to(*range(11, 19), environment=SANDBOX))
            assert set(answers.values()) == {Accepted()}
            assert not silent.done()
            silent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await silent

    tell(story)


def test_connections_are_kept_from_one_drain_to_the_next(apple: Apple) -> None:
    async def story() -> None:
        async with client(apple) as apns:
            for _ in range(3):
                await apns.begin(SigningKey(**apple.production.secret()))
                assert set((await push_all(apns, pushes_to(*range(1, 9)))).values()) == {Accepted()}
            assert apple.production.connections == 1

    tell(story)


def test_closing_ends_every_connection_and_a_later_push_opens_new_ones(apple: Apple) -> None:
    async def story() -> None:
        with TcpProxy(("127.0.0.1", apple.production.port)) as proxy:
            async with client(apple, production_url=f"https://127.0.0.1:{proxy.port}") as apns:
                await push_all(apns, pushes_to(*range(1, 9)))
                assert proxy.count == 1
                await apns.close()
                await until(lambda: proxy.count == 0)
                assert await push_all(apns, pushes_to(9)) == {9: Accepted()}
            await until(lambda: proxy.count == 0)

    tell(story)


@pytest.mark.parametrize("awake", [True, False], ids=["while we were awake", "while we were frozen"])
def test_a_connection_that_was_closed_between_two_drains_is_replaced_without_a_word(
    apple: Apple, *, awake: bool
) -> None:
    key = SigningKey(**apple.production.secret())
    with TcpProxy(("127.0.0.1", apple.production.port)) as proxy, asyncio.Runner() as runner:
        apns_of = client(apple, production_url=f"https://127.0.0.1:{proxy.port}")
        apns = runner.run(apns_of.__aenter__())
        assert runner.run(push_all(apns, pushes_to(1, 2, 3, 4))) == dict.fromkeys((1, 2, 3, 4), Accepted())

        proxy.cut()
        if awake:
            runner.run(asyncio.sleep(0.1))  # the loop learns of it now, and not from the next push
        runner.run(apns.begin(key))
        again = runner.run(push_all(apns, pushes_to(5, 6, 7, 8)))
        runner.run(apns_of.__aexit__(None, None, None))

    assert again == dict.fromkeys((5, 6, 7, 8), Accepted())
    assert Counter(push.token for push in apple.production.journal).most_common(1)[0][1] == 1
    assert apple.production.connections == 2


def test_an_apns_that_comes_back_is_pushed_to_again(apple: Apple) -> None:
    async def story() -> None:
        with TcpProxy(("127.0.0.1", apple.production.port)) as proxy:
            async with client(apple, production_url=f"https://127.0.0.1:{proxy.port}") as apns:
                await push_all(apns, pushes_to(1))
                proxy.refuse()
                proxy.cut()
                await until(lambda: proxy.count == 0)
                await apns.begin(SigningKey(**apple.production.secret()))
                assert reasons(await push_all(apns, pushes_to(2))) == {"connection_failed"}
                proxy.resume()
                assert await push_all(apns, pushes_to(3)) == {3: Accepted()}

    tell(story)


@dataclass(slots=True, eq=False)
class Scripted:
    """A transport that does one thing after the other, the last for ever, and says what became of it."""

    script: list[Exception | int]
    body: bytes = b""
    tried: int = 0
    checked: int = 0
    closed: int = 0
    closing: asyncio.Event | None = None  # that its end waits for
    answering: asyncio.Event | None = None  # that its answers wait for
    checking: asyncio.Event | None = None  # that its checks wait for
    check_fault: Exception | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:  # noqa: ARG002  httpx's signature
        self.tried += 1
        if self.answering is not None:
            await self.answering.wait()
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(said, Exception):
            raise type(said)(*said.args)  # one each: what was raised holds its frames, and parameters live for ever
        return httpx.Response(said, stream=httpx.ByteStream(self.body))

    async def check(self) -> None:
        self.checked += 1
        if self.checking is not None:
            await self.checking.wait()
        if self.check_fault is not None:
            raise type(self.check_fault)(*self.check_fault.args)

    async def aclose(self) -> None:
        self.closed += 1
        if self.closing is not None:
            await self.closing.wait()


def over(*transports: Transport, key: SigningKey | None = None, secret: Secret | None = None) -> Apns:
    """Make a client of these connections, in this order."""
    opened = iter(transports)
    key = key or a_key()
    return Apns(
        urls=dict.fromkeys(Environment, "https://127.0.0.1:1"),
        key=key,
        reread=(secret or Secret(key)).reread,
        now=Clock(),
        connect=lambda: next(opened),
    )


@pytest.mark.parametrize(
    ("error", "reason", "maybe_processed"),
    [
        (ConnectionFailed("No."), "connection_failed", False),
        (NotBegun("No."), "timeout", False),
        (Refused("No."), "refused", False),
        (AnswerTimeout("No."), "timeout", True),
        (ConnectionLost("No."), "connection_lost", True),
        (StreamReset("No."), "stream_reset", True),
        # What httpx's own transport raises. Its words are not repeated, since they may hold the URL.
        (httpx.ConnectError("5ec4e7"), "connection_failed", False),
        (httpx.ConnectTimeout("5ec4e7"), "connection_failed", False),
        (httpx.PoolTimeout("5ec4e7"), "connection_failed", False),
        (httpx.ReadTimeout("5ec4e7"), "timeout", True),
        (httpx.WriteTimeout("5ec4e7"), "timeout", True),
        (httpx.ReadError("5ec4e7"), "connection_lost", True),
        (httpx.WriteError("5ec4e7"), "connection_lost", True),
        (httpx.RemoteProtocolError("5ec4e7"), "connection_lost", True),
        (OSError("5ec4e7"), "connection_lost", True),
        (KeyError("5ec4e7"), "connection_lost", True),
    ],
    ids=repr,
)
def test_whatever_breaks_is_an_answer_that_says_whether_apns_may_have_the_push_and_the_next_has_a_new_connection(
    error: Exception, reason: str, *, maybe_processed: bool
) -> None:
    broken, sound = Scripted([error]), Scripted([200])

    async def story() -> None:
        apns = over(broken, sound)
        answer = await apns.push(a_push(1))
        assert isinstance(answer, Unanswered)
        assert (answer.reason, answer.maybe_processed) == (reason, maybe_processed)
        assert answer.error.endswith(".")
        assert "5ec4e7" not in answer.error
        assert broken.closed == 1
        assert await apns.push(a_push(2)) == Accepted()
        await apns.close()

    tell(story)
    assert (broken.tried, sound.tried) == (1, 1)  # and never twice: APNs might have it
    assert sound.closed == 1


def test_what_the_connection_has_no_way_to_say_is_that_rows_own_fault_and_the_connection_stays() -> None:
    line = Scripted([NotSendable("A header has a line break."), 200])

    async def story() -> None:
        apns = over(line)
        assert await apns.push(a_push(1)) == Unsendable("unsendable", "A header has a line break.")
        assert await apns.push(a_push(2)) == Accepted()
        assert line.closed == 0
        await apns.close()

    tell(story)


def test_what_is_under_way_on_a_retired_connection_is_answered_and_the_last_answer_closes_it() -> None:
    old, new = Scripted([200], answering=asyncio.Event()), Scripted([200])
    assert old.answering is not None

    async def story() -> None:
        assert old.answering is not None
        key = a_key()
        apns = over(old, new, key=key)
        under_way = asyncio.create_task(push_all(apns, pushes_to(1, 2)))
        await until(lambda: old.tried == 2)

        await apns.begin(a_key())
        assert await apns.push(a_push(3)) == Accepted()
        assert (old.tried, new.tried) == (2, 1)
        assert (old.closed, new.closed) == (0, 0)

        old.answering.set()
        assert await under_way == {1: Accepted(), 2: Accepted()}
        assert (old.closed, new.closed) == (1, 0)
        await apns.close()
        assert (old.closed, new.closed) == (1, 1)

    tell(story)


def test_a_connection_that_is_spoilt_under_others_lets_them_finish_and_takes_nothing_new() -> None:
    old, new = Scripted([500, 200], answering=asyncio.Event()), Scripted([200])

    async def story() -> None:
        assert old.answering is not None
        apns = over(old, new)
        under_way = asyncio.create_task(push_all(apns, pushes_to(1, 2)))
        await until(lambda: old.tried == 2)
        old.answering.set()
        assert sorted(map(type, (await under_way).values()), key=str) == [Accepted, Rejected]
        assert old.closed == 1
        assert await apns.push(a_push(3)) == Accepted()
        assert (old.tried, new.tried) == (2, 1)
        await apns.close()

    tell(story)


def test_a_connection_that_does_not_want_to_end_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.apns.CLOSE_SECONDS", 0.05)
    stubborn = Scripted([500, 200], closing=asyncio.Event())

    async def story() -> None:
        apns = over(stubborn, Scripted([200]))
        assert await apns.push(a_push(1)) == Rejected(500, "status_500")
        assert await apns.push(a_push(2)) == Accepted()
        await apns.close()

    tell(story)
    assert stubborn.closed == 1


def test_a_drain_begins_by_checking_every_connection_there_is() -> None:
    production, sandbox = Scripted([200]), Scripted([200])

    async def story() -> None:
        key = a_key()
        apns = over(production, sandbox, key=key)
        await apns.begin(key)
        await push_all(apns, [*pushes_to(1), *pushes_to(2, environment=SANDBOX)])
        await apns.end()
        assert (production.checked, sandbox.checked) == (0, 0)
        await apns.begin(key)
        await apns.end()
        assert (production.checked, sandbox.checked) == (1, 1)
        await apns.close()

    tell(story)


def test_a_drain_may_claim_while_its_connections_are_checked_and_only_its_pushes_wait_for_that() -> None:
    line = Scripted([200], checking=asyncio.Event())

    async def story() -> None:
        assert line.checking is not None
        key = a_key()
        apns = over(line, key=key)
        await apns.push(a_push(1))
        await apns.begin(key)  # returns, though the check does not
        pushing = asyncio.create_task(push_all(apns, pushes_to(2, 3)))
        await until(lambda: line.checked == 1)
        assert line.tried == 1
        line.checking.set()
        assert await pushing == {2: Accepted(), 3: Accepted()}
        await apns.close()

    tell(story)


@pytest.mark.parametrize("ends", ["end", "close"])
def test_no_check_is_half_done_when_a_drain_ends(ends: str) -> None:
    line = Scripted([200], checking=asyncio.Event())

    async def story() -> None:
        assert line.checking is not None
        key = a_key()
        apns = over(line, key=key)
        await apns.push(a_push(1))
        await apns.begin(key)
        ending = asyncio.create_task(apns.end() if ends == "end" else apns.close())
        await until(lambda: line.checked == 1)
        assert not ending.done()
        assert line.closed == 0
        line.checking.set()
        await ending
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await apns.close()

    tell(story)


def test_a_check_that_breaks_ends_no_drain() -> None:
    line = Scripted([200], check_fault=OSError("5ec4e7"))

    async def story() -> None:
        key = a_key()
        apns = over(line, key=key)
        await apns.push(a_push(1))
        await apns.begin(key)
        assert await apns.push(a_push(2)) == Accepted()
        await apns.end()
        await apns.close()

    tell(story)


def test_a_transport_that_never_answers_is_given_up_even_if_it_has_no_deadline_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.apns.ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("core.apns.CONNECT_SECONDS", 0.0)
    monkeypatch.setattr("core.apns.GRACE_SECONDS", 0.0)
    silent = Scripted([200], answering=asyncio.Event())

    async def story() -> None:
        apns = over(silent)
        assert reasons(await push_all(apns, pushes_to(1))) == {"timeout"}
        assert silent.closed == 1

    tell(story)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (500, "InternalServerError"),
        (503, "Shutdown"),
        (599, "Shiny"),
        (400, "IdleTimeout"),
        (403, "UnrelatedKeyIdInToken"),  # a topic that was added to the key counts on new connections only
        (429, "TooManyProviderTokenUpdates"),
    ],
)
def test_a_connection_is_not_used_again_after_an_answer_that_spoils_it(apple: Apple, status: int, reason: str) -> None:
    apple.production.answer(token_of(1), Reject(status, reason), Ok())

    async def story() -> None:
        async with client(apple) as apns:
            answer = await apns.push(a_push(1))
            assert isinstance(answer, Rejected)
            assert (answer.status, answer.reason) == (status, reason)
            assert await push_all(apns, pushes_to(2)) == {2: Accepted()}

    tell(story)
    assert [push.connection for push in apple.production.journal] == [1, 2]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "BadDeviceToken"),
        (410, "Unregistered"),
        (429, "TooManyRequests"),
        (413, "PayloadTooLarge"),
        (400, "TopicDisallowed"),
    ],
)
def test_a_connection_is_used_again_after_an_answer_about_the_delivery(apple: Apple, status: int, reason: str) -> None:
    apple.production.answer(token_of(1), Reject(status, reason), Ok())

    async def story() -> None:
        async with client(apple) as apns:
            assert await push_all(apns, pushes_to(1)) == {1: Rejected(status, reason)}
            assert await push_all(apns, pushes_to(2)) == {2: Accepted()}

    tell(story)
    assert [push.connection for push in apple.production.journal] == [1, 1]


# No answer.


@pytest.mark.parametrize(
    ("fault", "reason", "maybe_processed"),
    [
        (Reset(0), "stream_reset", True),
        (Reset(2), "stream_reset", True),  # INTERNAL_ERROR
        (Reset(8, after=0.1), "stream_reset", True),  # CANCEL
        (Reset(11), "stream_reset", True),  # ENHANCE_YOUR_CALM
        (Reset(7), "refused", False),  # REFUSED_STREAM, so it was sent again, once
    ],
    ids=repr,
)
def test_a_push_that_is_reset_is_unanswered_and_the_others_go_on(
    apple: Apple, fault: Reset, reason: str, *, maybe_processed: bool
) -> None:
    apple.production.answer(token_of(3), fault)

    answers = pushed(apple, pushes_to(*range(1, 13)))

    lost = answers.pop(3)
    assert isinstance(lost, Unanswered)
    assert (lost.reason, lost.maybe_processed) == (reason, maybe_processed)
    assert set(answers.values()) == {Accepted()}
    received = [push for push in apple.production.journal if push.token == token_of(3)]
    assert len(received) == (1 if maybe_processed else 2)  # what APNs may have is never sent again


@pytest.mark.parametrize("fault", [Hangup(), Hangup(received=True), Hangup(received=True, after=0.1)], ids=repr)
def test_a_connection_that_is_lost_takes_what_is_under_way_along_and_nothing_else(apple: Apple, fault: Hangup) -> None:
    apple.production.answer(token_of(3), fault)

    async def story() -> None:
        async with client(apple) as apns:
            assert await push_all(apns, pushes_to(1, 2)) == {1: Accepted(), 2: Accepted()}
            assert reasons(await push_all(apns, pushes_to(3))) == {"connection_lost"}
            assert await push_all(apns, pushes_to(4, 5)) == {4: Accepted(), 5: Accepted()}

    tell(story)
    assert {push.token: push.connection for push in apple.production.journal if push.token != token_of(3)} == {
        token_of(1): 1, token_of(2): 1, token_of(4): 2, token_of(5): 2,
    }  # fmt: skip
    assert len(apple.production.journal) == 4 + fault.received  # never sent again


def test_after_a_lost_answer_the_connection_is_a_new_one(apple: Apple) -> None:
    apple.production.answer(token_of(1), Reset(2))

    async def story() -> None:
        async with client(apple) as apns:
            await push_all(apns, pushes_to(1))
            assert await push_all(apns, pushes_to(2)) == {2: Accepted()}

    tell(story)
    assert [push.connection for push in apple.production.journal] == [1, 2]


def test_an_apns_that_is_not_there_is_a_failed_connection(apple: Apple) -> None:
    async def story() -> None:
        with TcpProxy(("127.0.0.1", apple.production.port)) as proxy:
            proxy.refuse()
            answers = await answers_of(apple, pushes_to(1, 2, 3, 4, 5), f"https://127.0.0.1:{proxy.port}")
        assert reasons(answers) == {"connection_failed"}
        assert not any(answer.maybe_processed for answer in answers.values() if isinstance(answer, Unanswered))

    tell(story)


def reasons(answers: dict[int, Answer]) -> set[str]:
    assert all(isinstance(answer, Unanswered) for answer in answers.values()), answers
    return {answer.reason for answer in answers.values() if isinstance(answer, Unanswered)}


def test_a_certificate_of_another_authority_is_a_failed_connection_and_nothing_is_sent(
    apple: Apple, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    stranger.write_bytes(Authority.generate().pem())

    async def story() -> None:
        async with client(apple, ca_file=stranger) as apns:
            assert reasons(await push_all(apns, pushes_to(1, 2))) == {"connection_failed"}

    tell(story)
    assert apple.production.journal == []


def test_a_certificate_for_another_host_is_a_failed_connection_and_nothing_is_sent(apple: Apple) -> None:
    # One more way to write 127.0.0.1, which the certificate does not name.
    async def story() -> None:
        async with client(apple, production_url=f"https://127.1:{apple.production.port}") as apns:
            assert reasons(await push_all(apns, pushes_to(1, 2))) == {"connection_failed"}

    tell(story)
    assert apple.production.journal == []


def test_that_other_host_would_have_been_reached(apple: Apple) -> None:
    """Or the test above would pass for want of a host."""

    async def story() -> None:
        _, writer = await asyncio.open_connection("127.1", apple.production.port)
        writer.close()
        await writer.wait_closed()

    tell(story)


def test_a_server_that_does_not_speak_http2_is_a_failed_connection_and_nothing_is_sent(
    apple: Apple, tmp_path: Path
) -> None:
    received: list[bytes] = []

    async def http1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # who finds no HTTP/2 here may leave as it likes
            received.append(await reader.read(65536))
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async def story() -> None:
        context = apple.production.authority.server_context(tmp_path)
        context.set_alpn_protocols(["http/1.1"])
        async with await asyncio.start_server(http1, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            answers = await answers_of(apple, pushes_to(1), f"https://127.0.0.1:{port}")
            assert reasons(answers) == {"connection_failed"}

    tell(story)
    assert not any(b"PRI * HTTP/2.0" in each for each in received)


def trickle(connection: Connection, stream_id: int) -> None:
    """Answer, and never come to an end: a byte a second keeps every time-out between two bytes from striking."""

    def drip() -> None:
        if not connection.transport.is_closing():
            connection.engine.send_data(stream_id, b" ")
            connection.flush()
            asyncio.get_running_loop().call_later(1, drip)

    connection.engine.send_headers(stream_id, [(":status", "400")])
    drip()


def test_nothing_waits_without_a_deadline(apple: Apple, tmp_path: Path) -> None:
    """All at once, since each takes its time: 3 s to connect, 8 s for an answer."""
    apple.production.answer(token_of(1), Silence())
    apple.sandbox.answer_all(Silence())

    async def story() -> None:
        with (
            TcpProxy(("127.0.0.1", apple.production.port)) as proxy,
            Eccentric(trickle).at(apple.production.authority, tmp_path) as endless,
        ):
            proxy.hang()  # takes the connection, and then no handshake comes
            unconnected, unended, silent = [
                asyncio.create_task(answers_of(apple, pushes, url))
                for pushes, url in (
                    (pushes_to(1, 2), f"https://127.0.0.1:{proxy.port}"),
                    (pushes_to(1, 2), endless),
                    (pushes_to(*range(1, 9)) + pushes_to(11, environment=SANDBOX), apple.production.url),
                )
            ]
            ends: list[asyncio.Task[dict[int, Answer]]] = []
            for task in (unconnected, silent, unended):
                task.add_done_callback(ends.append)
            await asyncio.gather(unconnected, silent, unended)
        assert ends[0] is unconnected
        assert reasons(unconnected.result()) == {"connection_failed"}
        assert reasons(unended.result()) == {"timeout"}
        answers = silent.result()
        assert reasons({number: answers.pop(number) for number in (1, 11)}) == {"timeout"}
        assert answers == dict.fromkeys(range(2, 9), Accepted())  # one that waits holds up nobody

    tell(story)


@pytest.mark.parametrize("awake", [True, False], ids=["while we were awake", "while we were frozen"])
def test_a_connection_that_apns_said_goodbye_on_between_two_drains_is_replaced_without_a_word(
    apple: Apple, tmp_path: Path, *, awake: bool
) -> None:
    said_goodbye = threading.Event()

    def answer_and_leave(connection: Connection, stream_id: int) -> None:
        def leave() -> None:
            connection.engine.close_connection(last_stream_id=stream_id)
            connection.flush()
            connection.transport.close()
            said_goodbye.set()

        connection.respond(stream_id, 200, [])
        asyncio.get_running_loop().call_later(0.1, leave)

    server = Eccentric(answer_and_leave)
    with server.at(apple.production.authority, tmp_path) as url, asyncio.Runner() as runner:
        apns_of = client(apple, production_url=url)
        apns = runner.run(apns_of.__aenter__())
        assert runner.run(push_all(apns, pushes_to(1))) == {1: Accepted()}

        assert said_goodbye.wait(PATIENCE)
        if awake:
            runner.run(asyncio.sleep(0.1))  # the loop learns of it now, and not from the next push
        runner.run(apns.begin(SigningKey(**apple.production.secret())))
        again = runner.run(push_all(apns, pushes_to(2)))
        runner.run(apns_of.__aexit__(None, None, None))

    assert again == {2: Accepted()}
    assert server.requests == [1, 2]


def test_after_a_push_that_was_cut_off_the_connection_is_a_new_one_and_its_late_answer_reaches_nobody(
    apple: Apple,
) -> None:
    apple.production.answer(token_of(1), Ok(after=60))

    async def story() -> None:
        async with client(apple) as apns:
            pushing = asyncio.create_task(apns.push(a_push(1)))
            await asyncio.to_thread(apple.production.wait_for_pushes, 1, PATIENCE)
            pushing.cancel()  # the drain's own end: the invocation's time is up
            with pytest.raises(asyncio.CancelledError):
                await pushing
            assert await push_all(apns, pushes_to(2)) == {2: Accepted()}

    tell(story)
    assert [push.connection for push in apple.production.journal] == [1, 2]


# One row's fault is that row's alone.


@pytest.mark.parametrize(
    "spoilt",
    [
        pytest.param(a_push(3, token="ab\ud800cd"), id="a token with half a surrogate pair"),
        pytest.param(a_push(3, token="ab\0cd"), id="a token with NUL"),
        pytest.param(a_push(3, token="ab\r\ncd"), id="a token with a line end"),
        pytest.param(a_push(3, token="f" * 100_000), id="a token longer than any URL"),
        pytest.param(a_push(3, a_delivery(3, collapse_id="Grüße")), id="a collapse id that is not ASCII"),
        pytest.param(a_push(3, a_delivery(3, collapse_id="\ud800")), id="a collapse id that is no text"),
        pytest.param(a_push(3, a_delivery(3, push_type="älert")), id="a push type that is not ASCII"),
        pytest.param(a_push(3, topic="com.example.ä"), id="a topic that is not ASCII"),
        pytest.param(a_push(3, a_delivery(3, payload=b"x" * 5000)), id="a payload that is too large"),
    ],
)
def test_a_row_of_which_no_request_can_be_made_is_unsendable_and_the_others_go_through(
    apple: Apple, spoilt: Push
) -> None:
    answers = pushed(apple, [spoilt if push.delivery.id == 3 else push for push in pushes_to(*range(1, 9))])

    unsendable = answers.pop(3)
    assert isinstance(unsendable, Unsendable)
    assert spoilt.device.token not in unsendable.error
    assert set(answers.values()) == {Accepted()}
    assert len(answers) == 7
    assert len(apple.production.journal) == 7


def test_a_signing_key_that_cannot_sign_is_no_rows_fault() -> None:
    """It is checked when the secret is read; if it gets here all the same, no row may end by it."""

    async def story() -> None:
        apns = over(Scripted([200]), key=replace(a_key(), private_key="hunter2"))
        with pytest.raises(ValueError, match="is not PEM"):
            await apns.push(a_push(1))

    tell(story)


def test_a_token_that_is_not_hex_and_can_be_sent_is_for_apns_to_judge(apple: Apple) -> None:
    assert pushed(apple, [a_push(1, token="naive"), *pushes_to(2)]) == {
        1: Rejected(400, "BadDeviceToken"),
        2: Accepted(),
    }


@pytest.mark.parametrize(
    "fault", [Hangup(), Reset(2), Reject(503, "Shutdown"), Reject(400, "BadDeviceToken")], ids=repr
)
def test_no_answer_shows_the_token_or_the_payload(apple: Apple, fault: Hangup | Reset | Reject) -> None:
    token = "5ec4e7" * 10
    apple.production.answer(token, fault)
    push = a_push(1, a_delivery(1, payload=b'{"aps": {"alert": "Your test is positive"}}'), token=token)

    answer = pushed(apple, [push])[1]

    assert token not in repr(answer)
    assert "positive" not in repr(answer)


# The provider token.


def test_all_pushes_of_both_environments_carry_the_same_provider_token(apple: Apple) -> None:
    pushed(apple, pushes_to(*range(1, 13)) + pushes_to(*range(21, 33), environment=SANDBOX))

    received = apple.production.journal + apple.sandbox.journal
    assert len(received) == 24
    assert len({push.headers["authorization"] for push in received}) == 1


EXPIRED = Reject(403, "ExpiredProviderToken")
INVALID = Reject(403, "InvalidProviderToken")


def dated(rejection: Reject, at: float) -> Reject:
    """Let APNs' clock show this."""
    date = format_datetime(datetime.fromtimestamp(at, UTC), usegmt=True)
    return replace(rejection, headers=(("date", date),))


def test_a_token_that_expired_is_replaced_by_one_dated_now_on_a_new_connection_and_the_push_goes_again(
    apple: Apple,
) -> None:
    apple.production.answer_all(Ok(), EXPIRED, Ok(), before_checks=True)
    clock = Clock(START + 1 * MINUTE)

    async def story() -> None:
        async with client(apple, now=clock) as apns:
            assert await apns.push(a_push(1)) == Accepted()
            clock.now += 20 * MINUTE
            assert await apns.push(a_push(2)) == Accepted()
            assert await apns.push(a_push(3)) == Accepted()

    tell(story)
    received = apple.production.journal
    assert [push.token for push in received] == [token_of(n) for n in (1, 2, 2, 3)]
    assert [push.connection for push in received] == [1, 1, 2, 2]
    assert [claims(push.headers["authorization"])["iat"] for push in received] == [
        START, START, START + 21 * MINUTE, START + 21 * MINUTE,
    ]  # fmt: skip
    assert received[1].apns_id == received[2].apns_id


def test_fifty_that_expired_at_once_cost_one_fresh_token_and_one_new_connection(apple: Apple) -> None:
    for number in range(1, 51):
        apple.production.answer(token_of(number), EXPIRED, Ok(), before_checks=True)
    apple.production.answer(token_of(99), Ok(), before_checks=True)
    clock = Clock()

    async def story() -> None:
        async with client(apple, now=clock) as apns:
            assert await apns.push(a_push(99)) == Accepted()
            clock.now += 25 * MINUTE
            assert set((await push_all(apns, pushes_to(*range(1, 51)))).values()) == {Accepted()}

    tell(story)
    assert len({push.headers["authorization"] for push in apple.production.journal}) == 2
    assert apple.production.connections == 2


def test_both_tries_together_take_no_longer_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.apns.CONNECT_SECONDS", 0.2)
    monkeypatch.setattr("core.apns.ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("core.apns.GRACE_SECONDS", 0.0)
    rejects = Scripted([403], body=b'{"reason": "InvalidProviderToken"}', answering=asyncio.Event())
    accepts = Scripted([200], answering=asyncio.Event())

    async def story() -> None:
        assert rejects.answering is not None
        assert accepts.answering is not None
        apns = over(rejects, accepts, secret=Secret(a_key()))
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, rejects.answering.set)
        loop.call_later(0.6, accepts.answering.set)  # in time only for a second try that has another half second
        assert reasons(await push_all(apns, pushes_to(1))) == {"timeout"}

    tell(story)


def test_a_fresh_token_that_is_called_expired_too_is_not_followed_by_a_third(apple: Apple) -> None:
    apple.production.answer_all(Ok(), EXPIRED, before_checks=True)
    clock = Clock()

    async def story() -> None:
        async with client(apple, now=clock) as apns:
            await apns.push(a_push(1))
            clock.now += 20 * MINUTE
            assert await apns.push(a_push(2)) == Rejected(403, "ExpiredProviderToken")
            assert await apns.push(a_push(3)) == Rejected(403, "ExpiredProviderToken")

    tell(story)
    assert [push.token for push in apple.production.journal] == [token_of(n) for n in (1, 2, 2, 3)]
    assert len({push.headers["authorization"] for push in apple.production.journal}) == 2


def test_a_token_younger_than_twenty_minutes_is_not_replaced_whatever_apns_calls_it(apple: Apple) -> None:
    apple.production.answer_all(Ok(), EXPIRED, before_checks=True)
    clock = Clock(START + 29 * MINUTE)

    async def story() -> None:
        async with client(apple, now=clock) as apns:
            await apns.push(a_push(1))
            clock.now += 20 * MINUTE - 1  # its date is 49 minutes back, and it was minted 20 minutes ago but a second
            assert await apns.push(a_push(2)) == Rejected(403, "ExpiredProviderToken")

    tell(story)
    assert len(apple.production.journal) == 2
    assert len({push.headers["authorization"] for push in apple.production.journal}) == 1


@pytest.mark.parametrize("rejection", [EXPIRED, INVALID], ids=["expired", "invalid"])
@pytest.mark.parametrize(
    ("ahead", "note"),
    [
        (-3600.0, "Our clock is 3600 s behind APNs': mend it."),
        (-61.0, "Our clock is 61 s behind APNs': mend it."),
        (-60.0, ""),
        (0.0, ""),
        (60.0, ""),
        (61.0, "Our clock is 61 s ahead of APNs': mend it."),
    ],
)
def test_a_clock_that_is_wrong_by_more_than_a_minute_is_named_where_it_may_be_the_cause(
    apple: Apple, rejection: Reject, ahead: float, note: str
) -> None:
    apple.production.answer_all(dated(rejection, START - ahead), before_checks=True)

    async def story() -> None:
        async with client(apple, now=Clock()) as apns:
            assert await apns.push(a_push(1)) == Rejected(403, rejection.reason, note=note)

    tell(story)


def test_a_wrong_clock_is_not_blamed_for_what_it_has_no_part_in(apple: Apple) -> None:
    apple.production.answer_all(dated(Reject(403, "Forbidden"), START - 3600), before_checks=True)

    async def story() -> None:
        async with client(apple, now=Clock()) as apns:
            assert await apns.push(a_push(1)) == Rejected(403, "Forbidden")

    tell(story)


@pytest.mark.parametrize(("retry_after", "floor"), [(None, 15 * MINUTE), ("60", 15 * MINUTE), ("1800", 30 * MINUTE)])
def test_a_token_that_was_renewed_too_often_is_kept_until_it_may_be_renewed(
    apple: Apple, retry_after: str | None, floor: float
) -> None:
    headers = (("retry-after", retry_after),) if retry_after else ()
    too_many = Reject(429, "TooManyProviderTokenUpdates", headers=headers)
    apple.production.answer_all(Ok(), too_many, Ok(), before_checks=True)
    clock = Clock(START + 7 * MINUTE)

    async def story() -> None:
        async with client(apple, now=clock) as apns:
            await apns.push(a_push(1))
            clock.now += 5 * MINUTE
            assert await apns.push(a_push(2)) == Rejected(429, "TooManyProviderTokenUpdates", floor=floor)
            assert await apns.push(a_push(3)) == Accepted()

    tell(story)
    assert [push.token for push in apple.production.journal] == [token_of(n) for n in (1, 2, 3)]
    assert len({push.headers["authorization"] for push in apple.production.journal}) == 1


# The key.


def test_a_key_that_the_secret_holds_by_now_is_used_at_once_and_on_new_connections(apple: Apple) -> None:
    old, new = a_key(), SigningKey(**apple.production.secret())
    apple.sandbox.answer(token_of(9), Ok(), before_checks=True)  # it still takes the old one
    secret = Secret(new)

    async def story() -> None:
        async with client(apple, key=old, secret=secret) as apns:
            assert await push_all(apns, pushes_to(9, environment=SANDBOX)) == {9: Accepted()}
            assert await push_all(apns, pushes_to(*range(1, 51))) == dict.fromkeys(range(1, 51), Accepted())
            assert await push_all(apns, pushes_to(10, environment=SANDBOX)) == {10: Accepted()}

    tell(story)
    assert secret.read == 1
    keys = {(push.connection, key_of(push.headers["authorization"])) for push in apple.production.journal}
    assert keys == {(1, old.key_id), (2, new.key_id)}
    of_sandbox = [(push.connection, key_of(push.headers["authorization"])) for push in apple.sandbox.journal]
    assert of_sandbox == [(1, old.key_id), (2, new.key_id)]


@pytest.mark.parametrize(
    "holds",
    [None, SecretFault("the secret cannot be read"), Unconfigured("the secret is empty")],
    ids=["still the bad one", "nothing that can be read", "nothing"],
)
def test_a_bad_key_gives_way_to_the_last_one_that_was_accepted(
    apple: Apple, holds: SecretFault | Unconfigured | None
) -> None:
    good, bad = SigningKey(**apple.production.secret()), a_key()
    secret = Secret(holds or bad)

    async def story() -> None:
        async with client(apple, key=good, secret=secret) as apns:
            await apns.push(a_push(1))
            await apns.begin(bad)
            assert await push_all(apns, pushes_to(*range(2, 52))) == dict.fromkeys(range(2, 52), Accepted())
            assert secret.read == 1
            await apns.begin(bad)  # the secret holds it still: no reason to try it again
            assert await apns.push(a_push(52)) == Accepted()
            assert secret.read == 1

    tell(story)
    received = [(push.connection, key_of(push.headers["authorization"])) for push in apple.production.journal]
    assert set(received) == {(1, good.key_id), (2, bad.key_id), (3, good.key_id)}
    assert received[-1] == (3, good.key_id)


def test_an_acceptance_that_comes_late_speaks_for_the_key_that_it_was_asked_with() -> None:
    first = Scripted([200], answering=asyncio.Event())
    refused = Scripted([403], body=b'{"reason": "InvalidProviderToken"}')
    bad = a_key()

    async def story() -> None:
        assert first.answering is not None
        apns = over(first, refused, Scripted([200]), secret=Secret(bad))
        pushing = asyncio.create_task(apns.push(a_push(1)))
        await until(lambda: first.tried == 1)
        await apns.begin(bad)
        first.answering.set()
        assert await pushing == Accepted()
        assert await apns.push(a_push(2)) == Accepted()
        await apns.close()

    tell(story)


def test_the_key_that_the_secret_gets_after_a_bad_one_is_used(apple: Apple) -> None:
    good, bad = SigningKey(**apple.production.secret()), a_key()
    with SimulatedApns(authority=apple.production.authority) as rotated:
        third = SigningKey(**rotated.secret())

        async def story() -> None:
            async with client(apple, key=good, secret=Secret(bad), production_url=rotated.url) as apns:
                rotated.answer(token_of(1), Ok(), before_checks=True)
                await apns.push(a_push(1))
                await apns.begin(bad)
                assert await apns.push(a_push(2)) == Rejected(403, "InvalidProviderToken")
                await apns.begin(third)
                assert await apns.push(a_push(3)) == Accepted()

        tell(story)
        assert key_of(rotated.journal[-1].headers["authorization"]) == third.key_id


def test_without_a_good_key_the_secret_is_read_once_a_drain_however_many_are_rejected(apple: Apple) -> None:
    bad = a_key()
    secret = Secret(bad)

    async def story() -> None:
        async with client(apple, key=bad, secret=secret) as apns:
            for drain in (1, 2):
                await apns.begin(bad)
                answers = await push_all(apns, pushes_to(*range(1, 51)))
                assert set(answers.values()) == {Rejected(403, "InvalidProviderToken")}
                assert await apns.push(a_push(51)) == Rejected(403, "InvalidProviderToken")
                assert secret.read == drain

    tell(story)
    assert len(apple.production.journal) == 2 * 51


def test_a_key_that_is_as_bad_as_the_one_before_it_is_tried_once(apple: Apple) -> None:
    secret = Secret(a_key())

    async def story() -> None:
        async with client(apple, key=a_key(), secret=secret) as apns:
            assert await apns.push(a_push(1)) == Rejected(403, "InvalidProviderToken")

    tell(story)
    assert secret.read == 1
    assert len(apple.production.journal) == 2


def test_a_drain_that_begins_with_another_key_has_new_connections(apple: Apple) -> None:
    other = a_key()
    for server in (apple.production, apple.sandbox):
        server.answer_all(Ok(), before_checks=True)

    async def story() -> None:
        async with client(apple) as apns:
            for key in (SigningKey(**apple.production.secret()), other, other):
                await apns.begin(key)
                await push_all(apns, [*pushes_to(1), *pushes_to(2, environment=SANDBOX)])

    tell(story)
    for server in (apple.production, apple.sandbox):
        assert [push.connection for push in server.journal] == [1, 2, 2]
        assert [key_of(push.headers["authorization"]) for push in server.journal[1:]] == [other.key_id] * 2


def test_while_an_old_connection_takes_its_time_to_end_no_other_old_one_carries_the_new_key() -> None:
    """APNs takes a connection for the team's that first pushed on it, and refuses the other's pushes."""
    production, sandbox = Scripted([200], closing=asyncio.Event()), Scripted([200])
    new = Scripted([200])

    async def story() -> None:
        assert production.closing is not None
        apns = over(production, sandbox, new)
        await push_all(apns, [*pushes_to(1), *pushes_to(2, environment=SANDBOX)])
        beginning = asyncio.create_task(apns.begin(a_key()))
        await until(lambda: production.closed == 1)
        assert await apns.push(a_push(3, environment=SANDBOX)) == Accepted()
        production.closing.set()
        await beginning
        await apns.close()

    tell(story)
    assert (sandbox.tried, new.tried) == (1, 1)


def test_the_topic_is_the_one_that_the_push_is_sent_with(apple: Apple) -> None:
    pushes = [
        a_push(1),
        a_push(2, topic="com.example.other"),
        a_push(3, a_delivery(3, push_type="voip")),
    ]
    apple.production.answer_all(Ok(), before_checks=True)
    other = replace(a_key(), topic="com.example.renamed")
    topics: list[str] = []

    async def story() -> None:
        async with client(apple) as apns:
            for key in (SigningKey(**apple.production.secret()), other):
                await apns.begin(key)
                for push in pushes:
                    topics.append(apns.topic(push))
                    await apns.push(push)

    tell(story)
    assert topics == [
        "com.example.app", "com.example.other", "com.example.app.voip",
        "com.example.renamed", "com.example.other", "com.example.renamed.voip",
    ]  # fmt: skip
    assert [push.headers["apns-topic"] for push in apple.production.journal] == topics


# Another transport than ours.


class Stock(httpx.AsyncHTTPTransport):
    """httpx's own, with the one thing that it lacks."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(verify=context, http2=True, http1=False, trust_env=False)

    async def check(self) -> None:
        pass


def test_httpx_s_own_transport_does_it_too(apple: Apple) -> None:
    for server in (apple.production, apple.sandbox):
        server.answer(token_of(3), Reject(410, "Unregistered"))
        server.answer(token_of(4), Hangup())

    async def story() -> None:
        async with client(apple, connect=Stock) as apns:
            assert await apns.push(a_push(1)) == Accepted()
            answers = await push_all(apns, pushes_to(*range(11, 31)) + pushes_to(*range(31, 51), environment=SANDBOX))
            assert set(answers.values()) == {Accepted()}
            assert await apns.push(a_push(3)) == Rejected(410, "Unregistered")
            assert reasons({4: await apns.push(a_push(4))}) == {"connection_lost"}
            assert await apns.push(a_push(5)) == Accepted()

    tell(story)
    assert (apple.production.connections, apple.sandbox.connections) == (2, 1)
    assert {push.body for push in apple.production.journal} == {b'{"aps":{"alert":"Hello"}}'}


def test_httpx_s_own_transport_mends_a_provider_token_on_a_new_connection_too(apple: Apple) -> None:
    secret = Secret(SigningKey(**apple.production.secret()))

    async def story() -> None:
        async with client(apple, connect=Stock, key=a_key(), secret=secret) as apns:
            assert await apns.push(a_push(1)) == Accepted()

    tell(story)
    assert [push.connection for push in apple.production.journal] == [1, 2]


def test_an_apns_that_is_not_there_is_a_failed_connection_to_httpx_s_own_transport_too(apple: Apple) -> None:
    async def story() -> None:
        with TcpProxy(("127.0.0.1", apple.production.port)) as proxy:
            proxy.refuse()
            async with client(apple, connect=Stock, production_url=f"https://127.0.0.1:{proxy.port}") as apns:
                assert reasons(await push_all(apns, pushes_to(1))) == {"connection_failed"}

    tell(story)


# The surroundings.


def test_a_proxy_in_the_environment_is_not_asked(apple: Apple, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    assert pushed(apple, pushes_to(1)) == {1: Accepted()}


def test_certificates_and_host_names_are_checked_from_tls_1_2_on_and_with_http2_alone(apple: Apple) -> None:
    context = tls(str(apple.production.ca_file))

    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) > 1  # one more authority to trust, and not instead of the others
    assert len(context.get_ca_certs()) == len(tls(None).get_ca_certs()) + 1


def test_a_push_with_a_topic_of_its_own_is_sent_for_that_one() -> None:
    with SimulatedApns(topics=frozenset({"com.example.app", "com.example.other"})) as production:
        apple = Apple(production, production)
        voip = replace(a_push(2, topic="com.example.other"), delivery=a_delivery(2, push_type="voip"))

        assert pushed(apple, [a_push(1, topic="com.example.other"), voip, a_push(3)]) == dict.fromkeys(
            (1, 2, 3), Accepted()
        )

        topics = {push.token: push.headers["apns-topic"] for push in production.journal}
        assert topics == {
            token_of(1): "com.example.other",
            token_of(2): "com.example.other.voip",
            token_of(3): "com.example.app",
        }
