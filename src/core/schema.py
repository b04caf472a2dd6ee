"""Brings the database to the version of the schema that this code needs: numbered SQL files, each applied once.

Needs a connection of its own, straight to Postgres: the lock that keeps two runs apart belongs to the session, which a
proxy in between would hand from one client to the next.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, LiteralString, Protocol

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from core.database import Connection, DatabaseFault, said

MIGRATIONS = Path(__file__).parent / "migrations"

_FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
# The newest file's number. Read from the names alone: a faulty file is reported by whoever wants to apply it.
REQUIRED_VERSION = max((int(file.name[:4]) for file in MIGRATIONS.glob("[0-9][0-9][0-9][0-9]_*.sql")), default=0)

# sha256 of "apns_outbox_migration", its first eight bytes: the same in every release, and nobody else's.
_LOCK = int.from_bytes(sha256(b"apns_outbox_migration").digest()[:8], signed=True)
# For one file. A function of Lambda lives at most 15 minutes.
_FILE_SECONDS = 600.0
_POLL_SECONDS = 0.2


class SchemaFault(Exception):  # noqa: N818  the name says what is so; an "Error" behind it would say nothing more
    """The schema is not what the code needs, and was not made so. Says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    version: int
    applied: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for others."""

    # Another run's turn: a second one is started while the first is at work whenever a deploy is repeated.
    turn_seconds: float = 60
    # A table's lock, each time. While we queue for it every statement that comes after us queues behind us, the
    # claim and the producers' inserts included: so not for long, and several times instead.
    lock_seconds: float = 5
    lock_tries: int = 5
    # Between two of those, so that what has queued up behind us gets through.
    pause_seconds: float = 2


class Reader(Protocol):
    async def fetch(self, sql: LiteralString, /) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class _Migration:
    version: int
    name: str
    sql: bytes

    @property
    def checksum(self) -> str:
        return sha256(self.sql).hexdigest()


async def require_version(database: Reader) -> None:
    """Refuse to work on a schema older than the code. A newer one is fine: changes only ever add."""
    try:
        rows = await database.fetch("SELECT coalesce(max(version), 0) AS version FROM apns_outbox_migration")
    except DatabaseFault as fault:
        if fault.sqlstate != errors.UndefinedTable.sqlstate:
            raise
        rows = [{"version": 0}]
    found = rows[0]["version"]
    if found < REQUIRED_VERSION:
        raise SchemaFault(
            f"the database schema is at version {found} and this code needs {REQUIRED_VERSION}: run the migrate"
            " function (handlers.migrate.handler) first"
        )


async def migrate(connection: Connection, *, folder: Path = MIGRATIONS, patience: Patience = Patience()) -> Migrated:
    """Apply what is new, in order, one transaction a file. What was applied stays, also when a later file fails.

    A database that is ahead of these files (an older release was put back) is left as it is.
    """
    files = _read(folder)
    try:
        async with _turn(connection, patience):
            await connection.execute(
                "CREATE TABLE IF NOT EXISTS apns_outbox_migration (version int PRIMARY KEY, name text NOT NULL,"
                " checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            recorded = await connection.execute("SELECT version, name, checksum FROM apns_outbox_migration")
            applied = {row["version"]: row for row in await recorded.fetchall()}
            _compare(files, applied)
            new = [file for file in files if file.version not in applied]
            for file in new:
                await _apply(connection, file, patience)
    except psycopg.Error as error:
        raise SchemaFault(
            f"the schema was not migrated: {said(error)}; mend that and run the migration again"
        ) from None
    return Migrated(
        version=max([*applied, *(file.version for file in new)], default=0),
        applied=tuple(file.name for file in new),
    )


def _read(folder: Path) -> tuple[_Migration, ...]:
    files = []
    for path in sorted(folder.glob("*.sql")):
        if not (match := _FILE_NAME.fullmatch(path.name)):
            raise SchemaFault(f"{path.name} must be named like 0001_what_it_does.sql: rename it")
        # Git may have turned the line ends on the way; that is no change of the file.
        sql = path.read_bytes().replace(b"\r\n", b"\n")
        files.append(_Migration(int(match[1]), path.name, sql))
    for place, file in enumerate(files, start=1):
        if place > 1 and file.version == files[place - 2].version:
            raise SchemaFault(f"{files[place - 2].name} and {file.name} have the same number: renumber the newer one")
        if file.version != place:
            raise SchemaFault(f"{file.name} is there and no {place:04}_*.sql is: restore the missing file, or renumber")
    return tuple(files)


def _compare(files: Iterable[_Migration], applied: Mapping[int, Mapping[str, Any]]) -> None:
    newest = max(applied, default=0)
    for file in files:
        if file.version not in applied:
            if file.version < newest:
                raise SchemaFault(
                    f"{file.name} was not applied to this database, but {applied[newest]['name']} was: give the file"
                    f" the next free number"
                )
        elif file.checksum != applied[file.version]["checksum"]:
            raise SchemaFault(
                f"{file.name} was changed after it was applied (as {applied[file.version]['name']}): restore what was"
                " applied, and put the change into a new file with the next number"
            )


@asynccontextmanager
async def _turn(connection: Connection, patience: Patience) -> AsyncIterator[None]:
    """Hold the lock that keeps a second run out.

    Polled, since a session that waits inside pg_advisory_lock holds a snapshot: the run that has the lock would
    wait for it in CREATE INDEX CONCURRENTLY, and Postgres would break the deadlock by failing one of them.
    """
    try:
        async with asyncio.timeout(patience.turn_seconds):
            while not await _try_lock(connection):  # noqa: ASYNC110  another process holds it: no event of ours
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise SchemaFault(
            f"another migration has been running for {patience.turn_seconds:g} s: let it end and start this one again;"
            " if none is running, end the session that holds the advisory lock (see pg_locks)"
        ) from None
    try:
        yield
    finally:
        # A connection that broke has released it already, and its error must not hide the one that is on its way.
        with suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(5):
                await connection.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])


async def _try_lock(connection: Connection) -> bool:
    cursor = await connection.execute("SELECT pg_try_advisory_lock(%s) AS ours", [_LOCK])
    return (await cursor.fetchall())[0]["ours"] is True


async def _apply(connection: Connection, file: _Migration, patience: Patience) -> None:
    for attempt in range(1, patience.lock_tries + 1):
        try:
            async with asyncio.timeout(_FILE_SECONDS), connection.transaction():
                await connection.execute(
                    "SELECT set_config('lock_timeout', %s, true)", [f"{round(patience.lock_seconds * 1000)}ms"]
                )
                # Bytes and no parameters: a % stays a %, and one message may hold many statements.
                await connection.execute(file.sql)
                if connection.info.transaction_status is not TransactionStatus.INTRANS:
                    raise SchemaFault(
                        f"{file.name} ends the transaction that it is applied in: take out its COMMIT or ROLLBACK, and"
                        " see what of it was applied"
                    )
                await connection.execute(
                    "INSERT INTO apns_outbox_migration (version, name, checksum) VALUES (%s, %s, %s)",
                    [file.version, file.name, file.checksum],
                )
        except errors.LockNotAvailable:
            if attempt == patience.lock_tries:
                raise SchemaFault(
                    f"{file.name} got no lock on a table in {attempt} tries of {patience.lock_seconds:g} s: end the"
                    " transaction that holds it (see pg_stat_activity), and run the migration again"
                ) from None
            await asyncio.sleep(patience.pause_seconds)
        except psycopg.Error as error:
            raise SchemaFault(
                f"{file.name}{_line(file, error)} failed: {said(error)}; nothing of it stays, mend it and run the"
                " migration again"
            ) from None
        except TimeoutError:
            raise SchemaFault(
                f"{file.name} was not through after {_FILE_SECONDS:g} s and was given up: apply its long part by hand,"
                " or at a quieter time"
            ) from None
        else:
            return


def _line(file: _Migration, error: psycopg.Error) -> str:
    if (position := error.diag.statement_position) is None:
        return ""
    return f", line {file.sql.decode()[: int(position) - 1].count('\n') + 1},"
