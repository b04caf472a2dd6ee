"""The SQL functions that other services call, and the view that tells them what became of it."""

import json
import zoneinfo
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import IsolationLevel, errors
from psycopg.types.json import Jsonb

from core.request import LARGEST_PAYLOAD, LARGEST_VOIP_PAYLOAD, compact
from core.verdict import Failed, Sent
from tests.support.database import Database
from tests.support.outbox import columns, enqueue, gone, register, session, whole_rows
from tests.support.time_travel import install_clock, tick

START = datetime(2030, 1, 1, tzinfo=UTC)
WAIT_SECONDS = 20
TOKEN = "ab" * 32


def one(db: psycopg.Connection[Any], query: str, *params: object) -> Any:  # noqa: ANN401  whatever it selects
    row = db.execute(query.encode(), params).fetchone()
    assert row is not None
    return row[0]


def payload_of(db: psycopg.Connection[Any], id_: int) -> Any:  # noqa: ANN401  JSON
    return columns(db, id_, "payload")


def everything(db: psycopg.Connection[Any]) -> list[Any]:
    return [
        *(whole_rows(db, table) for table in ("notification_delivery", "push_token")),
        db.execute("SELECT * FROM recipient ORDER BY user_id").fetchall(),
    ]


@contextmanager
def while_it_waits(
    db: psycopg.Connection[Any],
    other: psycopg.Connection[Any],
    call: Callable[[], Any],
) -> Iterator[list[Any]]:
    """Start the call, which is `other`'s, and go on when it waits for a lock. After the block its result is in."""
    result: list[Any] = []
    with ThreadPoolExecutor(1) as elsewhere:
        running = elsewhere.submit(call)
        for _ in range(WAIT_SECONDS * 100):
            if one(db, "SELECT cardinality(pg_blocking_pids(%s)) > 0 FROM pg_sleep(0.01)", other.info.backend_pid):
                break
        else:
            raise AssertionError("it did not have to wait")
        yield result
        result.append(running.result(WAIT_SECONDS))


# What is refused.


