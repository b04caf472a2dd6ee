"""The connection to APNs on the wire, against servers that do just what each test says."""

import asyncio
import gc
import itertools
import math
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
from hpack.struct import NeverIndexedHeaderTuple
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

import core.transport
from core.http2 import ErrorCode
from core.transport import (
    AnswerTimeout,
    ApnsTransport,
    BadAnswer,
    ConnectionFailed,
    ConnectionLost,
    NotBegun,
    NotProcessed,
    NotSendable,
    OutcomeUnknown,
    Refused,
    StreamReset,
)
from tests.support.wire_server import Peer, Request, Script, Tap, WireServer, answer_all, trusting

DEVICE_TOKEN = "c0ffee" * 10
PROVIDER_TOKEN = "bearer " + "x" * 190

type Outcome = int | httpx.TransportError


def request(url: str, number: int = 0, body: bytes = b'{"aps":{}}') -> httpx.Request:
    return httpx.Request(
        "POST",
        f"{url}/3/device/{DEVICE_TOKEN}{number:04}",
        headers={"apns-topic": "com.example.app", "authorization": PROVIDER_TOKEN},
        content=body,
    )


def number_of(request: Request) -> int:
    return int(request.path[-4:])


async def push(transport: ApnsTransport, url: str, number: int = 0, body: bytes = b'{"aps":{}}') -> Outcome:
    try:
        return (await transport.handle_async_request(request(url, number, body))).status_code
    except (NotProcessed, OutcomeUnknown) as error:
        outcome = error
    assert outcome.reason
    for secret in (DEVICE_TOKEN, "/3/device", "xxx", "localhost"):
        assert secret not in f"{outcome!r} {outcome}"
    return outcome


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  what happens in asyncio's own time sets no event of ours
        await asyncio.sleep(0)


async def pushes(transport: ApnsTransport, url: str, numbers: Sequence[int]) -> list[Outcome]:
    return await asyncio.gather(*(push(transport, url, number) for number in numbers))


def kinds(outcomes: Sequence[Outcome]) -> Counter[int | type]:
    return Counter(outcome if isinstance(outcome, int) else type(outcome) for outcome in outcomes)


@asynccontextmanager
async def apns(**options: Any) -> AsyncIterator[ApnsTransport]:  # noqa: ANN401  the options are ApnsTransport's
    transport = ApnsTransport(ssl_context=trusting(), **options)
    try:
        yield transport
    finally:
        await transport.aclose()
        assert not transport._waiting
        assert not transport._links
        assert transport._connecting is None


