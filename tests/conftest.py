"""One server a run, started by the first test that wants it; one database a test, a copy of a migrated template."""

import itertools
import os
import re
from collections.abc import Iterator

import psycopg
import pytest

from devtools.local_postgres import LocalPostgres, PostgresUnavailableError, postgres_version
from tests.support.database import Database, apply_migrations, connect, create, drop

# What the developer's shell says about the project, AWS, Postgres or a proxy must decide no test. The time zone may:
# the project has to work in any. PG_BINDIR chooses the server.
_OURS = re.compile(
    r"DATABASE_URL|LEASE_SECONDS|MAX_ATTEMPTS|GIVE_BACK_HOURS|LOG_LEVEL|(DB|APNS|DRAIN|BACKOFF|AWS|POWERTOOLS)_.*"
    r"|PG(?!TZ$|_BINDIR$).*|(?i:(http|https|all|no)_proxy)"
)
for _name in [name for name in os.environ if _OURS.fullmatch(name)]:
    del os.environ[_name]
os.environ |= {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

_TEMPLATE = "migrated"
_numbers = itertools.count(1)


def pytest_report_header() -> str:
    try:
        return f"postgres: {postgres_version()}"
    except PostgresUnavailableError as fault:
        return f"postgres: none, {fault}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[LocalPostgres]:
    """Start the run's server. A test that wants to stop it takes `own_postgres`."""
    try:
        with LocalPostgres() as server:
            yield server
    except PostgresUnavailableError as fault:
        pytest.exit(str(fault), returncode=2)  # said once, not by every test in turn


@pytest.fixture(scope="session")
def admin(postgres: LocalPostgres) -> Iterator[psycopg.Connection]:
    with connect(postgres) as connection:
        yield connection


@pytest.fixture(scope="session")
def _template(postgres: LocalPostgres, admin: psycopg.Connection) -> str:
    create(admin, _TEMPLATE, "template1")
    apply_migrations(postgres.url(_TEMPLATE))
    return _TEMPLATE


@pytest.fixture(scope="session")
def _left_over(admin: psycopg.Connection) -> list[str]:
    """Keep what is to be dropped, one test later: a backend takes some milliseconds to leave, and a drop that finds it
    still there waits for 100.
    """
    return []


def _copy(
    postgres: LocalPostgres, admin: psycopg.Connection, template: str, left_over: list[str]
) -> Iterator[Database]:
    while left_over:
        drop(admin, left_over.pop())
    name = f"test_{next(_numbers)}"
    create(admin, name, template)
    left_over.append(name)
    yield Database.on(postgres, name)


@pytest.fixture
def database(
    postgres: LocalPostgres, admin: psycopg.Connection, _template: str, _left_over: list[str]
) -> Iterator[Database]:
    """Make a database for this test alone, migrated."""
    yield from _copy(postgres, admin, _template, _left_over)


@pytest.fixture
def empty_database(postgres: LocalPostgres, admin: psycopg.Connection, _left_over: list[str]) -> Iterator[Database]:
    """Make a database for this test alone, with nothing in it."""
    yield from _copy(postgres, admin, "template1", _left_over)


@pytest.fixture
def db(database: Database) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def own_postgres() -> Iterator[LocalPostgres]:
    """Start a server for this test alone, to crash and restart. Its database `postgres` is migrated. Takes 0.5 s."""
    with LocalPostgres() as server:
        apply_migrations(server.url())
        yield server