@pytest.mark.parametrize(
    ("call", "constraint", "message", "hint"),
    [
        ("enqueue_notification(NULL, '{}')", "user_id_is_not_empty", "user_id is missing", "registered under"),
        ("enqueue_notification('', '{}')", "user_id_is_not_empty", "user_id is missing", "registered under"),
        ("enqueue_notification('7', '[]')", "payload_is_a_json_object", "payload is no", "encode it twice"),
        ("enqueue_notification('7', 'null')", "payload_is_a_json_object", "payload is no", "Give an object"),
        ("enqueue_notification('7')", None, "nothing to say", "Give title or body"),
        ("enqueue_notification('7', data => '{\"a\": 1}')", None, "nothing to say", "background"),
        ("enqueue_notification('7', '{}', title => 'x')", None, "payload excludes title", "leave the payload out"),
        ("enqueue_notification('7', '{}', badge => 0)", None, "payload excludes", "leave the payload out"),
        ("enqueue_notification('7', '{}', data => '{}')", None, "payload excludes", "leave the payload out"),
        ("enqueue_notification('7', title => 'x', data => '{\"aps\": 1}')", None, 'data has a key "aps"', "payload"),
        ("enqueue_notification('7', title => 'x', data => '[\"aps\"]')", None, "data is no JSON object", "beside"),
        ("enqueue_notification('7', badge => -1)", None, "badge is negative", "0 to take"),
        ("enqueue_notification('7', push_type => 'background', title => 'x')", None, "for an alert", "give data"),
        ("enqueue_notification('7', push_type => 'voip', badge => 1)", None, "for an alert", "give data"),
        ("enqueue_notification('7', push_type => 'voip')", None, "payload and data are both", "the call"),
        ("enqueue_notification('7', push_type => 'widgets', title => 'x')", None, "payload is missing", "yourself"),
        (
            "enqueue_notification('7', '{}', 'Alert')",
            "push_type_is_one_of_apples",
            "push_type is none",
            "voip, widgets",
        ),
        ("enqueue_notification('7', '{}', '')", "push_type_is_one_of_apples", "push_type is none", "alert, background"),
        ("enqueue_notification('7', '{}', priority => 0)", "priority_is_10_5_or_1", "priority is 0", "battery"),
        ("enqueue_notification('7', '{}', priority => 70000)", "priority_is_10_5_or_1", "priority is 70000", "10"),
        (
            "enqueue_notification('7', '{}', collapse_id => repeat('x', 65))",
            "collapse_id_is_1_to_64_printable_ascii",
            "collapse_id has 65 bytes",
            "MD5",
        ),
        (
            "enqueue_notification('7', '{}', collapse_id => repeat('ü', 33))",
            "collapse_id_is_1_to_64_printable_ascii",
            "collapse_id has 66 bytes",
            "64",
        ),
        (
            "enqueue_notification('7', '{}', collapse_id => 'ü')",
            "collapse_id_is_1_to_64_printable_ascii",
            "other characters",
            "ASCII",
        ),
        (
            "enqueue_notification('7', '{}', collapse_id => E'a\\n')",
            "collapse_id_is_1_to_64_printable_ascii",
            "other characters",
            "ASCII",
        ),
        (
            "enqueue_notification('7', '{}', collapse_id => '')",
            "collapse_id_is_1_to_64_printable_ascii",
            "collapse_id is empty",
            "leave it out",
        ),
        ("enqueue_notification('7', '{}', dedupe_key => '')", None, "dedupe_key is empty", "the same key"),
        ("enqueue_notification('7', '{}', expires_at => 'infinity')", "dates_are_finite", "expires_at", "an instant"),
        ("enqueue_notification('7', '{}', expires_at => '-infinity')", "dates_are_finite", "expires_at", "an instant"),
        ("enqueue_notification('7', '{}', send_at => 'infinity')", "dates_are_finite", "send_at", "an instant"),
        ("enqueue_notification('7', '{}', expires_at => now())", None, "expires_at has passed", "time zone"),
        (
            "enqueue_notification('7', '{}', send_at => now() + '1 hour', expires_at => now() + '1 hour')",
            None,
            "expires_at is not after send_at",
            "later",
        ),
        ("enqueue_notification('7', '{}', push_token_id => 42)", None, "push_token_id 42", "register_push_token"),
        ("register_push_token('', 'ab')", "push_token_user_id_is_not_empty", "user_id is missing", "unregister"),
        ("register_push_token(NULL, 'ab')", "push_token_user_id_is_not_empty", "user_id is missing", "signed in"),
        ("register_push_token('7', NULL)", "token_is_hex", "token is not in hex", "two hex digits"),
        ("register_push_token('7', '')", "token_is_hex", "token is not in hex", "two hex digits"),
        ("register_push_token('7', '<ab cd>')", "token_is_hex", "token is not in hex", "nothing before"),
        ("register_push_token('7', 'abc')", "token_is_hex", "odd number of hex digits", "two hex digits"),
        ("register_push_token('7', E'ab\\n')", "token_is_hex", "token is not in hex", "nothing before"),
        (
            "register_push_token('7', 'ab', 'development')",
            "environment_is_production_or_sandbox",
            "environment is neither",
            "Xcode",
        ),
        ("register_push_token('7', 'ab', topic => 'a/b')", "topic_is_a_bundle_id", "topic is no bundle id", "com."),
        (
            "unregister_push_token('7', 'ab', 'development')",
            "environment_is_production_or_sandbox",
            "environment is neither",
            "registered with",
        ),
        (
            "set_quiet_hours('', '22:00', '07:00', 'Europe/Berlin')",
            "recipient_user_id_is_not_empty",
            "user_id is missing",
            "queued for",
        ),
        (
            "set_quiet_hours('7', '22:00', NULL, 'Europe/Berlin')",
            "quiet_hours_have_both_ends",
            "quiet_until is missing",
            "NULL for both",
        ),
        (
            "set_quiet_hours('7', NULL, '07:00', 'Europe/Berlin')",
            "quiet_hours_have_both_ends",
            "quiet_from is missing",
            "NULL for both",
        ),
        (
            "set_quiet_hours('7', '22:00', '22:00', 'Europe/Berlin')",
            None,
            "the same time",
            "set_push_enabled(user_id, false)",
        ),
        ("set_quiet_hours('7', '00:00', '24:00', 'Europe/Berlin')", None, "the same time", "set_push_enabled"),
        ("set_quiet_hours('7', '22:00', '07:00')", None, "time_zone is missing", "IANA"),
        ("set_quiet_hours('7', '22:00', '07:00', 'Europe/Atlantis')", None, "time_zone is not", "pg_timezone_names"),
        (
            "set_quiet_hours('7', '22:00', '07:00', 'europe/berlin')",
            None,
            "time_zone is not",
            "Write it Europe/Berlin.",
        ),
        ("set_quiet_hours('7', NULL, NULL, 'Europe/Atlantis')", None, "time_zone is not", "Europe/Berlin"),
        ("set_quiet_hours('7', '22:00', '07:00', '<+03>-3')", None, "time_zone is not", "Europe/Berlin"),
        ("set_quiet_hours('7', '22:00', '07:00', 'posix/Europe/Berlin')", None, "time_zone is not", "Europe/Berlin"),
        ("set_quiet_hours('7', '22:00', '07:00', '')", None, "time_zone is not", "Europe/Berlin"),
        ("set_push_enabled('', true)", "recipient_user_id_is_not_empty", "user_id is missing", "queued for"),
        ("set_push_enabled('7', NULL)", None, "enabled is missing", "true or false"),
    ],
)
def test_a_refusal_names_the_argument_and_the_mend_and_leaves_nothing(
    call: str, constraint: str | None, message: str, hint: str, db: psycopg.Connection
) -> None:
    enqueue(db)
    register(db)
    db.execute("INSERT INTO recipient VALUES ('somebody', 'Asia/Tokyo')")
    before = everything(db)

    with pytest.raises((errors.CheckViolation, errors.InvalidParameterValue)) as refusal:
        one(db, f"SELECT {call}")

    said = refusal.value.diag
    assert message in (said.message_primary or "")
    assert hint in (said.message_hint or "")
    assert said.constraint_name == constraint
    assert refusal.value.sqlstate == ("23514" if constraint else "22023")
    assert said.message_detail is None
    assert everything(db) == before


