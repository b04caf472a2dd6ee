"""Lets the drain's database user in: makes it where it is missing, and grants it what the drain does and no more.

So that whoever deploys needs no session of their own on a database that only a VPC can reach.
"""

from typing import LiteralString

import psycopg
from psycopg import errors, sql

from core.database import Connection, said
from core.schema import SchemaFault

# Nothing is ever deleted by a drain, and no column list keeps it from a payload: it has to push them.
_GRANTS = """
GRANT SELECT, INSERT, UPDATE ON notification_delivery TO {user};
GRANT SELECT, UPDATE ON push_token TO {user};
GRANT SELECT ON recipient, apns_outbox_migration TO {user};
"""


async def admit(connection: Connection, user: str, *, iam: bool) -> None:
    """Do what is lacking, as the tables' owner. Safe to repeat."""
    name = sql.Identifier(user)
    lacking = await _lacking(connection, user, iam=iam)
    try:
        async with connection.transaction():
            for statement in lacking:
                await connection.execute(sql.SQL(statement).format(user=name))
    except errors.InsufficientPrivilege as error:
        who = connection.info.user
        by_hand = " ".join(sql.SQL(statement).format(user=name).as_string(connection) for statement in lacking[:-1])
        mend = f"have an administrator run: {by_hand}" if by_hand else f"make {who} the owner of the tables"
        raise SchemaFault(f"{who} may not let the drain's user {user} in ({said(error)}): {mend}") from None
    except psycopg.Error as error:
        raise SchemaFault(
            f"the drain's user {user} was not let in: {said(error)}; mend that and run the migration again"
        ) from None


async def _lacking(connection: Connection, user: str, *, iam: bool) -> list[LiteralString]:
    cursor = await connection.execute(
        "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = %(user)s) AS known,"
        " EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_iam') AS on_rds,"
        " EXISTS (SELECT FROM pg_auth_members m JOIN pg_roles g ON g.oid = m.roleid JOIN pg_roles u ON u.oid = m.member"
        "         WHERE g.rolname = 'rds_iam' AND u.rolname = %(user)s) AS by_token",
        {"user": user},
    )
    [found] = await cursor.fetchall()
    statements: list[LiteralString] = []
    if not found["known"]:
        statements.append("CREATE ROLE {user} LOGIN;")
    # A member of rds_iam logs in by token alone: one with a password must not become one.
    if iam and found["on_rds"] and not found["by_token"]:
        statements.append("GRANT rds_iam TO {user};")
    return [*statements, _GRANTS]
