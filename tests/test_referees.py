"""Our sender against HTTP/2 servers that nobody here wrote: what it says makes sense to others, and it gets along with
what others do. Each server's package is named where it is missing; CI has them all.
"""

import asyncio
import json
import re
import secrets
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hpack import Decoder, HeaderTuple, NeverIndexedHeaderTuple
from hyperframe.frame import ContinuationFrame, DataFrame, Frame, HeadersFrame, PriorityFrame, SettingsFrame

from core.transport import ApnsTransport, OutcomeUnknown
from devtools.other_servers import MissingProgramError, Server, nghttpd, nginx, node

PATIENCE = 60.0  # for 500 pushes, of which the slowest server needs a second
PUSHES = 500
TOKENS = [secrets.token_hex(32) for _ in range(7)]
BEARER = "bearer " + secrets.token_urlsafe(140)  # as long as a provider token
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@contextmanager
def referee(start: Callable[[], AbstractContextManager[Server]]) -> Iterator[Server]:
    """Start it, or skip the test and say what to install."""
    try:
        server = start()
        with server as running:
            yield running
    except MissingProgramError as fault:
        pytest.skip(str(fault))


def a_story(name: str) -> Callable[[], AbstractContextManager[Server]]:
    return lambda: node(Path(__file__).parent / "support/node_server.mjs", name)


def apns_id(number: int) -> str:
    return f"7f7af6c0-0000-4000-8000-{number:012}"


def body(number: int) -> bytes:
    return json.dumps({"aps": {"alert": f"Zürich № {number}", "badge": number}}, ensure_ascii=False).encode()


def request(server: Server, number: int) -> httpx.Request:
    return httpx.Request(
        "POST",
        f"{server.url}/3/device/{TOKENS[number % len(TOKENS)]}",
        headers=[
            ("apns-topic", "com.example.app"),
            ("apns-push-type", "alert"),
            ("apns-priority", "10"),
            ("apns-id", apns_id(number)),
            ("authorization", BEARER),
        ],
        content=body(number),
    )


type Answer = tuple[httpx.Response, bytes] | BaseException


def push_all(server: Server, *, connections: int = 1) -> list[Answer]:
    """Push them all at once, on so many connections at the same time. What is wrong with one push is its answer."""

    async def push(transport: ApnsTransport, number: int) -> tuple[httpx.Response, bytes]:
        response = await transport.handle_async_request(request(server, number))
        return response, await response.aread()

    async def story() -> list[Answer]:
        context = ssl.create_default_context(cafile=str(server.ca_file))
        transport = ApnsTransport(ssl_context=context, max_connections=connections)
        try:
            async with asyncio.timeout(PATIENCE):
                return await asyncio.gather(
                    *(push(transport, number) for number in range(PUSHES)), return_exceptions=True
                )
        finally:
            await transport.aclose()

    return asyncio.run(story())


def accepted(answers: Sequence[Answer]) -> list[tuple[httpx.Response, bytes]]:
    """Give them all, each of which has to be a 200."""
    good = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    assert {response.status_code for response, _ in good} == {200}
    return good


def events(server: Server) -> list[dict[str, Any]]:
    """Read what the Node server has printed."""
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def answered(server: Server) -> Counter[str]:
    return Counter(event["answered"] for event in events(server) if "answered" in event)


def faults(server: Server) -> list[dict[str, Any]]:
    return [event for event in events(server) if "fault" in event or event.get("goaway", 0) != 0]


EACH_ONCE = Counter(apns_id(number) for number in range(PUSHES))


def test_nghttpd_accepts_every_push() -> None:
    with referee(lambda: nghttpd(tokens=TOKENS, streams=100)) as server:
        assert len(accepted(push_all(server))) == PUSHES


def test_nghttpd_accepts_every_push_on_two_connections() -> None:
    with referee(lambda: nghttpd(tokens=TOKENS, streams=20)) as server:
        assert len(accepted(push_all(server, connections=2))) == PUSHES


def test_nginx_accepts_every_push_though_it_resets_each_stream_that_it_has_answered() -> None:
    with referee(lambda: nginx(streams=100)) as server:
        ids = [response.headers["apns-id"] for response, _ in accepted(push_all(server))]

        assert ids == [apns_id(number) for number in range(PUSHES)]


def test_headers_and_bodies_arrive_at_node_as_they_were_sent() -> None:
    with referee(a_story("echo")) as server:
        heard = [json.loads(content) for _, content in accepted(push_all(server))]

        for number, each in enumerate(heard):
            sent = request(server, number)
            assert each["body"].encode() == body(number)
            assert each["headers"] == {
                ":method": "POST",
                ":scheme": "https",
                ":authority": f"127.0.0.1:{server.port}",
                ":path": sent.url.path,
                "apns-topic": "com.example.app",
                "apns-push-type": "alert",
                "apns-priority": "10",
                "apns-id": apns_id(number),
                "authorization": BEARER,
                "content-length": str(len(body(number))),
            }
        assert answered(server) == EACH_ONCE
        assert faults(server) == []


def test_node_allows_one_stream_until_it_has_answered_and_hears_one_push_and_then_many() -> None:
    with referee(a_story("onlyOneAtFirst")) as server:
        accepted(push_all(server))

        at_once = [event["open"] for event in events(server) if "answered" in event]
        assert at_once[0] == 1
        assert max(at_once) > 100
        assert answered(server) == EACH_ONCE
        assert faults(server) == []