def test_a_refusal_under_a_constraints_name_is_what_that_constraint_refuses(db: psycopg.Connection) -> None:
    named = one(
        db,
        "SELECT array_agg(DISTINCT found[1]) FROM pg_proc,"
        " regexp_matches(prosrc, 'CONSTRAINT = ''(\\w+)''', 'g') AS found WHERE pronamespace = 'public'::regnamespace",
    )
    known = one(db, "SELECT array_agg(conname::text) FROM pg_constraint WHERE contype = 'c'")

    assert len(named) == 12
    assert set(named) <= set(known)


def test_the_push_types_that_a_refusal_lists_are_those_that_the_table_takes(db: psycopg.Connection) -> None:
    with pytest.raises(errors.CheckViolation) as refusal:
        one(db, "SELECT enqueue_notification('7', '{}', 'nonsense')")
    listed = (refusal.value.diag.message_hint or "").removeprefix("Give one of ").partition(", in lower")[0].split(", ")

    taken = one(db, "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'push_type_is_one_of_apples'")
    assert len(listed) == 11
    assert [push_type for push_type in listed if f"'{push_type}'" not in taken] == []
    for push_type in listed:
        one(db, "SELECT enqueue_notification('7', '{}', %s)", push_type)


def test_a_token_is_in_no_refusal(db: psycopg.Connection) -> None:
    """Errors end in logs, the server's own among them."""
    for secret in ("ab" * 32 + "c", "not hex " + "ab" * 32):
        with pytest.raises(errors.CheckViolation) as refusal:
            one(db, "SELECT register_push_token('7', %s)", secret)
        assert "abab" not in str(refusal.value)


# What is queued.


@pytest.mark.parametrize(
    ("arguments", "payload"),
    [
        ("title => 'T', body => 'B'", {"aps": {"alert": {"title": "T", "body": "B"}}}),
        ("body => 'B'", {"aps": {"alert": {"body": "B"}}}),
        ("title => ''", {"aps": {"alert": {"title": ""}}}),
        ("badge => 0", {"aps": {"badge": 0}}),
        ("sound => 'default'", {"aps": {"sound": "default"}}),
        ("badge => 3, sound => 's', title => 'T'", {"aps": {"alert": {"title": "T"}, "badge": 3, "sound": "s"}}),
        (
            """title => 'T', data => '{"a": null, "b": {"aps": 1, "c": null}, "alert": [null]}'""",
            {"aps": {"alert": {"title": "T"}}, "a": None, "b": {"aps": 1, "c": None}, "alert": [None]},
        ),
        ("push_type => 'background'", {"aps": {"content-available": 1}}),
        ("push_type => 'background', data => '{\"a\": 1}'", {"aps": {"content-available": 1}, "a": 1}),
        ("push_type => 'voip', data => '{\"a\": 1}'", {"aps": {}, "a": 1}),
        ("payload => '{}'", {}),
        ("payload => '{\"a\": null}'", {"a": None}),
        ("payload => '{\"aps\": {}}', push_type => 'widgets'", {"aps": {}}),
    ],
)
def test_words_and_data_become_the_payload_that_apns_wants(
    arguments: str, payload: dict[str, Any], db: psycopg.Connection
) -> None:
    assert payload_of(db, one(db, f"SELECT enqueue_notification('7', {arguments})")) == payload


def test_the_arguments_keep_the_place_they_had_in_the_first_release(db: psycopg.Connection) -> None:
    device = register(db, "7")
    install_clock(db, at=START)
    id_ = one(
        db,
        "SELECT enqueue_notification('7', '{}', 'voip', 5, 'c', now() + interval '2 hours', now() + interval '1 hour',"
        " 'k', true, %s)",
        device.push_token_id,
    )

    assert columns(db, id_, "push_type", "priority", "collapse_id", "dedupe_key") == ("voip", 5, "c", "k")
    assert columns(db, id_, "next_attempt_at", "expires_at", "ignore_quiet_hours", "push_token_id") == (
        START + timedelta(hours=1),
        START + timedelta(hours=2),
        True,
        device.push_token_id,
    )


