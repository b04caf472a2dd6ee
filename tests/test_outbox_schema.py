"""What the tables take and refuse, what they say of themselves, and the two functions producers call."""

import re
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import errors

from core import verdict
from core.delivery import Environment
from core.outbox import LONGEST_ERROR
from core.verdict import Skip
from tests.support.database import Database
from tests.support.outbox import columns, enqueue, register, session, whole_rows
from tests.support.time_travel import install_clock, tick

START = datetime(2030, 1, 1, tzinfo=UTC)
TABLES = ("notification_delivery", "push_token", "recipient")
WAIT_SECONDS = 20
APPLES_PUSH_TYPES = (
    "alert",
    "background",
    "complication",
    "controls",
    "fileprovider",
    "liveactivity",
    "location",
    "mdm",
    "pushtotalk",
    "voip",
    "widgets",
)
# All that two deliveries inserted alike have in common.
ALIKE: LiteralString = """
    SELECT to_jsonb(nd) - '{id,apns_id,created_at,updated_at,next_attempt_at}'::text[]
    FROM notification_delivery nd WHERE id = %s
"""


def one(db: psycopg.Connection, query: LiteralString, *params: object) -> Any:  # noqa: ANN401  whatever it selects
    row = db.execute(query, params).fetchone()
    assert row is not None
    return row[0]


# The contract of the columns.


def test_the_oldest_producers_minimal_insert_still_makes_a_delivery(db: psycopg.Connection, database: Database) -> None:
    """Producers write this by hand, in services of their own. Whatever is added here must not break it."""
    db.execute("SET TIME ZONE 'UTC'")  # JSON writes instants in the session's
    install_clock(db, at=START)
    db.execute("""INSERT INTO notification_delivery (user_id, payload) VALUES ('7', '{"aps": {"alert": "hello"}}')""")

    assert db.execute("SELECT to_jsonb(nd) - 'apns_id' FROM notification_delivery nd").fetchone() == (
        {
            "id": 1,
            "user_id": "7",
            "payload": {"aps": {"alert": "hello"}},
            "push_type": "alert",
            "priority": None,
            "collapse_id": None,
            "expires_at": None,
            "dedupe_key": None,
            "ignore_quiet_hours": False,
            "status": "pending",
            "reason": None,
            "attempts": 0,
            "next_attempt_at": "2030-01-01T00:00:00+00:00",
            "push_token_id": None,
            "fanned_out_from": None,
            "first_claimed_at": None,
            "claimed_at": None,
            "last_error": None,
            "sent_at": None,
            "created_at": "2030-01-01T00:00:00+00:00",
            "updated_at": "2030-01-01T00:00:00+00:00",
        },
    )
    assert one(db, "SELECT apns_id IS NOT NULL FROM notification_delivery")
    with session(database) as drain:
        assert len(drain.claim()) == 1


def test_the_minimal_registration_and_recipient_still_work(db: psycopg.Connection) -> None:
    install_clock(db, at=START)
    db.execute("INSERT INTO push_token (user_id, token, environment) VALUES ('7', 'ab', 'production')")
    db.execute("INSERT INTO recipient (user_id, time_zone) VALUES ('7', 'Europe/Berlin')")

    assert db.execute("SELECT * FROM push_token").fetchall() == [(1, "7", "ab", "production", None, START, None, None)]
    assert db.execute("SELECT * FROM recipient").fetchall() == [("7", "Europe/Berlin", None, None, True)]


def test_the_tables_have_the_columns_that_the_contract_names_and_no_others(db: psycopg.Connection) -> None:
    found = db.execute(
        "SELECT table_name, string_agg(column_name || ' ' || udt_name, ', ' ORDER BY column_name)"
        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name = ANY(%s) GROUP BY 1",
        [list(TABLES)],
    ).fetchall()

    assert dict(found) == {
        "notification_delivery": "apns_id uuid, attempts int4, claimed_at timestamptz, collapse_id text,"
        " created_at timestamptz, dedupe_key text, expires_at timestamptz, fanned_out_from int8,"
        " first_claimed_at timestamptz, id int8, ignore_quiet_hours bool, last_error text,"
        " next_attempt_at timestamptz, payload jsonb, priority int2, push_token_id int8, push_type text, reason text,"
        " sent_at timestamptz, status text, updated_at timestamptz, user_id text",
        "push_token": "environment text, id int8, invalid_reason text, invalidated_at timestamptz,"
        " registered_at timestamptz, token text, topic text, user_id text",
        "recipient": "push_enabled bool, quiet_from time, quiet_until time, time_zone text, user_id text",
    }


