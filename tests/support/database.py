"""Databases on the throw-away server: the project's own schema, and proof that what is dropped is ours."""

import asyncio
from dataclasses import dataclass
from typing import Self

import psycopg
from psycopg import sql

from core import database as core_database
from core.schema import migrate
from core.settings import DatabaseUrl
from devtools.local_postgres import LocalPostgres


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    name: str
    dsn: str
    url: str  # what DATABASE_URL takes

    @classmethod
    def on(cls, server: LocalPostgres, name: str) -> Self:
        return cls(name=name, dsn=server.dsn(name), url=server.url(name))


def connect(server: LocalPostgres) -> psycopg.Connection:
    """Open an administrator's session, having proved that the server is the one we started and nobody else's."""
    connection = psycopg.connect(server.dsn(), autocommit=True)
    answer = connection.execute("SHOW data_directory").fetchone()
    if answer != (str(server.data_directory),):
        connection.close()
        raise RuntimeError(f"the server at {server.dsn()} keeps its data in {answer}, not in {server.data_directory}")
    return connection


def create(admin: psycopg.Connection, name: str, template: str) -> None:
    # FILE_COPY: 8 to 10 ms for a database; the other strategy, the default since 15, writes every page to the WAL: 25.
    strategy = sql.SQL("STRATEGY FILE_COPY" if admin.info.server_version >= 150000 else "")
    admin.execute(
        sql.SQL("CREATE DATABASE {} TEMPLATE {} {}").format(sql.Identifier(name), sql.Identifier(template), strategy)
    )


def drop(admin: psycopg.Connection, name: str) -> None:
    admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def apply_migrations(url: str) -> None:
    async def apply() -> None:
        async with await core_database.connect(DatabaseUrl(url=url)) as connection:
            await migrate(connection)

    asyncio.run(apply())