def test_a_device_that_was_invalidated_may_be_named_since_it_may_live_again(db: psycopg.Connection) -> None:
    device = register(db, "7", invalidated_at="2020-01-01")

    one(db, "SELECT enqueue_notification('7', '{}', push_token_id => %s)", device.push_token_id)


def test_somebody_elses_device_is_refused_in_the_words_for_one_that_is_not_there(db: psycopg.Connection) -> None:
    device = register(db, "8")
    with pytest.raises(errors.InvalidParameterValue) as theirs:
        one(db, "SELECT enqueue_notification('7', '{}', push_token_id => %s)", device.push_token_id)
    db.execute("DELETE FROM push_token")
    with pytest.raises(errors.InvalidParameterValue) as nobodys:
        one(db, "SELECT enqueue_notification('7', '{}', push_token_id => %s)", device.push_token_id)

    assert str(theirs.value) == str(nobodys.value)


def padded(filling: Any, size: int) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Make a payload of that many bytes, compact."""
    payload = {"aps": {}, "filling": filling, "rest": ""}
    bare = len(json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode())
    payload["rest"] = "x" * (size - bare)
    return payload


@pytest.mark.parametrize(("push_type", "largest"), [("alert", LARGEST_PAYLOAD), ("voip", LARGEST_VOIP_PAYLOAD)])
@pytest.mark.parametrize(
    "filling",
    [
        "",
        [1] * 1900,  # nearly half as many spaces as bytes: as many as there can be
        {f"k{n}": n for n in range(300)},
        ["a, b: c", 'q"uo, te: ', "back\\", '\\"', "\\\\", "\t, \n: ", " , : "] * 20,
        ["ü, 😀: "] * 100,
        [],
    ],
    ids=["short", "numbers", "keys", "traps", "unicode", "empty"],
)
def test_what_fits_is_taken_to_the_last_byte_and_what_does_not_is_refused_as_the_drain_would(
    filling: object, push_type: str, largest: int, db: psycopg.Connection
) -> None:
    id_ = one(db, "SELECT enqueue_notification('7', %s, %s)", Jsonb(padded(filling, largest)), push_type)
    written = one(db, "SELECT payload::text FROM notification_delivery WHERE id = %s", id_)
    assert len(compact(written.encode())) == largest

    with pytest.raises(errors.InvalidParameterValue) as refusal:
        one(db, "SELECT enqueue_notification('7', %s, %s)", Jsonb(padded(filling, largest + 1)), push_type)
    assert refusal.value.diag.message_primary == (
        f"payload has {largest + 1} bytes, and APNs takes at most {largest} of {push_type}"
    )


def test_a_payload_of_a_megabyte_is_refused_as_well(db: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"payload has [0-9]{7} bytes"):
        one(db, "SELECT enqueue_notification('7', %s)", Jsonb({"x": ["a, b: c"] * 100_000}))


def test_words_that_make_too_large_a_payload_are_refused_too(db: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"payload has 4[0-9]+ bytes"):
        one(db, "SELECT enqueue_notification('7', body => repeat('x', 4096))")


# Once for all.


def test_asking_again_gives_the_same_id_also_when_it_could_no_longer_be_queued(db: psycopg.Connection) -> None:
    device = register(db, "7")
    install_clock(db, at=START)
    ask = "SELECT enqueue_notification('7', '{}', dedupe_key => 'k', expires_at => '2030-01-01 01:00+00'"
    ask += f", push_token_id => {device.push_token_id})"
    id_ = one(db, ask)
    before = whole_rows(db)
    tick(db, 7200)
    db.execute("DELETE FROM push_token")

    assert one(db, ask) == id_
    assert whole_rows(db) == before
    with pytest.raises(errors.CheckViolation):  # what was never right is told all the same
        one(db, "SELECT enqueue_notification('7', '[]', dedupe_key => 'k')")


def test_asking_again_uses_up_no_id(db: psycopg.Connection) -> None:
    id_ = one(db, "SELECT enqueue_notification('7', '{}', dedupe_key => 'k')")
    for _ in range(3):
        one(db, "SELECT enqueue_notification('7', '{}', dedupe_key => 'k')")

    assert one(db, "SELECT enqueue_notification('7', '{}')") == id_ + 1


@pytest.mark.parametrize("commits", [True, False])
def test_a_key_in_use_by_another_transaction_is_waited_for(
    commits: bool,  # noqa: FBT001  a parameter of the test
    db: psycopg.Connection,
    database: Database,
) -> None:
    ask = "SELECT enqueue_notification(%s, '{}', dedupe_key => 'k')"
    with psycopg.connect(database.dsn) as first, psycopg.connect(database.dsn) as second:
        id_ = one(first, ask, "7")
        with while_it_waits(db, second, lambda: one(second, ask, "8")) as waited:
            first.commit() if commits else first.rollback()
        second.commit()

    assert (waited == [id_]) is commits
    assert one(db, "SELECT array_agg(user_id) FROM notification_delivery") == (["7"] if commits else ["8"])


def test_a_row_that_is_deleted_while_its_key_is_asked_for_leaves_the_key_free(db: psycopg.Connection) -> None:
    """A rival's row is there when ours is to be inserted, and gone when its id is looked up."""
    db.execute("""
        CREATE FUNCTION rival() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_WHEN = 'BEFORE' AND pg_trigger_depth() = 1 AND NOT EXISTS (SELECT FROM recipient) THEN
                INSERT INTO recipient VALUES ('the rival came once', 'UTC');
                INSERT INTO notification_delivery (user_id, payload, dedupe_key) VALUES ('rival', '{}', 'k');
            ELSIF TG_WHEN = 'AFTER' AND pg_trigger_depth() = 1 THEN
                DELETE FROM notification_delivery WHERE user_id = 'rival';
            END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER rival_before BEFORE INSERT ON notification_delivery EXECUTE FUNCTION rival();
        CREATE TRIGGER rival_after AFTER INSERT ON notification_delivery EXECUTE FUNCTION rival();
    """)
    id_ = one(db, "SELECT enqueue_notification('7', '{}', dedupe_key => 'k')")

    assert one(db, "SELECT count(*) FROM recipient") == 1
    assert db.execute("SELECT id, user_id, dedupe_key FROM notification_delivery").fetchall() == [(id_, "7", "k")]


