"""Bad input: one clear message that says what to mend; every row as it was, or of one row's fault that row alone."""

import json
import re
import socket
from collections.abc import Iterator

import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from psycopg import errors

from core.database import DatabaseFault, DatabaseGone
from core.schema import SchemaFault
from core.secret import SecretFault
from core.settings import BadSettings
from devtools.local_postgres import LocalPostgres
from devtools.simulated_apns import Hangup
from tests.support.handler import LEASE, Invocation, Stack, only

pytest_plugins = ["tests.support.handler_fixtures"]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def untouched(stack: Stack) -> Iterator[Stack]:
    """Have rows of every kind there: due, scheduled, leased, left by a drain that died, ended. None may change."""
    for _ in range(3):
        stack.post()
    stack.enqueue("nobody")
    stack.db.execute("""
        INSERT INTO notification_delivery (user_id, payload, status, reason, attempts, next_attempt_at, claimed_at)
        VALUES ('a', '{}', 'pending', NULL, 1, now() + interval '60 seconds', now()),
               ('b', '{}', 'pending', NULL, 1, now() - interval '60 seconds', now()),
               ('c', '{}', 'pending', NULL, 5, now() - interval '60 seconds', now()),
               ('d', '{}', 'skipped', 'unconfigured', 1, now() - interval '60 seconds', NULL),
               ('e', '{}', 'pending', NULL, 0, now() + interval '1 hour', NULL)
    """)
    before = stack.tables()
    yield stack
    assert stack.tables() == before
    assert stack.apns.journal == []


def key(private_key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    return private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def test_every_variable_that_does_not_parse_is_named_at_once(untouched: Stack) -> None:
    bad = {
        "DRAIN_BATCH_SIZE": "many",
        "DRAIN_MAX_BATCHES": "0",
        "LEASE_SECONDS": "12O",
        "MAX_ATTEMPTS": "-1",
        "BACKOFF_BASE_SECONDS": "1.5",
        "BACKOFF_CAP_SECONDS": "1e3",
        "GIVE_BACK_HOURS": "three days",
        "APNS_PRODUCTION_URL": "http://user:hunter2@api.push.apple.com",
        "APNS_SANDBOX_URL": "api.sandbox.push.apple.com",
        "DATABASE_URL": "mysql://root:hunter2@db/outbox",
    }
    untouched.setenv(**bad)

    with pytest.raises(BadSettings) as raised:
        untouched.drain()

    assert [name for name in bad if not re.search(rf"(^|; ){name} ", str(raised.value))] == []
    assert "hunter2" not in "".join(untouched.said)


def test_no_database_is_named(untouched: Stack) -> None:
    untouched.setenv(DATABASE_URL=None)

    with pytest.raises(BadSettings, match="set DB_HOST, DB_NAME, DB_USER, or DATABASE_URL instead"):
        untouched.drain()


def test_a_ca_file_that_is_not_there_or_is_none(untouched: Stack) -> None:
    for path in ("/nowhere/ca.pem", __file__):
        untouched.setenv(APNS_CA_FILE=path)
        with pytest.raises(BadSettings, match=f"APNS_CA_FILE .*{re.escape(path)}"):
            untouched.drain()


def test_a_database_where_nobody_listens(stack: Stack, closed_port: int) -> None:
    stack.post()
    before = stack.tables()
    stack.setenv(DATABASE_URL=f"postgresql://postgres:hunter2@127.0.0.1:{closed_port}/outbox")

    with pytest.raises(
        DatabaseGone,
        match=f"outbox at 127.0.0.1:{closed_port} as postgres refused the connection: see that Postgres is up",
    ):
        stack.drain()

    assert stack.tables() == before
    assert "hunter2" not in "".join(stack.said)


def test_a_database_that_does_not_exist(untouched: Stack) -> None:
    untouched.setenv(DATABASE_URL=untouched.database.url.replace(untouched.database.name, "nowhere"))

    with pytest.raises(DatabaseFault, match=r"the database nowhere .*does not exist.*create it, or mend its name"):
        untouched.drain()


def test_a_database_that_was_never_migrated(untouched: Stack, postgres: LocalPostgres) -> None:
    untouched.setenv(DATABASE_URL=postgres.url("postgres"))

    with pytest.raises(
        SchemaFault, match=r"at version 0 .* run the migrate function \(handlers.migrate.handler\) first"
    ):
        untouched.drain()

    with psycopg.connect(postgres.dsn("postgres")) as bare:
        tables = bare.execute("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace").fetchall()
    assert tables == []


def test_a_schema_that_is_too_old(untouched: Stack) -> None:
    untouched.db.execute("DELETE FROM apns_outbox_migration")

    for _ in range(2):  # it is not taken for seen to, either
        with pytest.raises(SchemaFault, match="the database schema is at version 0 and this code needs"):
            untouched.drain()


def test_a_schema_that_is_mended_is_used_by_the_same_environment(stack: Stack) -> None:
    stack.post()
    kept = stack.db.execute("DELETE FROM apns_outbox_migration RETURNING version, name, checksum").fetchall()
    with pytest.raises(SchemaFault):
        stack.drain()

    for row in kept:
        stack.db.execute("INSERT INTO apns_outbox_migration (version, name, checksum) VALUES (%s, %s, %s)", row)
    assert stack.drain()["sent"] == 1


def test_a_user_without_rights(untouched: Stack) -> None:
    untouched.db.execute("DO $$ BEGIN CREATE ROLE poor LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    untouched.setenv(DATABASE_URL=untouched.database.url.replace("postgres@", "poor@"))

    with pytest.raises(DatabaseFault, match=r"permission denied .*grant the function's database user what it lacks"):
        untouched.drain()


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        pytest.param("{", "is not JSON: it must be", id="not JSON"),
        pytest.param("[1]", "is not a JSON object: it must be", id="not an object"),
        pytest.param('"text"', "is not a JSON object: it must be", id="a string"),
        pytest.param("null", "is not a JSON object: it must be", id="null"),
        pytest.param({"team_id": "TEAM"}, "has no text in key_id, private_key, topic", id="incomplete"),
        pytest.param({"private_key": "AuthKey.p8"}, "is not PEM: put in the whole", id="no PEM"),
        pytest.param(
            {"private_key": key(ec.generate_private_key(ec.SECP384R1()))}, "on the curve secp384r1", id="P-384"
        ),
        pytest.param(
            {"private_key": key(rsa.generate_private_key(65537, 2048))}, "not an elliptic-curve key", id="RSA"
        ),
        pytest.param({"team_id": "TE AM"}, "has a blank, a control or a non-ASCII character in team_id", id="blank"),
    ],
)
def test_a_secret_that_is_not_what_it_should_be(untouched: Stack, secret: object, says: str) -> None:
    if (isinstance(secret, dict) and len(secret) == 1 and "private_key" in secret) or secret == {"team_id": "TE AM"}:
        secret = untouched.apns.secret() | secret
    untouched.configure(secret)
    with pytest.raises(SecretFault, match=f"the secret {untouched.secret_id} .*{re.escape(says)}"):
        untouched.drain()


