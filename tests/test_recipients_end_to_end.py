"""What recipients want, kept by everything together: the real handler, Postgres, and what reaches APNs by wire."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import pytest

from core import outbox as statements
from core.database import STATEMENT_SECONDS, Database, DatabaseGone
from devtools.simulated_apns import Ok, Reject
from handlers import drain as drain_handler
from tests.support.handler import LEASE, ROOT, Posted, Stack, only
from tests.support.time_travel import install_clock, tick

pytest_plugins = ["tests.support.handler_fixtures"]

HOUR, DAY = 3600, 86_400
IN_THE_NIGHT = datetime(2030, 1, 15, 22, tzinfo=UTC)  # 23:00 in Berlin
NIGHT = ("Europe/Berlin", "22:00", "07:00")
UNTIL_MORNING = 8 * HOUR
WAKING = 60  # seconds within which a city wakes
OVERLOADED = Reject(503, "ServiceUnavailable")
BACKOFF = 61  # seconds: the first one is over


def wants(
    stack: Stack,
    user: str,
    time_zone: str = "Europe/Berlin",
    quiet_from: str | None = None,
    quiet_until: str | None = None,
    *,
    push_enabled: bool = True,
) -> None:
    """Write down what a user wants, past every function that would look at it."""
    stack.db.execute(
        "INSERT INTO recipient VALUES (%s, %s, %s, %s, %s) ON CONFLICT (user_id) DO UPDATE SET"
        " time_zone = excluded.time_zone, quiet_from = excluded.quiet_from, quiet_until = excluded.quiet_until,"
        " push_enabled = excluded.push_enabled",
        [user, time_zone, quiet_from, quiet_until, push_enabled],
    )


def pushed(stack: Stack) -> Counter[str]:
    return Counter(push.token for push in stack.apns.journal)


def end(stack: Stack, posted: Posted | int) -> tuple[str, str | None, int]:
    id_ = posted if isinstance(posted, int) else posted.id
    found = stack.db.execute(
        "SELECT status, reason, attempts FROM notification_delivery WHERE id = %s", [id_]
    ).fetchone()
    assert found is not None
    return found[0], found[1], found[2]


# Quiet hours.


def test_who_sleeps_is_not_woken_but_in_the_morning(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    sleeper, awake, unknown = stack.post(), stack.post(), stack.post()
    wants(stack, sleeper.user, *NIGHT)
    wants(stack, awake.user, "America/New_York", "22:00", "07:00")

    assert stack.drain() == only(claimed=3, pushed=2, sent=2, deferred=1)

    row = stack.row(sleeper)
    assert (row.status, row.reason, row.attempts, row.claimed_at) == ("pending", "quiet_hours", 0, None)
    assert row.last_error == "It is quiet hours where the recipient is."
    assert row.push_token_id is None  # bound in the morning, to the devices that there are then
    assert UNTIL_MORNING <= row.due_in <= UNTIL_MORNING + WAKING
    assert pushed(stack) == {awake.token: 1, unknown.token: 1}

    tick(stack.db, UNTIL_MORNING - 1)
    assert stack.drain() == only()
    tick(stack.db, 1 + WAKING)
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert end(stack, sleeper) == ("sent", None, 1)
    assert pushed(stack)[sleeper.token] == 1


def test_a_city_does_not_wake_in_one_second(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    for _ in range(2):
        for posted in [stack.post() for _ in range(50)]:
            wants(stack, posted.user, *NIGHT)

    assert stack.drain() == only(claimed=100, deferred=100)

    after = sorted(row.due_in - UNTIL_MORNING for row in stack.rows().values())
    assert after[0] >= 0
    assert after[-1] <= WAKING
    assert max(Counter(int(each) for each in after).values()) < 15  # 1.7 each, were they spread evenly
    assert after[25] < WAKING / 2 < after[75]


def test_however_many_nights_it_meets_it_is_never_dropped(stack: Stack) -> None:
    """More of them than there are attempts, and for longer than attempts are given back for any fault."""
    install_clock(stack.db, IN_THE_NIGHT)
    posted = stack.post()
    wants(stack, posted.user, *NIGHT)

    for _ in range(7):
        assert stack.drain() == only(claimed=1, deferred=1)
        assert end(stack, posted) == ("pending", "quiet_hours", 0)
        tick(stack.db, DAY)  # and nobody drained in the morning

    tick(stack.db, UNTIL_MORNING + WAKING)
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert end(stack, posted) == ("sent", None, 1)


def test_a_retry_that_comes_due_at_night_waits_for_the_morning_and_keeps_what_it_has_spent(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT - timedelta(hours=1, seconds=10))  # ten seconds before their begin
    posted, _ = stack.post(OVERLOADED, Ok()), stack.post()
    wants(stack, posted.user, *NIGHT)

    assert stack.drain() == only(claimed=2, pushed=2, sent=1, retried=1)
    tick(stack.db, BACKOFF)
    assert stack.drain() == only(claimed=1, deferred=1)
    assert end(stack, posted) == ("pending", "quiet_hours", 1)
    tick(stack.db, 9 * HOUR + WAKING)
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert end(stack, posted) == ("sent", None, 2)
    assert pushed(stack)[posted.token] == 2


def test_what_ignores_quiet_hours_wakes_people_up_and_nobody_who_opted_out(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    urgent, usual, declined = stack.post(ignore_quiet_hours=True), stack.post(), stack.post(ignore_quiet_hours=True)
    wants(stack, urgent.user, *NIGHT)
    wants(stack, usual.user, *NIGHT)
    wants(stack, declined.user, *NIGHT, push_enabled=False)

    assert stack.drain() == only(claimed=3, pushed=1, sent=1, deferred=1, skipped=1)
    assert pushed(stack) == {urgent.token: 1}
    assert end(stack, declined) == ("skipped", "opted_out", 1)


@pytest.mark.parametrize(
    ("now", "quiet", "wait"),
    [
        # 01:30 in Berlin, and half an hour later the clock shows 03:00: there is no 02:30 in that night.
        (datetime(2030, 3, 31, 0, 30, tzinfo=UTC), ("Europe/Berlin", "22:00", "02:30"), HOUR / 2),
        # 02:15 in Berlin for the first time, and for the second.
        (datetime(2030, 10, 27, 0, 15, tzinfo=UTC), ("Europe/Berlin", "22:00", "02:30"), HOUR / 4),
        (datetime(2030, 10, 27, 1, 15, tzinfo=UTC), ("Europe/Berlin", "22:00", "02:30"), HOUR / 4),
        # A night of nine hours and a half, all of which is looked at from its first second.
        (datetime(2030, 4, 6, 11, tzinfo=UTC), ("Australia/Lord_Howe", "22:00", "07:00"), 9.5 * HOUR),
        (datetime(2030, 6, 1, 17, tzinfo=UTC), ("Asia/Kathmandu", "22:00", "07:00"), 8.25 * HOUR),
    ],
)
def test_it_is_the_recipients_own_clock_that_counts(
    stack: Stack, now: datetime, quiet: tuple[str, str, str], wait: float
) -> None:
    install_clock(stack.db, now)
    posted = stack.post()
    wants(stack, posted.user, *quiet)

    assert stack.drain() == only(claimed=1, deferred=1)
    assert wait <= stack.row(posted).due_in <= wait + WAKING
    tick(stack.db, wait + WAKING)
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "Europe/Nowhere",
        "europe/berlin ",
        "Europe",
        "../../etc/passwd",
        "\t\n\x1b[2J",
        "a/" * 5000 + "a",
        "\U0001f4a9" * 999,
    ],
    ids=lambda name: ascii(name[:20]),
)
def test_a_zone_that_is_none_costs_its_recipient_the_quiet_hours_and_nobody_else(stack: Stack, bad: str) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    neighbour, broken, another = stack.post(), stack.post(), stack.post()
    wants(stack, neighbour.user, *NIGHT)
    wants(stack, broken.user, bad, "22:00", "07:00")

    assert stack.drain() == only(claimed=3, pushed=2, sent=2, deferred=1)

    assert pushed(stack) == {broken.token: 1, another.token: 1}
    (warning,) = stack.logged("the recipient's time zone is none")
    assert warning["level"] == "WARNING"
    assert warning["delivery_id"] == broken.id
    assert warning["time_zone"] == bad[:100]


@pytest.mark.parametrize(
    ("quiet", "options", "expected"),
    [
        ((None, None), {}, only(claimed=1, pushed=1, sent=1)),
        (("22:00", "07:00"), {"ignore_quiet_hours": True}, only(claimed=1, pushed=1, sent=1)),
        (("22:00", "07:00"), {"expires_at": IN_THE_NIGHT}, only(claimed=1, skipped=1)),
    ],
    ids=["no quiet hours", "they are ignored", "it has expired"],
)
def test_a_bad_zone_on_which_nothing_depends_is_nobodys_business(
    stack: Stack, quiet: tuple[str | None, str | None], options: dict[str, Any], expected: dict[str, int]
) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    wants(stack, stack.post(**options).user, "Europe/Nowhere", *quiet)

    assert stack.drain() == expected
    assert stack.logged("the recipient's time zone is none") == []


@pytest.mark.parametrize(
    ("quiet_from", "quiet_until", "deferred"),
    [
        ("22:00", "24:00", True),  # it is 23:00
        ("24:00", "22:00", False),
        ("24:00", "23:30", True),
        ("00:00", "24:00", False),  # both ends are one
        ("23:00", "23:00", False),
        ("22:59:59.999999", "23:00:00.5", True),
    ],
)
def test_whatever_times_of_day_postgres_knows_the_claim_goes_through(
    stack: Stack, quiet_from: str, quiet_until: str, *, deferred: bool
) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    posted, neighbour = stack.post(), stack.post()
    wants(stack, posted.user, "Europe/Berlin", quiet_from, quiet_until)

    tally = stack.drain()

    assert tally == (only(claimed=2, pushed=1, sent=1, deferred=1) if deferred else only(claimed=2, pushed=2, sent=2))
    assert pushed(stack)[neighbour.token] == 1


# Opting out, and expiry.


def test_whoever_opts_out_is_pushed_nothing_more_of_what_is_queued_nor_of_what_is_tried_again(stack: Stack) -> None:
    queued, tried, neighbour = stack.post(), stack.post(OVERLOADED), stack.post()
    wants(stack, queued.user, push_enabled=False)
    wants(stack, tried.user)

    assert stack.drain() == only(claimed=3, pushed=2, sent=1, retried=1, skipped=1)
    wants(stack, tried.user, push_enabled=False)
    stack.advance(BACKOFF)
    assert stack.drain() == only(claimed=1, skipped=1)

    assert end(stack, queued) == ("skipped", "opted_out", 1)
    assert end(stack, tried) == ("skipped", "opted_out", 2)
    assert stack.row(tried).last_error == "The recipient has opted out of pushes."
    assert pushed(stack) == {tried.token: 1, neighbour.token: 1}
    assert stack.logged("delivery failed") == []  # a decision and no fault


def test_opting_in_again_brings_only_what_is_still_pending(stack: Stack) -> None:
    posted = stack.post()
    later = stack.enqueue(posted.user, send_at=datetime.now(UTC) + timedelta(hours=1))
    wants(stack, posted.user, push_enabled=False)
    assert stack.drain() == only(claimed=1, skipped=1)

    wants(stack, posted.user)
    assert stack.drain() == only()
    stack.advance(HOUR)
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)

    assert end(stack, posted) == ("skipped", "opted_out", 1)
    assert end(stack, later) == ("sent", None, 1)
    assert pushed(stack) == {posted.token: 1}


def test_each_device_of_whoever_opted_out_between_two_tries_is_left_alone(stack: Stack) -> None:
    posted = stack.post(OVERLOADED)
    _, other = stack.device(posted.user)
    stack.apns.answer(other, OVERLOADED)
    stack.post()
    wants(stack, posted.user)
    assert stack.drain() == only(claimed=3, pushed=3, sent=1, retried=2)

    wants(stack, posted.user, push_enabled=False)
    stack.advance(BACKOFF)

    assert stack.drain() == only(claimed=2, skipped=2)


def test_what_nobody_wants_any_more_is_not_pushed_at_the_first_try_nor_at_a_later_one(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    past, now, soon = (
        stack.post(OVERLOADED, expires_at=IN_THE_NIGHT + timedelta(seconds=seconds)) for seconds in (-DAY, 0, 1)
    )
    never = stack.post()

    assert stack.drain() == only(claimed=4, pushed=2, sent=1, retried=1, skipped=2)
    assert end(stack, past) == end(stack, now) == ("skipped", "expired", 1)
    assert stack.row(past).last_error == "It expired before it could be pushed."
    tick(stack.db, BACKOFF)
    assert stack.drain() == only(claimed=1, skipped=1)

    assert end(stack, soon) == ("skipped", "expired", 2)
    assert pushed(stack) == {soon.token: 1, never.token: 1}


def test_what_expires_while_its_recipient_sleeps_is_not_pushed_in_the_morning(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    posted = stack.post(expires_at=IN_THE_NIGHT + timedelta(hours=1))
    wants(stack, posted.user, *NIGHT)

    assert stack.drain() == only(claimed=1, deferred=1)
    tick(stack.db, UNTIL_MORNING + WAKING)
    assert stack.drain() == only(claimed=1, skipped=1)

    assert end(stack, posted) == ("skipped", "expired", 1)
    assert stack.apns.journal == []


@pytest.mark.parametrize("expires_at", ["0044-03-15 12:00 BC", "200000-01-01"])
def test_a_date_that_python_does_not_know_decides_like_any_other(stack: Stack, expires_at: str) -> None:
    posted, neighbour = stack.post(expires_at=expires_at), stack.post()

    stack.drain()

    assert (pushed(stack)[posted.token], pushed(stack)[neighbour.token]) == (int("BC" not in expires_at), 1)


def test_a_suspect_is_asked_the_same_questions(stack: Stack) -> None:
    """A drain had died of each, or so it seems."""
    install_clock(stack.db, IN_THE_NIGHT)
    sleeper, declined, urgent = stack.post(), stack.post(), stack.post(ignore_quiet_hours=True)
    expired = stack.post(expires_at=IN_THE_NIGHT + timedelta(seconds=LEASE - 1))
    wants(stack, sleeper.user, *NIGHT)
    wants(stack, urgent.user, *NIGHT)
    wants(stack, declined.user, push_enabled=False)
    dies(stack, "after", "claim")
    tick(stack.db, LEASE)

    assert stack.drain() == only(claimed=4, pushed=1, sent=1, deferred=1, skipped=2)
    assert end(stack, sleeper) == ("pending", "quiet_hours", 1)  # what the crash cost stays spent
    assert end(stack, declined) == ("skipped", "opted_out", 2)
    assert end(stack, expired) == ("skipped", "expired", 2)
    assert UNTIL_MORNING - LEASE <= stack.row(sleeper).due_in <= UNTIL_MORNING - LEASE + WAKING
    assert pushed(stack) == {urgent.token: 1}


# Several devices.


def test_a_device_that_came_during_quiet_hours_is_reached_after_them_and_one_that_went_is_not(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    posted = stack.post()
    _, kept = stack.device(posted.user)
    wants(stack, posted.user, *NIGHT)
    assert stack.drain() == only(claimed=1, deferred=1)

    tick(stack.db, HOUR)
    _, new = stack.device(posted.user)
    stack.db.execute("UPDATE push_token SET invalidated_at = now() WHERE id = %s", [posted.push_token_id])
    tick(stack.db, UNTIL_MORNING)

    assert stack.drain() == only(claimed=2, pushed=2, sent=2)
    assert pushed(stack) == {kept: 1, new: 1}


def test_whoever_has_no_device_at_night_is_reached_on_the_one_of_the_morning(stack: Stack) -> None:
    install_clock(stack.db, IN_THE_NIGHT)
    id_ = stack.enqueue("ann")
    wants(stack, "ann", *NIGHT)
    assert stack.drain() == only(claimed=1, deferred=1)

    _, token = stack.device("ann")
    tick(stack.db, UNTIL_MORNING + WAKING)

    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert pushed(stack) == {token: 1}
    assert end(stack, id_) == ("sent", None, 1)


def dies(stack: Stack, when: str, verb: str) -> None:
    """Have a drain in a process of its own die, as of a power cut, before or after the first statement of a verb."""
    program = f"""
