from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from math import nextafter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.answer import Accepted, Answer, Rejected, Unanswered, Unbegun, Unsendable
from core.reasons import REASONS, Blame
from core.recipient import BadTimeZone, Recipient
from core.verdict import (
    Deferred,
    Failed,
    InvalidToken,
    Ladder,
    Outcome,
    Released,
    Retry,
    Sent,
    Skip,
    Skipped,
    Withheld,
    before_push,
    jittered,
    judge,
    withhold,
)
from tests.support.deliveries import a_delivery, a_push

LADDER = Ladder(max_attempts=5, base=60, cap=3600)
ALMOST_ONE = nextafter(1, 0)
DEAD_SINCE = datetime(2026, 3, 1, 12, 0, 0, 123_000, tzinfo=UTC)

OVERLOADED = Rejected(503, "ServiceUnavailable")
BAD_KEY = Rejected(403, "InvalidProviderToken")
BAD_TOPIC = Rejected(400, "TopicDisallowed")
GONE = Rejected(410, "Unregistered", DEAD_SINCE)
MALFORMED = Rejected(400, "BadCollapseId")
UNHEARD_OF = Rejected(400, "TokenIsTooShiny")
TIMEOUT = Unanswered("timeout", "APNs did not answer within 8 s.")
TOO_LARGE = Unsendable("PayloadTooLarge", "The payload has 4097 bytes.")


def becomes(answer: Answer, *, attempts: int = 1, may_give_back: bool = True, chance: float = 0.0) -> Outcome:
    push = a_push(1, a_delivery(1, attempts=attempts, may_give_back=may_give_back))
    return judge(push, answer, LADDER, chance)


# What happens, the attempt it happens on, whether attempts may still be given back, and what becomes of the delivery.
@pytest.mark.parametrize(
    ("answer", "attempts", "may_give_back", "outcome"),
    [
        pytest.param(Accepted(), 1, True, Sent, id="accepted"),
        pytest.param(Accepted(), 5, True, Sent, id="accepted on the last attempt"),
        pytest.param(Accepted(), 9, False, Sent, id="accepted long after"),
        pytest.param(OVERLOADED, 1, True, Retry, id="503"),
        pytest.param(OVERLOADED, 4, True, Retry, id="503 on the last attempt but one"),
        pytest.param(OVERLOADED, 5, True, Failed, id="503 on the last attempt"),
        pytest.param(OVERLOADED, 6, True, Failed, id="503 beyond the last attempt"),
        pytest.param(OVERLOADED, 1, False, Retry, id="503, claimed long ago"),
        pytest.param(Rejected(429, "TooManyRequests"), 4, True, Retry, id="429 for the device"),
        pytest.param(Rejected(429, "TooManyRequests"), 5, True, Failed, id="429 for the device on the last attempt"),
        pytest.param(Rejected(500, "status_500"), 4, True, Retry, id="500 that says nothing"),
        pytest.param(Rejected(302, "status_302"), 4, True, Retry, id="what is no answer of APNs'"),
        pytest.param(Rejected(400, "IdleTimeout"), 4, True, Retry, id="idle connection"),
        pytest.param(TIMEOUT, 1, True, Retry, id="no answer"),
        pytest.param(TIMEOUT, 4, False, Retry, id="no answer, claimed long ago"),
        pytest.param(TIMEOUT, 5, True, Failed, id="no answer on the last attempt"),
        pytest.param(BAD_KEY, 1, True, Withheld, id="bad key"),
        pytest.param(BAD_KEY, 5, True, Withheld, id="bad key on the last attempt"),
        pytest.param(BAD_KEY, 4, False, Retry, id="bad key, claimed long ago"),
        pytest.param(BAD_KEY, 5, False, Failed, id="bad key, claimed long ago, on the last attempt"),
        pytest.param(BAD_TOPIC, 5, True, Withheld, id="bad topic"),
        pytest.param(BAD_TOPIC, 5, False, Failed, id="bad topic, claimed long ago, on the last attempt"),
        pytest.param(Rejected(403, "Shiny"), 5, True, Withheld, id="403 that nobody has seen yet"),
        pytest.param(Rejected(429, "TooManyProviderTokenUpdates"), 5, True, Withheld, id="429 for our key"),
        pytest.param(GONE, 1, True, InvalidToken, id="410"),
        pytest.param(GONE, 5, True, InvalidToken, id="410 on the last attempt"),
        pytest.param(GONE, 5, False, InvalidToken, id="410, claimed long ago"),
        pytest.param(Rejected(410, "ExpiredToken"), 1, True, InvalidToken, id="410 without a date"),
        pytest.param(Rejected(410, "status_410"), 1, True, InvalidToken, id="410 that says nothing"),
        pytest.param(Rejected(400, "BadDeviceToken"), 1, True, InvalidToken, id="bad device token"),
        pytest.param(MALFORMED, 1, True, Failed, id="malformed"),
        pytest.param(MALFORMED, 1, False, Failed, id="malformed, claimed long ago"),
        pytest.param(UNHEARD_OF, 1, True, Failed, id="400 that nobody has seen yet"),
        pytest.param(Rejected(413, "PayloadTooLarge"), 1, True, Failed, id="too large by APNs' count"),
        pytest.param(TOO_LARGE, 1, True, Failed, id="too large by ours"),
        pytest.param(Unbegun(), 1, True, Released, id="not begun"),
        pytest.param(Unbegun(), 5, True, Released, id="not begun on the last attempt"),
        pytest.param(Unbegun(), 5, False, Released, id="not begun, claimed long ago"),
    ],
)
def test_what_becomes_of_a_delivery(
    *, answer: Answer, attempts: int, may_give_back: bool, outcome: type[Outcome]
) -> None:
    became = becomes(answer, attempts=attempts, may_give_back=may_give_back)

    assert isinstance(became, outcome)