def test_every_table_column_and_function_says_what_it_is_for(db: psycopg.Connection) -> None:
    silent = db.execute(
        """
        SELECT c.relname || '.' || a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        WHERE c.oid = ANY(%(tables)s::regclass[]) AND a.attnum > 0 AND NOT a.attisdropped
          AND length(coalesce(col_description(c.oid, a.attnum), '')) < 10
        UNION ALL
        SELECT c.relname FROM pg_class c
        WHERE c.oid = ANY(%(tables)s::regclass[]) AND length(coalesce(obj_description(c.oid, 'pg_class'), '')) < 10
        UNION ALL
        SELECT p.proname FROM pg_proc p
        WHERE p.pronamespace = 'public'::regnamespace AND length(coalesce(obj_description(p.oid, 'pg_proc'), '')) < 10
        """,
        {"tables": list(TABLES)},
    ).fetchall()

    assert silent == []


def test_no_table_refers_to_another_so_that_no_producers_transaction_locks_a_row_of_ours(
    db: psycopg.Connection,
) -> None:
    assert one(db, "SELECT count(*) FROM pg_constraint WHERE contype = 'f'") == 0


def test_the_table_is_vacuumed_and_analyzed_long_before_the_defaults_would(db: psycopg.Connection) -> None:
    settings = one(db, "SELECT reloptions FROM pg_class WHERE oid = 'notification_delivery'::regclass")

    assert set(settings) == {
        "autovacuum_vacuum_scale_factor=0.02",
        "autovacuum_vacuum_threshold=1000",
        "autovacuum_analyze_scale_factor=0.02",
        "autovacuum_analyze_threshold=1000",
        "autovacuum_vacuum_insert_scale_factor=0.02",
        "autovacuum_vacuum_cost_limit=2000",
    }


def test_each_pending_row_is_in_exactly_one_of_the_two_indexes_a_claim_goes_by(db: psycopg.Connection) -> None:
    found = db.execute(
        "SELECT indexrelid::regclass::text, pg_get_expr(indpred, indrelid), pg_get_indexdef(indexrelid)"
        " FROM pg_index WHERE indrelid = 'notification_delivery'::regclass AND indpred IS NOT NULL"
    ).fetchall()
    predicates = {name: predicate for name, predicate, _ in found}

    assert predicates == {
        "notification_delivery_due": "((status = 'pending'::text) AND (claimed_at IS NULL))",
        "notification_delivery_leased": "((status = 'pending'::text) AND (claimed_at IS NOT NULL))",
        "notification_delivery_done": "(status <> 'pending'::text)",
        "notification_delivery_sibling": "(fanned_out_from IS NOT NULL)",
    }
    columns_of = {"notification_delivery_done": "(updated_at)", "notification_delivery_sibling": "(fanned_out_from)"}
    for name, _, definition in found:
        assert columns_of.get(name, "(next_attempt_at, id)") in definition


# What is refused, and under which name.


@contextmanager
def refused(db: psycopg.Connection, by: str, kind: type[psycopg.Error] = errors.CheckViolation) -> Iterator[None]:
    """Expect a constraint to refuse it, by its name, and nothing to be left of it."""
    before = [whole_rows(db, table) for table in TABLES[:2]]
    with pytest.raises(kind) as refusal:
        yield
    assert refusal.value.diag.constraint_name == by
    assert [whole_rows(db, table) for table in TABLES[:2]] == before


