"""The protocol without a socket: what a server may say, and what a client makes of it. Referees: `h2`, `hyperframe`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hpack
import hypothesis.strategies as st
import pytest
from h2.settings import SettingCodes
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given

from core.hpack import METHOD_POST, SCHEME_HTTPS, length_of, literal_name
from core.http2 import (
    CONNECTION_WINDOW,
    DEFAULT_WINDOW,
    LARGEST_BODY,
    LARGEST_FRAME,
    LARGEST_WINDOW,
    MOST_STREAMS,
    PREFACE,
    Answered,
    Broken,
    ClientConnection,
    Dropped,
    ErrorCode,
    Event,
    GoneAway,
    Malformed,
    Pong,
    Reset,
    SettingsChanged,
)


def _header(name: bytes, value: bytes) -> bytes:
    return literal_name(name) + length_of(value) + value


REQUEST = METHOD_POST + SCHEME_HTTPS + _header(b":authority", b"localhost") + _header(b":path", b"/3/device/00")
OK = b"\x88"  # :status 200


def settings(**values: int) -> SettingsFrame:
    return SettingsFrame(0, settings={getattr(SettingsFrame, name.upper()): value for name, value in values.items()})


def headers(stream_id: int, block: bytes = OK, *flags: str) -> HeadersFrame:
    return HeadersFrame(stream_id, block, flags=flags or ("END_HEADERS", "END_STREAM"))


def data(stream_id: int, octets: bytes, *flags: str) -> DataFrame:
    return DataFrame(stream_id, octets, flags=flags)


def tell(connection: ClientConnection, *frames: Frame | bytes) -> list[Event]:
    return connection.receive(b"".join(f if isinstance(f, bytes) else f.serialize() for f in frames))


def parsed(octets: bytes) -> list[Frame]:
    frames: list[Frame] = []
    while octets:
        frame, length = Frame.parse_frame_header(memoryview(octets[:9]))
        assert length <= LARGEST_FRAME
        frame.parse_body(memoryview(octets[9 : 9 + length]))
        frames.append(frame)
        octets = octets[9 + length :]
    return frames


def said(connection: ClientConnection) -> list[Frame]:
    return parsed(connection.data_to_send().removeprefix(PREFACE))


def begun(streams: int = 1, body: bytes = b"{}", **values: int) -> ClientConnection:
    """Make a connection whose server has said its SETTINGS, and begin some streams on it."""
    connection = ClientConnection()
    tell(connection, settings(**values))
    for _ in range(streams):
        connection.request(REQUEST, body)
    connection.data_to_send()
    return connection


def answer(stream_id: int, status: int = 200, body: bytes = b"") -> Answered:
    return Answered(stream_id, status, [], body)


# What we say.


def test_a_connection_begins_with_the_preface_settings_and_a_window() -> None:
    connection = ClientConnection()
    connection.request(REQUEST, b"{}")

    octets = connection.data_to_send()

    assert octets.startswith(PREFACE)
    frames = parsed(octets.removeprefix(PREFACE))
    assert [type(frame) for frame in frames] == [SettingsFrame, WindowUpdateFrame, HeadersFrame, DataFrame]
    assert isinstance(frames[0], SettingsFrame)
    assert frames[0].settings[SettingsFrame.ENABLE_PUSH] == 0
    assert isinstance(frames[1], WindowUpdateFrame)
    assert frames[1].window_increment + DEFAULT_WINDOW == CONNECTION_WINDOW


def test_a_request_is_one_headers_frame_and_one_data_frame_that_ends_the_stream() -> None:
    connection = begun(0)
    connection.request(REQUEST, b'{"aps":{}}')
    connection.request(REQUEST, b"")

    first, body, second = said(connection)

    assert isinstance(first, HeadersFrame)
    assert (first.stream_id, set(first.flags)) == (1, {"END_HEADERS"})
    assert isinstance(body, DataFrame)
    assert (body.stream_id, body.data, set(body.flags)) == (1, b'{"aps":{}}', {"END_STREAM"})
    assert isinstance(second, HeadersFrame)
    assert (second.stream_id, set(second.flags)) == (3, {"END_HEADERS", "END_STREAM"})


# Limits.


def test_one_stream_may_begin_until_the_server_has_said_its_settings() -> None:
    connection = ClientConnection()
    assert connection.has_room
    connection.request(REQUEST, b"")
    assert not connection.has_room

    assert tell(connection, settings(max_concurrent_streams=2)) == [SettingsChanged()]

    connection.request(REQUEST, b"")
    assert not connection.has_room


def test_without_a_limit_of_the_server_s_or_with_an_absurd_one_there_is_our_own() -> None:
    for connection in (begun(MOST_STREAMS), begun(MOST_STREAMS, max_concurrent_streams=2**32 - 1)):
        assert not connection.has_room
        assert connection.is_full


def test_a_limit_below_what_is_under_way_ends_nothing_and_begins_nothing() -> None:
    connection = begun(3, max_concurrent_streams=3)

    tell(connection, settings(max_concurrent_streams=1), headers(1), headers(3))
    assert not connection.has_room

    assert tell(connection, headers(5)) == [answer(5)]
    assert connection.has_room


def test_a_limit_of_0_holds_until_it_is_raised() -> None:
    connection = begun(0, max_concurrent_streams=0)
    assert not connection.has_room
    tell(connection, settings(max_concurrent_streams=1))
    assert connection.has_room


def test_settings_and_pings_are_acknowledged() -> None:
    connection = ClientConnection()
    connection.data_to_send()
    tell(connection, settings(header_table_size=0), PingFrame(0, b"12345678"))

    first, second = said(connection)

    assert isinstance(first, SettingsFrame)
    assert "ACK" in first.flags
    assert isinstance(second, PingFrame)
    assert (second.opaque_data, set(second.flags)) == (b"12345678", {"ACK"})


def test_a_ping_of_ours_is_answered_by_an_event() -> None:
    connection = begun(0)
    connection.ping(b"12345678")
    [ping] = said(connection)
    assert isinstance(ping, PingFrame)
    assert tell(connection, PingFrame(0, ping.opaque_data, flags=("ACK",))) == [Pong(b"12345678")]


# Flow control of bodies.


def test_a_body_goes_as_far_as_its_stream_s_window_and_on_when_that_grows() -> None:
    connection = begun(0, initial_window_size=4)
    connection.request(REQUEST, b"123456789")
    assert _bodies(said(connection)) == [(b"1234", False)]

    tell(connection, WindowUpdateFrame(1, window_increment=2))
    assert _bodies(said(connection)) == [(b"56", False)]

    tell(connection, settings(initial_window_size=100))
    assert _bodies(said(connection)) == [(b"789", True)]
    assert tell(connection, headers(1)) == [answer(1)]


def test_a_window_that_shrank_below_what_was_sent_has_to_grow_above_it_first() -> None:
    connection = begun(0, initial_window_size=4)
    connection.request(REQUEST, b"123456789")
    said(connection)

    tell(connection, settings(initial_window_size=1), WindowUpdateFrame(1, window_increment=3))
    assert _bodies(said(connection)) == []

    tell(connection, WindowUpdateFrame(1, window_increment=1))
    assert _bodies(said(connection)) == [(b"5", False)]


def test_nothing_begins_without_room_in_the_connection_s_window() -> None:
    connection = begun(0)
    connection.request(REQUEST, b"x" * (DEFAULT_WINDOW + 1))
    assert sum(len(body) for body, _ in _bodies(said(connection))) == DEFAULT_WINDOW
    assert not connection.has_room

    tell(connection, WindowUpdateFrame(0, window_increment=10), WindowUpdateFrame(1, window_increment=10))

    assert _bodies(said(connection)) == [(b"x", True)]
    assert connection.has_room


def test_an_answer_before_the_end_of_the_body_ends_the_body() -> None:
    connection = begun(1, b"123456789", initial_window_size=4)

    assert tell(connection, headers(1, b"\x8c")) == [answer(1, 400)]

    [reset] = said(connection)
    assert isinstance(reset, RstStreamFrame)
    assert reset.error_code == ErrorCode.NO_ERROR
    tell(connection, WindowUpdateFrame(1, window_increment=100))
    assert said(connection) == []


def _bodies(frames: Sequence[Frame]) -> list[tuple[bytes, bool]]:
    return [(frame.data, "END_STREAM" in frame.flags) for frame in frames if isinstance(frame, DataFrame)]


def test_the_server_s_window_is_filled_up_before_it_is_empty() -> None:
    connection = begun(40)
    for stream_id in range(1, 81, 2):
        tell(connection, headers(stream_id, OK, "END_HEADERS"))
        for _ in range(3):
            tell(connection, data(stream_id, b"x" * LARGEST_FRAME))
        tell(connection, data(stream_id, b"", "END_STREAM"))

    grown = [frame.window_increment for frame in said(connection) if isinstance(frame, WindowUpdateFrame)]

    assert sum(grown) > 40 * 3 * LARGEST_FRAME - CONNECTION_WINDOW


# Answers.


def test_an_answer_with_a_body_has_both() -> None:
    connection = begun()
    assert tell(connection, headers(1, b"\x8c\x00\x07apns-id\x011", "END_HEADERS")) == []
    assert tell(connection, data(1, b'{"reason"')) == []

    events = tell(connection, data(1, b':"BadTopic"}', "END_STREAM"))

    assert events == [Answered(1, 400, [(b"apns-id", b"1")], b'{"reason":"BadTopic"}')]


def test_padding_priority_continuations_interim_answers_and_trailers_are_taken_apart() -> None:
    connection = begun(2)
    padded = HeadersFrame(1, b"\x88", pad_length=3, depends_on=5, stream_weight=7, flags=("PADDED", "PRIORITY"))
    events = tell(
        connection,
        headers(1, b"\x08\x03103\x00\x04link\x01x", "END_HEADERS"),
        headers(1, b"\x08\x03100", "END_HEADERS"),
        padded,
        ContinuationFrame(1, b"\x00\x01a"),
        ContinuationFrame(1, b""),
        ContinuationFrame(1, b"\x01b", flags=("END_HEADERS",)),
        DataFrame(1, b"body", pad_length=9, flags=("PADDED",)),
        data(1, b""),
        headers(1, b"\x00\x04late\x01x"),
        headers(3),
    )
    assert events == [Answered(1, 200, [(b"a", b"b")], b"body"), answer(3)]


def test_frames_may_come_octet_by_octet() -> None:
    connection, events = begun(), list[Event]()
    for octet in headers(1, OK, "END_HEADERS").serialize() + data(1, b"no", "END_STREAM").serialize():
        events += connection.receive(bytes((octet,)))
    assert events == [answer(1, 200, b"no")]


def test_frames_that_nobody_knows_and_outdated_ones_are_passed_over() -> None:
    connection = begun()
    unknown = b"\x00\x00\x03\xfa\xff\x00\x00\x00\x01abc"
    frames = unknown, PriorityFrame(1, depends_on=3), AltSvcFrame(0, origin=b"a", field=b"b"), headers(1)
    assert tell(connection, *frames) == [answer(1)]


def test_a_body_without_end_is_cut_off_and_the_status_is_the_answer() -> None:
    connection = begun(2)
    tell(connection, headers(1, OK, "END_HEADERS"))
    events = []
    for _ in range(3):
        events += tell(connection, data(1, b"x" * LARGEST_FRAME))
    events += tell(connection, data(1, b"x" * (LARGEST_BODY - 3 * LARGEST_FRAME)))

    assert events == [answer(1, 200, b"x" * LARGEST_BODY)]
    assert [frame.error_code for frame in said(connection) if isinstance(frame, RstStreamFrame)] == [ErrorCode.CANCEL]
    assert tell(connection, data(1, b"more"), headers(3)) == [answer(3)]


def test_more_than_a_stream_s_window_is_that_stream_s_fault() -> None:
    connection = begun(2)
    tell(connection, headers(1, OK, "END_HEADERS"), *[data(1, b"x" * LARGEST_FRAME)] * 3)
    [fault, other] = tell(connection, data(1, b"x" * LARGEST_FRAME), headers(3))
    assert isinstance(fault, Malformed)
    assert other == answer(3)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([headers(1, b"")], "without a status"),
        ([headers(1, b"\x00\x01a\x01b")], "without a status"),
        ([headers(1, b"\x08\x0220")], "without a status"),
        ([headers(1, b"\x08\x042000")], "without a status"),
        ([headers(1, b"\x08\x03abc")], "without a status"),
        ([headers(1, b"\x08\x03099")], "without a status"),
        ([headers(1, b"\x08\x03600")], "without a status"),
        ([headers(1, b"\x08\x03\xb2\xb3\xb9")], "without a status"),  # digits, for some alphabets
        ([headers(1, b"\x00\x01a\x01b\x88")], "without a status"),
        ([headers(1, b"\x88\x88")], "that is none"),
        ([headers(1, b"\x88\x84")], "that is none"),
        ([headers(1, b"\x88\x00\x01A\x01b")], "that is none"),
        ([headers(1, b"\x88\x00\x00\x01b")], "that is none"),
        ([headers(1, b"\x88\x00\x01a\x03b\r\n")], "that is none"),
        ([headers(1, b"\x88\x00\x0aconnection\x05close")], "that is none"),
        ([headers(1, b"\x88\x0f\x0d\x01x")], "content-length that is none"),
        ([headers(1, b"\x88\x0f\x0d\x015")], "another length"),
        ([headers(1, b"\x88\x0f\x0d\x015", "END_HEADERS"), data(1, b"1234", "END_STREAM")], "another length"),
        ([headers(1, b"\x08\x03100")], "interim"),
        ([headers(1, b"\x08\x03101", "END_HEADERS")], "interim"),
        ([headers(1, OK, "END_HEADERS"), headers(1, OK, "END_HEADERS")], "second answer"),
        ([headers(1, OK, "END_HEADERS"), headers(1, b"\x88")], "that is none"),
        ([data(1, b"x", "END_STREAM")], "before its headers"),
        ([WindowUpdateFrame(1, window_increment=LARGEST_WINDOW)], "too much"),
        ([b"\x00\x00\x04\x08\x00\x00\x00\x00\x01\x00\x00\x00\x00"], "by nothing"),
        (
            [headers(1, b"\x88\x40\x01k" + length_of(bytes(3000)) + b"v" * 3000 + b"\xbe" * 30)],
            "more headers than we read",
        ),
    ],
)
def test_an_answer_that_makes_no_sense_is_no_answer_and_the_others_are_answered(
    frames: list[Frame | bytes], why: str
) -> None:
    connection = begun(2)

    events = tell(connection, *frames, headers(3))

    [fault, other] = events
    assert isinstance(fault, Malformed)
    assert fault.stream_id == 1
    assert why in fault.why
    assert other == answer(3)
    assert [frame.stream_id for frame in said(connection) if isinstance(frame, RstStreamFrame)] == [1]
    assert connection.has_room


# What ends streams, and what ends all.


def test_a_reset_stream_says_its_code_and_what_had_come() -> None:
    connection = begun(3)
    events = tell(
        connection,
        RstStreamFrame(1, error_code=7),
        headers(3, OK, "END_HEADERS"),
        data(3, b"x"),
        RstStreamFrame(3, error_code=2),
        headers(5),
    )
    assert events == [Reset(1, 7, None), Reset(3, 2, answer(3, 200, b"x")), answer(5)]


def test_a_stream_that_we_gave_up_may_still_speak_and_is_not_heard() -> None:
    connection = begun(3, max_concurrent_streams=3)
    assert connection.drop(1) == Dropped(sent=True, so_far=None)
    [reset] = said(connection)
    assert isinstance(reset, RstStreamFrame)
    assert (reset.stream_id, reset.error_code) == (1, ErrorCode.CANCEL)
    assert connection.has_room

    # Its block is an entry of the table that the next one points to.
    events = tell(
        connection,
        headers(1, b"\x88\x40\x01a\x01b", "END_HEADERS"),
        data(1, b"x", "END_STREAM"),
        RstStreamFrame(1, error_code=0),
        WindowUpdateFrame(1, window_increment=1),
        headers(3, b"\x88\xbe"),
    )
    assert events == [Answered(3, 200, [(b"a", b"b")], b"")]


def test_a_stream_that_we_give_up_says_how_far_it_came() -> None:
    connection = begun(0, initial_window_size=2)
    for _ in range(2):
        connection.request(REQUEST, b"1234")
    tell(connection, WindowUpdateFrame(3, window_increment=2), headers(3, OK, "END_HEADERS"))
    assert connection.drop(1) == Dropped(sent=False, so_far=None)
    assert connection.drop(3) == Dropped(sent=True, so_far=answer(3))


def test_goaway_names_what_was_not_processed_and_nothing_new_begins() -> None:
    connection = begun(4)

    assert tell(connection, GoAwayFrame(0, last_stream_id=LARGEST_WINDOW)) == [GoneAway(0, b"", [])]
    assert tell(connection, GoAwayFrame(0, 3, 2, b"why")) == [GoneAway(2, b"why", [5, 7])]
    assert tell(connection, GoAwayFrame(0, last_stream_id=7)) == [GoneAway(0, b"", [])]
    assert tell(connection, headers(1), headers(5)) == [answer(1)]
    assert tell(connection, GoAwayFrame(0, last_stream_id=0)) == [GoneAway(0, b"", [3])]
    assert not connection.has_room


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], ErrorCode.FRAME_SIZE_ERROR),
        ([settings(), b"\x00\x40\x01\x00\x00\x00\x00\x00\x01"], ErrorCode.FRAME_SIZE_ERROR),
        ([PingFrame(0)], ErrorCode.PROTOCOL_ERROR),
        ([SettingsFrame(0, flags=("ACK",))], ErrorCode.PROTOCOL_ERROR),
        ([settings(enable_push=1)], ErrorCode.PROTOCOL_ERROR),
        ([settings(max_frame_size=1)], ErrorCode.PROTOCOL_ERROR),
        ([settings(initial_window_size=2**31)], ErrorCode.FLOW_CONTROL_ERROR),
        ([b"\x00\x00\x06\x04\x00\x00\x00\x00\x01\x00\x03\x00\x00\x00\x01"], ErrorCode.PROTOCOL_ERROR),
        ([b"\x00\x00\x05\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00"], ErrorCode.FRAME_SIZE_ERROR),
        ([settings(), b"\x00\x00\x06\x04\x01\x00\x00\x00\x00\x00\x03\x00\x00\x00\x01"], ErrorCode.FRAME_SIZE_ERROR),
        ([settings(), PushPromiseFrame(1, promised_stream_id=2, data=OK)], ErrorCode.PROTOCOL_ERROR),
        ([settings(), headers(2)], ErrorCode.PROTOCOL_ERROR),
        ([settings(), headers(7)], ErrorCode.PROTOCOL_ERROR),
        ([settings(), data(7, b"")], ErrorCode.PROTOCOL_ERROR),
        ([settings(), b"\x00\x00\x01\x01\x05\x00\x00\x00\x00\x88"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), b"\x00\x00\x01\x00\x01\x00\x00\x00\x00x"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), RstStreamFrame(7)], ErrorCode.PROTOCOL_ERROR),
        ([settings(), WindowUpdateFrame(7, window_increment=1)], ErrorCode.PROTOCOL_ERROR),
        ([settings(), b"\x00\x00\x03\x03\x00\x00\x00\x00\x01abc"], ErrorCode.FRAME_SIZE_ERROR),
        ([settings(), b"\x00\x00\x07\x06\x00\x00\x00\x00\x001234567"], ErrorCode.FRAME_SIZE_ERROR),
        ([settings(), b"\x00\x00\x08\x06\x00\x00\x00\x00\x0112345678"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), b"\x00\x00\x07\x07\x00\x00\x00\x00\x001234567"], ErrorCode.FRAME_SIZE_ERROR),
        ([settings(), b"\x00\x00\x08\x07\x00\x00\x00\x00\x0112345678"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), b"\x00\x00\x03\x08\x00\x00\x00\x00\x00abc"], ErrorCode.FRAME_SIZE_ERROR),
        ([settings(), b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), WindowUpdateFrame(0, window_increment=LARGEST_WINDOW)], ErrorCode.FLOW_CONTROL_ERROR),
        ([settings(), ContinuationFrame(1, OK, flags=("END_HEADERS",))], ErrorCode.PROTOCOL_ERROR),
        ([settings(), headers(1, OK, "END_STREAM"), headers(3)], ErrorCode.PROTOCOL_ERROR),
        ([settings(), headers(1, OK, "END_STREAM"), ContinuationFrame(3)], ErrorCode.PROTOCOL_ERROR),
        ([settings(), headers(1, OK, "END_STREAM"), b"\x00\x00\x00\xfa\x00\x00\x00\x00\x01"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), headers(1, OK, "END_STREAM"), *[ContinuationFrame(1)] * 100], ErrorCode.ENHANCE_YOUR_CALM),
        (
            [settings(), headers(1, OK, "END_STREAM"), *[ContinuationFrame(1, bytes(LARGEST_FRAME))] * 4],
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        ([settings(), headers(1, b"\xff\xff\xff\xff\xff\xff")], ErrorCode.COMPRESSION_ERROR),
        ([settings(), b"\x00\x00\x02\x00\x08\x00\x00\x00\x01\x02x"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), b"\x00\x00\x00\x00\x08\x00\x00\x00\x01"], ErrorCode.PROTOCOL_ERROR),
        ([settings(), b"\x00\x00\x04\x01\x24\x00\x00\x00\x01\x00\x00\x00\x00"], ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_a_broken_protocol_is_said_once_with_goaway_and_nothing_is_read_any_more(
    frames: list[Frame | bytes], code: ErrorCode
) -> None:
    connection = ClientConnection()
    connection.request(REQUEST, b"{}")
    connection.data_to_send()

    events = tell(connection, *frames, headers(1))

    broken = events.pop()
    assert isinstance(broken, Broken)
    assert broken.code == code
    assert set(map(type, events)) <= {SettingsChanged}
    [goaway] = [frame for frame in said(connection) if isinstance(frame, GoAwayFrame)]
    assert goaway.error_code == code
    assert not connection.has_room
    assert tell(connection, headers(1)) == []


def test_data_beyond_the_connection_s_window_breaks_it() -> None:
    connection = begun(1)
    connection._receivable = 3  # 1 MiB later
    [event] = tell(connection, data(1, b"1234"))
    assert isinstance(event, Broken)
    assert event.code == ErrorCode.FLOW_CONTROL_ERROR


def test_closing_says_goaway() -> None:
    connection = begun(1)
    connection.close()
    [goaway] = said(connection)
    assert isinstance(goaway, GoAwayFrame)
    assert (goaway.error_code, goaway.last_stream_id) == (ErrorCode.NO_ERROR, 0)
    assert not connection.has_room


# Whatever comes.

_stream_ids = st.sampled_from([0, 1, 1, 3, 3, 5, 2, 9])
_blocks = st.sampled_from([OK, b"\x8c", b"\x08\x03100", b"", b"\x88\x40\x01a\x01b", b"\x88\xbe", b"\x00\x01a\x01b"])
_frames = st.one_of(
    st.builds(
        lambda stream_id, block, flags: HeadersFrame(stream_id, block, flags=flags).serialize(),
        st.sampled_from([1, 3, 5, 2, 9]),
        _blocks | st.binary(max_size=20),
        st.sets(st.sampled_from(["END_HEADERS", "END_STREAM", "PADDED", "PRIORITY"])),
    ),
    st.builds(
        lambda stream_id, octets, flags: DataFrame(stream_id, octets, flags=flags).serialize(),
        st.sampled_from([1, 3, 5, 2, 9]),
        st.binary(max_size=20),
        st.sets(st.sampled_from(["END_STREAM", "PADDED"])),
    ),
    st.builds(
        lambda kind, flags, stream_id, payload: (
            len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload
        ),
        st.integers(0, 11),
        st.integers(0, 255) | st.sampled_from([0, 1, 4, 5]),
        _stream_ids,
        st.binary(max_size=30) | st.sampled_from([b"\x00\x00\x00\x07", bytes(8), b"\x00\x03\x00\x00\x00\x05"]),
    ),
    st.binary(max_size=30),
)


@given(frames=st.lists(_frames, max_size=30), cuts=st.lists(st.integers(1, 400), max_size=20), polite=st.booleans())
def test_whatever_comes_each_stream_ends_at_most_once_and_nothing_but_events_comes_of_it(
    frames: list[bytes], cuts: list[int], *, polite: bool
) -> None:
    octets = (settings().serialize() if polite else b"") + b"".join(frames)
    whole, parts = begun(3), begun(3)

    events = whole.receive(octets)
    in_parts: list[Event] = []
    at = 0
    for cut in cuts:
        in_parts += parts.receive(octets[at : at + cut])
        at += cut
    in_parts += parts.receive(octets[at:])

    assert events == in_parts
    assert whole.data_to_send() == parts.data_to_send()
    ends = Counter(
        stream_id
        for event in events
        for stream_id in (
            event.unprocessed
            if isinstance(event, GoneAway)
            else [event.stream_id]
            if isinstance(event, Answered | Reset | Malformed)
            else []
        )
    )
    assert set(ends) <= {1, 3, 5}
    assert set(ends.values()) <= {1}
    assert all(200 <= event.status < 600 for event in events if isinstance(event, Answered))
    assert not any(isinstance(event, Broken) for event in events[:-1])


@dataclass
class H2Server:
    """h2's server side. It raises at whatever we should not have said."""

    connection: h2.connection.H2Connection = field(
        default_factory=lambda: h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding=None)
        )
    )
    bodies: dict[int, bytes] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)

    def hear(self, octets: bytes) -> None:
        for event in self.connection.receive_data(octets):
            match event:
                case h2.events.RequestReceived():
                    assert event.stream_id is not None
                    self.bodies[event.stream_id] = b""
                case h2.events.DataReceived():
                    assert event.stream_id is not None
                    assert event.data is not None
                    self.bodies[event.stream_id] += event.data
                    if event.flow_controlled_length:
                        self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    assert event.stream_id is not None
                    self.ended.append(event.stream_id)
                case _:
                    pass


