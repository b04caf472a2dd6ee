"""The sender against the simulated APNs: real HTTP/2, real TLS, real signatures."""

import asyncio
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from h2.exceptions import ProtocolError

from core.answer import Accepted, Answer, Rejected, Unanswered, Unbegun, Unsendable
from core.apns import Apns, tls, transport
from core.delivery import Environment, Push
from core.provider_token import ProviderToken
from core.secret import SigningKey
from devtools.simulated_apns import Authority, Hangup, Ok, Reject, Reset, Silence, SimulatedApns
from devtools.simulated_apns.connection import Connection
from devtools.simulated_apns.listener import Listener
from devtools.simulated_apns.rules import Request
from tests.support.deliveries import a_delivery, a_push
from tests.support.tcp_proxy import TcpProxy

PATIENCE = 30.0  # for a story; the longest that one push may take is 11 s
LANES = 4
SANDBOX = Environment.SANDBOX


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


@asynccontextmanager
async def client(
    apple: Apple,
    *,
    production_url: str | None = None,
    ca_file: Path | None = None,
    now: Callable[[], float] = time.time,
) -> AsyncIterator[Apns]:
    context = tls(str(ca_file or apple.production.ca_file))
    key = SigningKey(**apple.production.secret())
    apns = Apns(
        urls={
            Environment.PRODUCTION: production_url or apple.production.url,
            Environment.SANDBOX: apple.sandbox.url,
        },
        topic=key.topic,
        token=ProviderToken(key),
        now=now,
        connect=lambda: transport(context),
    )
    try:
        yield apns
    finally:
        await apns.close()


async def always() -> bool:
    return True


async def push_all(
    apns: Apns, pushes: list[Push], may_begin: Callable[[], Awaitable[bool]] = always
) -> dict[int, Answer]:
    """Push, and see that each gets exactly one answer and that no task is left."""
    answers: dict[int, Answer] = {}

    def answered(push: Push, answer: Answer) -> None:
        assert push.delivery.id not in answers, "answered twice"
        answers[push.delivery.id] = answer

    try:
        await apns.push(pushes, may_begin, answered)
    finally:
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert sorted(answers) == sorted(push.delivery.id for push in pushes)
    return answers


async def answers_of(apple: Apple, pushes: list[Push], production_url: str) -> dict[int, Answer]:
    """Push with a new client, in a loop where others have tasks too."""
    answers: dict[int, Answer] = {}
    async with client(apple, production_url=production_url) as apns:
        await apns.push(pushes, always, lambda push, answer: answers.update({push.delivery.id: answer}))
    return answers


async def until(ready: Callable[[], bool]) -> None:
    while not ready():  # noqa: ASYNC110  what is waited for happens in another thread, which tells nobody
        await asyncio.sleep(0.01)