def test_under_repeatable_read_a_key_that_cannot_be_seen_yet_is_a_serialization_failure(
    db: psycopg.Connection, database: Database
) -> None:
    with psycopg.connect(database.dsn) as other:
        other.isolation_level = IsolationLevel.REPEATABLE_READ
        one(other, "SELECT 1 FROM recipient RIGHT JOIN (VALUES (1)) v ON true")
        one(db, "SELECT enqueue_notification('7', '{}', dedupe_key => 'k')")
        with pytest.raises(errors.SerializationFailure):
            one(other, "SELECT enqueue_notification('7', '{}', dedupe_key => 'k')")


def test_what_is_rolled_back_was_never_queued(db: psycopg.Connection, database: Database) -> None:
    with psycopg.connect(database.dsn) as producer:
        one(producer, "SELECT enqueue_notification('7', title => 'T', dedupe_key => 'k')")
        producer.rollback()

    assert whole_rows(db) == {}
    with session(database) as drain:
        assert drain.claim() == []


# Devices.


def device_row(db: psycopg.Connection[Any], id_: int) -> Any:  # noqa: ANN401  a row
    return columns(db, id_, "user_id", "registered_at", "invalidated_at", "invalid_reason", table="push_token")


@pytest.mark.parametrize("user", ["7", "8"])
def test_a_dead_device_that_registers_again_lives_under_its_old_id(user: str, db: psycopg.Connection) -> None:
    install_clock(db, at=START)
    id_ = one(db, "SELECT register_push_token('7', %s)", TOKEN)
    db.execute("UPDATE push_token SET invalidated_at = now(), invalid_reason = 'Unregistered'")
    tick(db, 60)

    assert one(db, "SELECT register_push_token(%s, %s)", user, TOKEN.upper()) == id_
    assert device_row(db, id_) == (user, START + timedelta(seconds=60), None, None)
    assert len(whole_rows(db, "push_token")) == 1


def test_of_several_rows_of_one_token_the_live_one_is_confirmed_else_the_last_one_lives(db: psycopg.Connection) -> None:
    dead = {"token": TOKEN, "invalidated_at": "2024-01-01", "invalid_reason": "x"}
    older = register(db, "7", registered_at="2021-01-01 00:00:00+00", **dead)
    newer = register(db, "8", registered_at="2023-01-01 00:00:00+00", **dead)
    oldest = register(db, "9", registered_at="2020-01-01 00:00:00+00", **dead)
    untouched = {each.push_token_id for each in (older, oldest)}
    before = whole_rows(db, "push_token")

    assert one(db, "SELECT register_push_token('7', %s)", TOKEN) == newer.push_token_id
    assert one(db, "SELECT register_push_token('8', %s)", TOKEN) == newer.push_token_id

    after = whole_rows(db, "push_token")
    assert {id_: after[id_] for id_ in untouched} == {id_: before[id_] for id_ in untouched}
    assert len(after) == 3


def test_a_token_of_another_environment_or_topic_is_another_device(db: psycopg.Connection) -> None:
    place = ("production", None), ("sandbox", None), ("production", "com.example.a"), ("production", "com.example.b")
    call = "SELECT register_push_token('7', %s, %s, %s)"
    ids = [one(db, call, TOKEN, *each) for each in place]
    db.execute("UPDATE push_token SET invalidated_at = now()")

    assert len(set(ids)) == 4
    assert [one(db, call, TOKEN, *each) for each in place] == ids
    assert one(db, "SELECT count(*) FROM push_token WHERE invalidated_at IS NULL") == 4


