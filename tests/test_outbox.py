"""The outbox's verbs on a real Postgres, and what several drains do to each other."""

import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest

from core import outbox as statements
from core.database import STATEMENT_SECONDS, DatabaseGone
from core.database import Database as Connected
from core.delivery import Delivery, Device, Environment, Lease, Push
from core.outbox import SWEEP_LIMIT, storable
from core.settings import DatabaseUrl
from core.verdict import Deferred, Failed, Outcome, Released, Retry, Sent, Skip, Skipped, Withheld
from devtools.local_postgres import LocalPostgres
from tests.support.database import Database, create, drop
from tests.support.outbox import (
    BATCH_SIZE,
    GIVE_BACK_HOURS,
    LEASE_SECONDS,
    MAX_ATTEMPTS,
    Session,
    columns,
    enqueue,
    gone,
    register,
    session,
    whole_rows,
)
from tests.support.time_travel import install_clock, tick

START = datetime(2030, 1, 1, tzinfo=UTC)
LEASE = timedelta(seconds=LEASE_SECONDS)
MICROSECOND = timedelta(microseconds=1)
WAIT_SECONDS = 20  # until something that ought to have happened is given up

# Each outcome once, with words of its own.
OUTCOMES: Mapping[str, Callable[[Push], Outcome]] = {
    "sent": lambda _: Sent(),
    "retry": lambda _: Retry("timeout", "No answer came.", 45.0),
    "withheld": lambda _: Withheld("TopicDisallowed", "The topic is not ours.", 300.0),
    "deferred": lambda _: Deferred(28_800.0),
    "failed": lambda _: Failed("PayloadTooLarge", "It is too large."),
    "invalid_token": lambda push: gone(push.device),
    "skipped": lambda _: Skipped(Skip.NO_PUSH_TOKEN),
    "released": lambda _: Released(),
}


@pytest.fixture
def clock(db: psycopg.Connection) -> Callable[[float], None]:
    """Stop the database's clock at START. What it gives moves it on. For sessions that are opened later."""
    install_clock(db, at=START)
    return lambda seconds: tick(db, seconds)


@contextmanager
def open_transaction(database: Database, query: LiteralString) -> Iterator[psycopg.Connection]:
    """Have somebody else's transaction open, after `query`. It ends with the block, unless it was ended in it."""
    with psycopg.connect(database.dsn) as other:
        other.execute(query)
        yield other


def wait_for_a_lock(db: psycopg.Connection) -> None:
    """Return once a drain's session waits for a lock."""
    for _ in range(WAIT_SECONDS * 100):
        row = db.execute(
            "SELECT pg_sleep(0.01), EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'apns-outbox' AND wait_event_type = 'Lock')"
        ).fetchone()
        if row is not None and row[1]:
            return
    raise AssertionError("nobody came to wait for the lock")


def one_each(db: psycopg.Connection, drain: Session, count: int) -> list[Push]:
    """Have `count` deliveries claimed and bound, each to its own user's one device."""
    for _ in range(count):
        user = f"user-{secrets.token_hex(4)}"
        register(db, user)
        enqueue(db, user)
    pushes = drain.bind(drain.claim())
    assert len(pushes) == count
    return pushes


def ids(deliveries: Sequence[Delivery]) -> list[int]:
    return [each.id for each in deliveries]


# The claim's limit, and the planner's traps.


# The obvious statement, as a first draft has it, and its table, as narrow as the trap needs it.
FIRST_TABLE = """
CREATE SCHEMA first_draft;
CREATE TABLE first_draft.notification_delivery (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status text NOT NULL DEFAULT 'pending',
    attempts int NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT now(),
    sent_at timestamptz
);
CREATE INDEX ON first_draft.notification_delivery (next_attempt_at) WHERE status = 'pending';
"""
FIRST_CLAIM = """
UPDATE first_draft.notification_delivery nd
SET attempts = attempts + 1, next_attempt_at = now() + interval '120 seconds'
FROM (SELECT id FROM first_draft.notification_delivery
      WHERE status = 'pending' AND next_attempt_at <= now()
      ORDER BY next_attempt_at LIMIT 50 FOR UPDATE SKIP LOCKED) claimed
WHERE nd.id = claimed.id {guard} RETURNING nd.*
"""


def one_row_by_the_statistics(db: psycopg.Connection, table: str, rows: int) -> None:
    """Set the trap: many are due and the planner believes in one. It springs only if all of them fit a page."""
    insert = f"INSERT INTO {table} (next_attempt_at) SELECT now() - interval '1 hour'"
    db.execute(insert.encode())
    db.execute(f"VACUUM ANALYZE {table}".encode())
    db.execute(f"{insert} + g * interval '1 ms' FROM generate_series(2, {rows}) g".encode())


def nothing_pending_by_the_statistics(db: psycopg.Connection, table: str, rows: int) -> None:
    """Set the other trap: a burst after the statistics were taken, beside much that has ended."""
    db.execute(
        f"INSERT INTO {table} (status, sent_at, next_attempt_at)"
        " SELECT 'sent', now(), now() - interval '24 hours' FROM generate_series(1, 10000)".encode()
    )
    db.execute(f"VACUUM ANALYZE {table}".encode())
    db.execute(
        f"INSERT INTO {table} (next_attempt_at)"
        f" SELECT now() - interval '1 hour' + g * interval '1 ms' FROM generate_series(1, {rows}) g".encode()
    )


@pytest.fixture
def narrow(db: psycopg.Connection) -> str:
    """Give the table's required columns short defaults, so that the traps can be set in it."""
    db.execute("ALTER TABLE notification_delivery ALTER user_id SET DEFAULT 'u', ALTER payload SET DEFAULT '{}'")
    return "notification_delivery"


@pytest.mark.parametrize("due", [60, 90])
def test_a_claim_takes_its_limit_and_no_more_when_the_statistics_know_one_row_of_many(
    due: int, narrow: str, db: psycopg.Connection, database: Database
) -> None:
    one_row_by_the_statistics(db, narrow, due)
    with session(database) as drain:
        assert len(drain.claim()) == BATCH_SIZE

    assert db.execute("SELECT count(*) FROM notification_delivery WHERE attempts > 0").fetchone() == (BATCH_SIZE,)


def test_a_claim_takes_its_limit_and_no_more_when_a_burst_came_after_the_statistics(
    narrow: str, db: psycopg.Connection, database: Database
) -> None:
    nothing_pending_by_the_statistics(db, narrow, 1000)
    with session(database) as drain:
        assert len(drain.claim()) == BATCH_SIZE

    assert db.execute("SELECT count(*) FROM notification_delivery WHERE attempts > 0").fetchone() == (BATCH_SIZE,)


def test_what_a_claim_does_is_bounded_by_its_limit_when_a_burst_came_after_the_statistics(
    narrow: str, db: psycopg.Connection
) -> None:
    nothing_pending_by_the_statistics(db, narrow, 1000)
    plan = explain(db, *sent_by(lambda drain: drain.claim()), analyze=True)

    (lock,) = [node for node in plan if node["Node Type"] == "LockRows"]
    assert (lock["Actual Loops"], lock["Actual Rows"]) == (1, BATCH_SIZE)
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in plan) <= BATCH_SIZE


def test_the_claim_as_it_was_first_written_takes_more_than_its_limit(db: psycopg.Connection) -> None:
    """The trap is real, on this server too: without that the tests above would prove nothing."""
    db.execute(FIRST_TABLE)
    table = "first_draft.notification_delivery"

    one_row_by_the_statistics(db, table, 90)
    assert len(db.execute(FIRST_CLAIM.format(guard="").encode()).fetchall()) == 90

    db.execute("TRUNCATE first_draft.notification_delivery")
    nothing_pending_by_the_statistics(db, table, 1000)
    assert len(db.execute(FIRST_CLAIM.format(guard="AND nd.status = 'pending'").encode()).fetchall()) == 1000


# What a claim takes.


def test_a_claim_takes_the_oldest_due_rows_and_returns_them_in_that_order(
    db: psycopg.Connection, database: Database
) -> None:
    # Dates that have nothing to do with the ids, each one twice.
    db.execute(
        "INSERT INTO notification_delivery (user_id, payload, next_attempt_at)"
        " SELECT 'user', '{}', now() - (g * 7919 % 100) * interval '1 second' FROM generate_series(1, 200) g"
    )
    db.execute("ANALYZE notification_delivery")  # now the plan returns the rows by id, or as they lie
    oldest_first = [
        id_ for (id_,) in db.execute("SELECT id FROM notification_delivery ORDER BY next_attempt_at, id").fetchall()
    ]
    with session(database, batch_size=80) as drain:
        assert [ids(drain.claim()) for _ in range(4)] == [
            oldest_first[:80],
            oldest_first[80:160],
            oldest_first[160:],
            [],
        ]


