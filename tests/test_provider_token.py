import base64
import json
from itertools import accumulate, pairwise
from math import nextafter

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from core.provider_token import ProviderToken
from core.secret import SigningKey

MINUTE = 60.0
HALF_HOUR = 30 * MINUTE
START = 1_799_992_800.0  # a full half hour
PRIVATE_KEY = ec.generate_private_key(ec.SECP256R1())
KEY = SigningKey(
    team_id="TEAM123456",
    key_id="KEY1234567",
    private_key=PRIVATE_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    topic="com.example.app",
)


def header_and_claims(bearer: str) -> tuple[dict[str, object], dict[str, object]]:
    head, claims, _ = bearer.removeprefix("bearer ").split(".")
    return json.loads(base64.urlsafe_b64decode(head + "==")), json.loads(base64.urlsafe_b64decode(claims + "=="))


def test_it_is_what_apple_documents_and_no_more() -> None:
    bearer = ProviderToken(KEY).bearer(START + 61.5)

    assert header_and_claims(bearer) == (
        {"alg": "ES256", "kid": "KEY1234567"},
        {"iss": "TEAM123456", "iat": int(START)},
    )
    assert bearer.startswith("bearer ")


def test_its_signature_is_our_keys() -> None:
    token = ProviderToken(KEY).bearer(START).removeprefix("bearer ")

    # The date is of no matter here, and lies in the future for as long as this machine's clock says so.
    assert jwt.decode(token, PRIVATE_KEY.public_key(), algorithms=["ES256"], options={"verify_iat": False})
    stranger = ec.generate_private_key(ec.SECP256R1()).public_key()
    with pytest.raises(jwt.InvalidSignatureError):
        jwt.decode(token, stranger, algorithms=["ES256"], options={"verify_iat": False})


def test_it_is_used_until_it_is_fifty_minutes_old_and_then_renewed() -> None:
    token = ProviderToken(KEY)
    renewal = START + 50 * MINUTE

    first = token.bearer(START + 1)
    assert token.bearer(nextafter(renewal, 0)) == first
    assert (token.issued_at, token.minted_at) == (START, START + 1)

    second = token.bearer(renewal)
    assert second != first
    assert (token.issued_at, token.minted_at) == (START + HALF_HOUR, renewal)


def test_before_the_first_push_nothing_is_minted() -> None:
    token = ProviderToken(KEY)

    assert (token.issued_at, token.minted_at) == (None, None)


def test_after_the_wall_clock_was_put_back_there_is_a_token_that_is_not_from_the_future() -> None:
    token = ProviderToken(KEY)
    token.bearer(START)

    token.bearer(START - 1)

    assert token.issued_at == START - HALF_HOUR


def test_a_small_step_back_within_the_half_hour_mints_nothing() -> None:
    token = ProviderToken(KEY)

    assert token.bearer(START + 5) == token.bearer(START + 1)


def test_a_new_key_signs_and_names_itself_anew() -> None:
    rotated = SigningKey(team_id="T", key_id="NEW", private_key=KEY.private_key, topic=KEY.topic)

    assert header_and_claims(ProviderToken(rotated).bearer(START))[0]["kid"] == "NEW"


@pytest.mark.parametrize(("age", "replaced"), [(0.0, False), (20 * MINUTE - 0.01, False), (20 * MINUTE, True)])
def test_it_is_replaced_at_apples_word_but_not_within_twenty_minutes(age: float, *, replaced: bool) -> None:
    token = ProviderToken(KEY)
    minted = START + 5 * MINUTE
    first = token.bearer(minted)

    assert token.replace(minted + age) is replaced
    assert (token.bearer(minted + age) != first) is replaced
    assert token.minted_at == minted + age * replaced


def test_a_replacement_is_dated_now_since_apple_calls_our_dates_too_old() -> None:
    token = ProviderToken(KEY)
    token.bearer(START)
    now = START + 29 * MINUTE + 0.7

    assert token.replace(now)

    assert header_and_claims(token.bearer(now))[1] == {"iss": KEY.team_id, "iat": int(now)}
    assert (token.issued_at, token.minted_at) == (int(now), now)