@pytest.mark.parametrize("commits", [True, False])
def test_a_device_that_registers_while_a_drain_invalidates_it_lives_under_its_old_id(
    commits: bool,  # noqa: FBT001  a parameter of the test
    db: psycopg.Connection,
    database: Database,
) -> None:
    device = register(db, "7", token=TOKEN)
    with psycopg.connect(database.dsn) as drain, psycopg.connect(database.dsn, autocommit=True) as app:
        drain.execute("UPDATE push_token SET invalidated_at = now(), invalid_reason = 'BadDeviceToken'")
        with while_it_waits(db, app, lambda: one(app, "SELECT register_push_token('7', %s)", TOKEN)) as registered:
            drain.commit() if commits else drain.rollback()

    assert registered == [device.push_token_id]
    assert len(whole_rows(db, "push_token")) == 1
    assert device_row(db, device.push_token_id)[2:] == (None, None)


@pytest.mark.parametrize("dead_since", [START, None])
def test_a_drain_that_says_again_that_a_device_is_dead_neither_kills_it_anew_nor_takes_back_the_end(
    dead_since: datetime | None, db: psycopg.Connection, database: Database
) -> None:
    """The answer to its first word was lost, and the device has come back in between, under its old id."""
    install_clock(db, at=START)
    device = register(db, "7", token=TOKEN)
    (id_,) = enqueue(db, "7")
    with session(database) as drain:
        (push,) = drain.bind(drain.claim())
        verdict = [(push.delivery, gone(push.device, dead_since=dead_since))]
        drain.settle(verdict)
        tick(db, 1)
        assert one(db, "SELECT register_push_token('7', %s)", TOKEN) == device.push_token_id
        before = whole_rows(db)
        (settled,) = drain.settle(verdict)

    assert settled.status == "invalid_token"
    assert whole_rows(db) == before
    assert columns(db, id_, "status") == "invalid_token"
    assert device_row(db, device.push_token_id)[2:] == (None, None)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("dead", [True, False])
def test_two_registrations_of_one_device_at_once_are_one_row(
    commits: bool,  # noqa: FBT001  a parameter of the test
    dead: bool,  # noqa: FBT001
    db: psycopg.Connection,
    database: Database,
) -> None:
    call = "SELECT register_push_token(%s, %s)"
    if dead:
        register(db, "7", token=TOKEN, invalidated_at="2020-01-01")
    with psycopg.connect(database.dsn) as first, psycopg.connect(database.dsn, autocommit=True) as second:
        id_ = one(first, call, "7", TOKEN)
        with while_it_waits(db, second, lambda: one(second, call, "8", TOKEN)) as registered:
            first.commit() if commits else first.rollback()

    assert (registered == [id_]) is (commits or dead)
    assert list(whole_rows(db, "push_token")) == registered
    assert device_row(db, registered[0])[0] == "8"


@pytest.mark.parametrize("commits", [True, False])
def test_a_plain_insert_that_comes_before_a_revival_is_the_device(
    commits: bool,  # noqa: FBT001  a parameter of the test
    db: psycopg.Connection,
    database: Database,
) -> None:
    dead = register(db, "7", token=TOKEN, invalidated_at="2020-01-01")
    with psycopg.connect(database.dsn) as app, psycopg.connect(database.dsn, autocommit=True) as other:
        inserted = register(app, "7", token=TOKEN)
        with while_it_waits(db, other, lambda: one(other, "SELECT register_push_token('8', %s)", TOKEN)) as registered:
            app.commit() if commits else app.rollback()

    assert registered == [inserted.push_token_id if commits else dead.push_token_id]
    assert device_row(db, registered[0])[0] == "8"
    assert one(db, "SELECT count(*) FROM push_token WHERE invalidated_at IS NULL") == 1


def test_under_repeatable_read_a_device_that_cannot_be_seen_yet_is_a_serialization_failure(
    db: psycopg.Connection, database: Database
) -> None:
    register(db, "7", token=TOKEN, invalidated_at="2020-01-01")
    with psycopg.connect(database.dsn) as other:
        other.isolation_level = IsolationLevel.REPEATABLE_READ
        one(other, "SELECT count(*) FROM recipient")
        register(db, "8", token=TOKEN)
        with pytest.raises(errors.SerializationFailure):
            one(other, "SELECT register_push_token('9', %s)", TOKEN)