def test_an_outcome_carries_the_reason_verbatim_and_a_sentence() -> None:
    assert becomes(UNHEARD_OF) == Failed(
        "TokenIsTooShiny", "APNs answered 400 TokenIsTooShiny, which this version does not know."
    )
    assert becomes(OVERLOADED) == Retry(
        "ServiceUnavailable", "APNs answered 503 ServiceUnavailable: APNs is unavailable.", 30.0
    )
    assert becomes(TIMEOUT) == Retry("timeout", "APNs did not answer within 8 s.", 30.0)
    assert becomes(TIMEOUT, attempts=5) == Failed("timeout", "APNs did not answer within 8 s.")
    assert becomes(TOO_LARGE) == Failed("PayloadTooLarge", "The payload has 4097 bytes.")
    assert becomes(Rejected(403, "Forbidden")) == Withheld(
        "Forbidden", "APNs answered 403 Forbidden: the action is not allowed.", 150.0
    )


def test_a_dead_token_brings_its_device_its_date_and_what_to_do_if_the_device_has_come_back() -> None:
    push = a_push(7, a_delivery(7, attempts=2))
    error = "APNs answered 410 Unregistered: the device token is no longer active for the topic."

    assert judge(push, GONE, LADDER, 0.0) == InvalidToken(
        "Unregistered", error, push.device, DEAD_SINCE, Retry("Unregistered", error, 60.0)
    )


def test_a_device_that_has_come_back_on_the_last_attempt_is_too_late() -> None:
    became = becomes(GONE, attempts=5)

    assert isinstance(became, InvalidToken)
    assert isinstance(became.if_alive, Failed)


@pytest.mark.parametrize("reason", sorted(reason for reason, row in REASONS.items() if row.blame is Blame.PROVIDER))
@pytest.mark.parametrize("attempts", [1, 5, 100])
def test_no_fault_of_ours_costs_a_delivery_its_attempts_or_a_device_its_token(reason: str, attempts: int) -> None:
    assert isinstance(becomes(Rejected(REASONS[reason].status, reason), attempts=attempts), Withheld)