@pytest.mark.parametrize(
    ("column", "value", "constraint"),
    [
        ("user_id", "", "user_id_is_not_empty"),
        ("payload", "[]", "payload_is_a_json_object"),
        ("payload", '"words"', "payload_is_a_json_object"),
        ("payload", "null", "payload_is_a_json_object"),
        ("payload", "7", "payload_is_a_json_object"),
        ("push_type", "Alert", "push_type_is_one_of_apples"),
        ("push_type", "", "push_type_is_one_of_apples"),
        ("push_type", "alert\n", "push_type_is_one_of_apples"),
        ("priority", 0, "priority_is_10_5_or_1"),
        ("priority", 11, "priority_is_10_5_or_1"),
        ("collapse_id", "", "collapse_id_is_1_to_64_printable_ascii"),
        ("collapse_id", "x" * 65, "collapse_id_is_1_to_64_printable_ascii"),
        ("collapse_id", "ü" * 33, "collapse_id_is_1_to_64_printable_ascii"),
        ("collapse_id", "ü", "collapse_id_is_1_to_64_printable_ascii"),
        ("collapse_id", "two\nlines", "collapse_id_is_1_to_64_printable_ascii"),
        ("collapse_id", "a line\n", "collapse_id_is_1_to_64_printable_ascii"),
        ("collapse_id", "\x7f", "collapse_id_is_1_to_64_printable_ascii"),
        ("expires_at", "infinity", "dates_are_finite"),
        ("expires_at", "-infinity", "dates_are_finite"),
        ("next_attempt_at", "infinity", "dates_are_finite"),
        ("next_attempt_at", "-infinity", "dates_are_finite"),
        ("status", "sent", "sent_means_sent_at"),
        ("status", "failed", "an_end_other_than_sent_has_a_reason"),
        ("sent_at", "2026-01-01", "sent_means_sent_at"),
        ("attempts", -1, "attempts_are_counted_from_0"),
        ("attempts", 1_000_001, "attempts_are_counted_from_0"),
        ("reason", "", "reason_is_one_short_word"),
        ("reason", "r" * 101, "reason_is_one_short_word"),
        ("last_error", "e" * 501, "last_error_is_at_most_500_characters"),
    ],
)
def test_a_delivery_that_makes_no_sense_is_refused_by_a_name_that_says_why(
    column: str, value: object, constraint: str, db: psycopg.Connection
) -> None:
    enqueue(db)
    wrong: dict[str, Any] = {column: value}
    with refused(db, constraint):
        enqueue(db, **wrong)
    with refused(db, constraint):
        db.execute(f"UPDATE notification_delivery SET {column} = %s".encode(), [value])


@pytest.mark.parametrize(
    ("column", "value", "constraint"),
    [
        ("user_id", "", "push_token_user_id_is_not_empty"),
        ("token", "", "token_is_hex"),
        ("token", "abc", "token_is_hex"),
        ("token", "<ab cd>", "token_is_hex"),
        ("token", "ab\n", "token_is_hex"),
        ("token", "ağ", "token_is_hex"),
        ("environment", "development", "environment_is_production_or_sandbox"),
        ("topic", "", "topic_is_a_bundle_id"),
        ("topic", "com.example/app", "topic_is_a_bundle_id"),
        ("topic", "com.example\n", "topic_is_a_bundle_id"),
        ("topic", "a" * 256, "topic_is_a_bundle_id"),
        ("registered_at", "infinity", "push_token_dates_are_finite"),
        ("invalidated_at", "-infinity", "push_token_dates_are_finite"),
    ],
)
def test_a_device_that_makes_no_sense_is_refused_by_a_name_that_says_why(
    column: str, value: object, constraint: str, db: psycopg.Connection
) -> None:
    register(db)
    wrong: dict[str, Any] = {column: value}
    with refused(db, constraint):
        register(db, **wrong)


def test_a_status_that_nobody_knows_is_refused(db: psycopg.Connection) -> None:
    with refused(db, "status_is_known"):
        enqueue(db, status="done", reason="Reason")