def test_a_row_is_due_at_its_instant_and_not_a_microsecond_before(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    (due,) = enqueue(db, next_attempt_at=START)
    (later,) = enqueue(db, next_attempt_at=START + MICROSECOND)
    with session(database) as drain:
        assert ids(drain.claim()) == [due]
        clock(0.000001)
        assert ids(drain.claim()) == [later]


def test_a_claim_counts_and_dates_the_attempt_and_commits_it_before_it_returns(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    (id_,) = enqueue(db, next_attempt_at=START - timedelta(seconds=30))
    clock(1)
    with session(database) as drain:
        (delivery,) = drain.claim()

        now = START + timedelta(seconds=1)
        assert (delivery.lease.attempts, delivery.lease.until) == (1, now + LEASE)
        assert delivery.due_at == (START - timedelta(seconds=30)).timestamp()
        assert columns(
            db, id_, "status", "attempts", "next_attempt_at", "claimed_at", "first_claimed_at", "updated_at"
        ) == ("pending", 1, now + LEASE, now, now, now)


def test_the_first_claim_is_remembered_through_later_ones(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    (id_,) = enqueue(db)
    with session(database) as drain:
        drain.settle([(each, Retry("timeout", "No answer.", 60.0)) for each in drain.claim()])
        clock(60)
        drain.claim()
        assert columns(db, id_, "attempts", "first_claimed_at", "claimed_at") == (2, START, START + timedelta(0, 60))

        clock(LEASE_SECONDS)
        drain.claim_suspect()
        assert columns(db, id_, "attempts", "first_claimed_at", "claimed_at") == (3, START, START + timedelta(0, 180))


def test_a_claim_hands_over_the_row_as_the_producer_wrote_it(db: psycopg.Connection, database: Database) -> None:
    payload = '{"aps": {"alert": "Grüße 🎈"}, "exact": 12345678901234567890.123456789, "a": [null, {}]}'
    (id_,) = enqueue(
        db,
        payload=payload,
        push_type="background",
        priority=5,
        collapse_id="score",
        expires_at="2031-01-01 00:00:00+00",
    )
    plain_id = enqueue(db)[0]
    with session(database) as drain:
        delivery, plain = drain.claim()

    assert (delivery.id, plain.id) == (id_, plain_id)
    assert (delivery.push_type, delivery.priority, delivery.collapse_id) == ("background", 5, "score")
    assert delivery.expires_at == int(datetime(2031, 1, 1, tzinfo=UTC).timestamp())
    assert delivery.apns_id == columns(db, id_, "apns_id")
    assert delivery.payload.decode() == db.execute("SELECT %s::jsonb::text", [payload]).fetchone()[0]  # type: ignore[index]  # it has a row
    assert "12345678901234567890.123456789" in delivery.payload.decode()
    assert (plain.push_type, plain.priority, plain.collapse_id, plain.expires_at) == ("alert", None, None, None)


def test_attempts_may_be_given_back_until_the_first_claim_is_too_long_ago(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    limit = START - timedelta(hours=GIVE_BACK_HOURS)
    enqueue(db, first_claimed_at=limit)
    enqueue(db, first_claimed_at=limit + MICROSECOND)
    enqueue(db)
    with session(database) as drain:
        assert [each.may_give_back for each in drain.claim()] == [False, True, True]

    db.execute("UPDATE notification_delivery SET next_attempt_at = now()")
    with session(database) as drain:
        assert [drain.claim_suspect()[0].may_give_back for _ in range(3)] == [False, True, True]


def test_a_row_that_is_finished_or_not_due_is_never_claimed(db: psycopg.Connection, database: Database) -> None:
    for status in ("failed", "invalid_token", "skipped"):
        enqueue(db, status=status, reason="Reason")
    enqueue(db, status="sent", sent_at="2020-01-01")
    db.execute("INSERT INTO notification_delivery (user_id, payload, next_attempt_at) VALUES ('u', '{}', now() + '1h')")
    with session(database) as drain:
        assert drain.claim() == []
        assert drain.claim_suspect() == []
        assert drain.sweep() == []


# Two claims at once.


def test_a_claim_passes_over_rows_that_another_claim_is_taking(db: psycopg.Connection, database: Database) -> None:
    rows = enqueue(db, rows=BATCH_SIZE * 2)
    taken = "SELECT id FROM notification_delivery ORDER BY next_attempt_at, id LIMIT 50 FOR NO KEY UPDATE"
    with open_transaction(database, taken), session(database) as drain:
        assert ids(drain.claim()) == rows[BATCH_SIZE:]
        assert drain.claim() == []

    with session(database) as drain:
        assert ids(drain.claim()) == rows[:BATCH_SIZE]


def test_a_claim_takes_rows_that_somebody_merely_refers_to(db: psycopg.Connection, database: Database) -> None:
    """A table of the producer's may have a foreign key to ours; its open transaction must not hide rows from us."""
    (id_,) = enqueue(db)
    (suspect,) = enqueue(db, claimed_at="2020-01-01")
    (exhausted,) = enqueue(db, claimed_at="2020-01-01", attempts=MAX_ATTEMPTS)
    refers = "SELECT FROM notification_delivery FOR KEY SHARE"
    with open_transaction(database, refers), session(database) as drain:
        (delivery,) = drain.claim()
        assert delivery.id == id_
        assert [each.status for each in drain.settle([(delivery, Sent())])] == ["sent"]
        assert ids(drain.claim_suspect()) == [suspect]
        assert [each.id for each in drain.sweep()] == [exhausted]


def test_claims_at_the_same_time_share_the_rows_and_none_is_taken_twice(
    db: psycopg.Connection, database: Database
) -> None:
    rows = enqueue(db, rows=600)
    started = threading.Barrier(4)

    def claim_all(_: int) -> list[int]:
        with session(database, batch_size=10) as drain:
            drain.backlog()  # connected
            started.wait(WAIT_SECONDS)
            taken = []
            while batch := drain.claim():
                taken += ids(batch)
            return taken

    with ThreadPoolExecutor(4) as threads:
        taken = [id_ for part in threads.map(claim_all, range(4)) for id_ in part]

    assert sorted(taken) == rows


# Suspects: their drain died.


def test_a_claim_leaves_suspects_out_and_they_are_taken_one_by_one_the_oldest_lease_first(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database, batch_size=2) as drain:
        first = [enqueue(db)[0] for _ in range(2)]
        drain.claim()
        clock(1)
        second = [enqueue(db)[0] for _ in range(2)]
        drain.claim()

        clock(LEASE_SECONDS)
        (fresh,) = enqueue(db)
        assert ids(drain.claim()) == [fresh]
        assert drain.claim() == []

        taken = [drain.claim_suspect() for _ in range(5)]
        assert [ids(each) for each in taken] == [[first[0]], [first[1]], [second[0]], [second[1]], []]
        assert [each.lease.attempts for [each] in taken[:4]] == [2] * 4
        assert {each.lease.until for [each] in taken[:4]} == {START + timedelta(seconds=1 + 2 * LEASE_SECONDS)}


def test_a_row_is_a_suspect_when_its_lease_ends_and_not_a_microsecond_before(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    (id_,) = enqueue(db)
    with session(database) as drain:
        drain.claim()
        clock(LEASE_SECONDS - 0.000001)
        assert drain.claim_suspect() == []
        clock(0.000001)
        assert ids(drain.claim_suspect()) == [id_]


def test_a_suspect_that_has_no_attempt_left_is_the_sweeps(db: psycopg.Connection, database: Database) -> None:
    (spent,) = enqueue(db, claimed_at="2020-01-01", next_attempt_at="2020-01-01", attempts=MAX_ATTEMPTS)
    (last,) = enqueue(db, claimed_at="2020-01-01", next_attempt_at="2020-01-02", attempts=MAX_ATTEMPTS - 1)
    with session(database) as drain:
        assert ids(drain.claim_suspect()) == [last]
        assert drain.claim_suspect() == []
        assert [(each.id, each.attempts) for each in drain.sweep()] == [(spent, MAX_ATTEMPTS)]


def test_a_suspect_that_another_drain_is_taking_is_passed_over(db: psycopg.Connection, database: Database) -> None:
    first, second = enqueue(db, rows=2, claimed_at="2020-01-01")
    taken = "SELECT FROM notification_delivery ORDER BY id LIMIT 1 FOR NO KEY UPDATE"
    with open_transaction(database, taken), session(database) as drain:
        assert ids(drain.claim_suspect()) == [second]
        assert drain.claim_suspect() == []

    with session(database) as drain:
        assert ids(drain.claim_suspect()) == [first]


def test_a_row_that_kills_its_drain_each_time_is_claimed_five_times_and_then_fails(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    (id_,) = enqueue(db)
    claims = 0
    with session(database) as drain:
        for _ in range(2 * MAX_ATTEMPTS):
            drain.sweep()
            claims += len(drain.claim() + drain.claim_suspect())
            clock(LEASE_SECONDS)

    assert claims == MAX_ATTEMPTS
    assert columns(db, id_, "status", "reason", "attempts") == ("failed", "lease_expired", MAX_ATTEMPTS)


# Rows that would break a naive claim.


@pytest.mark.parametrize("suspect", [False, True])
def test_a_date_that_python_cannot_hold_fails_no_claim(
    suspect: bool,  # noqa: FBT001  a parameter of the test
    db: psycopg.Connection,
    database: Database,
) -> None:
    claimed_at = "4000-01-01 BC" if suspect else None
    (ancient,) = enqueue(db, next_attempt_at="4000-01-01 00:00:00+00 BC", claimed_at=claimed_at)
    (lasting,) = enqueue(db, expires_at="20000-01-01 00:00:00+00", claimed_at=claimed_at)
    (stale,) = enqueue(db, expires_at="4000-01-01 00:00:00+00 BC", claimed_at=claimed_at)
    (strange,) = enqueue(
        db,
        created_at="200000-01-01",
        updated_at="4000-01-01 BC",
        first_claimed_at="4000-01-01 BC",
        claimed_at=claimed_at,
    )
    with session(database) as drain:
        claimed = [each for _ in range(4) for each in drain.claim_suspect()] if suspect else drain.claim()

    assert ids(claimed) == [ancient, lasting, stale, strange]
    assert [each.expires_at for each in claimed] == [None, 568971820800, -188363404800, None]
    assert claimed[0].due_at == -188363404800
    assert claimed[3].may_give_back is False


def test_a_row_with_an_absurd_number_of_attempts_does_not_fail_the_claim_of_the_others(
    db: psycopg.Connection, database: Database
) -> None:
    absurd = enqueue(db, attempts=1_000_000)
    good = enqueue(db, rows=3)
    with session(database) as drain:
        claimed = drain.claim()
        assert ids(claimed) == absurd + good
        assert {each.status for each in drain.settle([(each, Sent()) for each in claimed])} == {"sent"}


def test_ids_beyond_32_bits_pass_through_every_verb(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    db.execute("ALTER TABLE notification_delivery ALTER id RESTART WITH 3000000000")
    db.execute("ALTER TABLE push_token ALTER id RESTART WITH 4000000000")
    for _ in range(2):
        register(db)
    first, second, third = enqueue(db, rows=3)
    assert first == 3_000_000_000
    with session(database) as drain:
        one, two, three = drain.claim()
        clock(1)
        pushes = {push.delivery.id: push for push in drain.bind([one, two])}
        assert len(pushes) == 4
        settled = drain.settle(
            [
                (pushes[first].delivery, gone(pushes[first].device)),
                (pushes[second].delivery, Retry("timeout", "No answer.", 60.0)),
            ]
        )
        assert [each.status for each in settled] == ["invalid_token", "pending"]
        assert [each.status for each in drain.release([three])] == ["pending"]
        clock(LEASE_SECONDS)
        assert drain.claim_suspect()[0].id > third

    with session(database, max_attempts=1) as drain:
        clock(LEASE_SECONDS)
        assert {each.id for each in drain.sweep()} == pushes.keys() - {first, second}


# The sweep.


def test_a_sweep_fails_what_its_last_attempt_left_behind_and_nothing_else(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    before, then = START - timedelta(seconds=200), START - timedelta(seconds=80)
    ended: dict[str, Any] = {"claimed_at": before, "next_attempt_at": START}
    (spent,) = enqueue(db, **ended, attempts=MAX_ATTEMPTS, reason="timeout", last_error="No answer came.")
    (over,) = enqueue(db, **ended, attempts=MAX_ATTEMPTS + 3)
    enqueue(db, **ended, attempts=MAX_ATTEMPTS - 1)  # has another attempt
    enqueue(db, claimed_at=then, next_attempt_at=START + MICROSECOND, attempts=MAX_ATTEMPTS)  # its lease lives
    enqueue(db, next_attempt_at=then, attempts=MAX_ATTEMPTS)  # waits to be claimed
    enqueue(db, **ended, attempts=MAX_ATTEMPTS, status="failed", reason="Reason")
    clock(0)
    untouched = whole_rows(db)
    with session(database) as drain:
        assert {(each.id, each.attempts) for each in drain.sweep()} == {(spent, MAX_ATTEMPTS), (over, MAX_ATTEMPTS + 3)}
        assert drain.sweep() == []

    now = whole_rows(db)
    assert {id_ for id_ in now if now[id_] != untouched[id_]} == {spent, over}
    assert columns(db, spent, "status", "reason", "attempts", "claimed_at", "updated_at") == (
        "failed",
        "lease_expired",
        MAX_ATTEMPTS,
        None,
        START,
    )
    assert columns(db, spent, "last_error") == (
        "The drain died during attempt 5 and its lease expired. Before that: No answer came."
    )
    assert columns(db, over, "last_error") == "The drain died during attempt 8 and its lease expired."


def test_a_sweep_of_a_row_with_a_long_error_keeps_what_fits(db: psycopg.Connection, database: Database) -> None:
    (id_,) = enqueue(db, claimed_at="2020-01-01", attempts=MAX_ATTEMPTS, last_error="ü" * 500)
    with session(database) as drain:
        drain.sweep()

    said = "The drain died during attempt 5 and its lease expired. Before that: "
    assert columns(db, id_, "last_error") == said + "ü" * (500 - len(said))


def test_more_than_one_sweep_can_take_are_left_to_the_next(db: psycopg.Connection, database: Database) -> None:
    rows = enqueue(db, rows=SWEEP_LIMIT + 100, claimed_at="2020-01-01", attempts=MAX_ATTEMPTS)
    with session(database) as drain:
        swept = [[each.id for each in drain.sweep()] for _ in range(3)]

    assert [len(each) for each in swept] == [SWEEP_LIMIT, 100, 0]
    assert sorted(swept[0] + swept[1]) == rows


def test_a_sweep_does_not_wait_for_rows_that_another_is_sweeping(db: psycopg.Connection, database: Database) -> None:
    rows = enqueue(db, rows=5, claimed_at="2020-01-01", attempts=MAX_ATTEMPTS)
    taken = "SELECT FROM notification_delivery ORDER BY id LIMIT 3 FOR NO KEY UPDATE"
    with open_transaction(database, taken), session(database) as drain:
        assert sorted(each.id for each in drain.sweep()) == rows[3:]


def test_sweeps_at_the_same_time_share_the_rows(db: psycopg.Connection, database: Database) -> None:
    rows = enqueue(db, rows=2 * SWEEP_LIMIT, claimed_at="2020-01-01", attempts=MAX_ATTEMPTS)
    started = threading.Barrier(2)

    def sweep_all(_: int) -> list[int]:
        with session(database) as drain:
            drain.backlog()  # connected
            started.wait(WAIT_SECONDS)
            swept = []
            while batch := drain.sweep():
                swept += [each.id for each in batch]
            return swept

    with ThreadPoolExecutor(2) as threads:
        swept = [id_ for part in threads.map(sweep_all, range(2)) for id_ in part]

    assert sorted(swept) == rows


# Binding to devices.


def test_a_delivery_of_a_user_without_a_device_is_not_bound(db: psycopg.Connection, database: Database) -> None:
    register(db, "somebody else")
    (id_,) = enqueue(db)
    with session(database) as drain:
        claimed = drain.claim()
        before = whole_rows(db)

        assert drain.bind(claimed) == []
    assert whole_rows(db) == before
    assert columns(db, id_, "push_token_id") is None


def test_a_delivery_of_a_user_with_one_device_is_bound_to_it(db: psycopg.Connection, database: Database) -> None:
    device = register(db, environment="sandbox", topic="com.example.app")
    (id_,) = enqueue(db)
    with session(database) as drain:
        claimed = drain.claim()
        (push,) = drain.bind(claimed)

    assert (push.delivery, push.device) == (claimed[0], device)
    assert whole_rows(db).keys() == {id_}
    assert columns(db, id_, "push_token_id") == device.push_token_id


def test_a_delivery_of_a_user_with_three_devices_becomes_three_leased_by_the_same_drain(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    old, new, middle = (
        register(db, registered_at=START - timedelta(hours=age), token=token)
        for age, token in ((9, "aa"), (1, "bb"), (5, "cc"))
    )
    (id_,) = enqueue(
        db,
        payload={"aps": {"alert": "three"}},
        push_type="background",
        priority=1,
        collapse_id="same",
        expires_at=START + timedelta(hours=1),
        ignore_quiet_hours=True,
        dedupe_key="order-7",
    )
    with session(database) as drain:
        claimed = drain.claim()
        clock(1)
        pushes = drain.bind(claimed)
        clock(LEASE_SECONDS - 2)
        assert drain.claim() == []
        assert drain.claim_suspect() == []

    assert {push.device.push_token_id: push.device for push in pushes} == {
        each.push_token_id: each for each in (old, new, middle)
    }
    assert next(push for push in pushes if push.delivery.id == id_).device == new
    assert {push.delivery.lease for push in pushes} == {claimed[0].lease}
    assert len({push.delivery.apns_id for push in pushes}) == 3
    copied = "user_id", "payload", "push_type", "priority", "collapse_id", "expires_at", "ignore_quiet_hours"
    siblings = [push for push in pushes if push.delivery.id != id_]
    for push in siblings:
        sibling = push.delivery.id
        assert columns(db, sibling, *copied) == columns(db, id_, *copied)
        assert columns(db, sibling, "fanned_out_from", "dedupe_key", "status", "attempts", "next_attempt_at") == (
            id_,
            None,
            "pending",
            1,
            START + LEASE,
        )
        assert columns(db, sibling, "push_token_id", "apns_id") == (push.device.push_token_id, push.delivery.apns_id)
        assert columns(db, sibling, "first_claimed_at", "claimed_at") == (START, START + timedelta(seconds=1))
        assert push.delivery.payload == claimed[0].payload
        assert push.delivery.may_give_back
    assert columns(db, id_, "push_token_id", "fanned_out_from") == (new.push_token_id, None)


def test_of_twenty_five_devices_the_twenty_that_registered_last_are_bound(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    # Two a minute, so that the twentieth and the twenty-first have the same date: then the younger row counts.
    devices = [register(db, registered_at=START - timedelta(minutes=(25 - n) // 2)) for n in range(25)]
    enqueue(db)
    clock(0)
    with session(database) as drain:
        pushes = drain.bind(drain.claim())

    assert {push.device.push_token_id for push in pushes} == {each.push_token_id for each in devices[5:]}


def test_each_delivery_of_a_batch_is_bound_to_its_own_users_devices(db: psycopg.Connection, database: Database) -> None:
    wanted: dict[int, set[int]] = {}
    for user, count in (("a", 2), ("b", 0), ("c", 1), ("d", 3)):
        devices = {register(db, user).push_token_id for _ in range(count)}
        wanted |= dict.fromkeys(enqueue(db, user, rows=2), devices)
    with session(database) as drain:
        pushes = drain.bind(drain.claim())

    rows = db.execute("SELECT id, coalesce(fanned_out_from, id) FROM notification_delivery").fetchall()
    origin: dict[int, int] = dict(rows)
    found: dict[int, set[int]] = {id_: set() for id_ in wanted}
    for push in pushes:
        found[origin[push.delivery.id]].add(push.device.push_token_id)
    assert found == wanted
    assert len(pushes) == 2 * (2 + 1 + 3)


def test_a_delivery_for_one_named_device_goes_to_that_one_alone(db: psycopg.Connection, database: Database) -> None:
    _, named, _ = register(db), register(db), register(db)
    enqueue(db, push_token_id=named.push_token_id)
    with session(database) as drain:
        (push,) = drain.bind(drain.claim())

    assert push.device == named
    assert len(whole_rows(db)) == 1


@pytest.mark.parametrize(
    "what_became_of_it",
    [
        "UPDATE push_token SET invalidated_at = now()",
        "UPDATE push_token SET user_id = 'somebody else'",  # they log in with the same phone
        "DELETE FROM push_token",
    ],
)
def test_a_device_that_is_dead_or_changed_hands_or_is_gone_gets_nothing(
    what_became_of_it: LiteralString, db: psycopg.Connection, database: Database
) -> None:
    device = register(db)
    enqueue(db, push_token_id=device.push_token_id)  # named by the producer
    (bound,) = enqueue(db)
    (unbound,) = enqueue(db)
    with session(database) as drain:
        named, first, second = drain.claim()
        pushes = drain.bind([first])
        drain.settle([(push.delivery, Retry("timeout", "No answer.", -1.0)) for push in pushes])
        (first,) = drain.claim()
        assert columns(db, bound, "push_token_id") == device.push_token_id

        db.execute(what_became_of_it)
        assert drain.bind([named, first, second]) == []
    assert columns(db, bound, "push_token_id") == device.push_token_id
    assert columns(db, unbound, "push_token_id") is None


def test_a_delivery_that_is_bound_stays_with_its_device_whatever_registers_later(
    db: psycopg.Connection, database: Database
) -> None:
    device = register(db)
    enqueue(db)
    with session(database) as drain:
        (push,) = drain.bind(drain.claim())
        drain.settle([(push.delivery, Retry("timeout", "No answer.", -1.0))])
        register(db)
        (again,) = drain.bind(drain.claim())

    assert again.device == device
    assert again.delivery.apns_id == push.delivery.apns_id
    assert len(whole_rows(db)) == 1


def test_a_drain_that_dies_between_claim_and_binding_leaves_a_suspect_that_is_bound_once(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    devices = {register(db).push_token_id for _ in range(3)}
    (id_,) = enqueue(db)
    with session(database) as dead:
        dead.claim()
    clock(LEASE_SECONDS)
    with session(database) as drain:
        suspects = drain.claim_suspect()
        pushes = drain.bind(suspects)

        assert {push.device.push_token_id for push in pushes} == devices
        assert len(whole_rows(db)) == 3
        # The siblings have been tried once, whatever befell the first before they existed.
        assert {push.delivery.id == id_: push.delivery.lease.attempts for push in pushes} == {True: 2, False: 1}
        assert {push.delivery.lease.until for push in pushes} == {suspects[0].lease.until}

        # And one that dies after it: three suspects now, each bound to what it has.
        clock(LEASE_SECONDS)
        again = [push for _ in range(3) for push in drain.bind(drain.claim_suspect())]
        assert {push.delivery.id: push.device for push in again} == {push.delivery.id: push.device for push in pushes}
        assert drain.claim_suspect() == []
        assert len(whole_rows(db)) == 3


def test_binding_twice_makes_no_second_set_of_siblings(db: psycopg.Connection, database: Database) -> None:
    for _ in range(3):
        register(db)
    (id_,) = enqueue(db)
    with session(database) as drain:
        claimed = drain.claim()
        first = drain.bind(claimed)
        before = whole_rows(db)

        (again,) = drain.bind(claimed)
    assert again in first
    assert again.delivery.id == id_
    assert whole_rows(db) == before


def test_a_delivery_is_bound_with_all_its_siblings_or_not_at_all(db: psycopg.Connection, database: Database) -> None:
    register(db)
    refused = register(db)
    register(db)
    (id_,) = enqueue(db)
    db.execute(
        "ALTER TABLE notification_delivery ADD CONSTRAINT broken"
        f" CHECK (fanned_out_from IS NULL OR push_token_id <> {refused.push_token_id})".encode()
    )
    with session(database) as drain:
        claimed = drain.claim()
        before = whole_rows(db)
        with pytest.raises(Exception, match="broken"):
            drain.bind(claimed)

        assert whole_rows(db) == before
        db.execute("ALTER TABLE notification_delivery DROP CONSTRAINT broken")
        assert len(drain.bind(claimed)) == 3
        assert columns(db, id_, "push_token_id") is not None


@pytest.mark.parametrize("it_expired", [True, False])
def test_a_drain_that_lost_its_lease_binds_nothing(
    it_expired: bool,  # noqa: FBT001  a parameter of the test
    clock: Callable[[float], None],
    db: psycopg.Connection,
    database: Database,
) -> None:
    for _ in range(3):
        register(db)
    unbound, sent = enqueue(db, rows=2)
    with session(database) as late, session(database) as newer:
        claimed = late.claim()
        newer.settle([(each, Sent()) for each in claimed if each.id == sent])
        if it_expired:
            clock(LEASE_SECONDS)
            assert ids(newer.claim_suspect()) == [unbound]
        else:  # the same count of attempts again: the lease alone tells the two apart
            late.release([each for each in claimed if each.id == unbound])
            clock(1)
            assert [each.lease.attempts for each in newer.claim()] == [1]
        before = whole_rows(db)

        assert late.bind(claimed) == []
        assert whole_rows(db) == before
        assert columns(db, unbound, "push_token_id") is None


# Settling.


def test_any_mix_of_outcomes_is_written_as_it_was_said(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        pushes = one_each(db, drain, len(OUTCOMES))
        clock(1)
        outcomes = [(push.delivery, outcome(push)) for push, outcome in zip(pushes, OUTCOMES.values(), strict=True)]
        settled = drain.settle(list(reversed(outcomes)))

    now = START + timedelta(seconds=1)
    assert {each.delivery.id: each.outcome for each in settled} == {each.id: outcome for each, outcome in outcomes}
    status = {each.delivery.id: each.status for each in settled}
    rows = {}
    for name, push in zip(OUTCOMES, pushes, strict=True):
        rows[name] = columns(
            db, push.delivery.id, "status", "reason", "last_error", "attempts", "next_attempt_at", "sent_at"
        )
        assert rows[name][0] == status[push.delivery.id]
        assert columns(db, push.delivery.id, "claimed_at", "updated_at", "first_claimed_at") == (None, now, START)
    lease = START + LEASE
    assert rows == {
        "sent": ("sent", None, None, 1, lease, now),
        "retry": ("pending", "timeout", "No answer came.", 1, now + timedelta(seconds=45), None),
        "withheld": ("pending", "TopicDisallowed", "The topic is not ours.", 0, now + timedelta(seconds=300), None),
        "deferred": (
            "pending",
            "quiet_hours",
            "It is quiet hours where the recipient is.",
            0,
            now + timedelta(hours=8),
            None,
        ),
        "failed": ("failed", "PayloadTooLarge", "It is too large.", 1, lease, None),
        "invalid_token": ("invalid_token", "Unregistered", "APNs answered 410 Unregistered.", 1, lease, None),
        "skipped": (
            "skipped",
            "no_push_token",
            "The user has no live device, or the one that was asked for is not live or not the user's.",
            1,
            lease,
            None,
        ),
        "released": ("pending", None, None, 0, now, None),
    }
    dead = db.execute("SELECT id, invalidated_at, invalid_reason FROM push_token WHERE invalidated_at IS NOT NULL")
    device = pushes[list(OUTCOMES).index("invalid_token")].device
    assert dead.fetchall() == [(device.push_token_id, now, "Unregistered")]


def test_a_row_that_waits_is_due_when_its_delay_is_over_and_not_a_microsecond_before(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        retried, withheld = one_each(db, drain, 2)
        clock(7)
        drain.settle(
            [
                (retried.delivery, Retry("timeout", "No answer.", 30.5)),
                (withheld.delivery, Withheld("Forbidden", "Not allowed.", 200.25)),
            ]
        )
        clock(30.499999)
        assert drain.claim() == []
        clock(0.000001)
        (again,) = drain.claim()
        assert (again.id, again.lease.attempts, again.due_at) == (
            retried.delivery.id,
            2,
            (START + timedelta(seconds=37.5)).timestamp(),
        )
        clock(200.25 - 30.5)
        (given_back,) = drain.claim()
        assert (given_back.id, given_back.lease.attempts) == (withheld.delivery.id, 1)


class Line(Connected):
    """The database, with an ear on the line to it, and whatever may happen on the way there and back."""

    def __init__(self, database: Database) -> None:
        super().__init__(DatabaseUrl(database.url))
        self.asked: list[LiteralString] = []
        self.there: Callable[[LiteralString], None] = lambda _: None
        self.back: Callable[[LiteralString], None] = lambda _: None

    async def fetch(
        self,
        sql: LiteralString,
        params: Mapping[str, object] | Sequence[object] | None = None,
        *,
        deadline: float = STATEMENT_SECONDS,
    ) -> list[dict[str, Any]]:
        self.asked.append(sql)
        self.there(sql)
        rows = await super().fetch(sql, params, deadline=deadline)
        self.back(sql)
        return rows


@pytest.mark.parametrize("rows", [1, 50])
def test_a_claim_a_binding_a_settle_and_a_release_are_one_statement_each_however_many_rows(
    rows: int, db: psycopg.Connection, database: Database
) -> None:
    for _ in range(2):
        register(db)
    enqueue(db, rows=2 * rows)
    line = Line(database)
    with session(database, line, batch_size=rows) as drain:
        claimed = drain.claim()
        pushes = drain.bind(claimed)
        assert len(pushes) == 2 * rows
        everything = [
            (push.delivery, list(OUTCOMES.values())[n % 7](push))  # the first seven are settle.sql's
            for n, push in enumerate(pushes)
        ]
        assert len(drain.settle(everything)) == 2 * rows
        assert len(drain.release(drain.claim())) == rows
        assert drain.settle([]) == []

    assert line.asked == [
        statements.CLAIM,
        statements.BIND,
        statements.SETTLE,
        statements.CLAIM,
        statements.RELEASE,
    ]


def test_a_settle_whose_answer_was_lost_is_tried_again_and_what_it_ended_is_still_ours(
    db: psycopg.Connection, database: Database
) -> None:
    line = Line(database)
    names = ("sent", "failed", "invalid_token", "skipped")
    with session(database, line) as drain:
        pushes = one_each(db, drain, len(names))
        line.asked.clear()

        def lose_the_first(_: LiteralString) -> None:
            if len(line.asked) == 1:
                raise DatabaseGone("the answer was lost")

        line.back = lose_the_first
        settled = drain.settle([(p.delivery, OUTCOMES[name](p)) for name, p in zip(names, pushes, strict=True)])

    assert line.asked == [statements.SETTLE] * 2
    assert tuple(each.status for each in settled) == names


def test_a_settle_sent_again_changes_nothing(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        pushes = one_each(db, drain, len(OUTCOMES))
        outcomes = [(push.delivery, outcome(push)) for push, outcome in zip(pushes, OUTCOMES.values(), strict=True)]
        clock(1)
        drain.settle(outcomes)
        before, tokens = whole_rows(db, without="updated_at"), whole_rows(db, "push_token")

        clock(1)
        again = drain.settle(outcomes)

    assert whole_rows(db, "push_token") == tokens
    assert whole_rows(db, without="updated_at") == before
    assert {name: each.status for name, each in zip(OUTCOMES, again, strict=True)} == {
        "sent": "sent",
        "failed": "failed",
        "invalid_token": "invalid_token",
        "skipped": "skipped",
        # These have a date that was written down with the lease gone: nobody can tell any more who did it.
        "retry": None,
        "withheld": None,
        "deferred": None,
        "released": None,
    }


def test_a_row_that_is_settled_twice_keeps_the_date_of_its_end(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    """`updated_at` of a finished row is when it ended: by it the finished rows are indexed, and will be purged."""
    with session(database) as drain:
        pushes = one_each(db, drain, len(OUTCOMES))
        outcomes = [(push.delivery, outcome(push)) for push, outcome in zip(pushes, OUTCOMES.values(), strict=True)]
        drain.settle(outcomes)
        before = whole_rows(db)
        clock(1)
        drain.settle(outcomes)

    assert whole_rows(db) == before


def test_a_settle_that_never_gets_through_is_given_up_when_patience_is(
    db: psycopg.Connection, database: Database
) -> None:
    line = Line(database)
    enqueue(db)
    left = iter([10.0, 10.0, 5.0, 5.0, 0.05, 0.05])
    with session(database, line) as drain:
        (delivery,) = drain.claim()
        line.asked.clear()

        def be_away(_: LiteralString) -> None:
            raise DatabaseGone("away")

        line.there = be_away
        with pytest.raises(DatabaseGone, match="away"):
            drain.settle([(delivery, Sent())], patience=lambda: next(left))

    assert line.asked == [statements.SETTLE] * 3


# A drain that outlived its lease.


@pytest.mark.parametrize("newer", ["leased", "swept", "taken over after a release", *OUTCOMES])
def test_a_drain_that_outlived_its_lease_cannot_overwrite_a_newer_result(
    newer: str, clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    """Every late outcome upon everything that the newer claim may have left: only `sent` may still be written."""
    with session(database) as late, session(database) as other, session(database, max_attempts=1) as sweeper:
        held = one_each(db, late, len(OUTCOMES))
        if newer == "taken over after a release":  # the same number of attempts again: the lease alone tells them apart
            late.release([push.delivery for push in held])
            clock(1)
            assert {each.lease.attempts for each in other.claim()} == {1}
        else:
            clock(LEASE_SECONDS)
        if newer == "swept":
            assert len(sweeper.sweep()) == len(held)
        elif newer != "taken over after a release":
            pushes = [push for _ in held for push in other.bind(other.claim_suspect())]
            clock(1)
            if newer != "leased":
                assert None not in {
                    each.status for each in other.settle([(push.delivery, OUTCOMES[newer](push)) for push in pushes])
                }
        clock(1)
        before, tokens = whole_rows(db), whole_rows(db, "push_token")
        sent = whole_rows(db, without="updated_at")
        was = {push.delivery.id: columns(db, push.delivery.id, "status", "attempts", "sent_at") for push in held}

        settled = late.settle(
            [(push.delivery, outcome(push)) for push, outcome in zip(held, OUTCOMES.values(), strict=True)]
        )

    assert whole_rows(db, "push_token") == tokens
    said = {each.delivery.id: each.status for each in settled}
    after = whole_rows(db)
    for name, push in zip(OUTCOMES, held, strict=True):
        id_ = push.delivery.id
        status, attempts, sent_at = was[id_]
        if name != "sent" or status in ("invalid_token", "skipped"):
            assert (name, said[id_]) == (name, None)
            assert after[id_] == before[id_], f"a late {name} overwrote {newer}"
        else:
            assert said[id_] == "sent"
            found = columns(db, id_, "status", "attempts", "reason", "last_error", "claimed_at", "sent_at")
            now = db.execute("SELECT now()").fetchone()
            assert now is not None
            assert found == ("sent", attempts, None, None, None, sent_at or now[0])
            if status == "sent":
                assert whole_rows(db, without="updated_at")[id_] == sent[id_]


def test_what_the_newer_holder_says_after_a_late_acceptance_changes_nothing(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as late, session(database) as newer:
        held = one_each(db, late, len(OUTCOMES))
        clock(LEASE_SECONDS)
        pushes = [push for _ in held for push in newer.bind(newer.claim_suspect())]
        assert {each.status for each in late.settle([(push.delivery, Sent()) for push in held])} == {"sent"}
        before, tokens = whole_rows(db), whole_rows(db, "push_token")

        said = [(push.delivery, outcome(push)) for push, outcome in zip(pushes, OUTCOMES.values(), strict=True)]
        assert [each.status for each in newer.settle(said)] == ["sent"] + [None] * (len(OUTCOMES) - 1)
    assert whole_rows(db) == before
    assert whole_rows(db, "push_token") == tokens


def test_a_lease_that_ended_and_that_nobody_took_can_still_be_settled(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        held = one_each(db, drain, len(OUTCOMES))
        clock(10 * LEASE_SECONDS)
        settled = drain.settle(
            [(push.delivery, outcome(push)) for push, outcome in zip(held, OUTCOMES.values(), strict=True)]
        )

    assert None not in {each.status for each in settled}


def test_two_claims_in_the_same_microsecond_are_told_apart_by_their_count(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    clock(1)
    with session(database) as first, session(database) as second:
        held = one_each(db, first, len(OUTCOMES))
        first.settle([(push.delivery, Retry("timeout", "No answer.", 0.0)) for push in held])
        newer = second.claim()
        assert {each.lease.until for each in newer} == {held[0].delivery.lease.until}
        before = whole_rows(db)

        said = [(p.delivery, outcome(p)) for p, outcome in zip(held, OUTCOMES.values(), strict=True)]
        assert [each.status for each in first.settle(said[1:])] == [None] * (len(OUTCOMES) - 1)
        assert first.bind([push.delivery for push in held]) == []
    assert whole_rows(db) == before


def test_a_row_that_nobody_holds_is_not_settled_even_when_it_is_due_at_the_very_instant_an_old_lease_ended(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as late, session(database) as newer:
        held = one_each(db, late, len(OUTCOMES))
        clock(LEASE_SECONDS)
        newer.release([each for _ in held for each in newer.claim_suspect()])
        first = held[0].delivery
        assert columns(db, first.id, "attempts", "next_attempt_at") == (first.lease.attempts, first.lease.until)
        before, tokens = whole_rows(db), whole_rows(db, "push_token")

        said = [(push.delivery, outcome(push)) for push, outcome in zip(held, OUTCOMES.values(), strict=True)]
        assert [each.status for each in late.settle(said[1:-1])] == [None] * (len(OUTCOMES) - 2)
    assert whole_rows(db) == before
    assert whole_rows(db, "push_token") == tokens


def test_a_row_that_somebody_ended_by_hand_while_it_was_leased_stays_as_they_left_it(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        held = one_each(db, drain, len(OUTCOMES))
        db.execute("UPDATE notification_delivery SET status = 'skipped', reason = 'cancelled'")  # and nothing else
        before, tokens = whole_rows(db), whole_rows(db, "push_token")
        clock(1)

        said = [(push.delivery, outcome(push)) for push, outcome in zip(held, OUTCOMES.values(), strict=True)]
        assert [each.status for each in drain.settle(said)] == [None] * len(OUTCOMES)
        assert drain.bind([push.delivery for push in held]) == []
    assert whole_rows(db) == before
    assert whole_rows(db, "push_token") == tokens


# Words that Postgres cannot store.


@pytest.mark.parametrize(
    ("error", "stored"),
    [("No\0body", "Nobody"), ("half \ud800", "half ?"), ("ü" * 600, "ü" * 500), ("", "")],
    ids=["NUL", "lone surrogate", "600 characters", "nothing"],
)
def test_an_error_text_is_stored_as_far_as_it_can_be(
    error: str, stored: str, db: psycopg.Connection, database: Database
) -> None:
    line = Line(database)
    with session(database, line) as drain:
        one, bad, three = one_each(db, drain, 3)
        settled = drain.settle(
            [
                (one.delivery, Sent()),
                (bad.delivery, Failed("timeout", error)),
                (three.delivery, Retry("timeout", "No answer.", 60.0)),
            ]
        )

    assert line.asked.count(statements.SETTLE) == 1  # it was mended before, and did not fail the batch
    assert [each.status for each in settled] == ["sent", "failed", "pending"]
    assert columns(db, bad.delivery.id, "reason", "last_error") == ("timeout", stored)
    assert storable(error) == stored


@pytest.mark.parametrize(
    "reason",
    ["time\0out", "half\ud800", "r" * 600, ""],
    ids=["NUL", "lone surrogate", "600 characters", "nothing"],
)
@pytest.mark.parametrize("kind", ["retry", "withheld", "failed", "invalid_token"])
def test_a_reason_that_cannot_be_stored_costs_its_own_row_the_words_and_the_others_nothing(
    kind: str, reason: str, db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        one, bad, three = one_each(db, drain, 3)
        poisoned: Mapping[str, Outcome] = {
            "retry": Retry(reason, "The words.", 60.0),
            "withheld": Withheld(reason, "The words.", 60.0),
            "failed": Failed(reason, "The words."),
            "invalid_token": gone(bad.device, reason=reason),
        }
        settled = drain.settle(
            [
                (one.delivery, Failed("PayloadTooLarge", "It is too large.")),
                (bad.delivery, poisoned[kind]),
                (three.delivery, Sent()),
            ]
        )

    ends = {"retry": "pending", "withheld": "pending", "failed": "failed", "invalid_token": "invalid_token"}
    assert [each.status for each in settled] == ["failed", ends[kind], "sent"]
    assert [columns(db, p.delivery.id, "status", "reason", "last_error") for p in (one, bad, three)] == [
        ("failed", "PayloadTooLarge", "It is too large."),
        (ends[kind], "unrecordable", "Its words could not be stored."),
        ("sent", None, None),
    ]
    if kind == "invalid_token":
        assert columns(db, bad.device.push_token_id, "invalidated_at", table="push_token") is not None


# Tokens that are dead, or said to be.


REGISTERED = START - timedelta(hours=1) + timedelta(microseconds=123_456)


@pytest.mark.parametrize(
    ("dead_since", "dies"),
    [
        (REGISTERED - timedelta(hours=1), False),
        (REGISTERED.replace(microsecond=122_000), False),
        (REGISTERED.replace(microsecond=123_000), True),  # APNs says milliseconds: the same one is "no later"
        (REGISTERED.replace(microsecond=124_000), True),
        (START, True),
        (None, True),
    ],
)
def test_a_token_is_invalidated_only_if_it_was_registered_no_later_than_it_died(
    dead_since: datetime | None,
    dies: bool,  # noqa: FBT001  a parameter of the test
    clock: Callable[[float], None],
    db: psycopg.Connection,
    database: Database,
) -> None:
    device = register(db, registered_at=REGISTERED)
    (id_,) = enqueue(db)
    clock(0)
    with session(database) as drain:
        (push,) = drain.bind(drain.claim())
        (settled,) = drain.settle([(push.delivery, gone(device, dead_since=dead_since))])

    token = columns(db, device.push_token_id, "invalidated_at", "invalid_reason", table="push_token")
    row = columns(db, id_, "status", "reason", "next_attempt_at", "attempts", "claimed_at")
    if dies:
        assert settled.status == "invalid_token"
        assert token == (START, "Unregistered")
        assert row == ("invalid_token", "Unregistered", START + LEASE, 1, None)
    else:  # it is back since
        assert settled.status == "pending"
        assert token == (None, None)
        assert row == ("pending", "Unregistered", START + timedelta(seconds=60), 1, None)


def test_a_device_that_is_back_at_the_last_attempt_fails_the_delivery_and_lives(
    db: psycopg.Connection, database: Database
) -> None:
    device = register(db)
    (id_,) = enqueue(db)
    dead_since = datetime(2020, 1, 1, tzinfo=UTC)
    with session(database) as drain:
        (push,) = drain.bind(drain.claim())
        verdict = gone(device, dead_since=dead_since, if_alive=Failed("Unregistered", "Too often."))
        (settled,) = drain.settle([(push.delivery, verdict)])

    assert settled.status == "failed"

    assert columns(db, device.push_token_id, "invalidated_at", table="push_token") is None
    assert columns(db, id_, "status", "reason") == ("failed", "Unregistered")


def test_that_such_a_delivery_failed_is_still_ours_when_the_answer_was_lost(
    db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        (push,) = one_each(db, drain, 1)
        verdict = gone(
            push.device,
            dead_since=datetime(2020, 1, 1, tzinfo=UTC),
            if_alive=Failed("Unregistered", "Too often."),
        )
        assert [drain.settle([(push.delivery, verdict)])[0].status for _ in range(2)] == ["failed", "failed"]


def test_a_token_that_is_dead_already_keeps_its_date_and_ends_the_delivery(
    db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        (push,) = one_each(db, drain, 1)
        db.execute("UPDATE push_token SET invalidated_at = '2020-01-01', invalid_reason = 'BadDeviceToken'")
        before = whole_rows(db, "push_token")
        (settled,) = drain.settle([(push.delivery, gone(push.device))])

    assert settled.status == "invalid_token"
    assert whole_rows(db, "push_token") == before


def test_a_token_that_was_deleted_meanwhile_ends_the_delivery(db: psycopg.Connection, database: Database) -> None:
    with session(database) as drain:
        (push,) = one_each(db, drain, 1)
        db.execute("DELETE FROM push_token")
        (settled,) = drain.settle([(push.delivery, gone(push.device))])

    assert settled.status == "invalid_token"


def test_a_device_that_moved_to_another_user_after_it_was_said_to_be_dead_lives_and_gets_nothing_of_the_first(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    register(db, registered_at=START - timedelta(hours=1), token="ab" * 32)
    (id_,) = enqueue(db)
    with session(database) as drain:
        (push,) = drain.bind(drain.claim())
        clock(1)
        db.execute("SELECT register_push_token('somebody else', %s)", ["AB" * 32])
        clock(1)
        (settled,) = drain.settle([(push.delivery, gone(push.device, dead_since=START))])
        assert settled.status == "pending"
        assert columns(db, push.device.push_token_id, "user_id", "invalidated_at", table="push_token") == (
            "somebody else",
            None,
        )

        clock(60)
        assert drain.bind(drain.claim()) == []
        assert columns(db, id_, "attempts") == 2


def test_another_token_that_took_the_rows_place_meanwhile_is_not_invalidated(
    db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        (push,) = one_each(db, drain, 1)
        db.execute("UPDATE push_token SET token = 'cd'")
        (settled,) = drain.settle([(push.delivery, gone(push.device))])

    assert settled.status == "pending"
    assert columns(db, push.device.push_token_id, "invalidated_at", table="push_token") is None


def test_two_deliveries_of_one_dead_token_in_one_batch_both_end_with_it(
    db: psycopg.Connection, database: Database
) -> None:
    device = register(db, registered_at="2020-01-01 00:00:00+00")
    enqueue(db, rows=2)
    with session(database) as drain:
        pushes = drain.bind(drain.claim())
        dead_since = (datetime(2021, 1, 1, tzinfo=UTC), None)
        settled = drain.settle(
            [(p.delivery, gone(device, dead_since=since)) for p, since in zip(pushes, dead_since, strict=True)]
        )

    assert [each.status for each in settled] == ["invalid_token", "invalid_token"]
    assert columns(db, device.push_token_id, "invalidated_at", table="push_token") is not None


@pytest.mark.parametrize("commits", [True, False])
def test_a_device_that_registers_while_it_is_being_invalidated_is_what_it_has_said_it_is(
    commits: bool,  # noqa: FBT001  a parameter of the test
    db: psycopg.Connection,
    database: Database,
) -> None:
    device = register(db, token="ab" * 32, registered_at="2020-01-01 00:00:00+00")
    (id_,) = enqueue(db)
    with session(database) as drain, ThreadPoolExecutor(1) as elsewhere:
        (push,) = drain.bind(drain.claim())
        with open_transaction(database, "SELECT register_push_token('user', 'abab' || repeat('ab', 30))") as app:
            dead_since = datetime(2021, 1, 1, tzinfo=UTC)
            settling = elsewhere.submit(drain.settle, [(push.delivery, gone(device, dead_since=dead_since))])
            wait_for_a_lock(db)
            if commits:
                app.commit()
            else:
                app.rollback()
            (settled,) = settling.result(WAIT_SECONDS)

    dead = columns(db, device.push_token_id, "invalidated_at", table="push_token") is not None
    assert (dead, settled.status, columns(db, id_, "status")) == (
        (False, "pending", "pending") if commits else (True, "invalid_token", "invalid_token")
    )


def test_two_drains_that_hear_of_one_dead_token_at_the_same_time_both_end_their_delivery(
    db: psycopg.Connection, database: Database
) -> None:
    device = register(db)
    enqueue(db)
    with session(database) as drain, ThreadPoolExecutor(1) as elsewhere:
        (push,) = drain.bind(drain.claim())
        with open_transaction(database, "UPDATE push_token SET invalidated_at = now(), invalid_reason = 'x'") as other:
            settling = elsewhere.submit(drain.settle, [(push.delivery, gone(device))])
            wait_for_a_lock(db)
            other.commit()
            (settled,) = settling.result(WAIT_SECONDS)

    assert settled.status == "invalid_token"


# Releasing.


def test_what_is_released_is_due_at_once_and_was_not_tried(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    (id_,) = enqueue(db, reason="timeout", last_error="No answer.", attempts=2)
    with session(database) as drain:
        claimed = drain.claim()
        clock(1)
        (settled,) = drain.release(claimed)

        now = START + timedelta(seconds=1)
        assert settled.status == "pending"
        assert columns(db, id_, "status", "attempts", "next_attempt_at", "claimed_at", "updated_at") == (
            "pending",
            2,
            now,
            None,
            now,
        )
        assert columns(db, id_, "reason", "last_error") == ("timeout", "No answer.")
        assert ids(drain.claim()) == [id_]


def test_what_was_first_claimed_too_long_ago_spends_the_attempt_it_is_released_from_and_fails_at_the_last(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    long_ago = START - timedelta(hours=GIVE_BACK_HOURS)
    (spends,) = enqueue(db, first_claimed_at=long_ago, attempts=MAX_ATTEMPTS - 2)
    (last,) = enqueue(db, first_claimed_at=long_ago, attempts=MAX_ATTEMPTS - 1)
    (fresh,) = enqueue(db, attempts=MAX_ATTEMPTS - 1)
    clock(0)
    with session(database) as drain:
        assert [each.status for each in drain.release(drain.claim())] == ["pending", "failed", "pending"]

    assert columns(db, spends, "status", "attempts", "reason") == ("pending", MAX_ATTEMPTS - 1, None)
    assert columns(db, last, "status", "attempts", "reason", "last_error", "claimed_at") == (
        "failed",
        MAX_ATTEMPTS,
        "out_of_time",
        "Every drain that claimed it ran out of time before its push began.",
        None,
    )
    assert columns(db, fresh, "status", "attempts", "reason") == ("pending", MAX_ATTEMPTS - 1, None)


# Locks.


def settle_in_this_order(drain: Session, outcomes: Sequence[tuple[Delivery, Outcome]]) -> list[dict[str, Any]]:
    """Send the statement as it is: `settle` would put the rows in order first, and try again after a deadlock."""
    writes = [statements._Write.of(*each) for each in outcomes]
    table = {name: [getattr(write, name) for write in writes] for name in statements._Write.__slots__}
    return drain.runner.run(drain.outbox.database.fetch(statements.SETTLE, table))


@contextmanager
def aborting(together: threading.Barrier) -> Iterator[None]:
    """Let nobody wait for one who has failed."""
    try:
        yield
    except BaseException:
        together.abort()
        raise


def test_settles_of_the_same_rows_in_opposite_order_never_deadlock(db: psycopg.Connection, database: Database) -> None:
    """Both record that APNs accepted: the one write that passes the fence twice."""
    rounds, rows = 20, 100
    enqueue(db, rows=rows)
    # Among so many others each row is looked up by its id: in a small table it would be met in the order it lies in.
    enqueue(db, rows=20_000, next_attempt_at="2100-01-01")
    db.execute("ANALYZE notification_delivery")
    with session(database, batch_size=rows) as drain:
        claimed = drain.claim()
    together = threading.Barrier(2)

    def settle(deliveries: list[Delivery]) -> None:
        with session(database) as drain, aborting(together):
            for _ in range(rounds):
                together.wait(WAIT_SECONDS)
                assert len(settle_in_this_order(drain, [(each, Sent()) for each in deliveries])) == rows

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(settle, claimed), threads.submit(settle, claimed[::-1])]:
            each.result(WAIT_SECONDS)


def test_settles_that_hear_of_the_same_dead_tokens_in_opposite_order_never_deadlock(
    db: psycopg.Connection, database: Database
) -> None:
    rounds, devices = 10, [register(db) for _ in range(50)]
    enqueue(db, rows=2 * rounds * len(devices))

    def revive() -> None:
        db.execute("UPDATE push_token SET invalidated_at = NULL, invalid_reason = NULL")

    together = threading.Barrier(2, action=revive)

    def settle(order: int) -> None:
        with session(database) as drain, aborting(together):
            batches = [drain.claim() for _ in range(rounds)]
            for batch in batches:
                said = [(each, gone(device)) for each, device in zip(batch, devices[::order], strict=True)]
                together.wait(WAIT_SECONDS)
                assert len(settle_in_this_order(drain, said)) == len(batch)

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(settle, order) for order in (1, -1)]:
            each.result(WAIT_SECONDS)


# How much is due.


def test_the_backlog_is_what_is_due_now_with_expired_leases_and_its_age_the_oldest_ones(
    clock: Callable[[float], None], db: psycopg.Connection, database: Database
) -> None:
    with session(database) as drain:
        assert (drain.backlog().due, drain.backlog().oldest_age_seconds) == (0, 0)
        enqueue(db, next_attempt_at=START + timedelta(seconds=1))
        assert (drain.backlog().due, drain.backlog().oldest_age_seconds) == (0, 0)

        enqueue(db, rows=2, next_attempt_at=START - timedelta(seconds=30))
        enqueue(db, next_attempt_at=START - timedelta(seconds=90), claimed_at=START - timedelta(seconds=210))
        enqueue(db, next_attempt_at=START + timedelta(seconds=30), claimed_at=START - timedelta(seconds=90))
        enqueue(db, next_attempt_at=START - timedelta(hours=5), status="failed", reason="Reason")
        assert (drain.backlog().due, drain.backlog().oldest_age_seconds) == (3, 90)
        clock(1.5)
        assert (drain.backlog().due, drain.backlog().oldest_age_seconds) == (4, 91.5)


# How the statements are written, and how Postgres carries them out.


SOURCES = sorted((Path(statements.__file__).parent).glob("sql/*.sql")) + sorted(
    (Path(statements.__file__).parent).glob("migrations/*.sql")
)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_sql_asks_for_the_time_as_unqualified_now_and_counts_in_no_unit_longer_than_hours(file: Path) -> None:
    code = re.sub(r"--.*", "", file.read_text(encoding="utf-8")).lower()
    other_clocks = (
        r"\w*_timestamp\(|current_(timestamp|date|time)|localtime|timeofday|\.\s*now\(|'(now|today|tomorrow|yesterday)'"
    )

    assert not re.search(other_clocks, code)
    # A day has 23 to 25 hours where clocks are set.
    assert not re.search(r"interval '[^']*(day|week|month|year)|\b(days|weeks|months|years)\s*=>", code)


@pytest.mark.parametrize("file", [file for file in SOURCES if file.parent.name == "sql"], ids=lambda file: file.name)
def test_what_locks_rows_is_materialized(file: Path) -> None:
    code = re.sub(r"--.*", "", file.read_text(encoding="utf-8"))
    parts = re.findall(r"(\w+ AS (?:MATERIALIZED )?)\((.*?)\n\)", code, flags=re.DOTALL)

    assert [name for name, body in parts if "FOR NO KEY UPDATE" in body and "MATERIALIZED" not in name] == []
    assert code.count("FOR NO KEY UPDATE") == sum(body.count("FOR NO KEY UPDATE") for _, body in parts)


@pytest.mark.parametrize("statement", [statements.CLAIM, statements.CLAIM_SUSPECT, statements.SWEEP])
def test_what_was_locked_is_updated_by_its_id_with_no_further_condition(statement: str) -> None:
    """One more would be one more way for the planner to go about it: that is how the limit was lost at first."""
    code = re.sub(r"--.*", "", statement)
    outer = re.search(r"\n  FROM (\w+)\n WHERE (.*?)\nRETURNING", code, flags=re.DOTALL)

    assert outer is not None
    assert outer[2].strip() == f"nd.id = {outer[1]}.id"


def sent_by(verb: Callable[[Session], object]) -> tuple[LiteralString, Any]:
    """Catch the statement a verb sends, with its parameters, before it goes out."""
    caught: list[tuple[LiteralString, Any]] = []

    class Caught(Connected):
        async def fetch(self, sql: LiteralString, params: Any = None, **_: Any) -> list[dict[str, Any]]:  # noqa: ANN401
            caught.append((sql, params))
            return []

    nowhere = Database(name="", dsn="", url="")
    with session(nowhere, Caught(DatabaseUrl(""))) as drain:
        verb(drain)
    (statement,) = caught
    return statement


def explain(
    db: psycopg.Connection, statement: LiteralString, params: Mapping[str, Any] | None, *, analyze: bool = False
) -> list[dict[str, Any]]:
    """Ask for the plan: its nodes, one after the other. With `analyze` the statement is carried out."""
    options = "ANALYZE, FORMAT JSON" if analyze else "FORMAT JSON"
    row = db.execute(f"EXPLAIN ({options}) {statement}".encode(), params).fetchone()
    assert row is not None

    def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield node
        for child in node.get("Plans", ()):
            yield from nodes(child)

    return list(nodes(row[0][0]["Plan"]))


def ways_in(plan: list[dict[str, Any]]) -> set[str]:
    """Say by which indexes it goes, and which tables it reads from end to end."""
    return {node["Index Name"] for node in plan if "Index Name" in node} | {
        f"all of {node['Relation Name']}" for node in plan if node["Node Type"] == "Seq Scan"
    }


CROWD = 1_000_000
DUE, LEASED, BY_ID = "notification_delivery_due", "notification_delivery_leased", "notification_delivery_pkey"
DEVICES, DEVICE_BY_ID, RECIPIENT = "push_token_of_user", "push_token_pkey", "recipient_pkey"


def crowded(
    postgres: LocalPostgres, admin: psycopg.Connection, template: str, state: LiteralString
) -> Iterator[psycopg.Connection]:
    """Make a database of a million deliveries, with the devices and wishes of 20,000 users and fresh statistics."""
    create(admin, "crowded", template)
    try:
        with psycopg.connect(postgres.dsn("crowded"), autocommit=True) as connection:
            connection.execute(
                "INSERT INTO push_token (user_id, token, environment)"
                " SELECT 'user' || g, lpad(to_hex(g), 64, '0'), 'production' FROM generate_series(1, 20000) g"
            )
            connection.execute(
                "INSERT INTO recipient SELECT 'user' || g, 'Europe/Berlin', '22:00', '07:00'"
                " FROM generate_series(1, 20000) g"
            )
            connection.execute(
                "INSERT INTO notification_delivery"
                f" (user_id, payload, status, reason, attempts, next_attempt_at, claimed_at) {state}".encode()
            )
            connection.execute("VACUUM ANALYZE notification_delivery, push_token, recipient")
            yield connection
    finally:
        drop(admin, "crowded")


@pytest.fixture(scope="module", params=["everything is due", "some of everything"])
def crowd(
    request: pytest.FixtureRequest, postgres: LocalPostgres, admin: psycopg.Connection, _template: str
) -> Iterator[psycopg.Connection]:
    due = "'pending', NULL, 0, now() - g * interval '1 ms', NULL::timestamptz"
    mixed = """CASE WHEN g % 10 < 6 THEN 'failed' ELSE 'pending' END, CASE WHEN g % 10 < 6 THEN 'Reason' END,
        g % 5, now() + (g % 2000 - 1000) * interval '1 second', CASE WHEN g % 10 = 9 THEN now() END"""
    state = due if request.param == "everything is due" else mixed
    yield from crowded(
        postgres, admin, _template, f"SELECT 'user' || g % 20000, '{{}}', {state} FROM generate_series(1, {CROWD}) g"
    )


DELIVERIES = [
    Delivery(
        id=n * 3000,
        lease=Lease(1, START),
        due_at=0.0,
        payload=b"{}",
        push_type="alert",
        priority=None,
        collapse_id=None,
        expires_at=None,
        apns_id=UUID(int=n),
        may_give_back=True,
    )
    for n in range(1, BATCH_SIZE + 1)
]
DEVICE = Device(push_token_id=5, token="ab", environment=Environment.PRODUCTION, topic=None)


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (Session.claim, {DUE, BY_ID, RECIPIENT}),
        (Session.claim_suspect, {LEASED, BY_ID, RECIPIENT}),
        (Session.sweep, {LEASED, BY_ID}),
        (
            lambda drain: drain.bind(DELIVERIES),
            {BY_ID, DEVICES},
        ),
        (
            lambda drain: drain.settle(
                [(each, list(OUTCOMES.values())[n % 7](Push(each, DEVICE))) for n, each in enumerate(DELIVERIES)]
            ),
            {BY_ID},
        ),
        (lambda drain: drain.release(DELIVERIES), {BY_ID}),
    ],
    ids=["claim", "claim_suspect", "sweep", "bind", "settle", "release"],
)
def test_among_a_million_rows_each_verb_goes_by_its_index(
    verb: Callable[[Session], object], expected: set[str], crowd: psycopg.Connection
) -> None:
    # One device by its id is one look, and on some versions it is found among its user's just as well.
    assert ways_in(explain(crowd, *sent_by(verb))) - {DEVICE_BY_ID} == expected


def test_the_backlog_is_counted_without_reading_the_table(crowd: psycopg.Connection) -> None:
    plan = explain(crowd, statements.BACKLOG, {"limit": 1000})

    assert ways_in(plan) == {DUE, LEASED}


@pytest.mark.parametrize("crowd", ["everything is due"], indirect=True)
@pytest.mark.parametrize("verb", [Session.claim_suspect, Session.sweep])
def test_a_search_for_suspects_never_walks_over_the_backlog(
    verb: Callable[[Session], object], crowd: psycopg.Connection
) -> None:
    plan = explain(crowd, *sent_by(verb), analyze=True)

    assert sum(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in plan) == 0
