"""What the three roles may do and what they may not, tried by logins that are members of them."""

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from core import database as core_database
from core.schema import MIGRATIONS, Migrated, SchemaFault, migrate, require_version
from core.settings import DatabaseUrl
from core.verdict import Sent
from devtools.local_postgres import LocalPostgres
from tests.support.database import Database, apply_migrations
from tests.support.outbox import columns, enqueue, gone, register, session, whole_rows

ROLES = ("apns_outbox_producer", "apns_outbox_drain", "apns_outbox_reader")
STATEMENTS = sorted((MIGRATIONS.parent / "sql").glob("*.sql"))
WAIT_SECONDS = 20

FUNCTIONS = {
    "enqueue_notification",
    "register_push_token",
    "unregister_push_token",
    "set_quiet_hours",
    "set_push_enabled",
}
PRODUCERS_COLUMNS = {
    "user_id",
    "payload",
    "push_type",
    "priority",
    "collapse_id",
    "expires_at",
    "dedupe_key",
    "ignore_quiet_hours",
    "next_attempt_at",
    "push_token_id",
}

type LogIn = Callable[..., psycopg.Connection[Any]]


def one(db: psycopg.Connection[Any], query: str, *params: object) -> Any:  # noqa: ANN401  whatever it selects
    row = db.execute(query.encode(), params).fetchone()
    assert row is not None
    return row[0]


@pytest.fixture
def log_in(db: psycopg.Connection, database: Database) -> Iterator[LogIn]:
    """Make a login that is a member of these roles, or of none, and open a session of it. Roles are the cluster's."""
    made: list[tuple[str, psycopg.Connection[Any]]] = []

    def made_login(*roles: str) -> psycopg.Connection[Any]:
        name = f"{database.name}_login_{len(made)}"
        db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        for role in roles:
            db.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(name)))
        connection = psycopg.connect(as_user(database, name).dsn, autocommit=True)
        made.append((name, connection))
        return connection

    yield made_login
    for name, connection in made:
        connection.close()
        db.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(sql.Identifier(name)))


def as_user(database: Database, user: str) -> Database:
    return Database(
        name=database.name,
        dsn=database.dsn.replace("user=postgres", f"user={user}"),
        url=database.url.replace("postgres@", f"{user}@"),
    )


def refused(connection: psycopg.Connection[Any], statement: str) -> None:
    with pytest.raises(errors.InsufficientPrivilege):
        connection.execute(statement.encode())