def test_what_apple_allows_is_taken(db: psycopg.Connection) -> None:
    for collapse_id in ("x", "x" * 64, " ~"):
        enqueue(db, collapse_id=collapse_id)
    for push_type in APPLES_PUSH_TYPES:
        enqueue(db, push_type=push_type)
    for priority in (10, 5, 1, None):
        enqueue(db, priority=priority)
    for length in (1, 32, 100, 1000):
        register(db, token="aF" * length)
    register(db, topic="com.example.App-2")
    enqueue(db, payload={}, last_error="ü" * LONGEST_ERROR, reason="r" * 100)


def test_a_delivery_without_user_or_payload_names_what_is_missing(db: psycopg.Connection) -> None:
    for column in ("user_id", "payload"):
        missing: dict[str, Any] = {column: None}
        with pytest.raises(errors.NotNullViolation) as refusal:
            enqueue(db, **missing)
        assert refusal.value.diag.column_name == column
    assert whole_rows(db) == {}


def test_quiet_hours_with_one_end_are_refused(db: psycopg.Connection) -> None:
    with refused(db, "quiet_hours_have_both_ends"):
        db.execute("INSERT INTO recipient (user_id, time_zone, quiet_from) VALUES ('u', 'Europe/Berlin', '22:00')")
    with refused(db, "recipient_user_id_is_not_empty"):
        db.execute("INSERT INTO recipient (user_id, time_zone) VALUES ('', 'Europe/Berlin')")
    db.execute("INSERT INTO recipient VALUES ('u', 'Europe/Berlin', '22:00', '07:00')")


def test_the_statuses_the_table_knows_are_those_the_code_writes(db: psycopg.Connection, database: Database) -> None:
    definition = one(db, "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'status_is_known'")
    written = set()
    with session(database) as drain:
        device = register(db)
        enqueue(db, rows=6)
        endings = (
            verdict.Sent(),
            verdict.Failed("timeout", "No answer."),
            verdict.InvalidToken("Unregistered", "Gone.", device, None, verdict.Failed("timeout", "No answer.")),
            verdict.Skipped(Skip.UNCONFIGURED),
            verdict.Retry("timeout", "No answer.", 60.0),
            verdict.Deferred(60.0),
        )
        written = {each.status for each in drain.settle(list(zip(drain.claim(), endings, strict=True)))}

    assert set(re.findall(r"'(\w+)'::text", definition)) == written
    # Every outcome there is was asked, or writes no status of its own.
    assert {type(each) for each in endings} | {verdict.Withheld, verdict.Released} == set(
        typing.get_args(verdict.Outcome.__value__)
    )


def test_the_environments_the_table_knows_are_those_the_code_knows(db: psycopg.Connection) -> None:
    definition = one(
        db,
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'environment_is_production_or_sandbox'",
    )

    assert set(re.findall(r"'(\w+)'::text", definition)) == set(Environment)


def test_one_token_is_live_once_for_an_environment_and_a_topic(db: psycopg.Connection) -> None:
    register(db, token="ab" * 32, invalidated_at="2020-01-01")
    register(db, token="ab" * 32, invalidated_at="2021-01-01")
    register(db, token="ab" * 32)
    register(db, token="ab" * 32, environment="sandbox")
    register(db, token="ab" * 32, topic="com.example.app")
    with refused(db, "push_token_live", errors.UniqueViolation):
        register(db, "somebody else", token="AB" * 32)
    with refused(db, "push_token_live", errors.UniqueViolation):
        register(db, token="AB" * 32, topic="com.example.app")


def test_a_dedupe_key_is_used_once(db: psycopg.Connection) -> None:
    enqueue(db, dedupe_key="order-7")
    enqueue(db)
    enqueue(db)
    with refused(db, "dedupe_key_is_used_once", errors.UniqueViolation):
        enqueue(db, "somebody else", dedupe_key="order-7")


# enqueue_notification


def test_enqueueing_with_the_two_required_arguments_is_the_minimal_insert(db: psycopg.Connection) -> None:
    id_ = one(db, """SELECT enqueue_notification('7', '{"aps": {}}')""")
    (same,) = enqueue(db, "7", payload={"aps": {}})

    assert one(db, ALIKE, id_) == one(db, ALIKE, same)