def test_what_is_withheld_comes_back_in_two_and_a_half_to_five_minutes() -> None:
    delays = [
        became.delay
        for chance in (0.0, 0.5, ALMOST_ONE)
        if isinstance(became := becomes(BAD_KEY, chance=chance), Withheld)
    ]

    assert delays == [150.0, 225.0, pytest.approx(300.0)]


def delay_of(outcome: Outcome) -> float:
    match outcome:
        case Retry(delay=delay) | Withheld(delay=delay) | InvalidToken(if_alive=Retry(delay=delay)):
            return delay
        case _:
            pytest.fail(f"{outcome} does not come back")


# For 503 and 410 the ladder says 30 to 60 s on the first attempt; what is withheld waits 150 to 300 s.
@pytest.mark.parametrize(
    ("answer", "floor", "chance", "delay"),
    [
        pytest.param(OVERLOADED, 120.0, 0.0, 120.0, id="a retry waits for it"),
        pytest.param(OVERLOADED, 120.0, 0.5, 150.0, id="and not all at that very moment"),
        pytest.param(OVERLOADED, 10.0, 0.5, 45.0, id="one that is sooner than the ladder changes nothing"),
        pytest.param(OVERLOADED, 0.0, 0.5, 45.0, id="none changes nothing"),
        pytest.param(BAD_KEY, 900.0, 0.0, 900.0, id="what is withheld waits for it"),
        pytest.param(BAD_KEY, 900.0, 0.5, 1125.0, id="and that not all at that very moment either"),
        pytest.param(BAD_KEY, 100.0, 0.5, 225.0, id="one that is sooner than that wait changes nothing"),
        pytest.param(GONE, 120.0, 0.5, 150.0, id="a device that has come back waits for it, too"),
    ],
)
def test_before_the_instant_that_apns_named_nothing_is_asked_again(
    answer: Rejected, floor: float, chance: float, delay: float
) -> None:
    assert delay_of(becomes(replace(answer, floor=floor), chance=chance)) == delay


def test_a_floor_gives_nobody_an_attempt_more() -> None:
    assert isinstance(becomes(replace(OVERLOADED, floor=900.0), attempts=5), Failed)
    assert isinstance(becomes(replace(BAD_KEY, floor=900.0), attempts=5, may_give_back=False), Failed)
    assert isinstance(becomes(replace(MALFORMED, floor=900.0)), Failed)


def test_what_spends_its_attempt_though_the_fault_is_ours_waits_for_the_floor_all_the_same() -> None:
    assert delay_of(becomes(replace(BAD_KEY, floor=900.0), may_give_back=False)) == 900.0


def test_what_is_withheld_without_having_been_pushed_waits_as_if_it_had_been() -> None:
    assert withhold(a_delivery(), "Forbidden", "Why.", LADDER, 0.0) == Withheld("Forbidden", "Why.", 150.0)
    assert withhold(a_delivery(), "Forbidden", "Why.", LADDER, 0.5, floor=900.0) == Withheld(
        "Forbidden", "Why.", 1125.0
    )
    assert withhold(a_delivery(may_give_back=False), "Forbidden", "Why.", LADDER, 0.0, floor=40.0) == Retry(
        "Forbidden", "Why.", 40.0
    )


def test_what_we_know_beside_the_answer_is_part_of_the_sentence() -> None:
    became = becomes(Rejected(403, "Forbidden", note="Our clock is 90 s behind APNs': mend it."))

    assert became == Withheld(
        "Forbidden",
        "APNs answered 403 Forbidden: the action is not allowed. Our clock is 90 s behind APNs': mend it.",
        150.0,
    )


def test_a_retry_waits_as_the_ladder_says() -> None:
    delays = [
        became.delay
        for attempts in (1, 2, 3, 4)
        if isinstance(became := becomes(TIMEOUT, attempts=attempts, chance=0.5), Retry)
    ]

    assert delays == [45.0, 90.0, 180.0, 360.0]