def tell(story: Callable[[], Awaitable[None]]) -> None:
    """Run a story, bounded in time."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await story()

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
    assert pushed(apple, []) == {}
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


# Connections.


def test_there_are_at_most_four_connections_an_environment_and_four_when_there_is_work_for_them(apple: Apple) -> None:
    for server in (apple.production, apple.sandbox):
        server.answer_all(Ok(after=0.02))

    answers = pushed(apple, pushes_to(*range(1, 41)) + pushes_to(*range(101, 121), environment=SANDBOX))

    assert set(answers.values()) == {Accepted()}
    for server, count in ((apple.production, 40), (apple.sandbox, 20)):
        assert server.connections == LANES
        by_connection = Counter(push.connection for push in server.journal)
        assert len(by_connection) == LANES
        assert by_connection.total() == count


def test_on_a_connection_a_push_begins_when_the_one_before_is_answered(apple: Apple) -> None:
    takes = 0.1
    apple.production.answer_all(Ok(after=takes))

    pushed(apple, pushes_to(*range(1, 17)))

    arrivals = defaultdict(list)
    for push in apple.production.journal:
        arrivals[push.connection].append(push.at)
    # The server's timer may fire a clock tick early, and the rest of the way adds to it.
    early = timedelta(milliseconds=5)
    assert all(
        later - earlier >= timedelta(seconds=takes) - early
        for times in arrivals.values()
        for earlier, later in pairwise(sorted(times))
    )


def test_no_more_connections_are_opened_than_there_are_pushes(apple: Apple) -> None:
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
            pushes = pushes_to(*range(1, 9)) + pushes_to(*range(11, 19), environment=SANDBOX)
            pushing = asyncio.create_task(apns.push(pushes, always, lambda _push, _answer: None))
            await asyncio.to_thread(apple.sandbox.wait_for_pushes, 8, PATIENCE)
            assert len(apple.production.journal) <= LANES  # none of them was given up before
            pushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pushing

    tell(story)


def test_connections_are_kept_from_one_drain_to_the_next(apple: Apple) -> None:
    async def story() -> None:
        async with client(apple) as apns:
            for _ in range(3):
                assert set((await push_all(apns, pushes_to(*range(1, 9)))).values()) == {Accepted()}
            assert apple.production.connections == LANES

    tell(story)


def test_closing_ends_every_connection_and_a_later_push_opens_new_ones(apple: Apple) -> None:
    async def story() -> None:
        with TcpProxy(("127.0.0.1", apple.production.port)) as proxy:
            async with client(apple, production_url=f"https://127.0.0.1:{proxy.port}") as apns:
                await push_all(apns, pushes_to(*range(1, 9)))
                assert proxy.count == LANES
                await apns.close()
                await until(lambda: proxy.count == 0)
                assert await push_all(apns, pushes_to(9)) == {9: Accepted()}
            await until(lambda: proxy.count == 0)

    tell(story)


@pytest.mark.parametrize("awake", [True, False], ids=["while we were awake", "while we were frozen"])
def test_a_connection_that_was_closed_between_two_drains_is_replaced_without_a_word(
    apple: Apple, *, awake: bool
) -> None:
    with TcpProxy(("127.0.0.1", apple.production.port)) as proxy, asyncio.Runner() as runner:
        apns_of = client(apple, production_url=f"https://127.0.0.1:{proxy.port}")
        apns = runner.run(apns_of.__aenter__())
        assert runner.run(push_all(apns, pushes_to(1, 2, 3, 4))) == dict.fromkeys((1, 2, 3, 4), Accepted())

        proxy.cut()
        if awake:
            runner.run(asyncio.sleep(0.1))  # the loop learns of it now, and not from the next push
        again = runner.run(push_all(apns, pushes_to(5, 6, 7, 8)))
        runner.run(apns_of.__aexit__(None, None, None))

    assert again == dict.fromkeys((5, 6, 7, 8), Accepted())
    assert Counter(push.token for push in apple.production.journal).most_common(1)[0][1] == 1
    assert apple.production.connections == 2 * LANES


def test_a_connection_that_was_closed_is_replaced_once_and_not_over_and_over(apple: Apple) -> None:
    async def story() -> None:
        with TcpProxy(("127.0.0.1", apple.production.port)) as proxy:
            async with client(apple, production_url=f"https://127.0.0.1:{proxy.port}") as apns:
                await push_all(apns, pushes_to(1))
                proxy.refuse()
                proxy.cut()
                (answer,) = (await push_all(apns, pushes_to(2))).values()
                assert isinstance(answer, Unanswered)
                assert answer.reason == "connection_failed"
                proxy.resume()
                assert await push_all(apns, pushes_to(3)) == {3: Accepted()}

    tell(story)


@dataclass(slots=True)
class Quiet:
    """The network stream of a connection on which nothing waits to be read, as far as anybody can see."""

    def get_extra_info(self, info: str) -> object:
        return False if info == "is_readable" else None


@dataclass(slots=True)
class Brittle(httpx.AsyncBaseTransport):
    """A connection that accepts so many pushes, and then nothing can be written to it any more."""

    accepts: int
    tried: int = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:  # noqa: ARG002  httpx's signature
        self.tried += 1
        if self.tried > self.accepts:
            raise httpx.WriteError("broken pipe")
        return httpx.Response(200, stream=httpx.ByteStream(b""), extensions={"network_stream": Quiet()})


@pytest.mark.parametrize(
    ("first", "second", "answers", "tried"),
    [
        pytest.param(1, 1, [Accepted(), Accepted()], [2, 1], id="the new connection takes it"),
        pytest.param(1, 0, [Accepted(), "connection_lost"], [2, 1], id="nor does the new one: no third"),
        pytest.param(0, 1, ["connection_lost", Accepted()], [1, 1], id="a connection that was new already"),
    ],
)
def test_what_an_old_connection_did_not_take_is_sent_on_a_new_one_since_apns_has_nothing_of_it(
    apple: Apple, first: int, second: int, answers: list[Accepted | str], tried: list[int]
) -> None:
    connections = [Brittle(first), Brittle(second)]
    opened = iter(connections)
    key = SigningKey(**apple.production.secret())
    apns = Apns(
        urls={Environment.PRODUCTION: "https://127.0.0.1:1"},
        topic=key.topic,
        token=ProviderToken(key),
        now=time.time,
        connect=lambda: next(opened),
    )
    said: list[Accepted | str] = []

    async def story() -> None:
        for number in (1, 2):
            (answer,) = (await push_all(apns, pushes_to(number))).values()
            assert isinstance(answer, Accepted | Unanswered)
            said.append(answer.reason if isinstance(answer, Unanswered) else answer)
        await apns.close()

    tell(story)
    assert said == answers
    assert [connection.tried for connection in connections] == tried


@pytest.mark.parametrize("status", [500, 503, 599])
def test_a_connection_is_not_used_again_after_a_5xx(apple: Apple, status: int) -> None:
    apple.production.answer(token_of(1), Reject(status, "InternalServerError"), Ok())

    async def story() -> None:
        async with client(apple) as apns:
            assert await push_all(apns, pushes_to(1)) == {1: Rejected(status, "InternalServerError")}
            assert await push_all(apns, pushes_to(2)) == {2: Accepted()}

    tell(story)
    assert [push.connection for push in apple.production.journal] == [1, 2]


@pytest.mark.parametrize(
    ("status", "reason"), [(400, "BadDeviceToken"), (410, "Unregistered"), (429, "TooManyRequests")]
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
    "fault",
    [
        Hangup(),
        Hangup(received=True),
        Hangup(received=True, after=0.1),
        Reset(0),
        Reset(2),  # INTERNAL_ERROR
        Reset(7),  # REFUSED_STREAM
        Reset(8, after=0.1),  # CANCEL
        Reset(11),  # ENHANCE_YOUR_CALM
    ],
    ids=repr,
)
def test_a_push_whose_answer_is_lost_is_unanswered_and_the_others_go_on(apple: Apple, fault: Hangup | Reset) -> None:
    apple.production.answer(token_of(3), fault)

    answers = pushed(apple, pushes_to(*range(1, 13)))

    lost = answers.pop(3)
    assert isinstance(lost, Unanswered)
    assert lost.reason == "connection_lost"
    assert set(answers.values()) == {Accepted()}
    assert len([push for push in apple.production.journal if push.token == token_of(3)]) <= 1  # never sent again


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
            async with client(apple, production_url=f"https://127.0.0.1:{proxy.port}") as apns:
                answers = await push_all(apns, pushes_to(1, 2, 3, 4, 5))
        assert {answer.reason for answer in answers.values() if isinstance(answer, Unanswered)} == {"connection_failed"}
        assert len(answers) == 5

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
    """All at once, since each takes its time: 3 s to connect, 8 s for an answer to begin, 11 s in all."""
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
        assert ends == [unconnected, silent, unended]
        assert reasons(unconnected.result()) == {"connection_failed"}
        assert reasons(unended.result()) == {"timeout"}
        answers = silent.result()
        assert reasons({number: answers.pop(number) for number in (1, 11)}) == {"timeout"}
        assert answers == dict.fromkeys(range(2, 9), Accepted())  # one that waits holds up its own connection only

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
        again = runner.run(push_all(apns, pushes_to(2)))
        runner.run(apns_of.__aexit__(None, None, None))

    assert again == {2: Accepted()}
    assert server.requests == [1, 2]


def test_after_silence_the_connection_is_a_new_one_and_its_late_answer_reaches_nobody(apple: Apple) -> None:
    apple.production.answer(token_of(1), Ok(after=60))

    async def story() -> None:
        async with client(apple) as apns:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):  # the drain's own end: the invocation's time is up
                    await push_all(apns, pushes_to(1))
            assert await push_all(apns, pushes_to(2)) == {2: Accepted()}

    tell(story)
    assert [push.connection for push in apple.production.journal] == [1, 2]


# Whether a push may begin.


def test_what_may_not_begin_is_unbegun_and_apns_never_hears_of_it(apple: Apple) -> None:
    async def story() -> None:
        left = 6

        async def may_begin() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        async with client(apple) as apns:
            answers = await push_all(apns, pushes_to(*range(1, 21)), may_begin)
        assert Counter(type(answer) for answer in answers.values()) == {Accepted: 6, Unbegun: 14}
        assert {push.token for push in apple.production.journal} == {
            token_of(number) for number, answer in answers.items() if answer == Accepted()
        }

    tell(story)


def test_it_asks_before_each_push_and_not_before_all_of_them(apple: Apple) -> None:
    """An answer that comes late must find the question still open."""
    apple.production.answer_all(Ok(after=0.1))
    asked_when_answered: list[tuple[int, int]] = []

    async def story() -> None:
        asked = 0

        async def may_begin() -> bool:
            nonlocal asked
            asked += 1
            return True

        answered: list[int] = []

        def take(push: Push, _: Answer) -> None:
            answered.append(push.delivery.id)
            asked_when_answered.append((len(answered), asked))

        async with client(apple) as apns:
            await apns.push(pushes_to(*range(1, 13)), may_begin, take)

    tell(story)
    assert all(asked <= answered - 1 + LANES for answered, asked in asked_when_answered)


def test_what_the_question_raises_ends_the_pushing_and_cancels_the_rest(apple: Apple) -> None:
    apple.production.answer_all(Silence())

    async def story() -> None:
        asked = 0

        async def may_begin() -> bool:
            nonlocal asked
            asked += 1
            if asked > 3:
                await asyncio.to_thread(apple.production.wait_for_pushes, 3, PATIENCE)
                raise ZeroDivisionError
            return True

        async with client(apple) as apns:
            with pytest.raises(ZeroDivisionError):
                await push_all(apns, pushes_to(*range(1, 13)), may_begin)
            assert len(apple.production.journal) == 3
            apple.production.answer_all(Ok())
            assert await push_all(apns, pushes_to(21, 22)) == {21: Accepted(), 22: Accepted()}

    tell(story)


def test_pushing_that_is_cancelled_leaves_neither_a_task_nor_a_connection_in_doubt(apple: Apple) -> None:
    apple.production.answer_all(Silence())

    async def story() -> None:
        async with client(apple) as apns:
            pushing = asyncio.create_task(apns.push(pushes_to(*range(1, 13)), always, lambda _push, _answer: None))
            await asyncio.to_thread(apple.production.wait_for_pushes, LANES, PATIENCE)
            pushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pushing
            assert asyncio.all_tasks() == {asyncio.current_task()}
            apple.production.answer_all(Ok())
            assert set((await push_all(apns, pushes_to(*range(21, 25)))).values()) == {Accepted()}
            assert {push.connection for push in apple.production.journal[LANES:]}.isdisjoint(
                push.connection for push in apple.production.journal[:LANES]
            )

    tell(story)


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


def test_a_token_that_is_not_hex_and_can_be_sent_is_for_apns_to_judge(apple: Apple) -> None:
    assert pushed(apple, [a_push(1, token="naïve"), *pushes_to(2)]) == {
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


def test_the_provider_token_is_as_old_as_the_clock_says(apple: Apple) -> None:
    two_hours_ago = time.time() - 7200

    async def story() -> None:
        async with client(apple, now=lambda: two_hours_ago) as apns:
            assert await push_all(apns, pushes_to(1)) == {1: Rejected(403, "ExpiredProviderToken")}

    tell(story)


def test_another_key_than_apples_is_told_so(apple: Apple) -> None:
    with SimulatedApns(authority=apple.production.authority) as stranger:

        async def story() -> None:
            async with client(apple, production_url=stranger.url) as apns:
                assert await push_all(apns, pushes_to(1)) == {1: Rejected(403, "InvalidProviderToken")}

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