def test_a_secret_that_does_not_exist(untouched: Stack) -> None:
    untouched.setenv(APNS_SECRET_ID="nowhere")
    with pytest.raises(
        SecretFault, match=r"cannot read the secret nowhere: it does not exist here.* create it, or mend"
    ):
        untouched.drain()


def test_a_secrets_manager_that_is_not_reached(untouched: Stack, closed_port: int) -> None:
    untouched.setenv(AWS_ENDPOINT_URL=f"http://127.0.0.1:{closed_port}")
    with pytest.raises(SecretFault, match="Secrets Manager was not reached"):
        untouched.drain()


def test_a_fault_of_the_secret_comes_before_one_of_the_database(stack: Stack, closed_port: int) -> None:
    """And neither leads to the other's being forgotten: once the secret is mended, the database's is told."""
    stack.configure("{")
    stack.setenv(DATABASE_URL=f"postgresql://postgres@127.0.0.1:{closed_port}/outbox")
    with pytest.raises(SecretFault):
        stack.drain()
    stack.configure(stack.apns.secret())
    with pytest.raises(DatabaseGone):
        stack.drain()


def test_a_secret_that_is_mended_is_used_by_the_same_environment_at_once(stack: Stack) -> None:
    posted = stack.post()
    stack.configure("{")
    with pytest.raises(SecretFault):
        stack.drain()
    stack.configure(stack.apns.secret())
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert stack.row(posted).attempts == 1