def test_no_function_reads_through_a_table(db: psycopg.Connection, database: Database) -> None:
    db.execute(
        "INSERT INTO push_token (user_id, token, environment, invalidated_at)"
        " SELECT 'u' || n, md5(n::text), 'production', CASE WHEN n % 2 = 0 THEN now() END"
        " FROM generate_series(1, 20000) n"
    )
    db.execute(
        "INSERT INTO notification_delivery (user_id, payload, dedupe_key)"
        " SELECT 'u', '{}', 'k' || n FROM generate_series(1, 20000) n"
    )
    db.execute("INSERT INTO recipient SELECT 'u' || n, 'UTC' FROM generate_series(1, 20000) n")
    db.execute("ANALYZE")
    calls = (
        "register_push_token('u', md5('7'))",
        "register_push_token('u', md5('8'))",
        "register_push_token('u', md5('new'))",
        "unregister_push_token('u', md5('7'))",
        "enqueue_notification('u', '{}', dedupe_key => 'k7')",
        "enqueue_notification('u', '{}', dedupe_key => 'new', push_token_id => register_push_token('u', 'a1'))",
        "set_quiet_hours('u7', NULL, NULL)",
        "set_quiet_hours('u7', '22:00', '07:00', 'UTC')",
        "set_push_enabled('u7', false)",
    )
    with psycopg.connect(database.dsn) as caller:
        for call in calls:
            one(caller, f"SELECT {call}")
        read: dict[str, tuple[str, str]] = dict(
            caller.execute("SELECT relname::text, (seq_scan, idx_scan) FROM pg_stat_xact_user_tables").fetchall()
        )

    assert {table: scans for table, scans in read.items() if scans[0] != "0"} == {}
    assert {table for table, scans in read.items() if scans[1] != "0"} == {
        "notification_delivery",
        "push_token",
        "recipient",
    }


def test_signing_out_silences_this_users_device_until_it_registers_again(db: psycopg.Connection) -> None:
    install_clock(db, at=START)
    id_ = one(db, "SELECT register_push_token('7', %s)", TOKEN)
    other = one(db, "SELECT register_push_token('7', %s, 'sandbox')", TOKEN)

    assert one(db, "SELECT unregister_push_token('7', %s)", TOKEN.upper()) is True
    assert device_row(db, id_)[2:] == (START, "signed_out")
    assert device_row(db, other)[2:] == (None, None)
    assert one(db, "SELECT unregister_push_token('7', %s)", TOKEN) is False
    assert one(db, "SELECT unregister_push_token('7', %s, 'sandbox', 'com.example')", TOKEN) is False
    assert one(db, "SELECT unregister_push_token('7', %s, environment => 'sandbox')", TOKEN) is True
    assert one(db, "SELECT register_push_token('7', %s)", TOKEN) == id_


def test_a_late_sign_out_does_not_silence_who_signed_in_since(db: psycopg.Connection) -> None:
    id_ = one(db, "SELECT register_push_token('7', %s)", TOKEN)
    one(db, "SELECT register_push_token('8', %s)", TOKEN)

    assert one(db, "SELECT unregister_push_token('7', %s)", TOKEN) is False
    assert device_row(db, id_)[2] is None


@pytest.mark.parametrize("arguments", ["NULL, 'ab'", "'7', NULL", "'', ''", "'7', 'not hex'"])
def test_signing_out_what_was_never_registered_changes_nothing(arguments: str, db: psycopg.Connection) -> None:
    register(db, "7")

    assert one(db, f"SELECT unregister_push_token({arguments})") is False
    assert one(db, "SELECT count(*) FROM push_token WHERE invalidated_at IS NULL") == 1


# People.


def recipients(db: psycopg.Connection[Any]) -> list[Any]:
    return db.execute("SELECT * FROM recipient ORDER BY user_id").fetchall()


def test_quiet_hours_are_set_changed_and_taken_away(db: psycopg.Connection) -> None:
    night = (time_of_day(22), time_of_day(7, 30))
    one(db, "SELECT set_quiet_hours('7', NULL, NULL)")
    assert recipients(db) == []

    one(db, "SELECT set_quiet_hours('7', '22:00', '07:30', 'Europe/Berlin')")
    one(db, "SELECT set_quiet_hours('8', '22:00', '07:30', 'Europe/Berlin')")
    assert recipients(db) == [("7", "Europe/Berlin", *night, True), ("8", "Europe/Berlin", *night, True)]

    one(db, "SELECT set_quiet_hours('7', '13:00', '24:00', 'America/New_York')")
    assert recipients(db)[0] == ("7", "America/New_York", time_of_day(13), time_of_day(0), True)
    one(db, "SELECT set_quiet_hours('7', '24:00', '05:00', 'America/New_York')")
    assert recipients(db)[0] == ("7", "America/New_York", time_of_day(0), time_of_day(5), True)
    one(db, "SELECT set_quiet_hours('7', NULL, NULL)")
    assert recipients(db)[0] == ("7", "America/New_York", None, None, True)
    one(db, "SELECT set_quiet_hours('7', NULL, NULL, 'Asia/Kathmandu')")
    assert recipients(db)[0] == ("7", "Asia/Kathmandu", None, None, True)
    assert recipients(db)[1] == ("8", "Europe/Berlin", *night, True)


