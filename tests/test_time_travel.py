"""The test bed itself: a database a test, and the two ways to move its clock."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from devtools.local_postgres import LocalPostgres
from tests.support.database import Database, connect
from tests.support.time_travel import advance, install_clock, tick

ROOT = Path(__file__).parent.parent


def one(connection: psycopg.Connection[Any], query: str) -> Any:  # noqa: ANN401 - whatever it selects
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def test_everything_ages_by_what_is_advanced_whichever_session_looks(
    db: psycopg.Connection, database: Database
) -> None:
    db.execute("SELECT enqueue_notification('u', '{}', expires_at => now() + interval '1 hour')")
    with psycopg.connect(database.dsn, autocommit=True) as other:
        before = one(db, "SELECT array[next_attempt_at, created_at, updated_at, expires_at] FROM notification_delivery")

        advance(db, 90.5)

        after = one(
            other, "SELECT array[next_attempt_at, created_at, updated_at, expires_at] FROM notification_delivery"
        )
    assert [old - new for old, new in zip(before, after, strict=True)] == [timedelta(seconds=90.5)] * 4


def test_what_has_no_date_is_left_without_one_and_triggers_do_not_notice(db: psycopg.Connection) -> None:
    db.execute("SELECT enqueue_notification('u', '{}')")
    db.execute(
        "CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN new.reason := 'x'; RETURN new; END $$"
    )
    db.execute("CREATE TRIGGER touch BEFORE UPDATE ON notification_delivery FOR EACH ROW EXECUTE FUNCTION touch()")

    advance(db, 60)

    assert db.execute("SELECT sent_at, expires_at, reason FROM notification_delivery").fetchone() == (None, None, None)
    db.execute("UPDATE notification_delivery SET attempts = 1")
    assert one(db, "SELECT reason FROM notification_delivery") == "x"


def test_an_installed_clock_stands_still_and_ticks_exactly_in_every_later_session(
    db: psycopg.Connection, database: Database
) -> None:
    start = datetime(2031, 7, 1, 22, 30, tzinfo=UTC)
    install_clock(db, at=start)
    with psycopg.connect(database.dsn, autocommit=True) as other:
        assert [one(other, "SELECT now()"), one(other, "SELECT now()"), one(db, "SELECT now()")] == [start] * 3

        tick(db, 29.999999)
        assert one(other, "SELECT now()") == start + timedelta(seconds=29.999999)
        tick(other, 0.000001)
        assert one(db, "SELECT now()") == start + timedelta(seconds=30)


def test_an_installed_clock_dates_rows_by_default_and_by_function(db: psycopg.Connection, database: Database) -> None:
    install_clock(db)
    with psycopg.connect(database.dsn, autocommit=True) as other:
        tick(db, 1)
        other.execute("SELECT enqueue_notification('u', '{}')")
        other.execute("INSERT INTO notification_delivery (user_id, payload) VALUES ('v', '{}')")
        other.execute("SELECT register_push_token('u', 'ab')")

        dates = other.execute("SELECT next_attempt_at, created_at, updated_at FROM notification_delivery").fetchall()

        assert {date for row in dates for date in row} == {datetime(2030, 1, 1, 0, 0, 1, tzinfo=UTC)}
        assert one(other, "SELECT registered_at FROM push_token") == datetime(2030, 1, 1, 0, 0, 1, tzinfo=UTC)


def test_what_was_bound_to_the_real_clock_earlier_is_bound_anew(db: psycopg.Connection, database: Database) -> None:
    db.execute("CREATE TABLE dated (at timestamptz DEFAULT date_trunc('minute', now()) + interval '1 hour')")
    db.execute("CREATE VIEW present AS SELECT now() AS at")
    db.execute("CREATE FUNCTION atomic() RETURNS timestamptz BEGIN ATOMIC SELECT now(); END")
    db.execute("CREATE FUNCTION argument(at timestamptz DEFAULT now()) RETURNS timestamptz LANGUAGE sql AS 'SELECT at'")
    db.execute(
        "CREATE FUNCTION aloof() RETURNS timestamptz LANGUAGE plpgsql SET search_path = public"
        " AS $$ BEGIN RETURN now(); END $$"
    )
    db.execute("CREATE AGGREGATE none_of_ours (int) (sfunc = int4pl, stype = int)")
    install_clock(db)
    with psycopg.connect(database.dsn, autocommit=True) as other:
        other.execute("INSERT INTO dated VALUES (DEFAULT)")

        assert one(other, "SELECT at FROM dated") == datetime(2030, 1, 1, 1, tzinfo=UTC)
        for source in ("(SELECT at FROM present)", "atomic()", "argument()", "aloof()"):
            assert one(other, f"SELECT {source}") == datetime(2030, 1, 1, tzinfo=UTC), source


def test_a_table_made_after_the_clock_is_where_it_would_be_without(db: psycopg.Connection) -> None:
    install_clock(db)
    db.execute("CREATE TABLE later ()")

    assert one(db, "SELECT 'public.later'::regclass::text") == "later"


def test_a_clock_is_not_installed_at_a_time_of_no_zone(db: psycopg.Connection) -> None:
    with pytest.raises(ValueError, match="give it a time zone"):
        install_clock(db, at=datetime(2030, 1, 1))  # noqa: DTZ001 - the fault in question


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_has_a_database_of_its_own_with_the_projects_schema(
    turn: int, db: psycopg.Connection, admin: psycopg.Connection
) -> None:
    assert one(db, "SELECT count(*) FROM notification_delivery") == 0
    db.execute("SELECT enqueue_notification('u', '{}')")
    # This one's, and at most the one before it.
    assert one(admin, "SELECT count(*) FROM pg_database WHERE datname LIKE 'test%'") <= 2


def test_an_empty_database_has_nothing_in_it(empty_database: Database) -> None:
    with psycopg.connect(empty_database.url) as connection:
        assert one(connection, "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace") == 0


def test_a_server_of_ones_own_keeps_its_rows_over_a_restart(own_postgres: LocalPostgres) -> None:
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        connection.execute("SELECT enqueue_notification('u', '{}')")

    own_postgres.restart()

    with psycopg.connect(own_postgres.url()) as connection:
        assert one(connection, "SELECT count(*) FROM notification_delivery") == 1


def test_nobody_elses_server_is_administered(postgres: LocalPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalPostgres() as other:
        monkeypatch.setattr(other, "dsn", postgres.dsn)

        with pytest.raises(RuntimeError, match="keeps its data in"):
            connect(other)


def test_what_the_shell_says_decides_no_test_but_the_time_zone_may() -> None:
    hostile = {
        "DATABASE_URL": "x", "DB_HOST": "x", "APNS_SECRET_ID": "x", "DRAIN_BATCH_SIZE": "x", "LEASE_SECONDS": "x",
        "MAX_ATTEMPTS": "x", "BACKOFF_CAP_SECONDS": "x", "GIVE_BACK_HOURS": "x", "AWS_PROFILE": "x",
        "AWS_ENDPOINT_URL": "x", "AWS_CA_BUNDLE": "x", "POWERTOOLS_SERVICE_NAME": "x", "PGHOST": "x", "PGSERVICE": "x",
        "HTTPS_PROXY": "x", "http_proxy": "x", "PG_BINDIR": "kept", "PGTZ": "kept", "TZ": "kept", "PATH": "kept",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", "import tests.conftest, os, json; print(json.dumps(dict(os.environ)))"],
        cwd=ROOT, env=hostile | {"PYTHONPATH": "src:."}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        said, _ = process.communicate(timeout=60)

    left: dict[str, str] = json.loads(said)
    assert "x" not in left.values()
    assert {name for name, value in left.items() if value == "kept"} == {"PG_BINDIR", "PGTZ", "TZ", "PATH"}
    assert left["AWS_ACCESS_KEY_ID"] == "testing"