@pytest.mark.parametrize(
    ("secret_id", "secret"),
    [
        pytest.param(None, None, id="no secret's id"),
        pytest.param("  ", None, id="a blank id"),
        pytest.param("apns", " \n", id="a blank secret"),
        pytest.param("apns", "{}", id="an empty object"),
    ],
)
def test_unconfigured_skips_what_is_due_for_good_and_later_only_what_is_new_is_pushed(
    stack: Stack, secret_id: str | None, secret: str | None
) -> None:
    stack.setenv(APNS_SECRET_ID=stack.secret_id if secret_id == "apns" else secret_id)
    if secret is not None:
        stack.configure(secret)
    for _ in range(55):  # more than a batch: they use none up
        stack.post()
    scheduled = stack.post()
    stack.db.execute(
        "UPDATE notification_delivery SET next_attempt_at = now() + interval '1 hour' WHERE id = %s", [scheduled.id]
    )

    assert stack.drain() == only(claimed=55, skipped=55)

    ended = stack.ends()
    assert ended.pop(scheduled.id) == ("pending", None, 0)
    assert set(ended.values()) == {("skipped", "unconfigured", 1)}
    assert stack.apns.journal == []
    (line,) = stack.logged("APNs is not configured")
    assert line["level"] == "WARNING"

    stack.setenv(APNS_SECRET_ID=stack.secret_id)
    stack.configure(stack.apns.secret())
    stack.advance(LEASE)
    new = stack.post()
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert [push.token for push in stack.apns.journal] == [new.token]


def test_a_payload_that_is_no_object_does_not_get_in(stack: Stack) -> None:
    for payload in ("[]", '"text"', "3", "null"):
        with pytest.raises(errors.CheckViolation, match="payload is no JSON object"):
            stack.db.execute("SELECT enqueue_notification('u', %s::jsonb)", [payload])
    assert stack.rows() == {}


def test_a_token_that_is_not_hex_does_not_get_in(stack: Stack) -> None:
    for token in ("", "abc", "xy", "ab cd", "ab\n"):
        with pytest.raises(errors.CheckViolation, match=r"token (is not in hex|has an odd number of hex digits)"):
            stack.db.execute("SELECT register_push_token('u', %s)", [token])


@pytest.mark.parametrize("token", ["ab cd", "ab\ncd", "gerät", "", "%00", "?x=1#y"])
def test_a_token_that_got_in_all_the_same_fails_that_row_alone(stack: Stack, token: str) -> None:
    stack.db.execute("ALTER TABLE push_token DROP CONSTRAINT token_is_hex")
    before = stack.post()
    stack.db.execute("INSERT INTO push_token (user_id, token, environment) VALUES ('odd', %s, 'production')", [token])
    odd, behind = stack.enqueue("odd"), stack.post()

    tally = stack.drain()

    assert (tally["claimed"], tally["sent"]) == (3, 2)
    ended = stack.ends()
    assert (ended[before.id], ended[behind.id]) == (("sent", None, 1), ("sent", None, 1))
    assert ended[odd][0] in ("failed", "invalid_token")


def test_absurd_rows_fail_alone(stack: Stack) -> None:
    """What a producer can insert: the ends of what the columns hold."""
    user, _ = "odd", stack.device("odd")
    payloads = [
        {"aps": {"alert": "\u2028\u0007"}},
        {"n": 10**300},
        {"deep": json.loads("[" * 500 + "]" * 500)},
        {},
    ]
    ids = [stack.one("SELECT enqueue_notification(%s, %s::jsonb)", user, json.dumps(each)) for each in payloads]
    ids += [
        stack.one(
            "INSERT INTO notification_delivery (user_id, payload, expires_at) VALUES (%s, '{}', %s) RETURNING id",
            user,
            date,
        )
        for date in ("4000-01-01 BC", "1970-01-01", "200000-01-01 00:00+14")
    ]
    stack.db.execute(
        "INSERT INTO notification_delivery (user_id, payload, next_attempt_at, attempts) VALUES"
        " (%(user)s, '{}', '4000-01-01 BC', 0), (%(user)s, '{}', now(), 1000000)",
        {"user": user},
    )
    normal = stack.post()

    tally = stack.drain()

    assert tally["claimed"] == 10
    assert tally["skipped"] == 2  # what expired long ago
    assert tally["sent"] + tally["failed"] == 8
    assert stack.ends()[normal.id] == ("sent", None, 1)


def test_an_apns_whose_certificate_is_not_trusted_gets_nothing(stack: Stack) -> None:
    stack.setenv(APNS_CA_FILE=None)
    posted = stack.post()

    tally = stack.drain()

    assert tally == only(claimed=1, pushed=1, withheld=1)
    assert stack.apns.journal == []
    row = stack.row(posted)
    assert (row.reason, row.attempts) == ("connection_failed", 0)
    assert "certificate" in row.last_error


def test_an_answer_that_never_is_one_does_not_hold_up_the_others(stack: Stack) -> None:
    lost, kept = stack.post(Hangup()), [stack.post() for _ in range(9)]
    assert stack.drain(context=Invocation()) == only(claimed=10, pushed=10, sent=9, retried=1)
    assert stack.row(lost).reason == "connection_lost"
    assert {stack.row(each).status for each in kept} == {"sent"}
