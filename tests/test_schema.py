"""The runner of the migrations, on a real Postgres."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from core import schema
from core.database import Database, DatabaseFault, connect
from core.schema import MIGRATIONS, REQUIRED_VERSION, Migrated, Patience, SchemaFault, migrate, require_version
from core.settings import DatabaseUrl
from tests.support.database import Database as Disposable

IMPATIENT = Patience(turn_seconds=0.3, lock_seconds=0.05, lock_tries=3, pause_seconds=0.01)


def run(database: Disposable, folder: Path = MIGRATIONS, patience: Patience = IMPATIENT) -> Migrated:
    async def once() -> Migrated:
        connection = await connect(DatabaseUrl(database.url))
        try:
            async with asyncio.timeout(60):
                return await migrate(connection, folder=folder, patience=patience)
        finally:
            await connection.close()

    return asyncio.run(once())


def check(database: Disposable) -> None:
    async def once() -> None:
        opened = Database(DatabaseUrl(database.url))
        try:
            await require_version(opened)
        finally:
            await opened.close()

    asyncio.run(once())


@contextmanager
def session(database: Disposable) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield connection


def scalar(connection: psycopg.Connection[tuple[Any, ...]], query: str) -> Any:  # noqa: ANN401  whatever SQL returns
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def write(folder: Path, **files: str) -> Path:
    """Write `v0001_create="..."` as 0001_create.sql."""
    for name, sql in files.items():
        (folder / f"{name.removeprefix('v')}.sql").write_text(sql)
    return folder


def test_what_ships_is_applied_once_and_brings_the_required_version(empty_database: Disposable) -> None:
    shipped = tuple(sorted(path.name for path in MIGRATIONS.glob("*.sql")))

    first, second = run(empty_database), run(empty_database)

    assert first == Migrated(version=REQUIRED_VERSION, applied=shipped)
    assert second == Migrated(version=REQUIRED_VERSION, applied=())
    assert len(shipped) == REQUIRED_VERSION > 0
    check(empty_database)


def test_files_are_applied_in_order_and_only_what_is_new(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_create="CREATE TABLE t (n int)")
    assert run(empty_database, tmp_path).applied == ("0001_create.sql",)
    write(tmp_path, v0002_fill="INSERT INTO t VALUES (1)", v0003_add="UPDATE t SET n = n + 1; UPDATE t SET n = n * 10")

    migrated = run(empty_database, tmp_path)

    assert migrated == Migrated(version=3, applied=("0002_fill.sql", "0003_add.sql"))
    with session(empty_database) as db:
        assert scalar(db, "SELECT n FROM t") == 20
        assert scalar(db, "SELECT string_agg(name, ' ' ORDER BY version) FROM apns_outbox_migration") == (
            "0001_create.sql 0002_fill.sql 0003_add.sql"
        )


def test_a_percent_sign_is_only_a_percent_sign(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_percent="CREATE TABLE t AS SELECT '%s %(a)s 100%' AS words -- 100 %\n")

    run(empty_database, tmp_path)

    with session(empty_database) as db:
        assert scalar(db, "SELECT words FROM t") == "%s %(a)s 100%"


def test_a_file_that_fails_is_undone_whole_and_those_before_it_stay(empty_database: Disposable, tmp_path: Path) -> None:
    write(
        tmp_path,
        v0001_good="CREATE TABLE good ()",
        v0002_bad="CREATE TABLE half ();\n\nSELECT * FROM nowhere",
        v0003_never="CREATE TABLE never ()",
    )

    with pytest.raises(SchemaFault, match=r'0002_bad\.sql, line 3, failed: relation "nowhere" does not exist'):
        run(empty_database, tmp_path)

    with session(empty_database) as db:
        assert scalar(db, "SELECT string_agg(relname, ' ') FROM pg_class WHERE relname IN ('good','half','never')") == (
            "good"
        )
    write(tmp_path, v0002_bad="CREATE TABLE half ()")
    assert run(empty_database, tmp_path).applied == ("0002_bad.sql", "0003_never.sql")


def test_a_failure_never_shows_the_row_that_caused_it(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_fill="CREATE TABLE t (token text); INSERT INTO t VALUES ('secret'), ('secret')")
    run(empty_database, tmp_path)
    write(tmp_path, v0002_unique="CREATE UNIQUE INDEX ON t (token)")

    with pytest.raises(SchemaFault, match="could not create unique index") as failed:
        run(empty_database, tmp_path)

    assert "secret" not in str(failed.value)


def test_a_file_that_ends_its_own_transaction_is_refused(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_commits="CREATE TABLE t (); COMMIT")

    with pytest.raises(SchemaFault, match=r"0001_commits\.sql ends the transaction.*take out its COMMIT"):
        run(empty_database, tmp_path)


def test_an_applied_file_must_not_change(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_create="CREATE TABLE t ()")
    run(empty_database, tmp_path)
    write(tmp_path, v0001_create="CREATE TABLE t (n int)", v0002_more="CREATE TABLE u ()")

    with pytest.raises(SchemaFault, match=r"0001_create\.sql was changed after it was applied.*restore"):
        run(empty_database, tmp_path)

    with session(empty_database) as db:
        assert scalar(db, "SELECT to_regclass('u')") is None


def test_line_ends_and_a_new_name_are_no_change(empty_database: Disposable, tmp_path: Path) -> None:
    (tmp_path / "0001_create.sql").write_bytes(b"CREATE TABLE t (\nn int)\n")
    run(empty_database, tmp_path)
    (tmp_path / "0001_create.sql").unlink()
    (tmp_path / "0001_create_t.sql").write_bytes(b"CREATE TABLE t (\r\nn int)\r\n")

    assert run(empty_database, tmp_path) == Migrated(version=1, applied=())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0001_a", "0003_c"], r"0003_c\.sql is there and no 0002_\*\.sql is: restore"),
        (["0002_b"], r"0002_b\.sql is there and no 0001_\*\.sql is: restore"),
        (["0001_a", "0002_b", "0002_c"], r"0002_b\.sql and 0002_c\.sql have the same number: renumber"),
        (["0001_a", "2_b"], r"2_b\.sql must be named like 0001_what_it_does\.sql"),
    ],
)
def test_numbers_run_from_one_without_gap_or_double(
    empty_database: Disposable, tmp_path: Path, names: list[str], message: str
) -> None:
    write(tmp_path, **dict.fromkeys(names, "SELECT 1"))

    with pytest.raises(SchemaFault, match=message):
        run(empty_database, tmp_path)


def test_a_file_that_comes_late_is_not_slipped_in_behind_a_newer_one(
    empty_database: Disposable, tmp_path: Path
) -> None:
    write(tmp_path, v0001_a="SELECT 1", v0002_b="SELECT 2", v0003_c="SELECT 3")
    run(empty_database, tmp_path)
    with session(empty_database) as db:
        db.execute("DELETE FROM apns_outbox_migration WHERE version = 2")

    with pytest.raises(SchemaFault, match=r"0002_b\.sql was not applied to this database, but 0003_c\.sql was"):
        run(empty_database, tmp_path)


def test_a_database_that_is_ahead_is_left_alone_and_good_enough(empty_database: Disposable) -> None:
    run(empty_database)
    with session(empty_database) as db:
        db.execute("INSERT INTO apns_outbox_migration VALUES (%s, 'newer.sql', 'x')", [REQUIRED_VERSION + 1])

    assert run(empty_database) == Migrated(version=REQUIRED_VERSION + 1, applied=())
    check(empty_database)


def test_code_refuses_a_database_that_was_never_migrated(empty_database: Disposable) -> None:
    with pytest.raises(SchemaFault, match=rf"at version 0 and this code needs {REQUIRED_VERSION}: run the migrate"):
        check(empty_database)


def test_code_refuses_a_schema_that_is_older_than_itself(
    empty_database: Disposable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(empty_database)
    monkeypatch.setattr(schema, "REQUIRED_VERSION", REQUIRED_VERSION + 1)  # as the next release's will be

    with pytest.raises(SchemaFault, match=rf"at version {REQUIRED_VERSION} and this code needs {REQUIRED_VERSION + 1}"):
        check(empty_database)


def test_a_database_that_cannot_be_asked_is_not_taken_for_an_empty_one(empty_database: Disposable) -> None:
    run(empty_database)
    with session(empty_database) as db:
        db.execute("ALTER TABLE apns_outbox_migration RENAME COLUMN version TO versions")

    with pytest.raises(DatabaseFault, match='column "version" does not exist'):
        check(empty_database)


def test_two_runs_at_once_apply_each_file_once(empty_database: Disposable, tmp_path: Path) -> None:
    # Long enough that without the lock the other run would be in the midst of it, in most of the rounds.
    slow = "CREATE TABLE t (); SELECT pg_sleep(0.01)"
    write(tmp_path, v0001_a=slow, v0002_b="DROP TABLE t; " + slow, v0003_c="DROP TABLE t")
    patient = Patience(turn_seconds=30)

    async def both() -> list[Migrated]:
        connections = [await connect(DatabaseUrl(empty_database.url)) for _ in range(2)]
        try:
            return await asyncio.gather(*(migrate(one, folder=tmp_path, patience=patient) for one in connections))
        finally:
            for connection in connections:
                await connection.close()

    for _ in range(10):
        results = asyncio.run(both())

        assert sorted(len(result.applied) for result in results) == [0, 3]
        assert {result.version for result in results} == {3}
        with session(empty_database) as db:
            db.execute("DROP TABLE apns_outbox_migration")


def test_two_processes_at_once_agree(empty_database: Disposable) -> None:
    program = "import json; from handlers.migrate import handler; print(json.dumps(handler({}, None)['version']))"
    source = MIGRATIONS.parent.parent
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "DATABASE_URL": empty_database.url}
    runs = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    answers = [process.communicate(timeout=60)[0] for process in runs]

    assert [process.returncode for process in runs] == [0, 0]
    assert [answer.splitlines()[-1] for answer in answers] == [str(REQUIRED_VERSION)] * 2


def test_a_run_that_waits_for_its_turn_in_vain_says_so(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_a="SELECT 1")

    async def second_while_first_is_held() -> None:
        first, second = [await connect(DatabaseUrl(empty_database.url)) for _ in range(2)]
        holder = asyncio.create_task(migrate(first, folder=write(tmp_path, v0002_slow="SELECT pg_sleep(60)")))
        try:
            while not await locks(second):  # noqa: ASYNC110  it is the database that knows
                await asyncio.sleep(0.01)
            with pytest.raises(SchemaFault, match=r"another migration has been running for 0\.3 s"):
                await migrate(second, folder=tmp_path, patience=IMPATIENT)
        finally:
            holder.cancel()
            await asyncio.wait([holder])
            for connection in (first, second):
                await connection.close()

    async def locks(connection: psycopg.AsyncConnection[dict[str, Any]]) -> bool:
        cursor = await connection.execute("SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted")
        return bool(await cursor.fetchall())

    asyncio.run(second_while_first_is_held())

    # The one that was interrupted let go of the lock, and nothing of its file stayed.
    (tmp_path / "0002_slow.sql").write_text("SELECT 2")
    assert run(empty_database, tmp_path, Patience(turn_seconds=30)).applied == ("0002_slow.sql",)


def test_the_lock_is_let_go_on_a_connection_that_lives_on(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_bad="SELECT * FROM nowhere")

    async def twice() -> None:
        first, second = [await connect(DatabaseUrl(empty_database.url)) for _ in range(2)]
        try:
            with pytest.raises(SchemaFault):
                await migrate(first, folder=tmp_path, patience=IMPATIENT)
            write(tmp_path, v0001_bad="SELECT 1")
            assert (await migrate(second, folder=tmp_path, patience=IMPATIENT)).version == 1
        finally:
            await first.close()
            await second.close()

    asyncio.run(twice())


def test_a_locked_table_is_waited_for_a_few_times_and_then_named(empty_database: Disposable, tmp_path: Path) -> None:
    with session(empty_database) as db, db.transaction():
        db.execute("CREATE TABLE t ()")
    write(tmp_path, v0001_alter="ALTER TABLE t ADD n int")

    with session(empty_database) as holder, holder.transaction():
        holder.execute("LOCK TABLE t IN ACCESS SHARE MODE")
        with pytest.raises(SchemaFault, match=r"0001_alter\.sql got no lock on a table in 3 tries of 0\.05 s"):
            run(empty_database, tmp_path)

    assert run(empty_database, tmp_path).applied == ("0001_alter.sql",)


@dataclass
class LetsGoAfterOneTry:
    """A transaction in the way that ends as soon as it has seen a try fail."""

    database: Disposable
    locked: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        with session(self.database) as watch, session(self.database) as holder, holder.transaction():
            holder.execute("LOCK TABLE t IN ACCESS SHARE MODE")
            self.locked.set()
            tried = False
            while True:
                waits = scalar(watch, "SELECT count(*) FROM pg_locks WHERE NOT granted") > 0
                if tried and not waits:
                    return
                tried = tried or waits


def test_a_table_that_is_unlocked_in_time_costs_a_try_and_no_more(empty_database: Disposable, tmp_path: Path) -> None:
    with session(empty_database) as db:
        db.execute("CREATE TABLE t ()")
    write(tmp_path, v0001_alter="ALTER TABLE t ADD n int")
    in_the_way = LetsGoAfterOneTry(empty_database)

    async def migrated() -> Migrated:
        connection = await connect(DatabaseUrl(empty_database.url))
        holding = asyncio.create_task(asyncio.to_thread(in_the_way))
        try:
            await asyncio.to_thread(in_the_way.locked.wait, 10)
            return await migrate(
                connection, folder=tmp_path, patience=Patience(lock_seconds=0.1, lock_tries=20, pause_seconds=0.1)
            )
        finally:
            await holding
            await connection.close()

    assert asyncio.run(migrated()).applied == ("0001_alter.sql",)


def test_a_connection_lost_on_the_way_is_one_clear_fault(empty_database: Disposable, tmp_path: Path) -> None:
    write(tmp_path, v0001_suicide="CREATE TABLE t (); SELECT pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(SchemaFault, match=r"0001_suicide\.sql.* failed: .*57P01.*run the migration again"):
        run(empty_database, tmp_path)

    with session(empty_database) as db:
        assert scalar(db, "SELECT to_regclass('t')") is None


def test_a_file_that_takes_too_long_is_given_up_and_undone(
    empty_database: Disposable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, v0001_long="CREATE TABLE t (); SELECT pg_sleep(60)")
    monkeypatch.setattr(schema, "_FILE_SECONDS", 0.1)

    with pytest.raises(SchemaFault, match=r"0001_long\.sql was not through after 0\.1 s and was given up"):
        run(empty_database, tmp_path)

    with session(empty_database) as db:
        assert scalar(db, "SELECT to_regclass('t')") is None
    write(tmp_path, v0001_long="SELECT 1")
    assert run(empty_database, tmp_path, Patience(turn_seconds=30)).version == 1
