import json
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.answer import Unsendable
from core.delivery import Push
from core.request import Request, compact, compose, topic_of
from tests.support.deliveries import a_delivery, a_push

APP = "com.example.app"
APNS_ID = UUID("0B60A2E5-1DB6-4B25-9C0E-7A1D9C0F5B1A")


def composed(push: Push, key_topic: str = APP) -> Request:
    request = compose(push, key_topic)
    assert isinstance(request, Request)
    return request


def headers(push: Push, key_topic: str = APP) -> dict[str, str]:
    request = composed(push, key_topic)
    assert len(dict(request.headers)) == len(request.headers), "a header twice is DuplicateHeaders"
    return dict(request.headers)


def test_a_plain_delivery_is_an_alert_at_once_under_its_own_id() -> None:
    push = a_push(1, a_delivery(1, apns_id=APNS_ID), token="ABcd" * 16)

    request = composed(push)

    assert request.path == "/3/device/" + "ABcd" * 16
    assert headers(push) == {
        "apns-topic": "com.example.app",
        "apns-push-type": "alert",
        "apns-priority": "10",
        "apns-id": "0b60a2e5-1db6-4b25-9c0e-7a1d9c0f5b1a",  # canonical: lower case
        "apns-collapse-id": "0b60a2e5-1db6-4b25-9c0e-7a1d9c0f5b1a",
    }
    assert request.body == b'{"aps":{"alert":"Hello"}}'


# Apple, "Sending notification requests to APNs": all eleven.
@pytest.mark.parametrize(
    ("push_type", "topic"),
    [
        ("alert", "com.example.app"),
        ("background", "com.example.app"),
        ("complication", "com.example.app.complication"),
        ("controls", "com.example.app.push-type.controls"),
        ("fileprovider", "com.example.app.pushkit.fileprovider"),
        ("liveactivity", "com.example.app.push-type.liveactivity"),
        ("location", "com.example.app.location-query"),
        ("mdm", "com.example.app"),
        ("pushtotalk", "com.example.app.voip-ptt"),
        ("voip", "com.example.app.voip"),
        ("widgets", "com.example.app.push-type.widgets"),
    ],
)
def test_the_topic_has_the_suffix_of_its_push_type(push_type: str, topic: str) -> None:
    sent = headers(a_push(1, a_delivery(1, push_type=push_type)))

    assert (sent["apns-push-type"], sent["apns-topic"]) == (push_type, topic)


@pytest.mark.parametrize("push_type", ["alert", "voip", "liveactivity"])
@pytest.mark.parametrize("topic", [None, "com.example.other"])
def test_the_topic_by_which_pushes_are_grouped_is_the_one_that_is_sent(push_type: str, topic: str | None) -> None:
    push = a_push(1, a_delivery(1, push_type=push_type), topic=topic)

    assert topic_of(push, APP) == headers(push)["apns-topic"]


def test_the_devices_own_topic_comes_before_the_keys_and_has_the_suffix_too() -> None:
    assert headers(a_push(topic="com.example.other"))["apns-topic"] == "com.example.other"
    voip = a_push(1, a_delivery(1, push_type="voip"), topic="com.example.other")
    assert headers(voip)["apns-topic"] == "com.example.other.voip"


@pytest.mark.parametrize(
    ("push_type", "priority", "sent"),
    [
        ("alert", None, "10"),
        ("alert", 10, "10"),
        ("alert", 5, "5"),
        ("alert", 1, "1"),
        ("liveactivity", 5, "5"),
        ("voip", None, "10"),
        ("background", None, "5"),  # anything else is an error there
        ("background", 10, "5"),
        ("background", 1, "5"),
    ],
)
def test_the_priority_is_the_rows_or_10_and_of_a_background_push_always_5(
    push_type: str, priority: int | None, sent: str
) -> None:
    delivery = a_delivery(1, push_type=push_type, priority=priority)

    assert headers(a_push(1, delivery))["apns-priority"] == sent


def test_a_live_activity_of_priority_1_is_not_sent_since_apple_takes_none() -> None:
    unsendable = compose(a_push(1, a_delivery(1, push_type="liveactivity", priority=1)), "com.example.app")

    assert isinstance(unsendable, Unsendable)
    assert unsendable.reason == "BadPriority"


def test_the_collapse_id_is_the_rows_or_its_apns_id_so_that_a_second_push_replaces_the_first() -> None:
    assert headers(a_push(1, a_delivery(1, collapse_id="chat 7")))["apns-collapse-id"] == "chat 7"

    unnamed = headers(a_push(1, a_delivery(1, apns_id=APNS_ID)))
    assert unnamed["apns-collapse-id"] == unnamed["apns-id"] == str(APNS_ID)


