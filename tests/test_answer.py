import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.answer import Accepted, Rejected, Unanswered, read

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("body", [b"", b"{}", b"not JSON", b'{"reason": "BadTopic"}', b"\xff\xfe\x00"])
def test_200_is_accepted_whatever_the_body_says(body: bytes) -> None:
    assert read(200, body) == Accepted()


@pytest.mark.parametrize("status", [0, 100, 201, 204, 301, 400, 403, 404, 405, 410, 413, 429, 500, 503, 999])
def test_any_other_status_is_a_rejection_that_keeps_its_status(status: int) -> None:
    assert read(status, b'{"reason": "BadTopic"}') == Rejected(status, "BadTopic")


def test_a_reason_that_nobody_has_seen_yet_is_kept_verbatim() -> None:
    assert read(400, b'{"reason": "TokenIsTooShiny", "more": [1]}') == Rejected(400, "TokenIsTooShiny")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>Bad gateway</html>", id="a proxy's page"),
        pytest.param(b'{"reason": "BadTo', id="cut off"),
        pytest.param(b'{"reason": "\xe9t\xe9"}', id="not UTF-8"),
        pytest.param(b"\xff\xfe\xff", id="half of a UTF-16 character"),
        pytest.param(b"\x00\x00\x00", id="zeros"),
        pytest.param(b'["reason", "BadTopic"]', id="a list"),
        pytest.param(b'"BadTopic"', id="a string"),
        pytest.param(b"null", id="null"),
        pytest.param(b"9" * 5000, id="a number longer than Python reads"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="nested 100,000 deep"),
        pytest.param(b'{"reason":' * 100_000 + b"1" + b"}" * 100_000, id="objects nested 100,000 deep"),
        pytest.param(b"x" * 1_000_000, id="a megabyte that is not JSON"),
        pytest.param(b'{"padding": "' + b"x" * 1_000_000 + b'"}', id="a megabyte of JSON with no reason"),
        pytest.param(b'{"Reason": "BadTopic"}', id="another spelling of reason"),
        pytest.param(b'{"reason": null}', id="null for a reason"),
        pytest.param(b'{"reason": 7}', id="a number for a reason"),
        pytest.param(b'{"reason": true}', id="a boolean for a reason"),
        pytest.param(b'{"reason": ["BadTopic"]}', id="a list for a reason"),
        pytest.param(b'{"reason": {"reason": "BadTopic"}}', id="an object for a reason"),
        pytest.param(b'{"reason": ""}', id="an empty reason"),
        pytest.param(b'{"reason": " \\t\\n\\u2003"}', id="a blank reason"),
        pytest.param(b'{"reason": "\\u0000\\ud800"}', id="a reason of what nobody can store"),
    ],
)
def test_a_body_without_a_reason_leaves_the_status_to_say_so(body: bytes) -> None:
    assert read(503, body) == Rejected(503, "status_503")


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        pytest.param("Bad\0Topic", "BadTopic", id="NUL"),
        pytest.param("\0", "status_400", id="nothing but NUL"),
        pytest.param("Bad\ud800Topic", "BadTopic", id="half a surrogate pair"),
        pytest.param("Bad\r\nTopic\x1b[31m", "BadTopic[31m", id="line ends and a terminal's escape"),
        pytest.param("Bad\u202eTopic", "BadTopic", id="text that runs backwards"),
        pytest.param("  BadTopic\n", "BadTopic", id="spaces round it"),
        pytest.param("Bad Topic", "Bad Topic", id="a space within"),
        pytest.param("Thème", "Thème", id="not ASCII"),
        pytest.param("😀" * 3, "😀" * 3, id="beyond the first plane"),
        pytest.param("x" * 100, "x" * 100, id="just not too long"),
        pytest.param("x" * 10_000, "x" * 100, id="10,000 characters"),
        pytest.param(" " * 100 + "BadTopic", "status_400", id="a word behind too many spaces"),
    ],
)
def test_a_reason_is_cut_down_to_what_a_row_and_a_log_line_can_hold(reason: str, kept: str) -> None:
    assert read(400, json.dumps({"reason": reason}).encode()) == Rejected(400, kept)


