"""The outbox as tests use it: rows and devices to start from, and drains' sessions driven step by step."""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from core.database import Database as Connected
from core.delivery import Delivery, Device, Environment, Push
from core.drain import Settled, Swept
from core.outbox import Backlog, PostgresOutbox
from core.settings import DatabaseUrl
from core.verdict import Failed, InvalidToken, Outcome, Released, Retry
from tests.support.database import Database

BATCH_SIZE, LEASE_SECONDS, MAX_ATTEMPTS, GIVE_BACK_HOURS = 50, 120, 5, 72


def postgres_outbox(
    connected: Connected,
    *,
    batch_size: int = BATCH_SIZE,
    lease_seconds: int = LEASE_SECONDS,
    max_attempts: int = MAX_ATTEMPTS,
    give_back_hours: int = GIVE_BACK_HOURS,
) -> PostgresOutbox:
    return PostgresOutbox(
        database=connected,
        batch_size=batch_size,
        lease_seconds=lease_seconds,
        max_attempts=max_attempts,
        give_back_hours=give_back_hours,
    )


@dataclass(frozen=True, slots=True)
class Session:
    """A drain's outbox on a connection and an event loop of its own: each verb has gone through when it returns."""

    outbox: PostgresOutbox
    runner: asyncio.Runner

    def claim(self) -> list[Delivery]:
        return self.runner.run(self.outbox.claim())

    def claim_suspect(self) -> list[Delivery]:
        return self.runner.run(self.outbox.claim_suspect())

    def bind(self, deliveries: Sequence[Delivery]) -> list[Push]:
        return self.runner.run(self.outbox.bind(deliveries))

    def settle(
        self, outcomes: Sequence[tuple[Delivery, Outcome]], patience: Callable[[], float] = lambda: 10.0
    ) -> list[Settled]:
        return self.runner.run(self.outbox.settle(outcomes, patience))

    def release(self, deliveries: Sequence[Delivery]) -> list[Settled]:
        return self.settle([(each, Released()) for each in deliveries])

    def sweep(self) -> list[Swept]:
        return self.runner.run(self.outbox.sweep())

    def backlog(self) -> Backlog:
        return self.runner.run(self.outbox.backlog())


@contextmanager
def session(
    database: Database, connected: Connected | None = None, *, max_attempts: int = MAX_ATTEMPTS, **pace: int
) -> Iterator[Session]:
    """Open one. `pace` is what PostgresOutbox is made with."""
    connected = connected or Connected(DatabaseUrl(database.url))
    with asyncio.Runner() as runner:
        try:
            yield Session(postgres_outbox(connected, max_attempts=max_attempts, **pace), runner)
        finally:
            runner.run(connected.close())


def enqueue(db: psycopg.Connection[Any], user_id: str = "user", *, rows: int = 1, **columns: object) -> list[int]:
    """Insert so many rows, all alike, and return their ids."""
    values = {"user_id": user_id, "payload": {"aps": {"alert": "hello"}}} | columns
    names = sql.SQL(", ").join(map(sql.Identifier, values))
    statement = sql.SQL(
        "INSERT INTO notification_delivery ({}) SELECT {} FROM generate_series(1, {}) RETURNING id"
    ).format(names, sql.SQL(", ").join(sql.Placeholder() * len(values)), sql.Literal(rows))
    given = [Jsonb(value) if isinstance(value, dict) else value for value in values.values()]
    return [id_ for (id_,) in db.execute(statement, given)]


def register(db: psycopg.Connection[Any], user_id: str = "user", **columns: object) -> Device:
    """Insert a live device, of a token nobody has yet unless one is given."""
    values = {"user_id": user_id, "token": secrets.token_hex(32), "environment": "production"} | columns
    statement = sql.SQL("INSERT INTO push_token ({}) VALUES ({}) RETURNING id, token, environment, topic").format(
        sql.SQL(", ").join(map(sql.Identifier, values)), sql.SQL(", ").join(sql.Placeholder() * len(values))
    )
    row = db.execute(statement, list(values.values())).fetchone()
    assert row is not None
    return Device(push_token_id=row[0], token=row[1], environment=Environment(row[2]), topic=row[3])


def whole_rows(
    db: psycopg.Connection[Any], table: str = "notification_delivery", *, without: str = ""
) -> dict[int, str]:
    """Read every row with all its columns, as the database prints them: what is equal here is equal to the last bit."""
    statement = sql.SQL("SELECT id, (to_jsonb(t) - {})::text FROM {} t").format(without, sql.Identifier(table))
    return dict(db.execute(statement).fetchall())


def columns(db: psycopg.Connection[Any], id_: int, *names: str, table: str = "notification_delivery") -> Any:  # noqa: ANN401  whatever they hold
    """Read some columns of one row: a tuple, or the value alone when there is one."""
    statement = sql.SQL("SELECT {} FROM {} WHERE id = %s").format(
        sql.SQL(", ").join(map(sql.Identifier, names)), sql.Identifier(table)
    )
    row = db.execute(statement, [id_]).fetchone()
    assert row is not None, f"there is no row {id_} in {table}"
    return row if len(names) > 1 else row[0]


def gone(
    device: Device,
    *,
    reason: str = "Unregistered",
    dead_since: datetime | None = None,
    if_alive: Retry | Failed | None = None,
) -> InvalidToken:
    """Say what a 410 comes to."""
    error = "APNs answered 410 Unregistered."
    return InvalidToken(reason, error, device, dead_since, if_alive or Retry(reason, error, 60.0))