def run(story: Awaitable[None]) -> None:
    """Run a test's story. Far beyond all its deadlines there is one that only a hang meets."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await story

    asyncio.run(bounded())


def scripted(script: Script) -> Callable[[Callable[[WireServer], Awaitable[None]]], None]:
    """Run a story against a server with this script."""

    def of(story: Callable[[WireServer], Awaitable[None]]) -> None:
        async def both() -> None:
            async with WireServer(script) as server:
                await story(server)

        run(both())

    return of


# 1. One connection, many pushes.


def test_a_batch_costs_two_round_trips_on_one_connection_and_the_second_goes_in_one_write() -> None:
    async def script(peer: Peer) -> None:
        await peer.preface()
        # APNs says nothing before it has the first push: so this did not cost a round trip of its own.
        proof = await peer.request()
        peer.settings(max_concurrent_streams=1)
        peer.answer(proof)
        await peer.until(SettingsFrame)
        peer.settings(max_concurrent_streams=1000)
        # Nothing is answered before all are there: so they did not wait for each other.
        for rest in await peer.requests(49):
            peer.answer(rest)
        tap.records.clear()
        for warm in await peer.requests(50):
            peer.answer(warm)
        await peer.end()

    tap: Tap

    async def story() -> None:
        nonlocal tap
        async with WireServer(script) as server, Tap(server.port) as tap, apns() as transport:
            assert kinds(await pushes(transport, tap.url, range(50))) == {200: 50}
            await until(lambda: not tap.records)  # the script is at the second batch
            assert kinds(await pushes(transport, tap.url, range(50))) == {200: 50}
            octets = sum(tap.records) - 17 * len(tap.records)  # TLS 1.3 adds a type and a tag to each
            assert octets > 50 * len(DEVICE_TOKEN)
            # A record holds 16 KiB at most. One write each would have been 50 records, or more.
            assert len(tap.records) == math.ceil(octets / 16384)
            assert len(server.peers) == 1

    run(story())


def test_one_push_goes_first_until_the_server_says_how_many_it_allows() -> None:
    async def script(peer: Peer) -> None:
        await peer.preface()
        proof = await peer.request()
        peer.settings()
        await peer.until(SettingsFrame)
        assert not [f for f in peer.frames if isinstance(f, HeadersFrame) and f.stream_id > proof.stream_id]
        peer.answer(proof)
        for rest in await peer.requests(9):
            peer.answer(rest)
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert kinds(await pushes(transport, server.url, range(10))) == {200: 10}


def test_a_limit_lowered_below_what_is_under_way_delays_what_has_not_begun_and_nothing_else() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=20)
        under_way = await peer.requests(20)
        peer.settings(max_concurrent_streams=1)
        peer.answer(under_way[0], 400, b'{"reason":"BadDeviceToken"}')
        for one in under_way[1:]:
            peer.answer(one)
        # The rest one by one: nobody hurries before the one is answered.
        for _ in range(10):
            one = await peer.request()
            peer.send(PingFrame(0, b"are you?"))
            while not isinstance(frame := await peer.frame(), PingFrame):
                assert not isinstance(frame, HeadersFrame)
            peer.answer(one)
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(max_connections=1) as transport:
            assert kinds(await pushes(transport, server.url, range(30))) == {200: 29, 400: 1}
            assert len(server.peers) == 1


def test_a_limit_of_0_is_waited_out() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=1)
        proof = await peer.request()
        peer.settings(max_concurrent_streams=0)
        peer.answer(proof)
        await peer.until(SettingsFrame)
        await peer.until(SettingsFrame)
        peer.send(PingFrame(0, b"and now?"))
        await peer.until(PingFrame)
        assert len([frame for frame in peer.frames if isinstance(frame, HeadersFrame)]) == 1
        peer.settings(max_concurrent_streams=100)
        for rest in await peer.requests(9):
            peer.answer(rest)
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(max_connections=1) as transport:
            assert kinds(await pushes(transport, server.url, range(10))) == {200: 10}


def test_a_limit_of_0_for_ever_means_surely_not_processed() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=0)
        await peer.end()
        assert not [frame for frame in peer.frames if isinstance(frame, HeadersFrame) and frame.stream_id > 1]

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(connect_seconds=1, answer_seconds=0.5) as transport:
            outcomes = await pushes(transport, server.url, range(5))
            # The first went along with the preface, before the server had said anything.
            assert kinds(outcomes) == {NotBegun: 4, AnswerTimeout: 1}
            assert not transport._waiting  # where a later stream could find them


def test_more_streams_than_one_connection_allows_make_a_second_one_and_no_third() -> None:
    held: list[tuple[Peer, Request]] = []
    both = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=3)
        if peer.number == 0:
            peer.answer(await peer.request())
        while True:
            held.append((peer, await peer.request()))
            if len(held) == 6:
                both.set()
            if both.is_set():
                for its, one in held:
                    its.answer(one)
                held.clear()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert kinds(await pushes(transport, server.url, range(40))) == {200: 40}
            assert len(server.peers) == 2


def test_where_no_second_connection_can_be_made_one_does_it_and_the_next_invocation_tries_again() -> None:
    async def script(peer: Peer) -> None:
        await answer_all(peer, max_concurrent_streams=2)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert await push(transport, server.url) == 200
            server._server.close()
            assert kinds(await pushes(transport, server.url, range(10))) == {200: 10}
            await until(lambda: transport._connecting is None)
            async with WireServer(script, port=server.port) as again:
                assert kinds(await pushes(transport, server.url, range(10))) == {200: 10}
                assert transport._connecting is None
                await transport.check()
                assert kinds(await pushes(transport, server.url, range(10))) == {200: 10}
                await until(lambda: bool(again.peers))
                await transport.aclose()


def test_a_connection_that_has_answered_nothing_yet_is_no_reason_for_another() -> None:
    @scripted(lambda peer: answer_all(peer, max_concurrent_streams=1000))
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert kinds(await pushes(transport, server.url, range(100))) == {200: 100}
            assert len(server.peers) == 1


def test_a_body_larger_than_the_window_goes_in_parts() -> None:
    body = b'{"aps":"' + b"x" * 100 + b'"}'

    # The window has to be known before the push begins, so one goes before it.
    async def script(peer: Peer) -> None:
        await peer.greet(initial_window_size=60, max_concurrent_streams=10)
        peer.answer(await peer.request())
        await peer.until(HeadersFrame)
        assert len((await peer.until(DataFrame)).data) == 60
        peer.settings(initial_window_size=70)
        assert len((await peer.until(DataFrame)).data) == 10
        peer.send(WindowUpdateFrame(3, window_increment=1000))
        last = await peer.until(DataFrame)
        assert len(last.data) == len(body) - 70
        assert "END_STREAM" in last.flags
        peer.send(HeadersFrame(3, b"\x88", flags=("END_HEADERS", "END_STREAM")))
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert await push(transport, server.url) == 200
            assert await push(transport, server.url, 1, body) == 200


def test_what_the_server_s_window_never_let_through_was_surely_not_processed() -> None:
    @scripted(lambda peer: answer_all(peer, initial_window_size=20, max_concurrent_streams=2))
    async def _(server: WireServer) -> None:
        async with apns(answer_seconds=0.5) as transport:
            assert await push(transport, server.url) == 200
            stuck, passed = await asyncio.gather(
                push(transport, server.url, 1, b"x" * 21), push(transport, server.url, 2, b"x" * 20)
            )
            assert isinstance(stuck, NotBegun)
            assert passed == 200


def test_a_changed_header_table_size_changes_nothing() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(header_table_size=100)
        for size in (0, 65536, 0, 10):
            one = await peer.request()
            peer.settings(header_table_size=size)
            await peer.until(SettingsFrame)
            peer.decoder.max_allowed_table_size = size
            peer.answer(one)
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            for number in range(4):
                assert await push(transport, server.url, number) == 200


# 2. Whatever the other side does.


def test_goaway_sends_what_lay_above_again_at_once_and_awaits_what_lay_below() -> None:
    reasons: list[str] = []
    elsewhere = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        if peer.number == 1:
            for again in await peer.requests(6):
                peer.answer(again)
            elsewhere.set()
            return await peer.end()
        peer.answer(await peer.request())
        under_way = await peer.requests(10)
        peer.go_away(under_way[3].stream_id, debug=b'{"reason":"Shutdown"}')
        # Only when the others have their answers from elsewhere.
        await elsewhere.wait()
        for below in under_way[:3]:
            peer.answer(below)
        return await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(answer_seconds=2, on_goaway=reasons.append) as transport:
            assert await push(transport, server.url) == 200
            outcomes = await pushes(transport, server.url, range(10))
            assert kinds(outcomes) == {200: 9, AnswerTimeout: 1}
            assert isinstance(outcomes[3], AnswerTimeout)
            assert reasons == ["Shutdown"]
            assert len(server.peers) == 2


def test_goaway_with_last_stream_id_0_on_a_new_connection_costs_nothing() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        if peer.number < 2:
            await peer.request()
            peer.go_away(0)
            return await peer.end()
        for one in await peer.requests(10):
            order.append(number_of(one))
            peer.answer(one)
        return await peer.end()

    order: list[int] = []

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert kinds(await pushes(transport, server.url, range(10))) == {200: 10}
            assert len(server.peers) == 3
            assert order == list(range(10))  # what was sent back has waited longest


async def answer_rest(peer: Peer) -> None:
    while True:
        peer.answer(await peer.request())


def test_a_server_that_always_says_goaway_is_not_asked_for_ever() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.request()
        peer.go_away(0, ErrorCode.ENHANCE_YOUR_CALM)
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert kinds(await pushes(transport, server.url, range(50))) == {ConnectionFailed: 50}
            assert len(server.peers) == core.transport.FRUITLESS


def test_the_reason_of_a_goaway_may_be_anything() -> None:
    said = [b"", b"\xff\x00tired\n", b'{"reason":' + b"9" * 300 + b"}", b"[" * 5000, b"[1]"]
    heard: list[str] = []

    async def script(peer: Peer) -> None:
        await peer.greet()
        peer.answer(await peer.request())
        peer.go_away(1, 11, said[peer.number])
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(on_goaway=heard.append) as transport:
            for number in range(len(said)):
                assert await push(transport, server.url) == 200
                await until(lambda: len(heard) > number)  # noqa: B023  not beyond this turn
        assert heard[:2] == ["ENHANCE_YOUR_CALM", "\ufffdtired"]
        assert all(0 < len(reason) <= 100 for reason in heard)


def test_a_refused_stream_goes_again_once() -> None:
    refused: Counter[int] = Counter()

    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        while True:
            one = await peer.request()
            number = number_of(one)
            refused[number] += 1
            if number == 3 or (number == 5 and refused[number] == 1):
                peer.send(RstStreamFrame(one.stream_id, error_code=ErrorCode.REFUSED_STREAM))
            else:
                peer.answer(one)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            outcomes = await pushes(transport, server.url, range(10))
            assert kinds(outcomes) == {200: 9, Refused: 1}
            assert isinstance(outcomes[3], Refused)
            assert (refused[3], refused[5], refused[4]) == (2, 2, 1)


def test_a_reset_is_that_push_s_alone_and_its_outcome_unknown() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        while True:
            one = await peer.request()
            match number_of(one):
                case 1:
                    peer.send(RstStreamFrame(one.stream_id, error_code=ErrorCode.INTERNAL_ERROR))
                case 2:
                    peer.send(RstStreamFrame(one.stream_id, error_code=12345))
                case 3:  # accepted, and then it had no more to say
                    peer.send(HeadersFrame(one.stream_id, b"\x88", flags=("END_HEADERS",)))
                    peer.send(RstStreamFrame(one.stream_id, error_code=ErrorCode.NO_ERROR))
                case 4:  # refused after it had begun to answer: not a refusal that promises anything
                    peer.send(HeadersFrame(one.stream_id, b"\x8c", flags=("END_HEADERS",)))
                    peer.send(RstStreamFrame(one.stream_id, error_code=ErrorCode.REFUSED_STREAM))
                case _:
                    peer.answer(one)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            outcomes = await pushes(transport, server.url, range(10))
            assert kinds(outcomes) == {200: 7, StreamReset: 3}
            assert "INTERNAL_ERROR" in str(outcomes[1])
            assert "12345" in str(outcomes[2])
            assert outcomes[3] == 200
            assert len(server.peers) == 1


@pytest.mark.parametrize("leave", [Peer.close, Peer.cut])
def test_a_lost_connection_is_the_loss_of_what_was_sent_on_it_only(leave: Callable[[Peer], None]) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=5)
        if peer.number:
            return await answer_rest(peer)
        peer.answer(await peer.request())
        for one in (await peer.requests(5))[:2]:
            peer.answer(one)
        await peer.drain()
        return leave(peer)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(max_connections=1) as transport:
            assert await push(transport, server.url) == 200
            outcomes = kinds(await pushes(transport, server.url, range(20)))
            assert outcomes[ConnectionLost] in range(3, 6)  # those that took the places of the answered, perhaps
            assert outcomes[200] + outcomes[ConnectionLost] == 20


@pytest.mark.parametrize("end", ["abort", "lose"])
def test_what_was_not_written_yet_when_the_connection_ended_goes_on_another_and_only_there(end: str) -> None:
    @scripted(answer_all)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert await push(transport, server.url) == 200
            [link] = transport._links
            unwritten = asyncio.create_task(push(transport, server.url))
            await asyncio.sleep(0)
            assert link.pushes
            # In the same turn of the loop, so before the write.
            if end == "abort":
                link._transport.abort()
            else:
                link.lose(ConnectionLost("It broke the protocol."))
            assert await unwritten == 200
            assert len(server.peers) == 2
            await until(lambda: len(server._tasks) == 1)  # the first peer has read all there was
            assert [sum(isinstance(frame, HeadersFrame) for frame in peer.frames) for peer in server.peers] == [1, 1]


def test_nothing_begins_while_the_server_takes_nothing() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=1000, initial_window_size=1 << 20)
        peer.send(WindowUpdateFrame(0, window_increment=1 << 30))
        peer.answer(await peer.request())
        peer._writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(answer_seconds=1, connect_seconds=1, max_connections=1) as transport:
            assert await push(transport, server.url) == 200
            tasks = []
            for number in range(300):
                tasks.append(asyncio.create_task(push(transport, server.url, number, bytes(100_000))))
                for _ in range(3):
                    await asyncio.sleep(0)
            [link] = transport._links
            assert link._transport.get_write_buffer_size() < 2 << 20
            assert len(link.pushes) < 200
            # The others had another connection, when this one had been silent for too long.
            assert ConnectionLost not in kinds(await asyncio.gather(*tasks))


def test_a_silent_connection_is_given_up_and_the_next_push_has_a_new_one() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        if peer.number == 0:
            peer.answer(await peer.request())
            return await peer.end()
        return await answer_rest(peer)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(answer_seconds=0.4) as transport:
            assert await push(transport, server.url) == 200
            assert kinds(await pushes(transport, server.url, range(5))) == {AnswerTimeout: 5}
            assert kinds(await pushes(transport, server.url, range(5))) == {200: 5}
            assert len(server.peers) == 2
            # It was left properly: every stream given up, and then the connection.
            await asyncio.sleep(0)
            frames = server.peers[0].frames
            assert len([frame for frame in frames if isinstance(frame, RstStreamFrame)]) == 5
            assert isinstance(frames[-1], GoAwayFrame)


def test_one_push_without_an_answer_on_a_connection_that_lives_costs_nobody_else_anything() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        while True:
            one = await peer.request()
            if number_of(one) != 3:
                peer.answer(one)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(answer_seconds=0.4) as transport:
            outcomes = await pushes(transport, server.url, range(10))
            assert isinstance(outcomes[3], AnswerTimeout)
            assert kinds(outcomes) == {200: 9, AnswerTimeout: 1}
            assert await push(transport, server.url) == 200
            assert len(server.peers) == 1


def test_a_server_that_never_speaks_tls_is_a_failed_connection() -> None:
    async def story() -> None:
        silence = asyncio.Event()
        taken: list[asyncio.StreamWriter] = []

        async def attend(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken.append(writer)
            await silence.wait()
            writer.close()

        async with await asyncio.start_server(attend, "127.0.0.1", 0) as server:
            url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
            async with apns(connect_seconds=0.3) as transport:
                outcomes = await pushes(transport, url, range(5))
                assert kinds(outcomes) == {ConnectionFailed: 5}
                assert "within 0.3 s" in str(outcomes[0])
                assert len(taken) == 1
            silence.set()

    run(story())


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x16\x03\x01", b""])
def test_a_server_that_speaks_something_else_than_tls_is_a_failed_connection(said: bytes) -> None:
    async def script(peer: Peer) -> None:
        peer.send(said)
        await peer.drain()
        peer.close()

    async def story() -> None:
        async with WireServer(script, tls=False) as server, apns() as transport:
            assert kinds(await pushes(transport, server.url, range(5))) == {ConnectionFailed: 5}

    run(story())


def test_a_server_that_never_says_settings_is_given_up_when_connecting_should_be_done() -> None:
    async def script(peer: Peer) -> None:
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(connect_seconds=1, answer_seconds=20) as transport:
            outcomes = await pushes(transport, server.url, range(5))
            assert kinds(outcomes) == {AnswerTimeout: 1, ConnectionFailed: 4}
            assert isinstance(outcomes[0], AnswerTimeout)


def test_headers_without_an_end_are_an_answer_only_if_they_say_200() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        while True:
            one = await peer.request()
            match number_of(one):
                case 1:
                    peer.send(HeadersFrame(one.stream_id, b"\x88", flags=("END_HEADERS",)))
                case 2:
                    peer.send(HeadersFrame(one.stream_id, b"\x8c", flags=("END_HEADERS",)))
                    peer.send(DataFrame(one.stream_id, b'{"reason":"Bad'))
                case _:
                    peer.answer(one)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(answer_seconds=0.4) as transport:
            outcomes = await pushes(transport, server.url, range(5))
            assert outcomes[1] == 200
            assert isinstance(outcomes[2], AnswerTimeout)
            assert kinds(outcomes) == {200: 4, AnswerTimeout: 1}
            assert len(server.peers) == 1


def test_continuations_padding_trailers_and_interim_answers_end_in_the_one_answer() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        one, two, three = [await peer.request() for _ in range(3)]
        peer.send(
            HeadersFrame(one.stream_id, b"\x08\x03103\x00\x01x\x01y", flags=("END_HEADERS",)),
            HeadersFrame(one.stream_id, b"\x08\x03400", pad_length=9, flags=("PADDED",)),
            *[ContinuationFrame(one.stream_id, octet) for octet in (b"\x00", b"\x01x", b"\x01")],
            ContinuationFrame(one.stream_id, b"y", flags=("END_HEADERS",)),
            HeadersFrame(two.stream_id, b"\x08\x03100", flags=("END_HEADERS",)),
            DataFrame(one.stream_id, b'{"reason"', pad_length=200, flags=("PADDED",)),
            HeadersFrame(two.stream_id, b"\x88", flags=("END_HEADERS",)),
            DataFrame(one.stream_id, b':"BadTopic"}'),
            HeadersFrame(one.stream_id, b"\x00\x04late\x01x", flags=("END_HEADERS", "END_STREAM")),
            DataFrame(two.stream_id, b"", flags=("END_STREAM",)),
        )
        peer.answer(three)
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            responses = await asyncio.gather(
                *(transport.handle_async_request(request(server.url, number)) for number in range(3))
            )
            assert [response.status_code for response in responses] == [400, 200, 200]
            assert responses[0].headers["x"] == "y"
            assert responses[0].content == await responses[0].aread() == b'{"reason":"BadTopic"}'
            assert responses[0].json() == {"reason": "BadTopic"}
            assert responses[1].content == b""
            assert responses[0].extensions["http_version"] == b"HTTP/2"


@pytest.mark.parametrize(
    "nonsense",
    [
        PushPromiseFrame(3, promised_stream_id=2, data=b"\x82"),
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\n\r\n",
        HeadersFrame(3, b"\xff" * 10, flags=("END_HEADERS",)),
        HeadersFrame(99, b"\x88", flags=("END_HEADERS", "END_STREAM")),
        SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 2**31}),
    ],
)
def test_a_broken_protocol_ends_that_connection_and_what_waits_has_another(nonsense: Frame | bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=5)
        if peer.number:
            return await answer_rest(peer)
        peer.answer(await peer.request())
        await peer.requests(5)
        peer.send(nonsense)
        await peer.end()
        [goaway] = [frame for frame in peer.frames if isinstance(frame, GoAwayFrame)]
        assert goaway.error_code != ErrorCode.NO_ERROR
        return None

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(max_connections=1) as transport:
            assert await push(transport, server.url) == 200
            outcomes = await pushes(transport, server.url, range(20))
            assert kinds(outcomes) == {ConnectionLost: 5, 200: 15}
            assert "broke the protocol" in str(outcomes[0])
            assert len(server.peers) == 2


def test_an_answer_that_makes_no_sense_is_that_push_s_alone() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        while True:
            one = await peer.request()
            if number_of(one) == 3:
                peer.send(DataFrame(one.stream_id, b"200", flags=("END_STREAM",)))
            else:
                peer.answer(one)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            outcomes = await pushes(transport, server.url, range(10))
            assert kinds(outcomes) == {200: 9, BadAnswer: 1}
            assert len(server.peers) == 1


def test_a_body_of_a_gigabyte_is_an_answer_by_its_status_and_is_not_read() -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.greet(max_concurrent_streams=100)
        large = await peer.request()
        peer.send(HeadersFrame(large.stream_id, b"\x08\x03403", flags=("END_HEADERS",)))
        # As much as the windows allow, and then a bit of what they do not.
        while sent < 65535:
            part = bytes(min(16384, 65535 - sent))
            peer.send(DataFrame(large.stream_id, part))
            sent += len(part)
        reset = await peer.until(RstStreamFrame)
        assert (reset.stream_id, reset.error_code) == (large.stream_id, ErrorCode.CANCEL)
        peer.send(DataFrame(large.stream_id, bytes(1000)))
        await answer_rest(peer)

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            response = await transport.handle_async_request(request(server.url))
            assert response.status_code == 403
            assert response.content == bytes(65535)
            assert kinds(await pushes(transport, server.url, range(5))) == {200: 5}
            assert len(server.peers) == 1


def test_a_server_that_asks_and_never_listens_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.transport, "MOST_UNSENT", 1 << 20)

    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        if peer.number:
            return await answer_rest(peer)
        peer.answer(await peer.request())
        await peer.request()
        peer._reader._limit = 1  # type: ignore[attr-defined]  # asyncio then reads no more from the socket
        while True:
            peer.send(PingFrame(0, b"12345678").serialize() * 1000)
            await peer.drain()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(max_connections=1) as transport:
            assert await push(transport, server.url) == 200
            assert isinstance(await push(transport, server.url), ConnectionLost)
            assert await push(transport, server.url) == 200
            assert len(server.peers) == 2


# 3. What an error means is its type.


@pytest.mark.parametrize(
    ("error", "means", "httpx_s", "reason"),
    [
        (ConnectionFailed, NotProcessed, httpx.ConnectError, "connection_failed"),
        (NotBegun, NotProcessed, httpx.PoolTimeout, "timeout"),
        (Refused, NotProcessed, httpx.RemoteProtocolError, "refused"),
        (NotSendable, NotProcessed, httpx.LocalProtocolError, "unsendable"),
        (AnswerTimeout, OutcomeUnknown, httpx.ReadTimeout, "timeout"),
        (ConnectionLost, OutcomeUnknown, httpx.ReadError, "connection_lost"),
        (StreamReset, OutcomeUnknown, httpx.ReadError, "stream_reset"),
        (BadAnswer, OutcomeUnknown, httpx.RemoteProtocolError, "malformed_answer"),
    ],
)
def test_each_error_is_one_of_httpx_s_and_says_whether_the_push_may_have_been_processed(
    error: type[NotProcessed | OutcomeUnknown],
    means: type[httpx.TransportError],
    httpx_s: type[httpx.TransportError],
    reason: str,
) -> None:
    assert issubclass(error, means)
    assert issubclass(error, httpx_s)
    assert not issubclass(error, NotProcessed if means is OutcomeUnknown else OutcomeUnknown)
    assert error.reason == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"apns-topic": "a\nb"},
        {"apns-topic": "a\0"},
        {"apns-topic": " a"},
        {"apns-topic": "a "},
        {"bad name": "a"},
        {"": "a"},
        {"apns-topic": "a" * 20_000},
    ],
)
def test_a_header_that_would_upset_the_server_is_never_sent(fields: dict[str, str]) -> None:
    @scripted(answer_all)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            with pytest.raises(NotSendable):
                await transport.handle_async_request(httpx.Request("POST", server.url, headers=fields))
            assert await push(transport, server.url) == 200


# 4. Connections from before a freeze, and new ones.


def test_an_idle_connection_that_answers_a_ping_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.transport, "CHECK_SECONDS", 1000)  # which the answer cuts short

    @scripted(answer_all)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert await push(transport, server.url) == 200
            await transport.check()
            assert await push(transport, server.url) == 200
            assert len(server.peers) == 1
            assert [frame for frame in server.peers[0].frames if isinstance(frame, PingFrame)]


def test_without_a_connection_there_is_nothing_to_check() -> None:
    async def story() -> None:
        async with apns() as transport:
            await transport.check()

    run(story())


@pytest.mark.parametrize("left", ["silent", "closed", "cut", "goaway"])
def test_a_stale_connection_is_replaced_without_a_word(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.transport, "CHECK_SECONDS", 0.2 if left == "silent" else 20)
    frozen = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        if peer.number:
            return await answer_rest(peer)
        peer.answer(await peer.request())
        await frozen.wait()
        match left:
            case "closed":
                peer.close()
            case "cut":
                peer.cut()
            case "goaway":
                peer.go_away(1)
        return await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert await push(transport, server.url) == 200
            frozen.set()
            await transport.check()
            assert kinds(await pushes(transport, server.url, range(5))) == {200: 5}
            assert len(server.peers) == 2


@pytest.mark.parametrize(
    ("minutes", "idle", "kept"),
    [(4, True, True), (6, True, False), (59, False, True), (61, False, False), (-1, False, False)],
)
def test_an_old_or_long_idle_connection_is_closed_politely(minutes: int, *, idle: bool, kept: bool) -> None:
    now = time.time()

    @scripted(answer_all)
    async def _(server: WireServer) -> None:
        nonlocal now
        async with apns(now=lambda: now) as transport:
            assert await push(transport, server.url) == 200
            for _ in range(0 if idle else minutes - 1):
                now += 60
                await transport.check()
            now += 60 * (minutes if idle or minutes < 0 else 1)
            await transport.check()
            assert await push(transport, server.url) == 200
            assert len(server.peers) == (1 if kept else 2)
            if not kept:
                await until(lambda: any(isinstance(frame, GoAwayFrame) for frame in server.peers[0].frames))


def test_renewing_lets_end_what_is_under_way_and_begins_the_next_on_a_new_connection() -> None:
    renewed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=100)
        if peer.number:
            return await answer_rest(peer)
        peer.answer(await peer.request())
        under_way = await peer.requests(3)
        begun.set()
        await renewed.wait()
        for one in under_way:
            peer.answer(one)
        await peer.end()
        assert isinstance(peer.frames[-1], GoAwayFrame)
        return None

    begun = asyncio.Event()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert await push(transport, server.url) == 200
            old = asyncio.create_task(pushes(transport, server.url, range(3)))
            await begun.wait()
            await transport.renew()
            assert await push(transport, server.url) == 200
            assert len(server.peers) == 2
            assert not old.done()
            renewed.set()
            assert kinds(await old) == {200: 3}
            await transport.renew()
            assert await push(transport, server.url) == 200
            assert len(server.peers) == 3


class Names(asyncio.SelectorEventLoop):
    """An event loop in which a host name means what a test says."""

    def __init__(self, addresses: Sequence[str], port: int | None = None) -> None:
        super().__init__()
        self.addresses, self.port = addresses, port
        self.asked: list[tuple[object, object]] = []

    async def getaddrinfo(self, host: object, port: object, **_: object) -> list[Any]:
        self.asked.append((host, port))
        return [
            (2, 1, 6, "", (address, self.port or port))
            if "." in address
            else (10, 1, 6, "", (address, self.port or port, 0, 0))
            for address in self.addresses
        ]


@pytest.mark.parametrize(
    ("addresses", "listening"), [(["::1", "127.0.0.1"], "127.0.0.1"), (["127.0.0.1", "::1"], "::1")]
)
def test_ipv6_and_ipv4_are_both_tried_and_the_name_is_resolved_for_each_connection(
    addresses: list[str], listening: str
) -> None:
    loop = Names(addresses)

    async def story() -> None:
        async with asyncio.timeout(20), WireServer(host=listening) as server, apns() as transport:
            loop.asked.clear()
            for _ in range(2):
                assert await push(transport, server.url) == 200
                await transport.renew()
            assert loop.asked == [("localhost", server.port)] * 2

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(story())


def test_an_address_that_swallows_everything_is_not_waited_for() -> None:
    async def story() -> None:
        async with asyncio.timeout(20), WireServer() as server, apns(connect_seconds=10) as transport:
            with socket.create_server(("::1", server.port), family=socket.AF_INET6, backlog=0) as hole:
                fillers = [socket.socket(socket.AF_INET6) for _ in range(4)]  # a full backlog drops every further SYN
                for filler in fillers:
                    filler.settimeout(0)
                    filler.connect_ex(hole.getsockname())
                assert await push(transport, server.url) == 200
                for filler in fillers:
                    filler.close()

    with asyncio.Runner(loop_factory=lambda: Names(["::1", "127.0.0.1"])) as runner:
        runner.run(story())


@pytest.mark.parametrize(("port", "meant"), [("", 443), (":443", 443), (":2197", 2197)])
def test_the_url_s_port_is_used(port: str, meant: int) -> None:
    async def listen() -> None:
        async with asyncio.timeout(20), WireServer() as server, apns() as transport:
            loop.port = server.port
            loop.asked.clear()
            assert await push(transport, f"https://localhost{port}") == 200
            assert loop.asked == [("localhost", meant)]
            headers = server.peers[0].frames[2]
            assert isinstance(headers, HeadersFrame)
            assert f"localhost{port.removesuffix(':443')}".encode() in headers.data

    loop = Names(["127.0.0.1"])
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(listen())


def test_a_certificate_for_another_name_is_no_certificate() -> None:
    async def story() -> None:
        async with asyncio.timeout(20), WireServer() as server, apns() as transport:
            outcome = await push(transport, f"https://api.push.example:{server.port}")
            assert isinstance(outcome, ConnectionFailed)
            assert "certificate is not to be trusted" in str(outcome)

    with asyncio.Runner(loop_factory=lambda: Names(["127.0.0.1"])) as runner:
        runner.run(story())


def test_a_certificate_of_an_unknown_authority_is_no_certificate() -> None:
    @scripted(answer_all)
    async def _(server: WireServer) -> None:
        async with ApnsTransport(ssl_context=ssl.create_default_context()) as transport:
            outcome = await push(transport, server.url)
            assert isinstance(outcome, ConnectionFailed)
            assert "certificate is not to be trusted" in str(outcome)


@pytest.mark.parametrize("alpn", [["http/1.1"], []])
def test_a_server_that_does_not_agree_on_h2_is_a_failed_connection(alpn: list[str]) -> None:
    async def story() -> None:
        async with WireServer(alpn=alpn) as server, apns() as transport:
            outcome = await push(transport, server.url)
            assert isinstance(outcome, ConnectionFailed)
            assert "does not speak HTTP/2" in str(outcome)

    run(story())


def test_a_port_where_nobody_listens_and_a_name_that_nobody_has_are_failed_connections() -> None:
    async def story() -> None:
        async with WireServer() as server:
            port = server.port
        async with apns() as refused:
            assert isinstance(await push(refused, f"https://localhost:{port}"), ConnectionFailed)
        async with apns() as unknown:
            outcome = await push(unknown, "https://name.invalid")
            assert isinstance(outcome, ConnectionFailed)

    run(story())


def _trusting_anybody() -> ssl.SSLContext:
    context = trusting()
    context.check_hostname = False
    return context


def _without_verification() -> ssl.SSLContext:
    context = _trusting_anybody()
    context.verify_mode = ssl.CERT_NONE
    return context


def _of_any_age() -> ssl.SSLContext:
    context = trusting()
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    return context


@pytest.mark.parametrize("context", [_trusting_anybody, _without_verification, _of_any_age])
def test_a_context_that_does_not_verify_or_allows_old_tls_is_not_taken(context: Callable[[], ssl.SSLContext]) -> None:
    with pytest.raises(ValueError, match="TLS context"):
        ApnsTransport(ssl_context=context())


# 5. Cancellation, deadlines, leaks.


def test_a_cancelled_push_gives_its_stream_back_and_costs_nobody_else_anything() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=2)
        peer.answer(await peer.request())
        await peer.requests(2)
        begun.set()
        assert (await peer.until(RstStreamFrame)).error_code == ErrorCode.CANCEL
        others = await peer.requests(2)  # begun because there is room again, and not because we said anything
        peer.send(HeadersFrame(3, b"\x88", flags=("END_HEADERS", "END_STREAM")))  # too late
        for one in others:
            peer.answer(one)
        await answer_rest(peer)

    begun = asyncio.Event()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(max_connections=1) as transport:
            assert await push(transport, server.url) == 200
            tasks = [asyncio.create_task(push(transport, server.url, number)) for number in range(10)]
            await begun.wait()
            tasks[0].cancel()
            tasks[1].cancel()
            tasks[9].cancel()  # of those that wait
            await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [True, True, *[False] * 7, True]
            assert kinds([task.result() for task in tasks[2:9]]) == {200: 7}
            assert len(server.peers) == 1


def test_a_push_that_is_cancelled_while_the_connection_is_made_leaves_it_to_the_others() -> None:
    @scripted(answer_all)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            tasks = [asyncio.create_task(push(transport, server.url, number)) for number in range(3)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            await asyncio.wait(tasks)
            assert tasks[0].cancelled()
            assert kinds([task.result() for task in tasks[1:]]) == {200: 2}
            assert len(server.peers) == 1


def test_closing_says_goaway_and_each_push_still_under_way_has_its_error() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=3)
        peer.answer(await peer.request())
        await peer.requests(3)
        begun.set()
        await peer.end()
        assert isinstance(peer.frames[-1], GoAwayFrame)
        ended.set()

    begun, ended = asyncio.Event(), asyncio.Event()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(max_connections=1) as transport:
            assert await push(transport, server.url) == 200
            under_way = asyncio.create_task(pushes(transport, server.url, range(5)))
            await begun.wait()
            await transport.aclose()
            assert kinds(await under_way) == {ConnectionLost: 3, ConnectionFailed: 2}
            assert isinstance(await push(transport, server.url), ConnectionFailed)
            await ended.wait()


def test_closing_a_connection_whose_other_side_is_dead_takes_no_longer_than_it_may() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        peer.answer(await peer.request())
        peer._writer.transport.pause_reading()  # type: ignore[attr-defined]  # it sees no GOAWAY, and no close_notify
        await asyncio.Event().wait()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            assert await push(transport, server.url) == 200


def test_ten_thousand_faulty_pushes_leave_nothing_behind() -> None:
    faults: Iterator[Callable[[Peer, Request], None]] = itertools.cycle(
        [
            lambda peer, one: peer.answer(one),
            lambda peer, one: peer.answer(one, 410, b'{"reason":"Unregistered"}'),
            lambda peer, one: peer.send(RstStreamFrame(one.stream_id, error_code=2)),
            lambda peer, one: peer.send(RstStreamFrame(one.stream_id, error_code=7)),
            lambda peer, one: peer.send(DataFrame(one.stream_id, b"no headers")),
            lambda peer, one: peer.send(HeadersFrame(one.stream_id, b"\x88", flags=("END_HEADERS",))),
            lambda peer, one: peer.send(HeadersFrame(one.stream_id, b"\x8c", flags=("END_HEADERS",))),
            lambda *_: None,
            *[lambda peer, one: peer.answer(one)] * 3,
        ]
    )

    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=500)
        for count in itertools.count(1):
            one = await peer.request()
            next(faults)(peer, one)
            peer.frames.clear()
            if count % 1300 == 0:
                peer.go_away(one.stream_id - 100)
            elif count % 1700 == 0:
                peer.cut()
                break

    def held() -> Counter[str]:
        gc.collect()
        return Counter(
            type(each).__name__
            for each in gc.get_objects()
            if str(type(each).__module__).startswith(("core.", "httpx", "asyncio", "_asyncio"))
        )

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns(answer_seconds=0.3) as transport:
            assert await push(transport, server.url) == 200

            async def some(count: int) -> Counter[int | type]:
                tasks = [asyncio.create_task(push(transport, server.url, number)) for number in range(count)]
                await asyncio.sleep(0)
                for task in tasks[::97]:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.sleep(0)  # the loop holds what woke us until its next turn
                return kinds([result for result in results if not isinstance(result, asyncio.CancelledError)])  # type: ignore[misc]  # nothing else is raised

            outcomes = await some(1000)
            server.peers.clear()
            process = psutil.Process()
            before, files, tasks = held(), process.num_fds(), len(asyncio.all_tasks())
            blocks = sys.getallocatedblocks()
            for _ in range(10):
                outcomes += await some(1000)
                server.peers.clear()
            after = held()

            assert outcomes.keys() >= {200, 410, StreamReset, BadAnswer, AnswerTimeout}
            assert sum(outcomes.values()) + 11 * len(range(0, 1000, 97)) == 11 * 1000
            assert not transport._waiting
            assert sum(len(link.pushes) + len(link.engine._streams) for link in transport._links) == 0
            assert len([link for link in transport._links if not link.retired]) <= 2
            assert after["_Push"] == after["_Stream"] == 0
            assert after["_Response"] == after["Request"] == 0
            assert after.total() <= before.total() + 300  # a connection or two that are being closed
            assert process.num_fds() <= files + 20
            assert len(asyncio.all_tasks()) <= tasks + 3
            assert sys.getallocatedblocks() < blocks + 10_000  # one for each push would be 10,000 and more


def test_an_error_takes_its_push_along_when_it_goes_without_waiting_for_the_garbage_collector() -> None:
    async def story() -> None:
        async with WireServer() as server:
            nobody = server.url
        async with apns() as transport:
            gc.collect()
            gc.disable()
            try:
                with suppress(ConnectionFailed):
                    await transport.handle_async_request(request(nobody))
                await asyncio.sleep(0)
                assert not [each for each in gc.get_objects() if type(each).__name__ == "_Push"]
            finally:
                gc.enable()

    run(story())


# 6. What must not be kept.


def test_neither_token_is_put_into_a_table_and_the_provider_s_is_marked_as_never_to_be() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=10)
        for _ in range(3):
            one = await peer.request()
            sensitive = {bytes(f[0]) for f in one.fields if isinstance(f, NeverIndexedHeaderTuple)}
            assert sensitive == {b"authorization"}
            assert b"\x1f\x08" in one.block  # section 6.2.3 of RFC 7541, with the name of index 23
            assert b"\x04" + bytes((len(one.path),)) + one.path.encode() in one.block  # section 6.2.2, index 4
            assert not peer.decoder.header_table.dynamic_entries
            peer.answer(one)
        await peer.end()

    @scripted(script)
    async def _(server: WireServer) -> None:
        async with apns() as transport:
            for number in range(3):
                assert await push(transport, server.url, number) == 200


# The face towards httpx.


def test_the_request_arrives_as_httpx_s_caller_meant_it() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet(max_concurrent_streams=10)
        for _ in range(3):
            one = await peer.request()
            assert one.headers == {
                b":method": b"POST",
                b":scheme": b"https",
                b":authority": f"localhost:{server_port}".encode(),
                b":path": b"/3/device/c0ffee",
                b"content-length": b"4",
                b"apns-topic": b"com.example.app",
            }
            assert one.body == b"body"
            peer.answer(one)
        await peer.end()

    server_port = 0

    @scripted(script)
    async def _(server: WireServer) -> None:
        nonlocal server_port
        server_port = server.port

        async def parts() -> AsyncIterator[bytes]:
            yield b"bo"
            yield b"dy"

        fields = {"Apns-Topic": "com.example.app", "Connection": "keep-alive", "content-length": "4"}
        whole = httpx.Request("POST", f"{server.url}/3/device/c0ffee", headers=fields, content=b"body")
        streamed = httpx.Request("POST", f"{server.url}/3/device/c0ffee", headers=fields, content=parts())
        cheap = httpx.Request(
            "POST",
            httpx.URL(server.url),
            headers=fields,
            stream=httpx.ByteStream(b"body"),
            extensions={"target": b"/3/device/c0ffee"},
        )
        async with apns() as transport:
            for each in (whole, streamed, cheap):
                assert (await transport.handle_async_request(each)).status_code == 200


def test_it_serves_an_httpx_client_too() -> None:
    @scripted(answer_all)
    async def _(server: WireServer) -> None:
        async with httpx.AsyncClient(transport=apns_transport()) as client:
            response = await client.post(f"{server.url}/3/device/00", content=b"{}")
            assert response.status_code == 200
            assert response.http_version == "HTTP/2"
            assert response.is_closed


def apns_transport() -> ApnsTransport:
    return ApnsTransport(ssl_context=trusting())


def test_a_transport_serves_one_origin_in_one_event_loop() -> None:
    transport = apns_transport()

    async def first() -> None:
        with pytest.raises(httpx.UnsupportedProtocol):
            await transport.handle_async_request(httpx.Request("POST", "http://localhost"))
        async with WireServer() as server:
            assert await push(transport, server.url) == 200
            with pytest.raises(ValueError, match="one host"):
                await transport.handle_async_request(request("https://elsewhere"))
            await transport.aclose()

    async def second() -> None:
        with pytest.raises(RuntimeError, match="one event loop"):
            await transport.handle_async_request(request("https://localhost"))

    run(first())
    run(second())