@pytest.mark.parametrize(
    ("attempts", "full"),
    [
        (1, 60),
        (2, 120),
        (3, 240),
        (4, 480),
        (5, 960),
        (6, 1920),
        (7, 3600),
        (8, 3600),
        (9, 3600),
        (10, 3600),
        (41, 3600),
        (42, 3600),
        (10**6, 3600),
    ],
)
def test_the_backoff_doubles_from_a_minute_to_an_hour_and_half_of_it_is_certain(attempts: int, full: int) -> None:
    assert LADDER.backoff(attempts, 0.0) == full / 2
    assert LADDER.backoff(attempts, 0.5) == full * 3 / 4
    assert LADDER.backoff(attempts, ALMOST_ONE) == pytest.approx(full)
    assert LADDER.backoff(attempts, ALMOST_ONE) <= full


def test_the_backoff_has_the_base_and_the_cap_that_were_set() -> None:
    ladder = Ladder(max_attempts=9, base=10, cap=35)

    assert [ladder.backoff(attempts, 0.0) for attempts in (1, 2, 3, 4)] == [5.0, 10.0, 17.5, 17.5]


def test_a_cap_below_the_base_caps_the_first_wait_too() -> None:
    assert Ladder(max_attempts=5, base=60, cap=10).backoff(1, 0.0) == 5.0


def test_what_failed_together_does_not_return_together() -> None:
    dice = Random(20260301)  # noqa: S311  chance, not cryptography, and the same in every run
    delays = [LADDER.backoff(1, dice.random()) for _ in range(1000)]
    by_second = Counter(int(delay) for delay in delays)

    assert set(by_second) == set(range(30, 60))  # every second of the certain half to the whole is met
    assert max(by_second.values()) < 70  # 33 each, were they spread evenly
    assert sum(delays) / len(delays) == pytest.approx(45, abs=1)


CHANCES = st.floats(0, 1, exclude_max=True)
LADDERS = st.builds(Ladder, max_attempts=st.integers(1, 100), base=st.integers(1, 86_400), cap=st.integers(1, 604_800))


@settings(deadline=None)
@given(LADDERS, st.integers(1, 1_000_000), CHANCES)
def test_the_wait_is_between_half_of_the_backoff_and_all_of_it(ladder: Ladder, attempts: int, chance: float) -> None:
    full = min(ladder.base * 2 ** min(attempts - 1, 64), ladder.cap)  # the definition, in exact integers

    assert full / 2 <= ladder.backoff(attempts, chance) <= full


@settings(deadline=None)
@given(LADDERS, CHANCES)
def test_no_wait_is_shorter_than_the_one_before(ladder: Ladder, chance: float) -> None:
    waits = [ladder.backoff(attempts, chance) for attempts in range(1, 30)]

    assert all(earlier <= later for earlier, later in pairwise(waits))
    assert waits[-1] <= ladder.cap


@settings(deadline=None)
@given(st.floats(0, 1e9), CHANCES, CHANCES)
def test_more_luck_is_more_wait(seconds: float, one: float, other: float) -> None:
    assert jittered(seconds, min(one, other)) <= jittered(seconds, max(one, other))


ANSWERS: st.SearchStrategy[Answer] = st.one_of(
    st.just(Accepted()),
    st.builds(
        Rejected,
        st.integers(0, 999),
        st.sampled_from(sorted(REASONS)) | st.text(),
        st.none(),
        st.just(0.0) | st.floats(0, 86_400),
        st.text(),
    ),
    st.builds(Unanswered, st.text(), st.text(), st.booleans()),
    st.builds(Unsendable, st.text(), st.text()),
    st.just(Unbegun()),
)


@settings(deadline=None)
@given(answer=ANSWERS, ladder=LADDERS, attempts=st.integers(1, 200), may_give_back=st.booleans(), chance=CHANCES)
def test_every_answer_has_an_outcome_and_a_row_out_of_attempts_is_never_tried_again_unless_one_is_given_back(
    *, answer: Answer, ladder: Ladder, attempts: int, may_give_back: bool, chance: float
) -> None:
    push = a_push(1, a_delivery(1, attempts=attempts, may_give_back=may_give_back))

    outcome = judge(push, answer, ladder, chance)

    match outcome:
        case Retry() | InvalidToken(if_alive=Retry()):
            assert attempts < ladder.max_attempts
        case Withheld(delay=delay):
            assert may_give_back
            assert isinstance(answer, Rejected)
            assert max(150, answer.floor) <= delay <= max(300, answer.floor * 1.5)
        case Released():
            assert answer == Unbegun()
        case Sent():
            assert answer == Accepted()
        case _:
            assert isinstance(outcome, Failed | InvalidToken)