def test_everything_that_is_enqueued_by_name_reaches_the_row(db: psycopg.Connection) -> None:
    device = register(db, "7")
    id_ = one(
        db,
        """SELECT enqueue_notification('7', '{"aps": {}}', push_type => 'background', priority => 5,
             collapse_id => 'score', expires_at => '2031-01-01 00:00+00', send_at => '2030-06-01 00:00+00',
             dedupe_key => 'order-7', ignore_quiet_hours => true, push_token_id => %s)""",
        device.push_token_id,
    )

    assert columns(
        db, id_, "user_id", "payload", "push_type", "priority", "collapse_id", "expires_at", "next_attempt_at"
    ) == (
        "7",
        {"aps": {}},
        "background",
        5,
        "score",
        datetime(2031, 1, 1, tzinfo=UTC),
        datetime(2030, 6, 1, tzinfo=UTC),
    )
    assert columns(db, id_, "dedupe_key", "ignore_quiet_hours", "push_token_id", "status", "attempts") == (
        "order-7",
        True,
        device.push_token_id,
        "pending",
        0,
    )


def test_null_for_an_optional_argument_means_its_default(db: psycopg.Connection) -> None:
    plain = one(db, "SELECT enqueue_notification('7', '{}')")
    nulls = one(
        db,
        "SELECT enqueue_notification('7', '{}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
    )

    assert one(db, ALIKE, nulls) == one(db, ALIKE, plain)
    assert one(db, "SELECT next_attempt_at <= now() FROM notification_delivery WHERE id = %s", nulls)


def test_null_for_the_environment_of_a_registration_means_production(db: psycopg.Connection) -> None:
    id_ = one(db, "SELECT register_push_token('7', 'ab', NULL, NULL)")

    assert columns(db, id_, "environment", "topic", table="push_token") == ("production", None)


def test_the_same_dedupe_key_gives_the_row_there_is_and_queues_nothing(db: psycopg.Connection) -> None:
    first = one(db, "SELECT enqueue_notification('7', '{}', dedupe_key => 'order-7')")
    before = whole_rows(db)

    assert one(db, """SELECT enqueue_notification('8', '{"other": 1}', dedupe_key => 'order-7')""") == first
    assert whole_rows(db) == before