def test_opting_out_and_in_again_leaves_the_quiet_hours_as_they_are_and_the_other_way_round(
    db: psycopg.Connection,
) -> None:
    one(db, "SELECT set_push_enabled('7', false)")
    assert recipients(db) == [("7", "UTC", None, None, False)]
    one(db, "SELECT set_quiet_hours('7', '22:00', '07:00', 'Europe/Berlin')")
    assert recipients(db) == [("7", "Europe/Berlin", time_of_day(22), time_of_day(7), False)]
    one(db, "SELECT set_push_enabled('7', true)")
    one(db, "SELECT set_push_enabled('7', true)")
    assert recipients(db) == [("7", "Europe/Berlin", time_of_day(22), time_of_day(7), True)]


def test_every_zone_that_is_taken_is_one_that_the_drain_finds(db: psycopg.Connection) -> None:
    """Each server brings its own list, so ask it; the names Python knows come with the tzdata package."""
    names = {name for (name,) in db.execute("SELECT name FROM pg_timezone_names").fetchall()}
    known = zoneinfo.available_timezones()
    strange = {name for name in names if name not in known or name.startswith(("posix", "right")) or name.islower()}
    sample = {"Europe/Berlin", "Asia/Kathmandu", "America/Argentina/Buenos_Aires", "Etc/GMT+12", "UTC"}

    for name in sample | set(sorted(names & known - strange)[::40]):
        one(db, "SELECT set_quiet_hours('7', '22:00', '07:00', %s)", name)
        zoneinfo.ZoneInfo(one(db, "SELECT time_zone FROM recipient"))
    for name in sorted(strange)[::40]:
        with pytest.raises(errors.InvalidParameterValue):
            one(db, "SELECT set_quiet_hours('7', '22:00', '07:00', %s)", name)


# What became of it.


def status(db: psycopg.Connection[Any], id_: int) -> dict[str, Any]:
    found: dict[str, Any] = one(db, "SELECT to_jsonb(s) FROM notification_status s WHERE id = %s", id_)
    return found


def test_a_notification_is_followed_from_the_queue_to_its_end_over_all_its_devices(
    db: psycopg.Connection, database: Database
) -> None:
    db.execute("SET TIME ZONE 'UTC'")  # JSON writes instants in the session's
    install_clock(db, at=START)
    for _ in range(3):
        register(db, "7", registered_at=START - timedelta(hours=1))
    id_ = one(db, "SELECT enqueue_notification('7', '{}', dedupe_key => 'k', send_at => '2030-01-01 01:00+00')")
    queued = {
        "id": id_, "user_id": "7", "created_at": "2030-01-01T00:00:00+00:00", "dedupe_key": "k", "devices": 0,
        "sent": 0, "failed": 0, "invalid_token": 0, "skipped": 0, "pending": 1, "last_reason": None,
        "finished": False, "next_attempt_at": "2030-01-01T01:00:00+00:00",
    }  # fmt: skip
    assert status(db, id_) == queued

    tick(db, 3600)
    with session(database) as drain:
        first, second, third = drain.bind(drain.claim())
        held = queued | {"devices": 3, "pending": 3, "next_attempt_at": "2030-01-01T01:02:00+00:00"}
        assert status(db, id_) == held

        drain.settle([(first.delivery, Sent())])
        tick(db, 1)
        drain.settle([(second.delivery, gone(second.device))])
        assert status(db, id_) == held | {"pending": 1, "sent": 1, "invalid_token": 1, "last_reason": "Unregistered"}

        tick(db, 1)
        drain.settle([(third.delivery, Failed("PayloadTooLarge", "Too large."))])
    assert status(db, id_) == held | {
        "pending": 0, "sent": 1, "invalid_token": 1, "failed": 1, "last_reason": "PayloadTooLarge", "finished": True,
        "next_attempt_at": None,
    }  # fmt: skip
    assert one(db, "SELECT count(*) FROM notification_status") == 1


def test_a_notification_to_nobody_is_one_that_was_skipped(db: psycopg.Connection) -> None:
    (id_,) = enqueue(db, status="skipped", reason="no_push_token")

    found = status(db, id_)
    assert (found["devices"], found["skipped"], found["last_reason"], found["finished"]) == (
        0,
        1,
        "no_push_token",
        True,
    )


@pytest.mark.parametrize("condition", ["id = 700", "dedupe_key = 'k700'"])
def test_the_status_of_one_notification_is_found_through_indexes_alone(
    condition: LiteralString, db: psycopg.Connection
) -> None:
    enqueue(db, rows=20_000)
    db.execute("UPDATE notification_delivery SET fanned_out_from = id - 1 WHERE id % 2 = 0")
    db.execute("UPDATE notification_delivery SET dedupe_key = 'k' || id")
    db.execute("VACUUM ANALYZE notification_delivery")

    plan = "\n".join(
        line for (line,) in db.execute(f"EXPLAIN SELECT * FROM notification_status WHERE {condition}").fetchall()
    )

    assert "Seq Scan" not in plan
    assert "notification_delivery_sibling" in plan