def test_a_replacement_is_used_for_fifty_minutes_like_any_other() -> None:
    token = ProviderToken(KEY)
    token.bearer(START)
    token.replace(START + 20 * MINUTE)
    replacement = token.bearer(START + 20 * MINUTE)

    assert token.bearer(START + 70 * MINUTE - 0.01) == replacement
    assert token.bearer(START + 70 * MINUTE) != replacement
    assert token.issued_at == START + 2 * HALF_HOUR


def test_a_replacement_is_not_replaced_within_twenty_minutes_either() -> None:
    token = ProviderToken(KEY)
    token.bearer(START)

    assert token.replace(START + 20 * MINUTE)
    assert not token.replace(START + 40 * MINUTE - 0.01)
    assert token.replace(START + 40 * MINUTE)


def test_before_the_first_push_there_is_nothing_to_replace() -> None:
    token = ProviderToken(KEY)

    assert not token.replace(START)
    assert token.issued_at is None


def test_it_says_how_long_it_cannot_be_replaced_yet() -> None:
    token = ProviderToken(KEY)
    assert token.replaceable_in(START) == 0.0

    token.bearer(START + 5 * MINUTE)

    assert token.replaceable_in(START + 5 * MINUTE) == 20 * MINUTE  # since it was minted, and not since its date
    assert token.replaceable_in(START + 24 * MINUTE) == MINUTE
    assert token.replaceable_in(START + 25 * MINUTE) == 0.0
    assert token.replaceable_in(START + 99 * MINUTE) == 0.0


# From tick after tick to a night's silence, and every fraction of a second in between.
steps = st.one_of(st.floats(0, 45), st.floats(0, 40 * MINUTE), st.floats(0, 24 * 60 * MINUTE))
moments = st.builds(
    lambda start, then: list(accumulate(then, initial=start)),
    st.floats(START, START + 2 * HALF_HOUR),
    st.lists(steps, max_size=60),
)


@settings(deadline=None)  # two noisy cores
@given(moments, st.sets(st.integers(0, 60)))
def test_it_is_never_too_old_never_from_the_future_and_never_minted_twice_in_twenty_minutes(
    nows: list[float], called_expired: set[int]
) -> None:
    token = ProviderToken(KEY)
    mints: list[float] = []
    for number, now in enumerate(nows):
        if number in called_expired and token.replace(now):
            mints.append(now)
        bearer = token.bearer(now)
        issued_at = header_and_claims(bearer)[1]["iat"]
        assert issued_at == token.issued_at
        assert isinstance(issued_at, int)
        assert 0 <= now - issued_at < 50 * MINUTE
        if not mints or token.minted_at != mints[-1]:
            assert token.minted_at == now
            mints.append(now)

    assert all(later - earlier >= 20 * MINUTE for earlier, later in pairwise(mints))


@settings(deadline=None)  # two noisy cores
@given(moments, moments)
def test_environments_that_never_meet_date_their_tokens_alike(mine: list[float], yours: list[float]) -> None:
    now = max(mine[-1], yours[-1])
    half_hour = now // HALF_HOUR * HALF_HOUR
    dates = []
    for nows in (mine, yours):
        token = ProviderToken(KEY)
        for earlier in nows:
            token.bearer(earlier)
        token.bearer(now)
        dates.append(token.issued_at)

    # Two at most, however many environments there are; and in the last ten minutes of each half hour only one.
    assert set(dates) <= {half_hour, half_hour - HALF_HOUR}
    if now - half_hour >= 20 * MINUTE:
        assert dates == [half_hour, half_hour]


@settings(deadline=None)  # two noisy cores
@given(*[st.floats(START, START + HALF_HOUR, exclude_max=True)] * 2)
def test_tokens_minted_in_the_same_half_hour_bear_the_same_date(mine: float, yours: float) -> None:
    one, other = ProviderToken(KEY), ProviderToken(KEY)

    claims = [header_and_claims(token.bearer(now))[1] for token, now in ((one, mine), (other, yours))]

    assert claims[0] == claims[1]