@pytest.mark.parametrize("commits", [True, False])
def test_two_sessions_with_one_dedupe_key_queue_one_delivery(
    commits: bool,  # noqa: FBT001  a parameter of the test
    db: psycopg.Connection,
    database: Database,
) -> None:
    enqueue_it = "SELECT enqueue_notification('7', '{}', dedupe_key => 'order-7')"
    with (
        psycopg.connect(database.dsn) as first,
        psycopg.connect(database.dsn, autocommit=True) as second,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        id_ = one(first, enqueue_it)
        waiting = elsewhere.submit(one, second, enqueue_it)
        wait_until_it_is_blocked(db, second)
        if commits:
            first.commit()
        else:
            first.rollback()
        other = waiting.result(WAIT_SECONDS)

    assert (other == id_) is commits
    assert set(whole_rows(db)) == {other}


def wait_until_it_is_blocked(db: psycopg.Connection, session: psycopg.Connection) -> None:
    for _ in range(WAIT_SECONDS * 100):
        if one(db, "SELECT cardinality(pg_blocking_pids(%s)) > 0 FROM pg_sleep(0.01)", session.info.backend_pid):
            return
    raise AssertionError("it did not have to wait")


@pytest.mark.parametrize(
    ("call", "constraint"),
    [
        ("enqueue_notification('7', '[]')", "payload_is_a_json_object"),
        ("enqueue_notification('', '{}')", "user_id_is_not_empty"),
        ("enqueue_notification('7', '{}', push_type => 'unknown')", "push_type_is_one_of_apples"),
        ("enqueue_notification('7', '{}', priority => 7)", "priority_is_10_5_or_1"),
        ("enqueue_notification('7', '{}', collapse_id => repeat('x', 65))", "collapse_id_is_1_to_64_printable_ascii"),
        ("enqueue_notification('7', '{}', collapse_id => 'ü')", "collapse_id_is_1_to_64_printable_ascii"),
        ("enqueue_notification('7', '{}', expires_at => 'infinity')", "dates_are_finite"),
        ("enqueue_notification('7', '{}', send_at => '-infinity')", "dates_are_finite"),
        ("register_push_token('7', 'not hex')", "token_is_hex"),
        ("register_push_token('', 'ab')", "push_token_user_id_is_not_empty"),
        ("register_push_token('7', 'ab', 'development')", "environment_is_production_or_sandbox"),
        ("register_push_token('7', 'ab', topic => 'com/example')", "topic_is_a_bundle_id"),
    ],
)
def test_a_function_refuses_what_the_table_refuses_under_the_same_name(
    call: str, constraint: str, db: psycopg.Connection
) -> None:
    with refused(db, constraint):
        db.execute(f"SELECT {call}".encode())


# register_push_token


def test_a_registration_with_the_two_required_arguments_is_for_production(db: psycopg.Connection) -> None:
    install_clock(db, at=START)
    id_ = one(db, "SELECT register_push_token('7', 'AB')")

    assert columns(db, id_, "user_id", "token", "environment", "topic", table="push_token") == (
        "7",
        "ab",
        "production",
        None,
    )
    assert columns(db, id_, "registered_at", "invalidated_at", table="push_token") == (START, None)


def test_the_same_token_in_either_case_is_the_same_device(db: psycopg.Connection) -> None:
    id_ = one(db, "SELECT register_push_token('7', %s)", "ab" * 32)

    assert one(db, "SELECT register_push_token('7', %s)", "AB" * 32) == id_
    assert len(whole_rows(db, "push_token")) == 1


def test_a_device_that_registers_again_moves_to_its_user_and_is_registered_now(db: psycopg.Connection) -> None:
    install_clock(db, at=START)
    id_ = one(db, "SELECT register_push_token('7', 'ab', 'sandbox', 'com.example.app')")
    tick(db, 60)

    assert one(db, "SELECT register_push_token('8', 'ab', 'sandbox', 'com.example.app')") == id_
    assert columns(db, id_, "user_id", "registered_at", table="push_token") == ("8", START + timedelta(seconds=60))
    others = {
        one(db, "SELECT register_push_token('8', 'ab', 'production', 'com.example.app')"),
        one(db, "SELECT register_push_token('8', 'ab', 'sandbox', 'com.example.other')"),
        one(db, "SELECT register_push_token('8', 'ab', 'sandbox')"),
    }
    assert len(others | {id_}) == 4


def test_a_registration_never_moves_the_date_back(db: psycopg.Connection, database: Database) -> None:
    """The session that waited for the other began before it, and has the older now()."""
    id_ = one(db, "SELECT register_push_token('7', 'ab')")
    with (
        psycopg.connect(database.dsn) as older,
        psycopg.connect(database.dsn) as younger,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        older_now = one(older, "SELECT now()")
        younger_now = one(younger, "SELECT now()")
        assert older_now < younger_now
        assert one(younger, "SELECT register_push_token('8', 'ab')") == id_
        waiting = elsewhere.submit(one, older, "SELECT register_push_token('9', 'ab')")
        wait_until_it_is_blocked(db, older)
        younger.commit()
        assert waiting.result(WAIT_SECONDS) == id_
        older.commit()

    assert columns(db, id_, "registered_at", table="push_token") == younger_now


def test_two_sessions_that_register_one_device_at_once_make_one_row(db: psycopg.Connection, database: Database) -> None:
    with (
        psycopg.connect(database.dsn) as first,
        psycopg.connect(database.dsn, autocommit=True) as second,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        id_ = one(first, "SELECT register_push_token('7', 'ab')")
        waiting = elsewhere.submit(one, second, "SELECT register_push_token('8', 'AB')")
        wait_until_it_is_blocked(db, second)
        first.commit()
        assert waiting.result(WAIT_SECONDS) == id_

    assert len(whole_rows(db, "push_token")) == 1
    assert columns(db, id_, "user_id", table="push_token") == "8"