_answers = st.tuples(
    st.sampled_from([200, 400, 403, 410, 429, 500, 503, 204]),
    st.lists(
        st.tuples(st.sampled_from([b"apns-id", b"date", b"x"]), st.binary(max_size=20).map(bytes.hex)), max_size=4
    ),
    st.binary(max_size=200),
    st.integers(0, 2),  # interim answers
    st.booleans(),  # trailers
    st.none() | st.integers(0, 20),  # padding
)
_settings = st.fixed_dictionaries(
    {},
    optional={
        SettingCodes.INITIAL_WINDOW_SIZE: st.sampled_from([0, 1, 10, 1000, 100_000]),
        SettingCodes.MAX_CONCURRENT_STREAMS: st.sampled_from([1, 2, 5, 100]),
        SettingCodes.HEADER_TABLE_SIZE: st.sampled_from([0, 100, 4096, 65_536]),
        SettingCodes.MAX_FRAME_SIZE: st.sampled_from([16_384, 100_000]),
    },
)


@given(
    rounds=st.lists(
        st.tuples(_settings, st.lists(st.tuples(st.binary(max_size=3000), _answers), max_size=6)), max_size=6
    )
)
def test_with_h2_as_the_server_each_body_and_each_answer_arrives(
    rounds: list[
        tuple[
            dict[SettingCodes | int, int],
            list[tuple[bytes, tuple[int, list[tuple[bytes, str]], bytes, int, bool, int | None]]],
        ]
    ],
) -> None:
    client, server = ClientConnection(), H2Server()
    server.connection.initiate_connection()
    events: list[Event] = []

    def talk() -> None:
        while octets := client.data_to_send():
            server.hear(octets)
            events.extend(client.receive(server.connection.data_to_send()))
        events.extend(client.receive(server.connection.data_to_send()))
        if octets := client.data_to_send():
            server.hear(octets)

    talk()
    for new, exchanges in rounds:
        server.connection.update_settings(new)
        talk()
        for body, (status, fields, said_back, interim, trailers, padding) in exchanges:
            assert client.has_room
            events.clear()
            stream_id = client.request(REQUEST, body)
            talk()
            # A window of 0 does not open by itself.
            if stream_id not in server.ended:
                server.connection.increment_flow_control_window(10_000, stream_id)
                talk()
            assert server.ended.pop() == stream_id
            assert server.bodies.pop(stream_id) == body

            listed = [(name, value.encode()) for name, value in fields]
            for _ in range(interim):
                server.connection.send_headers(stream_id, [(b":status", b"103"), *listed])
            server.connection.send_headers(stream_id, [(b":status", b"%d" % status), *listed])
            server.connection.send_data(stream_id, said_back, end_stream=not trailers, pad_length=padding)
            if trailers:
                server.connection.send_headers(stream_id, [(b"late", b"x")], end_stream=True)
            talk()
            assert events == [Answered(stream_id, status, listed, said_back)]


def test_a_server_that_shrinks_its_table_finds_nothing_of_ours_in_it() -> None:
    server = hpack.Decoder()
    connection = begun(0, header_table_size=0)
    server.max_allowed_table_size = 0
    for _ in range(2):
        connection.request(REQUEST, b"")
    for frame in said(connection):
        assert isinstance(frame, HeadersFrame)
        server.decode(frame.data)
    assert not server.header_table.dynamic_entries
