"""The connection, on a real Postgres: through a proxy that plays the network, and over TLS with a password."""

import asyncio
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from psycopg.types.json import Jsonb

from core import settings
from core.database import RDS_ROOTS, Database, DatabaseFault, DatabaseGone, StatementRefused, connect
from core.secret import SecretFault
from core.settings import DatabaseUrl, RdsIam, RdsSecret
from devtools.local_postgres import LocalPostgres
from tests.support.database import Database as Disposable
from tests.support.tcp_proxy import TcpProxy

SECRET = "dec0de5ec2e7"  # stands for a device token, a payload or a password: what must never be told
# Far above what anything here takes, and below the ten seconds for which psycopg, left alone, waits on a dead network.
PATIENCE = 5.0


def using[T](database: Disposable | str, story: Callable[[Database], Awaitable[T]]) -> T:
    """Run the story with a Database of its own; nothing is left on the loop when it is over."""

    async def once() -> T:
        opened = Database(DatabaseUrl(database if isinstance(database, str) else database.url))
        try:
            async with asyncio.timeout(60):
                return await story(opened)
        finally:
            await opened.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(once())


def fault_of(where: settings.Database | str) -> DatabaseFault:
    """Try to connect in vain. Whatever is raised is checked for what must not be told."""

    async def once() -> None:
        connection = await connect(DatabaseUrl(where) if isinstance(where, str) else where)
        await connection.close()

    with pytest.raises(DatabaseFault) as raised:
        asyncio.run(once())
    assert_discreet(raised.value)
    return raised.value


def assert_discreet(fault: DatabaseFault) -> None:
    logged = "".join(traceback.format_exception(fault))

    assert SECRET not in logged
    assert "://" not in str(fault).replace("postgresql://user:password@host:port/name", "")


async def refusal(database: Database, sql: str, params: Any = None) -> DatabaseFault:  # noqa: ANN401  as psycopg's
    with pytest.raises(DatabaseFault) as raised:
        await database.fetch(sql, params)
    assert_discreet(raised.value)
    return raised.value


async def backend(database: Database) -> int:
    pid = (await database.fetch("SELECT pg_backend_pid() AS pid"))[0]["pid"]
    assert isinstance(pid, int)
    return pid


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  what it waits for happens outside of this process
            await asyncio.sleep(0.01)


def count(connection: psycopg.Connection, query: str, *params: object) -> int:
    row = connection.execute(query.encode(), params).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def proxy(postgres: LocalPostgres) -> Iterator[TcpProxy]:
    with TcpProxy(postgres.address) as running:
        yield running


def through(proxy: TcpProxy, database: Disposable) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/{database.name}"


# What it does when all is well.


