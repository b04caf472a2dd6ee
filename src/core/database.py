"""The one connection to Postgres: opened, checked, bounded in time and, when in doubt, thrown away.

Nothing here waits without a deadline, and nothing here tries a statement twice: whether a second try is right, only
the caller knows. What Postgres says about a failure is told in its first sentence alone: the DETAIL and CONTEXT below
it quote the row, with its device token and its payload.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString, assert_never

import psycopg
from psycopg import errors
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row
from psycopg.waiting import wait_async

from core import settings
from core.secret import Fetch, SecretFault, secrets_manager
from core.settings import DatabaseUrl, RdsIam, RdsSecret

RDS_ROOTS = Path(__file__).parent / "certs" / "rds-global-bundle.pem"

# Twice libpq's own limit below, which counts for one address: a name may have two, and is to be resolved first.
CONNECT_SECONDS = 10.0
# A statement of ours takes milliseconds. One that takes this long waits for a lock or for a dead network.
STATEMENT_SECONDS = 10.0
# SELECT 1 takes 0.2 ms. A connection that needs this long was lost while Lambda had us frozen.
CHECK_SECONDS = 2.0
# How long the server is given to hear that nobody waits for the statement any more.
CANCEL_SECONDS = 0.5

# No `options` and no SET: either pins the session of an RDS Proxy, or is refused by it.
_PARAMETERS: Mapping[str, str | int] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "application_name": "apns-outbox",
}


class DatabaseFault(Exception):  # noqa: N818  the name says what is so; an "Error" behind it would say nothing more
    """The database did not do what was asked. Says what happened and what to mend; never a password, a URL or a row."""

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class DatabaseGone(DatabaseFault):
    """The connection, the server or its answer was lost: the same statement may succeed later.

    It may also have been carried out already. Only what is fenced may be tried again.
    """


class StatementRefused(DatabaseFault):
    """The data was refused: the same statement will never succeed, though half of its rows might."""


class Connection(psycopg.AsyncConnection[DictRow]):
    """A connection that an interruption ends at once."""

    async def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:  # noqa: ASYNC109  psycopg's signature
        """Give up within half a second of being cancelled.

        psycopg's own asks the server to cancel and then waits for both answers, ten seconds on a network that
        swallows everything. We ask too (else a claim that a lock held up would go through later and lease rows for
        nobody), but wait for neither the server nor the statement: the connection is closed, and with it the socket
        that `wait_async` has by then taken off the event loop.
        """
        try:
            return await wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)
        except asyncio.CancelledError:
            try:
                with suppress(psycopg.Error):
                    await self.cancel_safe(timeout=CANCEL_SECONDS)
            finally:
                self.pgconn.finish()
            raise


class Database:
    """A connection that is kept from one invocation to the next, and made anew when it was lost.

    For one event loop, since statements that come at the same time take turns.
    """

    def __init__(self, where: settings.Database, *, read_secret: Fetch | None = None, roots: Path = RDS_ROOTS) -> None:
        self._where, self._read_secret, self._roots = where, read_secret or secrets_manager(), roots
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def ready(self) -> None:
        """Open the connection, or see that the one left from the last invocation still answers."""
        if self._connection is not None:
            # One that the server ended meanwhile still calls itself open: only a statement finds out.
            with suppress(DatabaseGone):
                await self.fetch("SELECT 1", deadline=CHECK_SECONDS)
                return
        await self.fetch("SELECT 1", deadline=CONNECT_SECONDS)

    async def fetch(
        self,
        sql: LiteralString,
        params: Mapping[str, object] | Sequence[object] | None = None,
        *,
        deadline: float = STATEMENT_SECONDS,
    ) -> list[DictRow]:
        """Run one statement and return its rows, each a dict; none if it returns none.

        The deadline holds for everything: waiting for one's turn, connecting if there is no connection, and the
        statement. A second late at most, DatabaseGone is raised.
        """
        try:
            async with asyncio.timeout(deadline), self._turn:
                return await self._fetch(sql, params)
        except TimeoutError:
            raise DatabaseGone(
                f"{_place(self._where)} gave no answer within {deadline:g} s: see that it is up, that the network"
                " between lets packets through, and that no transaction sits on a lock"
            ) from None

    async def _fetch(self, sql: LiteralString, params: Mapping[str, object] | Sequence[object] | None) -> list[DictRow]:
        # Closed without our doing: a statement that was cancelled closes it.
        if self._connection is None or self._connection.closed:
            self._connection = await connect(self._where, read_secret=self._read_secret, roots=self._roots)
        try:
            cursor = await self._connection.execute(sql, params)
            return await cursor.fetchall() if cursor.description else []
        except (psycopg.Error, UnicodeEncodeError) as error:
            fault = _fault(self._where, error)
            if isinstance(fault, DatabaseGone) and not isinstance(error, errors.DeadlockDetected):
                await self.close()
            raise fault from None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


async def connect(where: settings.Database, *, read_secret: Fetch | None = None, roots: Path = RDS_ROOTS) -> Connection:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            match where:
                case DatabaseUrl(url=url):
                    return await _open(where, {**_PARAMETERS, **_parsed(url)})
                case RdsIam(user=user):
                    # In a thread: importing botocore takes 100 ms, and outside Lambda credentials come over HTTP.
                    token = await asyncio.to_thread(_iam_token, where)
                    return await _open(where, _rds(where, user, token, roots))
                case RdsSecret():
                    read = read_secret or secrets_manager()
                    try:
                        return await _open(where, _rds(where, *await _login(where, read), roots))
                    except DatabaseFault as fault:
                        if fault.sqlstate != errors.InvalidPassword.sqlstate:
                            raise
                    # It was rotated between our reading it and the server's. Once: a wrong secret stays wrong.
                    return await _open(where, _rds(where, *await _login(where, read), roots))
                case _:
                    assert_never(where)
    except TimeoutError:
        raise DatabaseGone(f"{_place(where)} was not reached within {CONNECT_SECONDS:g} s: {_TIMED_OUT.mend}") from None


def said(error: psycopg.Error) -> str:
    """Tell what Postgres says of a statement, without what it quotes.

    Its sentence ends in `: "..."` where it repeats what it could not read, and that may be a device token.
    """
    words = (error.diag.message_primary or "").partition(': "')[0] or type(error).__name__
    return f"{words} ({error.sqlstate})" if error.sqlstate else words


async def _open(where: settings.Database, parameters: Mapping[str, Any]) -> Connection:
    try:
        return await Connection.connect(
            "",
            autocommit=True,
            # Prepared statements pin an RDS Proxy's session, and one unlucky plan would be kept for hours.
            prepare_threshold=None,
            row_factory=dict_row,
            **parameters,
        )
    except psycopg.ProgrammingError:  # it quotes the value it cannot read
        raise DatabaseFault(_BAD_URL) from None
    except psycopg.Error as error:
        raise _no_connection(where, error) from None


def _parsed(url: str) -> dict[str, Any]:
    try:
        parsed = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # it quotes the URL
        raise DatabaseFault(_BAD_URL) from None
    # An unescaped slash in the password makes its end a part of the database's name, which we would print.
    if any("@" in str(parsed.get(part, "")) for part in ("host", "dbname")):
        raise DatabaseFault(_BAD_URL)
    return parsed


_BAD_URL = (
    "DATABASE_URL cannot be read: it must be postgresql://user:password@host:port/name, the parameters behind a ?"
    " must be libpq's, and each of : / @ ? # % [ ] in the password must be written as % and two hexadecimal digits"
    " (@ is %40)"
)


def _rds(where: RdsIam | RdsSecret, user: str, password: str, roots: Path) -> dict[str, str | int]:
    return {
        **_PARAMETERS,
        "host": where.host,
        "port": where.port,
        "dbname": where.name,
        "user": user,
        "password": password,
        # Without the name's being checked, whoever has any certificate of Amazon's could pose as the database.
        "sslmode": "verify-full",
        "sslrootcert": str(roots),
    }


def _iam_token(where: RdsIam) -> str:
    """Sign in place of a password. Good for 15 minutes, and only for connecting.

    What `generate_db_auth_token` does, without the half second that making boto3's RDS client costs.
    """
    # Here and not above: 100 ms of a cold start that uses a URL.
    from botocore.auth import SigV4QueryAuth
    from botocore.awsrequest import AWSRequest
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    try:
        session = get_session()
        region, credentials = session.get_config_variable("region"), session.get_credentials()
        if credentials is None:
            raise DatabaseFault(
                f"cannot sign in to {_place(where)}: there are no AWS credentials; give the function a role (or set"
                " AWS_ACCESS_KEY_ID and its kin), or use DATABASE_URL"
            )
        if not region:
            raise DatabaseFault(f"cannot sign in to {_place(where)}: no AWS region is known; set AWS_DEFAULT_REGION")
        request = AWSRequest(
            method="GET",
            url=f"https://{where.host}:{where.port}/",
            params={"Action": "connect", "DBUser": where.user},
        )
        SigV4QueryAuth(credentials.get_frozen_credentials(), "rds-db", region, expires=900).add_auth(request)
    except BotoCoreError as error:
        raise DatabaseFault(
            f"cannot sign in to {_place(where)}: {type(error).__name__} while looking for AWS credentials; mend the"
            " function's role, or what AWS_PROFILE or the AWS configuration file say"
        ) from None
    return str(request.prepare().url).removeprefix("https://")


async def _login(where: RdsSecret, read: Fetch) -> tuple[str, str]:
    try:
        holds = json.loads(await read(where.secret_id))
    except SecretFault as fault:
        # Secrets Manager may be back in a moment. Its advice is written for the other secret.
        advice = str(fault).replace("APNS_SECRET_ID", "DB_SECRET_ID")
        raise DatabaseGone(f"cannot sign in to {_place(where)}: {advice}") from None
    except (ValueError, RecursionError):  # the JSON error carries the whole text
        holds = None
    # The secret's own user first: where two users alternate, the password is that user's alone.
    user = (holds.get("username") or where.user) if isinstance(holds, dict) else None
    password = holds.get("password") if isinstance(holds, dict) else None
    if not (isinstance(user, str) and user and isinstance(password, str) and password):
        raise DatabaseFault(
            f"cannot sign in to {_place(where)}: the secret {where.secret_id} (DB_SECRET_ID) must be a JSON object"
            ' {"username": "...", "password": "..."}'
        )
    return user, password


def _place(where: settings.Database) -> str:
    """Which database, as whom. Of a URL only these four parts, never the whole."""
    match where:
        case DatabaseUrl(url=url):
            with suppress(psycopg.ProgrammingError):
                parsed = conninfo_to_dict(url)
                host, port = parsed.get("host") or parsed.get("hostaddr") or "localhost", parsed.get("port") or 5432
                user = f" as {parsed['user']}" if parsed.get("user") else ""
                return f"the database {parsed.get('dbname') or '(of its user)'} at {host}:{port}{user}"
            return "the database"
        case (
            RdsIam(host=host, port=port, name=name, user=login) | RdsSecret(host=host, port=port, name=name, user=login)
        ):
            return f"the database {name} at {host}:{port}" + (f" as {login}" if login else "")
        case _:
            assert_never(where)


def _fault(where: settings.Database, error: psycopg.Error | UnicodeEncodeError) -> DatabaseFault:
    match error:
        case UnicodeEncodeError():
            return StatementRefused(f"{_place(where)} cannot take the data: a text holds half a surrogate pair")
        case psycopg.DataError() | psycopg.IntegrityError() | errors.RaiseException():
            # psycopg's own refusal, before anything was sent.
            words = "a text holds a NUL character" if "contain NUL" in str(error) else said(error)
            return StatementRefused(f"{_place(where)} cannot take the data: {words}", sqlstate=error.sqlstate)
        case errors.DeadlockDetected():
            return DatabaseGone(
                f"{_place(where)} gave up our statement to end a deadlock ({error.sqlstate}): it may be tried again",
                sqlstate=error.sqlstate,
            )
        case psycopg.OperationalError() | psycopg.InterfaceError() | psycopg.InternalError():
            # InternalError, too: after a fail-over it is the old primary, read-only now, that a connection leads to.
            if error.sqlstate is None:
                return DatabaseGone(f"{_place(where)} broke the connection off: see that it is up; a new one is made")
            return DatabaseGone(
                f"{_place(where)} did not finish the statement: {said(error)}; it may be tried again once the cause is"
                " gone",
                sqlstate=error.sqlstate,
            )
        case errors.InsufficientPrivilege():
            mend = "grant the function's database user what it lacks"
        case errors.UndefinedTable() | errors.UndefinedColumn() | errors.UndefinedFunction():
            mend = (
                "run the migrate function (handlers.migrate.handler), and see that the search_path leads to its tables"
            )
        case _:
            mend = "the statement does not suit this database; see that code and schema are of one version"
    return DatabaseFault(f"{_place(where)} refused the statement: {said(error)}; {mend}", sqlstate=error.sqlstate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """One way for a connection not to come about. libpq gives no code for it, only words."""

    sign: str
    what: str
    mend: str
    raises: type[DatabaseFault] = DatabaseFault
    sqlstate: str | None = None


_TIMED_OUT = _Failure(
    sign=r"timeout expired|timed out",
    what="did not answer in time",
    mend="see that host and port are right and that security groups and routes let the function through",
    raises=DatabaseGone,
)
# In this order: "no pg_hba.conf entry" speaks of SSL too. And of a name's two addresses one often refuses, which must
# not hide what is wrong with the other.
_FAILURES = (
    _Failure(
        sign=r"(password|PAM) authentication failed",
        what="does not accept our login",
        mend="mend user and password (with DB_AUTH=iam: GRANT rds_iam to the user, and rds-db:connect to the role)",
        sqlstate=errors.InvalidPassword.sqlstate,
    ),
    _Failure(
        sign=r"authentication failed|no password supplied|no pg_hba\.conf entry|is not permitted to log in",
        what="does not let us log in",
        mend="mend user and password, and see that the server takes this user from here, with or without TLS",
    ),
    _Failure(sign=r'role ".*" does not exist', what="does not know the user", mend="create the user, or mend its name"),
    _Failure(
        sign=r'database ".*" does not exist',
        what="does not exist",
        mend="create it, or mend its name in DATABASE_URL or DB_NAME",
    ),
    _Failure(
        sign=r"permission denied for database",
        what="is closed to the user",
        mend="GRANT CONNECT on it to the user",
    ),
    _Failure(
        sign=r"FATAL:",
        what="takes no connection now",
        mend="try again when it has started, or when it has connections to spare",
        raises=DatabaseGone,
    ),
    _TIMED_OUT,
    _Failure(
        sign=r"certificate|does not support SSL|SSL error:",
        what="did not pass the check of its TLS certificate",
        mend="give the host the name that is in the certificate, and see that its CA is in sslrootcert"
        " (for RDS: core/certs, whose README says what to do for a region that is not in it)",
    ),
    _Failure(
        sign=r"failed to resolve host|could not translate host name",
        what="has a host name that does not resolve",
        mend="mend the name in DATABASE_URL or DB_HOST, or the VPC's DNS",
        raises=DatabaseGone,
    ),
    _Failure(
        sign=r"Connection refused|Is the server running",
        what="refused the connection",
        mend="see that Postgres is up and that host and port are right",
        raises=DatabaseGone,
    ),
    _Failure(
        sign=r"Network is unreachable|No route to host",
        what="cannot be reached from here",
        mend="see that the function is in the database's VPC and has a route",
        raises=DatabaseGone,
    ),
    _Failure(
        sign=r"",
        what="broke the connection off while it was being made",
        mend="see that it is up, and that it is Postgres that listens there",
        raises=DatabaseGone,
    ),
)


def _no_connection(where: settings.Database, error: psycopg.Error) -> DatabaseFault:
    text = str(error)
    if "connection is bad: invalid " in text:  # a parameter's value, quoted
        return DatabaseFault(_BAD_URL)
    # With several addresses there are several lines. What a server says is worth more than what another did not.
    fatal = re.findall(r"FATAL:\s*(.*)", text)
    words = f"FATAL: {fatal[-1]}" if fatal else text
    failure = next(known for known in _FAILURES if re.search(known.sign, words))
    quoted = f" ({fatal[-1]})" if fatal else ""
    return failure.raises(f"{_place(where)} {failure.what}{quoted}: {failure.mend}", sqlstate=failure.sqlstate)