@pytest.mark.parametrize(
    ("expires_at", "sent"),
    [(1_772_366_400, "1772366400"), (1, "1"), (0, "0"), (-62_135_596_800, "0")],
)
def test_the_expiration_is_in_seconds_since_the_epoch_and_never_negative(expires_at: int, sent: str) -> None:
    assert headers(a_push(1, a_delivery(1, expires_at=expires_at)))["apns-expiration"] == sent


def test_without_an_expiry_there_is_no_expiration() -> None:
    assert "apns-expiration" not in headers(a_push())


def payload_of(size: int, character: str = "x") -> bytes:
    """As Postgres writes a jsonb: one space after each colon and comma. `size` counts neither."""
    frame = len(b'{"aps":{"alert":""},"n":1}')
    width = len(character.encode())
    text = character * ((size - frame) // width) + "x" * ((size - frame) % width)
    return f'{{"aps": {{"alert": "{text}"}}, "n": 1}}'.encode()


@pytest.mark.parametrize("character", ["x", "é", "€", "😀", " "])
@pytest.mark.parametrize(
    ("push_type", "largest"),
    [("alert", 4096), ("background", 4096), ("liveactivity", 4096), ("pushtotalk", 4096), ("voip", 5120)],
)
def test_a_payload_may_have_so_many_bytes_and_not_one_more(push_type: str, largest: int, character: str) -> None:
    fits = a_delivery(1, push_type=push_type, payload=payload_of(largest, character))
    exceeds = replace(fits, payload=payload_of(largest + 1, character))

    assert len(fits.payload) > largest  # what Postgres adds is not counted
    assert len(composed(a_push(1, fits)).body) == largest
    assert compose(a_push(1, exceeds), APP) == Unsendable(
        "PayloadTooLarge", f"The payload has {largest + 1} bytes; APNs takes at most {largest} of a {push_type}."
    )


@pytest.mark.parametrize(
    ("stored", "sent"),
    [
        (b"{}", b"{}"),
        (b'{"a": 1, "b": [1, 2, {"c": null}]}', b'{"a":1,"b":[1,2,{"c":null}]}'),
        (b'{"a, b": "c: d,  e"}', b'{"a, b":"c: d,  e"}'),
        (rb'{"a": "\" , \" : \\", "b": "\\\\", "c": "\\\" , "}', rb'{"a":"\" , \" : \\","b":"\\\\","c":"\\\" , "}'),
        (b'{"a": "\\u0041 \\n \\t"}', b'{"a":"\\u0041 \\n \\t"}'),
        ('{"ä ö": "ü , ß", "e": "😀 : 😀"}'.encode(), '{"ä ö":"ü , ß","e":"😀 : 😀"}'.encode()),
        (b'{\n\t"a" :\r\n 1\n}', b'{"a":1}'),
        # No float has passed over them: Postgres keeps numbers exactly, and so do we.
        (b'{"id": 12345678901234567890123}', b'{"id":12345678901234567890123}'),
        (b'{"x": 0.10000000000000000000001, "y": 1.50}', b'{"x":0.10000000000000000000001,"y":1.50}'),
        (b'{"x": -1' + b"0" * 400 + b"}", b'{"x":-1' + b"0" * 400 + b"}"),
    ],
)
def test_only_the_spaces_between_words_are_taken_out(stored: bytes, sent: bytes) -> None:
    assert compact(stored) == sent
    assert composed(a_push(1, a_delivery(1, payload=stored))).body == sent


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('ab ",:\\{}[]\n\té😀/'))
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('ab ",:\\é')) | st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_compacting_changes_nothing_of_what_is_said(payload: dict[str, object], escaped: bool) -> None:  # noqa: FBT001  hypothesis fills it in
    stored = json.dumps(payload, ensure_ascii=escaped).encode()  # with Postgres' spaces

    sent = compact(stored)

    assert json.loads(sent) == payload
    assert sent == json.dumps(payload, ensure_ascii=escaped, separators=(",", ":")).encode()
    assert compact(sent) == sent


def test_a_megabyte_of_backslashes_is_compacted_without_trouble() -> None:
    stored = b'{"a": "' + b'\\\\\\"' * 250_000 + b'"}'

    assert compact(stored) == stored.replace(b'"a": ', b'"a":')


def test_neither_token_nor_payload_shows_in_what_a_log_or_an_error_may_print() -> None:
    push = a_push(1, a_delivery(1, payload=b'{"aps": {"alert": "Your test is positive"}}'), token="5ec4e7" * 10)
    request = composed(push)

    for shown in (repr(push), repr(request), repr(push.device), repr(push.delivery), str(push), f"{request}"):
        assert "5ec4e7" not in shown
        assert "positive" not in shown
    too_large = compose(replace(push, delivery=a_delivery(1, payload=payload_of(9999, "s"))), APP)
    assert "sss" not in repr(too_large)