def test_rows_come_as_dicts_and_a_statement_without_rows_gives_none(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        assert await database.fetch("CREATE TABLE t (n int, word text)") == []
        assert await database.fetch("INSERT INTO t VALUES (%(n)s, 'a'), (2, 'b')", {"n": 1}) == []
        assert await database.fetch("SELECT * FROM t WHERE n > %s", [1]) == [{"n": 2, "word": "b"}]
        assert await database.fetch("SELECT 1 AS one WHERE false") == []

    using(empty_database, story)


def test_every_statement_is_its_own_transaction_and_none_is_prepared(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        transactions = [
            await database.fetch("SELECT pg_current_xact_id()::text AS id WHERE %s::int = 1", [1]) for _ in range(10)
        ]

        assert len({row["id"] for [row] in transactions}) == 10
        assert await database.fetch("SELECT count(*) AS n FROM pg_prepared_statements") == [{"n": 0}]

    using(empty_database, story)


def test_the_connection_is_kept_and_bears_our_name(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        first = await backend(database)
        await database.ready()

        assert await backend(database) == first
        assert await database.fetch("SHOW application_name") == [{"application_name": "apns-outbox"}]

    using(empty_database, story)


def test_a_database_that_was_closed_opens_again(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        await database.close()
        await database.close()

        assert await database.fetch("SELECT 1 AS n") == [{"n": 1}]

    using(empty_database, story)


# The connection is lost.


def test_ready_replaces_a_connection_that_the_server_ended_while_we_were_frozen(
    empty_database: Disposable, admin: psycopg.Connection
) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        before = await backend(database)
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [before])

        await database.ready()

        assert await backend(database) != before

    using(empty_database, story)


def test_ready_replaces_a_connection_that_the_network_lost_while_we_were_frozen(
    empty_database: Disposable, proxy: TcpProxy
) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        proxy.cut()

        await database.ready()

        assert await database.fetch("SELECT 1 AS n") == [{"n": 1}]

    using(through(proxy, empty_database), story)


def test_a_statement_that_lost_its_connection_is_not_run_again_but_the_next_one_is(
    empty_database: Disposable, admin: psycopg.Connection
) -> None:
    async def story(database: Database) -> None:
        await database.fetch("CREATE SEQUENCE tries")
        fault = await refusal(database, "SELECT nextval('tries'), pg_terminate_backend(pg_backend_pid(), 5000)")

        assert isinstance(fault, DatabaseGone)
        assert fault.sqlstate == "57P01"
        assert await database.fetch("SELECT nextval('tries') AS n") == [{"n": 2}]

    using(empty_database, story)


def test_a_connection_that_breaks_in_the_middle_of_a_statement_is_made_anew(
    empty_database: Disposable, proxy: TcpProxy
) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        running = asyncio.create_task(refusal(database, "SELECT pg_sleep(60)"))
        sent = proxy.bytes_to_target
        await until(lambda: proxy.bytes_to_target > sent)
        proxy.cut()

        assert isinstance(await running, DatabaseGone)
        assert await database.fetch("SELECT 1 AS n") == [{"n": 1}]

    using(through(proxy, empty_database), story)


def test_a_server_that_crashes_is_used_again_once_it_is_back(own_postgres: LocalPostgres) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        own_postgres.crash()
        for _ in range(2):  # the connection that there was; then none can be made
            assert isinstance(await refusal(database, "SELECT 1"), DatabaseGone)
        own_postgres.restart()

        await database.ready()

    using(own_postgres.url(), story)


# Nothing waits without a deadline.


async def assert_nothing_left(proxy: TcpProxy) -> None:
    """Neither on the loop nor in the network, once that lets our end of the connection through."""
    watched = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]  # no public list of readers
    assert len(watched) == 1  # the loop's own pipe
    proxy.resume()
    await until(lambda: proxy.count == 0)


def test_a_statement_that_the_network_swallows_ends_at_its_deadline_and_leaves_nothing(
    empty_database: Disposable, proxy: TcpProxy
) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        proxy.hang()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(DatabaseGone, match=r"gave no answer within 0\.2 s: see that it is up") as raised:
                await database.fetch("SELECT 1", deadline=0.2)
        assert_discreet(raised.value)
        await assert_nothing_left(proxy)

        assert await database.fetch("SELECT 1 AS n") == [{"n": 1}]

    using(through(proxy, empty_database), story)


def test_a_connection_that_the_network_swallows_ends_at_the_deadline_and_leaves_nothing(
    empty_database: Disposable, proxy: TcpProxy
) -> None:
    async def story(database: Database) -> None:
        proxy.hang()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(DatabaseGone, match=r"gave no answer within 0\.2 s"):
                await database.fetch("SELECT 1", deadline=0.2)
        await assert_nothing_left(proxy)

    using(through(proxy, empty_database), story)


def test_a_connection_that_nobody_answers_is_given_up_by_itself(empty_database: Disposable, proxy: TcpProxy) -> None:
    proxy.hang()

    fault = fault_of(through(proxy, empty_database) + "?connect_timeout=2")

    assert isinstance(fault, DatabaseGone)
    assert "did not answer in time: see that host and port are right" in str(fault)


def test_a_cancelled_statement_is_let_go_at_once_on_a_dead_network_too(
    empty_database: Disposable, proxy: TcpProxy
) -> None:
    async def story(database: Database) -> None:
        await database.ready()
        proxy.hang()
        running = asyncio.create_task(database.fetch("SELECT 1"))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running], timeout=PATIENCE)

        assert running.cancelled()
        await assert_nothing_left(proxy)
        assert await database.fetch("SELECT 1 AS n") == [{"n": 1}]

    using(through(proxy, empty_database), story)


def test_the_server_is_told_that_nobody_waits_for_the_statement_any_more(
    empty_database: Disposable, admin: psycopg.Connection
) -> None:
    async def story(database: Database) -> None:
        await database.fetch("CREATE TABLE t (n int)")
        with psycopg.connect(empty_database.dsn) as holder:
            holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(DatabaseGone, match="that no transaction sits on a lock"):
                await database.fetch("INSERT INTO t VALUES (1)", deadline=0.2)
            # While the lock is still held: else the statement would go through once it is free.
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
            await until(lambda: count(admin, waiting, empty_database.name) == 0)

        assert await database.fetch("SELECT n FROM t") == []

    using(empty_database, story)


