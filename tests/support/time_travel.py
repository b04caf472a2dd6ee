"""Two ways to move the database's clock, the only clock that dates rows here, without a change in the code under test.

- `advance`: back-date every row. Any number of sessions, opened before or after. Boundaries blur by the milliseconds
  that really pass: test 119 s and 121 s. And what somebody holds in memory is not back-dated: a drain that claimed
  before `advance` and settles after it finds its lease gone, however short the way. So it goes *between* drains only; a
  test of the fence that used it would pass whatever the fence does.
- `install_clock` and `tick`: shadow `now()` with a clock that stands still. Exact boundaries, and a lease in memory
  stays the lease in the table; but only for unqualified `now()`, in sessions opened later that keep their search_path.
"""

from datetime import UTC, datetime
from typing import Any

from psycopg import Connection, sql

# Triggers are off, or they would date the rows anew.
_BACK_DATE = sql.SQL("""
DO $do$
DECLARE
    touched record;
BEGIN
    SET LOCAL session_replication_role = replica;
    FOR touched IN
        SELECT c.oid::regclass AS name,
               string_agg(format('%1$I = %1$I - {seconds} * interval ''1 second''', a.attname), ', ') AS changes
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
          AND a.atttypid = 'timestamptz'::regtype AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
        GROUP BY 1
    LOOP
        EXECUTE format('UPDATE %s SET %s', touched.name, touched.changes);
    END LOOP;
END $do$""")

# `public` first: what a test creates later belongs there. pg_catalog is named, or else it would come before all others.
_PATH = sql.SQL("public, test_clock, pg_catalog")

# What was bound to the real now() when it was made, and is now printed as pg_catalog.now(): defaults of columns, views,
# and functions (defaults of arguments, bodies in BEGIN ATOMIC). Plain bodies are read anew in each session.
_BOUND = """
SELECT format('ALTER TABLE %s ALTER %I SET DEFAULT %s', adrelid::regclass, attname, pg_get_expr(adbin, adrelid))
FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
WHERE attgenerated = '' AND pg_get_expr(adbin, adrelid) LIKE '%pg_catalog.now()%'
UNION ALL
SELECT format('CREATE OR REPLACE VIEW %s AS %s', oid::regclass, pg_get_viewdef(oid))
FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind = 'v' AND pg_get_viewdef(oid) LIKE '%pg_catalog.now()%'
UNION ALL
SELECT definition
FROM pg_proc, LATERAL (SELECT CASE WHEN prokind IN ('f', 'p') THEN pg_get_functiondef(oid) END) AS printed (definition)
WHERE pronamespace = 'public'::regnamespace AND definition LIKE '%pg_catalog.now()%'
"""

_OWN_PATH = """
SELECT format('ALTER ROUTINE %s SET search_path = public, test_clock, pg_catalog', oid::regprocedure)
FROM pg_proc
WHERE pronamespace = 'public'::regnamespace
  AND EXISTS (SELECT FROM unnest(proconfig) setting WHERE setting LIKE 'search\\_path=%')
"""


def advance(connection: Connection[Any], seconds: float) -> None:
    """Let `seconds` have passed for everything that is in the database."""
    connection.execute(_BACK_DATE.format(seconds=sql.Literal(float(seconds))))


def install_clock(connection: Connection[Any], at: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
    """Stop the clock of this database at `at`, for this session and for all that open from now on."""
    if at.tzinfo is None:
        raise ValueError(f"{at} is no instant: give it a time zone")
    connection.execute("CREATE SCHEMA test_clock")
    connection.execute("CREATE TABLE test_clock.clock (instant timestamptz NOT NULL)")
    connection.execute("INSERT INTO test_clock.clock VALUES (%s)", [at])
    connection.execute(
        "CREATE FUNCTION test_clock.now() RETURNS timestamptz LANGUAGE sql STABLE"
        " AS 'SELECT instant FROM test_clock.clock'"
    )
    # A test may work as a role that owns nothing.
    connection.execute("GRANT USAGE ON SCHEMA test_clock TO public")
    connection.execute("GRANT SELECT ON test_clock.clock TO public")
    database = sql.Identifier(connection.info.dbname)
    connection.execute(sql.SQL("ALTER DATABASE {} SET search_path = {}").format(database, _PATH))
    connection.execute(sql.SQL("SET search_path = {}").format(_PATH))
    for (definition,) in connection.execute(_BOUND).fetchall():
        connection.execute(definition.replace("pg_catalog.now()", "now()"))
    for (definition,) in connection.execute(_OWN_PATH).fetchall():
        connection.execute(definition)


def tick(connection: Connection[Any], seconds: float) -> None:
    """Move the clock that `install_clock` stopped."""
    connection.execute("UPDATE test_clock.clock SET instant = instant + %s * interval '1 second'", [seconds])