def test_node_lowers_its_limit_under_what_is_in_flight_and_every_push_is_answered_once() -> None:
    with referee(a_story("lowered")) as server:
        accepted(push_all(server))

        at_once = [event["open"] for event in events(server) if "answered" in event]
        assert at_once[:100] == list(range(1, 101))
        assert set(at_once[-100:]) == {1}
        assert answered(server) == EACH_ONCE
        assert faults(server) == []


def test_node_leaves_with_a_goaway_and_what_it_had_not_looked_at_goes_on_another_connection() -> None:
    with referee(a_story("leaving")) as server:
        accepted(push_all(server))

        where = Counter(event["connection"] for event in events(server) if "answered" in event)
        assert where[1] == 50
        assert answered(server) == EACH_ONCE
        assert faults(server) == []


def test_node_refuses_streams_and_they_go_again_and_breaks_streams_and_only_they_have_an_unknown_outcome() -> None:
    with referee(a_story("resetting")) as server:
        answers = push_all(server)

        unknown = [number for number, answer in enumerate(answers) if isinstance(answer, OutcomeUnknown)]
        assert unknown == [number for number in range(PUSHES) if number % 10 == 1]
        accepted([answer for number, answer in enumerate(answers) if number % 10 != 1])
        assert answered(server) == EACH_ONCE - Counter(apns_id(number) for number in unknown)
        assert faults(server) == []


def test_nghttpd_sees_settings_first_then_headers_and_data_and_no_priority() -> None:
    """As nghttpd tells it: `-v` prints each frame, and marks what may not be indexed as sensitive."""
    with referee(lambda: nghttpd(tokens=TOKENS, streams=100, options=["-v"])) as server:
        accepted(push_all(server))
        log = server.log.read_text()

    frames = re.findall(r"\] recv (\S+) frame <length=\d+, flags=0x(\d\d), stream_id=(\d+)>", log)
    kinds = Counter(kind for kind, _, _ in frames)
    assert frames[0] == ("SETTINGS", "00", "0")
    assert set(kinds) <= {"SETTINGS", "WINDOW_UPDATE", "HEADERS", "DATA", "GOAWAY", "PING"}
    streams = [str(2 * number + 1) for number in range(PUSHES)]
    # END_HEADERS, and END_STREAM on the DATA that holds the whole body: two frames a push.
    assert [frame for frame in frames if frame[0] == "HEADERS"] == [("HEADERS", "04", stream) for stream in streams]
    assert [frame for frame in frames if frame[0] == "DATA"] == [("DATA", "01", stream) for stream in streams]
    headers = Counter(re.findall(r"\] recv \(stream_id=\d+(, sensitive)?\) (:?[a-z-]+): ", log))
    assert headers[", sensitive", "authorization"] == PUSHES
    assert headers["", "authorization"] == 0
    assert headers["", ":path"] == PUSHES


def test_hpack_finds_authorization_never_indexed_and_nothing_of_a_push_in_the_dynamic_table() -> None:
    """On the octets that nghttpd has heard: its `--hexdump`, read by hyperframe and hpack."""
    with referee(lambda: nghttpd(tokens=TOKENS, streams=100, options=["-v", "--hexdump"])) as server:
        accepted(push_all(server))
        heard = from_hexdump(server.log.read_text())

    assert heard.startswith(PREFACE)
    frames = read_frames(heard[len(PREFACE) :])
    assert isinstance(frames[0], SettingsFrame)
    assert not [frame for frame in frames if isinstance(frame, PriorityFrame | ContinuationFrame)]
    blocks = [frame for frame in frames if isinstance(frame, HeadersFrame)]
    assert len(blocks) == PUSHES
    assert not [frame for frame in blocks if "PRIORITY" in frame.flags]
    assert {len(frame.data) for frame in frames if isinstance(frame, DataFrame)} >= {
        len(body(0)),
        len(body(PUSHES - 1)),
    }
    decoder = WatchfulDecoder()
    for frame in blocks:
        fields = decoder.decode(frame.data, raw=True)
        assert {bytes(field[0]) for field in fields if isinstance(field, NeverIndexedHeaderTuple)} == {b"authorization"}
    assert decoder.indexed == []
    assert list(decoder.header_table.dynamic_entries) == []


class WatchfulDecoder(Decoder):
    """hpack's, which also notes the fields that are to be put in the table, whether or not there is room for them."""

    def __init__(self) -> None:
        super().__init__()
        self.indexed: list[bytes] = []

    def _decode_literal_index(self, data: bytes | memoryview) -> tuple[HeaderTuple, int]:
        field, consumed = super()._decode_literal_index(data)
        self.indexed.append(bytes(field[0]))
        return field, consumed


def from_hexdump(log: str) -> bytes:
    """Put together what nghttpd has printed in `hexdump -C`'s way."""
    octets = bytearray()
    for line in log.splitlines():
        assert line != "*", "a repeated line was left out"
        if found := re.match(r"[0-9a-f]{8}  ((?:[0-9a-f]{2} {1,2})+) *\|", line):
            octets += bytes.fromhex(found[1])
    return bytes(octets)


def read_frames(data: bytes) -> list[Frame]:
    frames = []
    while data:
        frame, length = Frame.parse_frame_header(memoryview(data[:9]))
        frame.parse_body(memoryview(data[9 : 9 + length]))
        frames.append(frame)
        data = data[9 + length :]
    return frames