def rights(db: psycopg.Connection[Any], role: str) -> dict[tuple[str, str], set[str]]:
    """Find all that a role may do to each table or view of ours: on the whole of it, or on these columns."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for table, right, column in db.execute(
        """
        SELECT c.relname, wanted.privilege, '*'
          FROM pg_class c
         CROSS JOIN unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS wanted (privilege)
         WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v', 'm', 'p', 'f')
           AND has_table_privilege(%(role)s, c.oid, wanted.privilege)
        UNION ALL
        SELECT c.relname, wanted.privilege, a.attname
          FROM pg_class c
          JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         CROSS JOIN unnest('{SELECT,INSERT,UPDATE,REFERENCES}'::text[]) AS wanted (privilege)
         WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v', 'm', 'p', 'f')
           AND has_column_privilege(%(role)s, c.oid, a.attnum, wanted.privilege)
           AND NOT has_table_privilege(%(role)s, c.oid, wanted.privilege)
        UNION ALL
        SELECT c.relname, wanted.privilege, '*'
          FROM pg_class c CROSS JOIN unnest('{SELECT,UPDATE,USAGE}'::text[]) AS wanted (privilege)
         -- as a condition of its own the planner might ask it of what is no sequence, which is an error
         WHERE CASE WHEN c.relkind = 'S' AND c.relnamespace = 'public'::regnamespace
                    THEN has_sequence_privilege(%(role)s, c.oid, wanted.privilege) END
        """,
        {"role": role},
    ).fetchall():
        found[table, right].add(column)
    return dict(found)


def callable_functions(db: psycopg.Connection[Any], role: str) -> set[str]:
    return {
        name
        for (name,) in db.execute(
            "SELECT proname FROM pg_proc"
            " WHERE pronamespace = 'public'::regnamespace AND has_function_privilege(%s, oid, 'EXECUTE')",
            [role],
        ).fetchall()
    }


# The whole of what each may do.


def test_a_producer_inserts_its_columns_reads_ids_calls_the_functions_and_nothing_else(db: psycopg.Connection) -> None:
    assert rights(db, "apns_outbox_producer") == {
        ("notification_delivery", "INSERT"): PRODUCERS_COLUMNS,
        ("notification_delivery", "SELECT"): {"id"},
    }
    assert callable_functions(db, "apns_outbox_producer") == FUNCTIONS


def test_a_drain_rewrites_deliveries_and_may_say_that_a_device_is_dead(db: psycopg.Connection) -> None:
    assert rights(db, "apns_outbox_drain") == {
        ("notification_delivery", "SELECT"): {"*"},
        ("notification_delivery", "INSERT"): {"*"},
        ("notification_delivery", "UPDATE"): {"*"},
        ("push_token", "SELECT"): {"*"},
        ("push_token", "UPDATE"): {"invalidated_at", "invalid_reason"},
        ("recipient", "SELECT"): {"*"},
        ("apns_outbox_migration", "SELECT"): {"*"},
    }
    assert callable_functions(db, "apns_outbox_drain") == set()


def test_a_reader_reads_all_but_payloads_and_tokens(db: psycopg.Connection) -> None:
    def all_but(table: str, hidden: str) -> set[str]:
        names = set(
            one(
                db,
                "SELECT array_agg(attname::text) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0",
                table,
            )
        )
        assert hidden in names
        return names - {hidden}

    assert rights(db, "apns_outbox_reader") == {
        ("notification_status", "SELECT"): {"*"},
        ("notification_delivery", "SELECT"): all_but("notification_delivery", "payload"),
        ("push_token", "SELECT"): all_but("push_token", "token"),
        ("recipient", "SELECT"): {"*"},
        ("apns_outbox_migration", "SELECT"): {"*"},
    }
    assert callable_functions(db, "apns_outbox_reader") == set()


def test_who_is_a_member_of_none_may_do_nothing(db: psycopg.Connection, log_in: LogIn) -> None:
    nobody = log_in()

    assert rights(db, nobody.info.user) == {}
    assert callable_functions(db, nobody.info.user) == set()
    refused(nobody, "SELECT enqueue_notification('7', '{}')")
    refused(nobody, "SELECT id FROM notification_status")


def test_the_roles_can_neither_log_in_nor_make_anything_of_themselves(db: psycopg.Connection) -> None:
    found = db.execute(
        "SELECT rolname, rolcanlogin OR rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls"
        " FROM pg_roles WHERE rolname = ANY(%s)",
        [list(ROLES)],
    ).fetchall()

    assert dict(found) == dict.fromkeys(ROLES, False)


# A producer at work.


def test_a_producer_can_do_all_that_producers_do(db: psycopg.Connection, log_in: LogIn) -> None:
    shop = log_in("apns_outbox_producer")
    device = one(shop, "SELECT register_push_token('7', 'ab')")
    first = one(shop, "SELECT enqueue_notification('7', title => 'T', dedupe_key => 'k', push_token_id => %s)", device)
    assert one(shop, "SELECT enqueue_notification('7', title => 'T', dedupe_key => 'k')") == first
    one(shop, "SELECT set_quiet_hours('7', '22:00', '07:00', 'Europe/Berlin')")
    one(shop, "SELECT set_push_enabled('7', false)")
    assert one(shop, "SELECT unregister_push_token('7', 'ab')") is True
    insert = "INSERT INTO notification_delivery (user_id, payload, dedupe_key) VALUES ('7', '{}', 'k2')"
    insert += " ON CONFLICT DO NOTHING RETURNING id"
    second = one(shop, insert)
    assert shop.execute(insert.encode()).fetchall() == []

    assert set(whole_rows(db)) == {first, second}
    assert columns(db, device, "invalid_reason", table="push_token") == "signed_out"


def test_a_producer_may_set_each_of_its_columns(db: psycopg.Connection, log_in: LogIn) -> None:
    shop = log_in("apns_outbox_producer")
    values = {
        "user_id": "7", "payload": "{}", "push_type": "voip", "priority": 5, "collapse_id": "c", "dedupe_key": "k",
        "expires_at": "2031-01-01", "ignore_quiet_hours": True, "next_attempt_at": "2030-01-01", "push_token_id": 7,
    }  # fmt: skip
    assert set(values) == PRODUCERS_COLUMNS
    placeholders = ", ".join(["%s"] * len(values))
    id_ = one(
        shop,
        f"INSERT INTO notification_delivery ({', '.join(values)}) VALUES ({placeholders}) RETURNING id",
        *values.values(),
    )

    assert columns(db, id_, "push_type", "priority", "push_token_id") == ("voip", 5, 7)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT payload FROM notification_delivery",
        "SELECT user_id FROM notification_delivery",
        "SELECT dedupe_key FROM notification_delivery",
        "SELECT id FROM notification_delivery WHERE payload::text LIKE '%secret%'",
        "SELECT * FROM notification_status",
        "TABLE push_token",
        "TABLE recipient",
        "TABLE apns_outbox_migration",
        "SELECT token FROM push_token",
        "INSERT INTO notification_delivery (user_id, payload) VALUES ('7', '{}') RETURNING payload",
        "INSERT INTO notification_delivery (user_id, payload, status, reason) VALUES ('7', '{}', 'failed', 'x')",
        "INSERT INTO notification_delivery (user_id, payload, attempts) VALUES ('7', '{}', 0)",
        "INSERT INTO notification_delivery (user_id, payload, apns_id) VALUES ('7', '{}', gen_random_uuid())",
        "INSERT INTO notification_delivery (user_id, payload, fanned_out_from) VALUES ('7', '{}', 1)",
        "INSERT INTO notification_delivery (user_id, payload, claimed_at) VALUES ('7', '{}', now())",
        (
            "INSERT INTO notification_delivery (user_id, payload, dedupe_key) VALUES ('7', '{}', 'k')"
            " ON CONFLICT (dedupe_key) DO UPDATE SET payload = '{}'"
        ),
        "INSERT INTO push_token (user_id, token, environment) VALUES ('7', 'ab', 'production')",
        "INSERT INTO recipient (user_id, time_zone) VALUES ('7', 'UTC')",
        "UPDATE notification_delivery SET status = 'failed', reason = 'x'",
        "UPDATE notification_delivery SET payload = '{}'",
        "UPDATE push_token SET user_id = 'me'",
        "DELETE FROM notification_delivery",
        "DELETE FROM push_token",
        "TRUNCATE notification_delivery",
        "SELECT nextval('notification_delivery_id_seq')",
        "DO 'BEGIN LOCK notification_delivery IN EXCLUSIVE MODE; END'",
        "SELECT id FROM notification_delivery FOR UPDATE",
        "COPY push_token TO STDOUT",
        "CREATE TRIGGER t AFTER INSERT ON notification_delivery EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "CREATE OR REPLACE FUNCTION enqueue_notification() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "SET ROLE apns_outbox_drain",
        "SET ROLE postgres",
    ],
)
def test_a_producer_can_not(statement: str, db: psycopg.Connection, log_in: LogIn) -> None:
    register(db, "7")
    enqueue(db, payload={"secret": 1}, dedupe_key="k")

    refused(log_in("apns_outbox_producer"), statement)


def test_a_key_of_somebody_elses_gives_the_id_and_nothing_more(db: psycopg.Connection, log_in: LogIn) -> None:
    (id_,) = enqueue(db, "somebody", payload={"secret": 1}, dedupe_key="k")
    shop = log_in("apns_outbox_producer")

    assert shop.execute("SELECT * FROM enqueue_notification('7', '{}', dedupe_key => 'k')").fetchall() == [(id_,)]
    with pytest.raises(errors.UniqueViolation) as refusal:
        shop.execute("INSERT INTO notification_delivery (user_id, payload, dedupe_key) VALUES ('7', '{}', 'k')")
    assert "somebody" not in str(refusal.value)
    assert "secret" not in str(refusal.value)


CALLS = (
    "enqueue_notification('7', title => 'T', data => '{\"a\": 1}', dedupe_key => 'k', expires_at => now() + '1h')",
    # Fits, but only without the spaces: so they are counted.
    "enqueue_notification('7', ('{\"x\": [1' || repeat(', 1', 1900) || ']}')::jsonb)",
    "register_push_token('7', 'AB')",
    "set_quiet_hours('7', '22:00', '07:00', 'Europe/Berlin')",
    "set_push_enabled('7', true)",
    "unregister_push_token('7', 'AB')",
)


def test_tables_of_the_callers_do_not_stand_before_ours(db: psycopg.Connection, log_in: LogIn) -> None:
    shop = log_in("apns_outbox_producer")
    tables = ("notification_delivery", "push_token", "recipient")
    db.execute(sql.SQL("CREATE SCHEMA AUTHORIZATION {}").format(sql.Identifier(shop.info.user)))
    for table in tables:
        alike = one(
            db,
            "SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ') FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0",
            table,
        )
        for schema in (f'"{shop.info.user}"', "pg_temp"):
            shop.execute(f"CREATE TABLE {schema}.{table} ({alike})".encode())
    shop.execute(f'SET search_path = pg_temp, "{shop.info.user}", public'.encode())
    for call in CALLS:
        one(shop, f"SELECT public.{call}")

    for table in tables:
        assert one(shop, f"SELECT count(*) FROM pg_temp.{table}") == 0
        assert one(shop, f'SELECT count(*) FROM "{shop.info.user}".{table}') == 0
        assert one(db, f"SELECT count(*) > 0 FROM public.{table}")


def test_functions_of_the_callers_are_never_run_with_the_owners_rights(db: psycopg.Connection, log_in: LogIn) -> None:
    """On a server before 15, or one upgraded from there, everybody may create in `public`. So lay a trap there for each
    built-in function that is called: one that fits better than the built-in does.
    """
    shop = log_in("apns_outbox_producer")
    db.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    shop.execute("CREATE TABLE sprung (who text)")
    shop.execute("GRANT INSERT ON sprung TO PUBLIC")
    traps = (
        ("now", ""),
        ("lower", "text"),
        ("isfinite", "timestamptz"),
        ("octet_length", "text"),
        ("jsonb_typeof", "jsonb"),
        ("jsonb_strip_nulls", "jsonb"),
        ("jsonb_exists", "jsonb, text"),
        ("jsonb_build_object", "text, jsonb"),
        ("jsonb_build_object", "text, int"),
        ("jsonb_build_object", "text, text, text, text"),
        ("jsonb_build_object", "text, jsonb, text, int, text, text"),
        ("convert_to", "text, text"),
        ("regexp_replace", "text, text, text, text"),
    )
    for name, arguments in traps:
        result = {"now": "timestamptz", "isfinite": "boolean", "jsonb_exists": "boolean"}.get(
            name, "jsonb" if name.startswith("jsonb_") and name != "jsonb_typeof" else "text"
        )
        shop.execute(
            f"CREATE FUNCTION public.{name}({arguments}) RETURNS {result} LANGUAGE plpgsql AS $$ BEGIN"
            f" INSERT INTO public.sprung VALUES (current_user || ' in {name}'); RETURN NULL; END $$".encode()
        )
    for call in CALLS:
        one(shop, f"SELECT {call}")

    assert db.execute("TABLE sprung").fetchall() == []


def test_every_function_that_runs_with_its_owners_rights_is_written_so_that_only_built_ins_can_be_meant(
    db: psycopg.Connection,
) -> None:
    found = db.execute(
        "SELECT proname, prosecdef, proconfig, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
    ).fetchall()
    # What the grammar itself knows, and ours; now() takes no arguments, so that nothing can fit better.
    known = r"coalesce|nullif|greatest|now|in|and|or|values|where|elsif|nd|pt|recipient|push_token"

    assert {name for name, *_ in found} == FUNCTIONS
    for _, runs_as_owner, settings, source in found:
        assert runs_as_owner
        assert settings == ["search_path=public, pg_temp"]
        code = re.sub(r"'(?:[^']|'')*'|--.*", "", source)
        called = set(re.findall(r"(?<![.\w])(\w+)\s*\(", code.lower()))
        # ON CONFLICT repeats the expressions of the index
        inferred = {"lower"} if "on conflict (lower(token)" in code.lower() else set()
        assert {name for name in called if not re.fullmatch(known, name)} - inferred - {"conflict"} == set()


# The drain and the reader at work.


@pytest.mark.parametrize("file", STATEMENTS, ids=lambda file: file.name)
def test_the_drain_may_run_every_statement_there_is(file: Path, log_in: LogIn) -> None:
    """Postgres looks at the rights when it makes ready to run, which EXPLAIN does; what is refused says so."""
    nothing: defaultdict[str, None] = defaultdict(lambda: None)
    for refuses, roles in ((False, ("apns_outbox_drain",)), (True, ())):
        connection = log_in(*roles)
        statement = b"EXPLAIN " + file.read_bytes()
        if refuses:
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute(statement, nothing)
        else:
            connection.execute(statement, nothing)


def test_a_drain_can_do_its_work(db: psycopg.Connection, database: Database, log_in: LogIn) -> None:
    for token in ("aa", "bb"):
        one(db, "SELECT register_push_token('7', %s)", token)
    enqueue(db, "7", rows=2)
    own = as_user(database, log_in("apns_outbox_drain").info.user)

    with session(own) as drain:
        drain.runner.run(require_version(drain.outbox.database))
        drain.backlog()
        drain.sweep()
        first, second, *siblings = drain.bind(drain.claim())
        drain.settle([(first.delivery, Sent()), (second.delivery, gone(second.device))])
        drain.release([push.delivery for push in siblings])
        drain.claim_suspect()

    assert columns(db, first.delivery.id, "status") == "sent"
    assert columns(db, second.delivery.id, "status") == "invalid_token"
    assert len(siblings) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM notification_delivery",
        "TRUNCATE notification_delivery",
        "UPDATE push_token SET token = 'ab'",
        "UPDATE push_token SET user_id = '8'",
        "UPDATE push_token SET registered_at = now()",
        "INSERT INTO push_token (user_id, token, environment) VALUES ('7', 'ab', 'production')",
        "DELETE FROM push_token",
        "UPDATE recipient SET push_enabled = true",
        "INSERT INTO recipient (user_id, time_zone) VALUES ('7', 'UTC')",
        "UPDATE apns_outbox_migration SET version = 1",
        "SELECT set_push_enabled('7', true)",
        "SELECT register_push_token('7', 'ab')",
    ],
)
def test_a_drain_can_not(statement: str, log_in: LogIn) -> None:
    refused(log_in("apns_outbox_drain"), statement)


def test_a_reader_sees_what_became_of_everything(db: psycopg.Connection, log_in: LogIn) -> None:
    enqueue(db, "7", dedupe_key="k")
    register(db, "7")
    support = log_in("apns_outbox_reader")

    assert one(support, "SELECT pending FROM notification_status WHERE dedupe_key = 'k'") == 1
    assert one(support, "SELECT status FROM notification_delivery WHERE user_id = '7'") == "pending"
    assert one(support, "SELECT environment FROM push_token WHERE user_id = '7'") == "production"
    assert support.execute("TABLE recipient").fetchall() == []
    assert one(support, "SELECT count(*) FROM apns_outbox_migration") > 0


@pytest.mark.parametrize(
    "statement",
    [
        "TABLE notification_delivery",
        "SELECT payload FROM notification_delivery",
        "SELECT id FROM notification_delivery WHERE payload = '{}'",
        "SELECT notification_delivery FROM notification_delivery",
        "TABLE push_token",
        "SELECT id FROM push_token WHERE token LIKE 'ab%'",
        "INSERT INTO notification_delivery (user_id, payload) VALUES ('7', '{}')",
        "UPDATE notification_delivery SET status = 'failed'",
        "DELETE FROM notification_delivery",
        "UPDATE recipient SET push_enabled = true",
        "SELECT enqueue_notification('7', '{}')",
    ],
)
def test_a_reader_can_not(statement: str, db: psycopg.Connection, log_in: LogIn) -> None:
    enqueue(db)

    refused(log_in("apns_outbox_reader"), statement)


# How the roles come about.


def run_migrations(database: Database, folder: Path = MIGRATIONS) -> Migrated:
    async def once() -> Migrated:
        async with await core_database.connect(DatabaseUrl(url=database.url)) as connection:
            return await migrate(connection, folder=folder)

    return asyncio.run(once())


def test_whoever_could_call_the_functions_of_the_first_release_still_can(
    empty_database: Database, tmp_path: Path
) -> None:
    """They had the right to insert; now the functions have rights of their own, and not everybody may call them."""
    (tmp_path / "0001_outbox.sql").write_bytes((MIGRATIONS / "0001_outbox.sql").read_bytes())
    run_migrations(empty_database, tmp_path)
    names = [f"{empty_database.name}_{kind}" for kind in ("table", "columns", "devices", "Other one")]
    on_table, on_columns, on_devices, other = (sql.Identifier(name) for name in names)
    with psycopg.connect(empty_database.dsn, autocommit=True) as db:
        for name in names:
            db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        try:
            db.execute(
                sql.SQL(
                    "GRANT SELECT, INSERT ON notification_delivery TO {}, {};"
                    "GRANT SELECT, INSERT (user_id, payload) ON notification_delivery TO {};"
                    "GRANT SELECT, INSERT, UPDATE ON push_token TO {};"
                    "GRANT SELECT ON push_token TO {}"
                ).format(on_table, other, on_columns, on_devices, other)
            )
            run_migrations(empty_database)
            able = {name: callable_functions(db, name) for name in names}
        finally:
            for name in names:
                db.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))

    assert able == dict(
        zip(
            names,
            [{"enqueue_notification"}, {"enqueue_notification"}, {"register_push_token"}, {"enqueue_notification"}],
            strict=True,
        )
    )


@pytest.fixture
def roleless(own_postgres: LocalPostgres) -> LocalPostgres:
    """Start a cluster that knows nothing of our roles yet, where two databases are ours to migrate."""
    with psycopg.connect(own_postgres.dsn(), autocommit=True) as admin:
        for role in ROLES:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))
        admin.execute("CREATE ROLE deployer LOGIN")
        for name in ("one", "two"):
            admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0 OWNER deployer").format(sql.Identifier(name)))
            with psycopg.connect(own_postgres.dsn(name), autocommit=True) as there:
                there.execute("GRANT ALL ON SCHEMA public TO deployer")
    return own_postgres


def test_who_may_not_create_roles_is_told_what_an_administrator_has_to_run(roleless: LocalPostgres) -> None:
    deployed = as_user(Database.on(roleless, "one"), "deployer")
    with pytest.raises(SchemaFault) as fault:
        run_migrations(deployed)

    assert "0003_roles.sql" in str(fault.value)
    assert "the role apns_outbox_producer does not exist and deployer may not create roles" in str(fault.value)
    advice = re.search(r"run (CREATE ROLE.*NOLOGIN) \(", str(fault.value))
    assert advice
    with psycopg.connect(roleless.dsn(), autocommit=True) as admin:
        admin.execute(advice[1].encode())
    assert run_migrations(deployed).applied[0] == "0003_roles.sql"
    with psycopg.connect(roleless.dsn("one")) as db:
        assert callable_functions(db, "apns_outbox_producer") == FUNCTIONS


def test_a_deployer_that_may_create_roles_does_and_a_second_database_shares_them(roleless: LocalPostgres) -> None:
    with psycopg.connect(roleless.dsn(), autocommit=True) as admin:
        admin.execute("ALTER ROLE deployer CREATEROLE")
    for name in ("one", "two"):
        run_migrations(as_user(Database.on(roleless, name), "deployer"))
        with psycopg.connect(roleless.dsn(name)) as db:
            assert callable_functions(db, "apns_outbox_producer") == FUNCTIONS


@pytest.mark.parametrize("commits", [True, False])
def test_two_databases_that_are_migrated_at_once_do_not_quarrel_over_the_roles(
    commits: bool,  # noqa: FBT001  a parameter of the test
    roleless: LocalPostgres,
) -> None:
    with psycopg.connect(roleless.dsn("two")) as other, ThreadPoolExecutor(1) as elsewhere:
        for role in ROLES:
            other.execute(sql.SQL("CREATE ROLE {} NOLOGIN").format(sql.Identifier(role)))
        migrating = elsewhere.submit(apply_migrations, roleless.url("one"))
        with psycopg.connect(roleless.dsn(), autocommit=True) as admin:
            for _ in range(WAIT_SECONDS * 100):
                if one(
                    admin,
                    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid)))"
                    " FROM pg_sleep(0.01)",
                    other.info.backend_pid,
                ):
                    break
            else:
                raise AssertionError("it did not have to wait")
        other.commit() if commits else other.rollback()
        migrating.result(WAIT_SECONDS)

    with psycopg.connect(roleless.dsn("one")) as db:
        assert callable_functions(db, "apns_outbox_producer") == FUNCTIONS