import os, sys
from core import outbox
from handlers import drain
from tests.support.handler import Invocation

class Dying(drain.Database):
    async def fetch(self, sql, *args, **named):
        fatal = sql == outbox.{verb.upper()}
        if fatal and {when == "before"}:
            os._exit(70)
        rows = await super().fetch(sql, *args, **named)
        if fatal:
            os._exit(70)
        return rows

drain.Database = Dying
drain.handler({{}}, Invocation())
"""
    died = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=40,
    )
    stack.said += [died.stdout, died.stderr]
    assert died.returncode == 70, died.stderr


def assert_each_device_has_one_row_and_is_pushed(stack: Stack, tokens: set[str], *, at_most: int = 1) -> None:
    rows = stack.rows().values()
    assert [row.status for row in rows] == ["sent"] * len(tokens)
    assert len({row.push_token_id for row in rows}) == len(tokens)
    assert sum(row.fanned_out_from is None for row in rows) == 1
    assert set(pushed(stack)) == tokens
    assert max(pushed(stack).values()) <= at_most
    apns_ids = {(push.token, push.apns_id) for push in stack.apns.journal}
    assert len(apns_ids) == len(tokens)  # what was pushed twice carried the same one


@pytest.mark.parametrize(
    ("when", "verb", "pushes"),
    [
        ("before", "claim", 1),
        ("after", "claim", 1),
        ("before", "bind", 1),
        ("after", "bind", 1),
        ("before", "settle", 2),  # what was accepted and not written down is pushed once more
        ("after", "settle", 2),
    ],
)
def test_wherever_a_drain_dies_each_device_has_exactly_one_row_and_gets_the_notification(
    stack: Stack, when: str, verb: str, pushes: int
) -> None:
    posted = stack.post()
    tokens = {posted.token, *(stack.device(posted.user)[1] for _ in range(2))}

    dies(stack, when, verb)
    stack.advance(LEASE)
    stack.drain()

    assert_each_device_has_one_row_and_is_pushed(stack, tokens, at_most=pushes)


def test_a_binding_that_is_cut_off_in_the_middle_has_bound_nothing(stack: Stack) -> None:
    posted = stack.post()
    tokens = {posted.token, *(stack.device(posted.user)[1] for _ in range(2))}
    stack.db.execute(
        "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END'"
    )
    stack.db.execute("CREATE TRIGGER cut AFTER INSERT ON notification_delivery FOR EACH ROW EXECUTE FUNCTION cut()")

    with pytest.raises(DatabaseGone):
        stack.drain()

    (row,) = stack.rows().values()
    assert (row.id, row.status, row.push_token_id) == (posted.id, "pending", None)
    stack.db.execute("DROP TRIGGER cut ON notification_delivery")
    stack.advance(LEASE)
    assert stack.drain() == only(claimed=3, pushed=3, sent=3)
    assert_each_device_has_one_row_and_is_pushed(stack, tokens)


# Fairness.

CROWD, OTHERS, BATCH = 20_000, 100, 50


class Counting(Database):
    """The database, and how often each statement went to it."""

    asked: Counter[LiteralString]

    async def fetch(
        self,
        sql: LiteralString,
        params: Mapping[str, object] | Sequence[object] | None = None,
        *,
        deadline: float = STATEMENT_SECONDS,
    ) -> list[dict[str, Any]]:
        self.asked[sql] += 1
        return await super().fetch(sql, params, deadline=deadline)


@pytest.mark.parametrize(
    ("crowd", "tally", "statements_a_claim"),
    [
        ("no device", {"skipped": CROWD}, 3),  # to claim, to bind, and to settle
        ("opted out", {"skipped": CROWD}, 2),  # what is not wanted is not bound
        ("asleep", {"deferred": CROWD}, 2),
        ("a bad topic", {"withheld": CROWD}, 4),
    ],
)
def test_a_crowd_that_comes_first_and_is_not_pushed_keeps_nobody_waiting(
    stack: Stack, crowd: str, tally: dict[str, int], statements_a_claim: int
) -> None:
    """Others are sent in as many drains as they would need alone, though 20,000 rows are due before them."""
    stack.db.execute(
        "INSERT INTO notification_delivery (user_id, payload, next_attempt_at)"
        f" SELECT 'crowd', '{{}}', now() - interval '1 hour' FROM generate_series(1, {CROWD})"
    )
    match crowd:
        case "opted out":
            wants(stack, "crowd", push_enabled=False)
        case "asleep":
            stack.db.execute(
                "INSERT INTO recipient SELECT 'crowd', 'UTC', t - interval '1 hour', t + interval '2 hours'"
                " FROM CAST(now() AT TIME ZONE 'UTC' AS time) t"
            )
        case "a bad topic":
            _, token = stack.device("crowd", topic="com.example.other")
            stack.apns.answer(token, Reject(400, "TopicDisallowed"))
    others = [stack.post() for _ in range(OTHERS)]
    asked = Counting.asked = Counter()
    stack.monkeypatch.setattr(drain_handler, "Database", Counting)

    tallies = [stack.drain() for _ in range(OTHERS // BATCH)]

    assert [each["sent"] for each in tallies] == [BATCH] * (OTHERS // BATCH)
    assert [end(stack, each)[0] for each in others] == ["sent"] * OTHERS
    ((name, count),) = tally.items()
    assert sum(each[name] for each in tallies) == count
    claims = (CROWD + OTHERS) // BATCH
    assert asked[statements.CLAIM] == claims
    assert stack.one("SELECT count(DISTINCT first_claimed_at) FROM notification_delivery") == claims
    assert asked[statements.BIND] <= (claims if statements_a_claim > 2 else OTHERS // BATCH)
    # Beside them each batch of the others' is settled as it is answered, and each drain looks round a few times.
    assert asked.total() - asked[statements.CLAIM_SUSPECT] <= claims * statements_a_claim + 2 * (OTHERS + 10)
    assert asked[statements.CLAIM_SUSPECT] <= claims + 2