def test_the_dice_are_handed_in_so_the_same_question_has_the_same_answer() -> None:
    push = a_push()

    assert judge(push, OVERLOADED, LADDER, 0.3) == judge(push, OVERLOADED, LADDER, 0.3)
    assert judge(push, OVERLOADED, LADDER, 0.3) != judge(push, OVERLOADED, LADDER, 0.4)


# Before a push.

SLEEPER = Recipient(push_enabled=True, time_zone="Europe/Berlin", quiet_from=22 * 3600, quiet_until=7 * 3600)
DECLINED = replace(SLEEPER, push_enabled=False)
NOWHERE = replace(SLEEPER, time_zone="Mars/Olympus_Mons")
IN_THE_NIGHT, AT_NOON = (datetime(2026, 6, 10, hour, tzinfo=UTC).timestamp() for hour in (1, 10))  # three, and twelve


@pytest.mark.parametrize(
    ("about", "outcome"),
    [
        pytest.param({}, None, id="nobody knows the recipient"),
        pytest.param({"is_expired": True}, Skipped(Skip.EXPIRED), id="it has expired"),
        pytest.param({"recipient": SLEEPER, "claimed_at": AT_NOON}, None, id="it is day"),
        pytest.param({"recipient": SLEEPER}, Deferred(4 * 3600.0), id="it is night"),
        pytest.param({"recipient": SLEEPER, "ignore_quiet_hours": True}, None, id="it wakes people up"),
        pytest.param({"recipient": SLEEPER, "is_expired": True}, Skipped(Skip.EXPIRED), id="expired at night"),
        pytest.param({"recipient": DECLINED}, Skipped(Skip.OPTED_OUT), id="opted out, at night"),
        pytest.param({"recipient": DECLINED, "claimed_at": AT_NOON}, Skipped(Skip.OPTED_OUT), id="opted out"),
        pytest.param(
            {"recipient": DECLINED, "ignore_quiet_hours": True}, Skipped(Skip.OPTED_OUT), id="opted out of that too"
        ),
        pytest.param({"recipient": DECLINED, "is_expired": True}, Skipped(Skip.EXPIRED), id="opted out and expired"),
        pytest.param(
            {"recipient": replace(NOWHERE, push_enabled=False)}, Skipped(Skip.OPTED_OUT), id="opted out, of no zone"
        ),
        pytest.param({"recipient": NOWHERE, "ignore_quiet_hours": True}, None, id="it wakes people up, of no zone"),
        pytest.param({"recipient": NOWHERE, "is_expired": True}, Skipped(Skip.EXPIRED), id="expired, of no zone"),
        pytest.param({"recipient": SLEEPER, "may_give_back": False}, Deferred(4 * 3600.0), id="claimed long ago"),
    ],
)
def test_what_the_recipient_wants_decides_before_any_device_does(
    about: dict[str, Any], outcome: Skipped | Deferred | None
) -> None:
    assert before_push(replace(a_delivery(), **{"claimed_at": IN_THE_NIGHT} | about), 0.0) == outcome


def test_a_time_zone_that_is_none_is_for_the_drain_to_tell() -> None:
    with pytest.raises(BadTimeZone, match="Mars"):
        before_push(replace(a_delivery(), recipient=NOWHERE, claimed_at=IN_THE_NIGHT), 0.0)


@given(CHANCES)
def test_a_city_wakes_within_a_minute_after_the_quiet_hours_and_never_before_their_end(chance: float) -> None:
    outcome = before_push(replace(a_delivery(), recipient=SLEEPER, claimed_at=IN_THE_NIGHT), chance)

    assert outcome == Deferred(4 * 3600 + 60 * chance)