def test_statements_take_turns_and_who_waits_in_vain_leaves_the_other_alone(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        pid = await backend(database)
        slow = asyncio.create_task(database.fetch("SELECT pg_sleep(0.5)::text, pg_backend_pid() AS pid"))
        await asyncio.sleep(0)
        with pytest.raises(DatabaseGone, match=r"within 0\.05 s"):
            await database.fetch("SELECT 1", deadline=0.05)
        patient = await database.fetch("SELECT 1 AS n")

        assert (await slow)[0]["pid"] == pid
        assert patient == [{"n": 1}]
        assert await backend(database) == pid

    using(empty_database, story)


def test_statements_that_come_before_there_is_a_connection_share_one(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        pids = await asyncio.gather(*(backend(database) for _ in range(3)))

        assert len(set(pids)) == 1

    using(empty_database, story)


def test_a_statement_that_gives_up_does_not_take_those_behind_it_along(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        hopeless = asyncio.create_task(database.fetch("SELECT pg_sleep(60)", deadline=0.2))
        await asyncio.sleep(0)

        assert await database.fetch("SELECT 1 AS n") == [{"n": 1}]
        with pytest.raises(DatabaseGone):
            await hopeless

    using(empty_database, story)


# The statement is refused.


def test_a_row_that_is_refused_is_never_shown_and_costs_no_connection(database: Disposable) -> None:
    insert = (
        "INSERT INTO notification_delivery (user_id, payload, last_error, dedupe_key)"
        " VALUES (%(user)s, %(payload)s, %(error)s, %(key)s)"
    )
    good = {"user": SECRET, "payload": Jsonb({"aps": SECRET}), "error": None, "key": SECRET}

    async def story(opened: Database) -> None:
        pid = await backend(opened)
        await opened.fetch(insert, good)
        for bad, sqlstate, words in [
            (good, "23505", 'duplicate key value violates unique constraint "dedupe_key_is_used_once"'),
            (good | {"error": SECRET * 100}, "23514", 'violates check constraint "last_error_is_at_most_500_charac'),
            (good | {"user": None}, "23502", "null value in column"),
            (good | {"payload": Jsonb({"aps": SECRET + "\0"})}, "22P05", "unsupported Unicode escape sequence"),
            (good | {"payload": Jsonb({"aps": SECRET + "\ud800"})}, "22P02", "invalid input syntax for type json"),
            (good | {"user": SECRET + "\0"}, None, "a text holds a NUL character"),
            (good | {"user": SECRET + "\ud800"}, None, "a text holds half a surrogate pair"),
        ]:
            fault = await refusal(opened, insert, bad)
            assert isinstance(fault, StatementRefused)
            assert fault.sqlstate == sqlstate
            assert words in str(fault)
        assert await backend(opened) == pid

    using(database, story)


def test_a_value_that_postgres_repeats_in_its_first_sentence_is_left_out(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        fault = await refusal(database, "SELECT %s::uuid", [SECRET])

        assert isinstance(fault, StatementRefused)
        assert str(fault).endswith("cannot take the data: invalid input syntax for type uuid (22P02)")

    using(empty_database, story)


def test_what_a_trigger_raises_is_the_fault_of_the_row(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        fault = await refusal(database, "DO $$ BEGIN RAISE EXCEPTION 'not this one'; END $$")

        assert isinstance(fault, StatementRefused)
        assert "not this one (P0001)" in str(fault)

    using(empty_database, story)


def test_a_deadlock_may_be_tried_again_on_the_same_connection(empty_database: Disposable) -> None:
    async def story(database: Database) -> None:
        await database.fetch("CREATE TABLE t (n int)")
        await database.fetch("INSERT INTO t VALUES (1), (2)")
        pid = await backend(database)
        other = await psycopg.AsyncConnection.connect(empty_database.dsn)
        async with other:
            # The other is patient, so it is ours that Postgres picks: the one whose deadlock_timeout ends first.
            await other.execute("SET deadlock_timeout = '60s'")
            await other.execute("UPDATE t SET n = n WHERE n = 2")
            update = "UPDATE t SET n = n WHERE n = "
            both = f"DO $$ BEGIN {update} 1; PERFORM pg_sleep(0.2); {update} 2; END $$"
            ours = asyncio.create_task(refusal(database, both))
            await asyncio.sleep(0.1)
            await other.execute("UPDATE t SET n = n WHERE n = 1")
            fault = await ours

        assert isinstance(fault, DatabaseGone)
        assert fault.sqlstate == "40P01"
        assert "may be tried again" in str(fault)
        assert await backend(database) == pid

    using(empty_database, story)


@pytest.mark.parametrize(
    ("sql", "sqlstate", "message"),
    [
        (
            "SELECT * FROM notification_delivery",
            "42P01",
            "does not exist .*: run|does not exist .*; run the migrate fun",
        ),
        ("SELECT * FROM pg_authid", "42501", "permission denied for table pg_authid .*; grant"),
        ("SELEC", "42601", "syntax error at or near .*; the statement does not suit this database"),
    ],
)
def test_a_statement_that_does_not_suit_the_database_says_what_to_mend(
    empty_database: Disposable, sql: str, sqlstate: str, message: str
) -> None:
    async def story(database: Database) -> None:
        await database.fetch("SET ROLE pg_monitor")
        with pytest.raises(DatabaseFault, match=message) as raised:
            await database.fetch(sql)

        assert type(raised.value) is DatabaseFault
        assert raised.value.sqlstate == sqlstate

    using(empty_database, story)


def test_a_server_that_became_read_only_is_left_for_another(empty_database: Disposable) -> None:
    """After a fail-over a connection that was kept leads to the old primary."""

    async def story(database: Database) -> None:
        pid = await backend(database)
        await database.fetch("SET default_transaction_read_only = on")
        fault = await refusal(database, "CREATE TABLE t ()")

        assert isinstance(fault, DatabaseGone)
        assert await backend(database) != pid

    using(empty_database, story)


# No connection comes about.


def test_a_port_where_nobody_listens(empty_database: Disposable, proxy: TcpProxy) -> None:
    proxy.refuse()

    fault = fault_of(f"postgresql://postgres:{SECRET}@127.0.0.1:{proxy.port}/{empty_database.name}")

    assert isinstance(fault, DatabaseGone)
    assert str(fault) == (
        f"the database {empty_database.name} at 127.0.0.1:{proxy.port} as postgres refused the connection: see that"
        " Postgres is up and that host and port are right"
    )


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("/nowhere", "the database nowhere .* does not exist .*: create it, or mend its name"),
        ("/postgres?user=stranger", 'does not know the user .*"stranger" does not exist'),
        ("/postgres?sslmode=require", "did not pass the check of its TLS certificate"),
        ("/postgres?sslmode=verify-full&sslrootcert=/nowhere", "did not pass the check of its TLS certificate"),
    ],
)
def test_what_no_second_try_would_mend_is_not_called_gone(proxy: TcpProxy, query: str, message: str) -> None:
    with pytest.raises(DatabaseFault, match=message):
        raise (fault := fault_of(f"postgresql://postgres:{SECRET}@127.0.0.1:{proxy.port}{query}"))

    assert type(fault) is DatabaseFault


def test_a_host_that_does_not_resolve() -> None:
    fault = fault_of(f"postgresql://postgres:{SECRET}@database.invalid/app")

    assert isinstance(fault, DatabaseGone)
    assert "has a host name that does not resolve: mend the name in DATABASE_URL or DB_HOST" in str(fault)


def test_a_server_without_room_may_have_some_later(postgres: LocalPostgres, admin: psycopg.Connection) -> None:
    admin.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
    try:
        fault = fault_of(postgres.url().replace("postgres@", "crowded@"))
    finally:
        admin.execute("DROP ROLE crowded")

    assert isinstance(fault, DatabaseGone)
    assert 'takes no connection now (too many connections for role "crowded")' in str(fault)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{SECRET}%zz@localhost/app",
        f"postgresql://user:pass@{SECRET}@localhost/app",
        f"postgresql://user:12/{SECRET}@localhost/app",
        f"postgresql://user@localhost/app?{SECRET}",
        f"postgresql://user@localhost/app?{SECRET}=1",
        f"postgresql://user@localhost/app?sslmode={SECRET}",
        f"postgresql://user@localhost/app?connect_timeout={SECRET}",
        f"mysql://user:{SECRET}@localhost/app",
    ],
)
def test_a_url_that_cannot_be_read_is_not_repeated(url: str) -> None:
    fault = fault_of(url)

    assert type(fault) is DatabaseFault
    assert str(fault).startswith("DATABASE_URL cannot be read: it must be postgresql://user:password@host:port/name")


# RDS: TLS that is checked, and a login that is fetched.


def test_the_packaged_roots_are_authorities_and_none_has_expired() -> None:
    roots = x509.load_pem_x509_certificates(RDS_ROOTS.read_bytes())

    names = {root.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value for root in roots}
    assert {f"Amazon RDS eu-west-1 Root CA {kind} G1" for kind in ("RSA2048", "RSA4096", "ECC384")} < names
    assert "Amazon Root CA 1" in names
    for root in roots:
        assert root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert root.not_valid_before_utc < datetime.now(UTC) < root.not_valid_after_utc


def certificate(subject: str, ca: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None) -> Any:  # noqa: ANN401  a pair
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(ca[0].subject if ca else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
    )
    return builder.sign(ca[1] if ca else key, hashes.SHA256()), key


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A server that asks for passwords, behind a door that speaks TLS, which the embedded Postgres does not."""

    server: LocalPostgres
    roots: Path
    tls: ssl.SSLContext

    def password(self, password: str) -> None:
        with psycopg.connect(self.server.dsn(), password="of the administrator", autocommit=True) as admin:
            admin.execute(f"ALTER ROLE apns_drain PASSWORD '{password}'".encode())

    @asynccontextmanager
    async def door(self) -> AsyncIterator[int]:
        async with await asyncio.start_server(self._enter, "127.0.0.1", 0) as listener:
            yield listener.sockets[0].getsockname()[1]

    async def _enter(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        to_server = None
        try:
            await client.readexactly(8)  # SSLRequest
            to_client.write(b"S")
            await to_client.start_tls(self.tls)
            server, to_server = await asyncio.open_connection("127.0.0.1", self.server.port)
            await asyncio.gather(self._pump(client, to_server), self._pump(server, to_client))
        except OSError:  # a client that did not like the certificate
            pass
        finally:
            to_client.close()
            if to_server:
                to_server.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    authority = certificate("an authority of the tests", None)
    mine, key = certificate("127.0.0.1", authority)
    folder = tmp_path_factory.mktemp("tls")
    (folder / "roots.pem").write_bytes(authority[0].public_bytes(Encoding.PEM))
    (folder / "door.pem").write_bytes(
        mine.public_bytes(Encoding.PEM) + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "door.pem")
    with LocalPostgres(tcp=True) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("ALTER ROLE postgres PASSWORD 'of the administrator'")
            admin.execute("CREATE ROLE apns_drain LOGIN")
            # Written over and not replaced, so that it stays the server's own file.
            (server.data_directory / "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\n")
            admin.execute("SELECT pg_reload_conf()")
        yield Guarded(server=server, roots=folder / "roots.pem", tls=tls)


@dataclass
class Secrets:
    """Secrets Manager, giving one answer after another, the last one for ever."""

    answers: list[str | Exception]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, secret_id: str) -> str:
        self.asked.append(secret_id)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def login(password: str, username: str = "apns_drain") -> str:
    return f'{{"username": "{username}", "password": "{password}", "engine": "postgres"}}'


async def who(where: settings.Database, secrets: Secrets, roots: Path = RDS_ROOTS) -> str:
    database = Database(where, read_secret=secrets, roots=roots)
    try:
        return str((await database.fetch("SELECT current_user AS name"))[0]["name"])
    finally:
        await database.close()


def sign_in(guarded: Guarded, secrets: Secrets, *, host: str = "127.0.0.1", roots: Path | None = None) -> str:
    async def through_the_door() -> str:
        async with guarded.door() as port:
            where = RdsSecret(host=host, port=port, name="postgres", user=None, secret_id="prod/db")
            return await who(where, secrets, roots or guarded.roots)

    return asyncio.run(through_the_door())


def test_the_secret_logs_in_over_tls(guarded: Guarded) -> None:
    guarded.password("first")
    secrets = Secrets([login("first")])

    assert sign_in(guarded, secrets) == "apns_drain"
    assert secrets.asked == ["prod/db"]


def test_a_password_that_was_rotated_meanwhile_is_fetched_once_more(guarded: Guarded) -> None:
    guarded.password("second")
    secrets = Secrets([login("first"), login("second")])

    assert sign_in(guarded, secrets) == "apns_drain"
    assert len(secrets.asked) == 2


def test_a_wrong_password_is_a_fault_after_two_tries_and_is_not_told(guarded: Guarded) -> None:
    guarded.password("third")
    secrets = Secrets([login(SECRET)])

    with pytest.raises(DatabaseFault, match=r"does not accept our login .*: mend user and password") as raised:
        sign_in(guarded, secrets)

    assert type(raised.value) is DatabaseFault
    assert raised.value.sqlstate == "28P01"
    assert len(secrets.asked) == 2
    assert_discreet(raised.value)


def test_a_server_whose_certificate_bears_another_name_is_refused(guarded: Guarded) -> None:
    with pytest.raises(DatabaseFault, match="did not pass the check of its TLS certificate") as raised:
        sign_in(guarded, Secrets([login("any")]), host="localhost")

    assert type(raised.value) is DatabaseFault


def test_a_server_whose_certificate_is_not_amazons_is_refused(guarded: Guarded) -> None:
    with pytest.raises(DatabaseFault, match="did not pass the check of its TLS certificate") as raised:
        sign_in(guarded, Secrets([login("any")]), roots=RDS_ROOTS)

    assert type(raised.value) is DatabaseFault


@pytest.mark.parametrize(
    "text", ["", SECRET, f'["{SECRET}"]', f'{{"username": "{SECRET}"}}', f'{{"password": "{SECRET}"}}', "[" * 100_000]
)
def test_a_secret_that_is_no_login_is_a_fault_that_does_not_tell_it(text: str) -> None:
    where = RdsSecret(host="db.invalid", port=5432, name="app", user=None, secret_id="prod/db")

    with pytest.raises(DatabaseFault, match=r'prod/db \(DB_SECRET_ID\) must be a JSON object \{"username"') as raised:
        asyncio.run(who(where, Secrets([text])))

    assert type(raised.value) is DatabaseFault
    assert_discreet(raised.value)


def test_a_secret_that_cannot_be_read_now_may_be_readable_later() -> None:
    where = RdsSecret(host="db.invalid", port=5432, name="app", user="apns_drain", secret_id="prod/db")
    secrets = Secrets([SecretFault("cannot read the secret prod/db: create it, or mend APNS_SECRET_ID")])

    with pytest.raises(DatabaseGone, match=r"cannot sign in to .* app at .*: create it, or mend DB_SECRET_ID"):
        asyncio.run(who(where, secrets))


def test_a_token_for_iam_says_who_wants_to_connect_to_what_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.database import _iam_token

    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    token = _iam_token(RdsIam(host="db.example", port=5433, name="app", user="apns_drain"))

    parts = urlsplit(f"//{token}")
    assert parts.netloc == "db.example:5433"
    said = parse_qs(parts.query)
    assert said["Action"] == ["connect"]
    assert said["DBUser"] == ["apns_drain"]
    assert said["X-Amz-Expires"] == ["900"]
    assert said["X-Amz-Credential"][0].startswith("testing/")
    assert said["X-Amz-Credential"][0].endswith("/eu-west-1/rds-db/aws4_request")
    assert len(said["X-Amz-Signature"][0]) == 64


@pytest.mark.parametrize(
    ("unset", "message"),
    [
        ("AWS_ACCESS_KEY_ID", "there are no AWS credentials; give the function a role"),
        ("AWS_SECRET_ACCESS_KEY", "PartialCredentialsError while looking for AWS credentials"),
        ("AWS_DEFAULT_REGION", "no AWS region is known; set AWS_DEFAULT_REGION"),
    ],
)
def test_iam_without_credentials_or_region_says_so(monkeypatch: pytest.MonkeyPatch, unset: str, message: str) -> None:
    monkeypatch.delenv(unset)

    fault = fault_of(RdsIam(host="db.invalid", port=5432, name="app", user="apns_drain"))

    assert f"cannot sign in to the database app at db.invalid:5432 as apns_drain: {message}" in str(fault)


def test_iam_logs_in_over_tls_with_the_token_as_the_password(guarded: Guarded) -> None:
    """No server but Amazon's can check the token. That it asked for one and did not like it, is what can be seen."""

    async def through_the_door() -> str:
        async with guarded.door() as port:
            where = RdsIam(host="127.0.0.1", port=port, name="postgres", user="apns_drain")
            return await who(where, Secrets([""]), guarded.roots)

    with pytest.raises(DatabaseFault, match=r"does not accept our login .*GRANT rds_iam to the user"):
        asyncio.run(through_the_door())