@pytest.mark.parametrize(
    ("timestamp", "instant"),
    [
        ("0", EPOCH),
        ("1", EPOCH + timedelta(milliseconds=1)),
        ("1772366400123", datetime(2026, 3, 1, 12, 0, 0, 123_000, tzinfo=UTC)),
        ("1772366400999", datetime(2026, 3, 1, 12, 0, 0, 999_000, tzinfo=UTC)),
        ("1772366400123.0", datetime(2026, 3, 1, 12, 0, 0, 123_000, tzinfo=UTC)),
        ("-1", EPOCH - timedelta(milliseconds=1)),
    ],
)
def test_a_410_tells_to_the_millisecond_since_when_the_token_is_dead(timestamp: str, instant: datetime) -> None:
    body = f'{{"reason": "Unregistered", "timestamp": {timestamp}}}'.encode()

    assert read(410, body) == Rejected(410, "Unregistered", instant)


@pytest.mark.parametrize("zone", ["Asia/Jakarta", "America/New_York"])
def test_the_instant_does_not_depend_on_where_this_machine_stands(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", zone)
            time.tzset()
            answer = read(410, b'{"reason": "Unregistered", "timestamp": 1772366400123}')
    finally:
        time.tzset()

    assert answer == Rejected(410, "Unregistered", datetime(2026, 3, 1, 12, 0, 0, 123_000, tzinfo=UTC))


@settings(deadline=None)
@given(st.integers(0, 4_102_444_800_000))  # until 2100
def test_no_millisecond_of_this_century_is_moved(milliseconds: int) -> None:
    body = json.dumps({"reason": "Unregistered", "timestamp": milliseconds}).encode()

    assert read(410, body) == Rejected(410, "Unregistered", EPOCH + timedelta(milliseconds=milliseconds))


@pytest.mark.parametrize(
    "timestamp",
    [
        '"1772366400123"',
        "true",
        "false",
        "null",
        "[1772366400123]",
        "{}",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "1e300",
        "9" * 18,
        "9" * 400,
        "-" + "9" * 18,
        "-" + "9" * 400,
    ],
)
def test_a_timestamp_that_is_no_instant_is_none(timestamp: str) -> None:
    body = f'{{"reason": "ExpiredToken", "timestamp": {timestamp}}}'.encode()

    assert read(410, body) == Rejected(410, "ExpiredToken", None)


def test_a_410_without_a_timestamp_is_a_410_all_the_same() -> None:
    assert read(410, b'{"reason": "Unregistered"}') == Rejected(410, "Unregistered", None)
    assert read(410, b"") == Rejected(410, "status_410", None)


@pytest.mark.parametrize("status", [400, 403, 429, 500])
def test_a_timestamp_counts_with_a_410_alone(status: int) -> None:
    assert read(status, b'{"reason": "Gone", "timestamp": 1772366400123}') == Rejected(status, "Gone", None)


def test_a_body_says_nothing_of_floors_and_notes() -> None:
    body = b'{"reason": "TooManyRequests", "floor": 99, "note": "x", "retry-after": 99}'

    assert read(429, body) == Rejected(429, "TooManyRequests", None, 0.0, "")


def test_no_answer_means_that_apns_may_have_it_unless_it_is_known_better() -> None:
    assert Unanswered("timeout", "No answer.").maybe_processed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)
ALMOST_APPLES = st.builds(
    lambda reason, timestamp, more: json.dumps(more | {"reason": reason, "timestamp": timestamp}).encode(),
    JSON,
    JSON,
    st.dictionaries(st.text(max_size=4), JSON, max_size=2),
)


@settings(deadline=None)
@given(st.integers(0, 1000), st.binary() | JSON.map(lambda said: json.dumps(said).encode()) | ALMOST_APPLES)
def test_reading_never_raises_and_a_reason_is_always_one_that_postgres_and_a_log_line_take(
    status: int, body: bytes
) -> None:
    answer = read(status, body)

    if status == 200:
        assert answer == Accepted()
        return
    assert isinstance(answer, Rejected)
    assert answer.status == status
    assert 1 <= len(answer.reason) <= 100
    assert answer.reason.isprintable()
    assert answer.reason == answer.reason.strip()
    answer.reason.encode()  # raises of a lone surrogate
    assert answer.dead_since is None or status == 410
