"""The deploy's function, as CloudFormation invokes it: it is answered whatever happens, and in time."""

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
import pytest
from psycopg import sql

from core.database import DatabaseGone
from core.schema import REQUIRED_VERSION, SchemaFault
from handlers.deploy import ANSWER_SECONDS, NotAnswered, handler
from tests.support.database import Database

STACK = "arn:aws:cloudformation:eu-west-1:123456789012:stack/apns-outbox/51af3dc0"


@dataclass(slots=True)
class CloudFormation:
    """The place where answers go: a bucket that is written to by a signed URL."""

    url: str
    signature: str
    refusals: list[int] = field(default_factory=list)  # statuses to answer first
    answers: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def asks(self, kind: str, **more: object) -> dict[str, Any]:
        return {
            "RequestType": kind,
            "ResponseURL": f"{self.url}?X-Amz-Signature={self.signature}",
            "StackId": STACK,
            "RequestId": "5e7a2b1c",
            "ResourceType": "Custom::ApnsOutboxSchema",
            "LogicalResourceId": "Schema",
            "ResourceProperties": {"Migrations": "0001_outbox.sql"},
            **more,
        }

    @property
    def answer(self) -> dict[str, Any]:
        [only] = self.answers
        return only


@pytest.fixture
def cloudformation() -> Iterator[CloudFormation]:
    class Bucket(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = asked.refusals.pop(0) if asked.refusals else 200
            if status == 200:
                asked.answers.append(json.loads(body))
                asked.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        asked = CloudFormation(f"http://127.0.0.1:{server.server_port}/answer", secrets.token_hex(16))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield asked
        server.shutdown()
        thread.join()


@dataclass(slots=True)
class Context:
    """Lambda's: how much time is left."""

    seconds: float = 900.0
    _began: float = field(default_factory=time.monotonic)

    def get_remaining_time_in_millis(self) -> int:
        return round((self.seconds - (time.monotonic() - self._began)) * 1000)


@pytest.fixture
def role(admin: psycopg.Connection) -> Iterator[str]:
    """Name a user that is not there, and take it away afterwards: users belong to the server, not to the database."""
    name = f"drain_{secrets.token_hex(4)}"
    yield name
    admin.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))


def test_a_create_migrates_and_is_answered_with_what_was_asked(
    empty_database: Database, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database.url)

    handler(cloudformation.asks("Create"), Context())

    assert cloudformation.answer == {
        "Status": "SUCCESS",
        "StackId": STACK,
        "RequestId": "5e7a2b1c",
        "LogicalResourceId": "Schema",
        "PhysicalResourceId": f"{STACK}/Schema",
        "Data": {"Version": REQUIRED_VERSION},
    }
    with psycopg.connect(empty_database.dsn) as db:
        assert db.execute("SELECT max(version) FROM apns_outbox_migration").fetchone() == (REQUIRED_VERSION,)


def test_an_answer_carries_its_length_and_no_content_type_as_the_url_was_signed(
    database: Database, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database.url)

    handler(cloudformation.asks("Create"), Context())

    [headers] = cloudformation.headers
    assert headers["content-type"] == ""
    assert int(headers["content-length"]) > 0
    assert "transfer-encoding" not in headers


def test_an_update_migrates_what_is_new_and_stays_the_same_resource(
    database: Database, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database.url)

    handler(cloudformation.asks("Update", PhysicalResourceId="as it was"), Context())

    assert cloudformation.answer["Status"] == "SUCCESS"
    assert cloudformation.answer["PhysicalResourceId"] == "as it was"


def test_a_delete_touches_nothing_and_does_not_even_look_at_the_settings(
    cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)

    handler(cloudformation.asks("Delete", PhysicalResourceId="as it was"), Context())

    assert cloudformation.answer["Status"] == "SUCCESS"
    assert cloudformation.answer["PhysicalResourceId"] == "as it was"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://postgres@127.0.0.1:1/app", "refused the connection: see that Postgres is up"),
        ("mysql://127.0.0.1/app", "DATABASE_URL must begin with postgresql://"),
        ("", "the database is not named"),
    ],
)
def test_what_keeps_it_from_the_database_fails_the_deploy_with_the_reason(
    url: str, reason: str, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)

    handler(cloudformation.asks("Create"), Context())

    assert cloudformation.answer["Status"] == "FAILED"
    assert reason in cloudformation.answer["Reason"]


def test_a_migration_that_fails_fails_the_deploy_with_the_reason(
    empty_database: Database, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database.url)
    with psycopg.connect(empty_database.dsn, autocommit=True) as db:
        db.execute("CREATE TABLE notification_delivery ()")

    handler(cloudformation.asks("Create"), Context())

    assert cloudformation.answer["Status"] == "FAILED"
    assert '"notification_delivery" already exists' in cloudformation.answer["Reason"]


def test_a_migration_that_would_outlast_the_function_is_broken_off_in_time_to_say_so(
    empty_database: Database, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session holds the lock of the migrations, so that this one waits: for a minute, if it were let."""
    monkeypatch.setenv("DATABASE_URL", empty_database.url)
    context = Context(ANSWER_SECONDS + 1)
    with psycopg.connect(empty_database.dsn, autocommit=True) as db:
        db.execute("SELECT pg_advisory_lock(%s)", [migrations_lock()])

        handler(cloudformation.asks("Create"), context)

    assert context.get_remaining_time_in_millis() > 0
    assert cloudformation.answer["Status"] == "FAILED"
    assert "not through in the time" in cloudformation.answer["Reason"]


def migrations_lock() -> int:
    from core import schema

    return schema._LOCK


def test_a_database_that_takes_the_connection_and_says_nothing_is_given_up(
    cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DATABASE_URL", f"postgresql://postgres@127.0.0.1:{silent.getsockname()[1]}/app")

        handler(cloudformation.asks("Create"), Context(ANSWER_SECONDS + 1))

    assert cloudformation.answer["Status"] == "FAILED"


def test_what_nobody_foresaw_is_answered_by_its_kind_alone(
    cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Context):
        def get_remaining_time_in_millis(self) -> int:
            raise ZeroDivisionError("with a password in it")

    monkeypatch.setenv("DATABASE_URL", "postgresql://postgres@127.0.0.1:1/app")

    handler(cloudformation.asks("Create"), Broken())

    capsys.readouterr()  # the log has the traceback
    assert cloudformation.answer["Status"] == "FAILED"
    assert cloudformation.answer["Reason"] == "ZeroDivisionError; the function's log says more"


def test_a_long_reason_is_cut_to_what_cloudformation_takes(
    cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgresql://postgres@127.0.0.1:1/{'a' * 5000}")

    handler(cloudformation.asks("Create"), Context())

    assert cloudformation.answer["Status"] == "FAILED"
    assert len(json.dumps(cloudformation.answer)) < 4096


def test_an_answer_that_is_not_taken_is_given_again(
    database: Database, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database.url)
    cloudformation.refusals += [503]

    handler(cloudformation.asks("Create"), Context())

    assert cloudformation.answer["Status"] == "SUCCESS"


def test_an_answer_that_is_never_taken_is_an_error_that_does_not_show_the_signed_url(
    database: Database, cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lambda runs it again: it may be the network's fault, and the work is safe to repeat."""
    monkeypatch.setenv("DATABASE_URL", database.url)
    cloudformation.refusals += [503, 403, 503]

    with pytest.raises(NotAnswered, match=r"HTTP 503.*NAT gateway") as raised:
        handler(cloudformation.asks("Create"), Context())

    assert cloudformation.signature not in str(raised.getrepr(chain=True))


def test_the_signed_url_is_not_logged_at_any_level(
    database: Database,
    cloudformation: CloudFormation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("DATABASE_URL", database.url)
    cloudformation.refusals += [503]

    with caplog.at_level(logging.DEBUG):
        handler(cloudformation.asks("Create"), Context())

    said = caplog.text + "".join(capsys.readouterr())
    assert cloudformation.answer["Status"] == "SUCCESS"
    assert cloudformation.signature not in said


def test_asked_by_hand_it_returns_what_it_did_or_raises(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database.url)

    assert handler({}, Context())["version"] == REQUIRED_VERSION
    assert handler({}, Context()) == {"version": REQUIRED_VERSION, "applied": []}

    monkeypatch.setenv("DATABASE_URL", "postgresql://postgres@127.0.0.1:1/app")
    with pytest.raises(DatabaseGone, match="refused the connection"):
        handler({}, Context())


def test_the_drains_user_is_made_and_may_do_what_a_drain_does_and_no_more(
    empty_database: Database, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database.url)
    monkeypatch.setenv("DRAIN_DB_USER", role)

    handler({}, Context())
    handler({}, Context())

    with psycopg.connect(empty_database.dsn, user=role, autocommit=True) as db:
        allowed = {
            (table, verb)
            for (table,) in db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            for verb in ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
            if db.execute("SELECT has_table_privilege(%s, %s)", [table, verb]).fetchone() == (True,)
        }
        assert allowed == {
            ("notification_delivery", "SELECT"),
            ("notification_delivery", "INSERT"),
            ("notification_delivery", "UPDATE"),
            ("push_token", "SELECT"),
            ("push_token", "UPDATE"),
            ("recipient", "SELECT"),
            ("apns_outbox_migration", "SELECT"),
        }
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute("DELETE FROM notification_delivery")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute("CREATE TABLE mine ()")
    with psycopg.connect(empty_database.dsn, autocommit=True) as db:
        db.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))


@pytest.fixture
def on_rds(admin: psycopg.Connection) -> Iterator[None]:
    """Have the role whose members RDS lets in by token."""
    admin.execute("CREATE ROLE rds_iam")
    yield
    admin.execute("DROP ROLE rds_iam")


@pytest.mark.parametrize(("auth", "members"), [("iam", 1), ("secret", 0)])
def test_on_rds_the_drains_user_logs_in_by_token_unless_it_has_a_password(  # noqa: PLR0917  fixtures
    auth: str,
    members: int,
    database: Database,
    role: str,
    on_rds: None,
    admin: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", database.url)
    monkeypatch.setenv("DRAIN_DB_USER", role)
    monkeypatch.setenv("DRAIN_DB_AUTH", auth)

    handler({}, Context())
    handler({}, Context())

    found = admin.execute(
        "SELECT count(*) FROM pg_auth_members WHERE roleid = 'rds_iam'::regrole AND member = %s::regrole", [role]
    ).fetchone()
    assert found == (members,)
    with psycopg.connect(database.dsn, autocommit=True) as db:
        db.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))


def test_an_owner_that_may_make_no_user_says_what_an_administrator_has_to_run(
    empty_database: Database, role: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = f"owner_{secrets.token_hex(4)}"
    admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(owner)))
    try:
        with psycopg.connect(empty_database.dsn, autocommit=True) as db:
            db.execute(sql.SQL("GRANT ALL ON SCHEMA public TO {}").format(sql.Identifier(owner)))
        monkeypatch.setenv("DATABASE_URL", empty_database.url.replace("postgres@", f"{owner}@"))
        monkeypatch.setenv("DRAIN_DB_USER", role)
        with pytest.raises(SchemaFault, match=f'may not let .* in .* run: CREATE ROLE "{role}" LOGIN;$'):
            handler({}, Context())

        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        assert handler({}, Context())["version"] == REQUIRED_VERSION
    finally:
        with psycopg.connect(empty_database.dsn, autocommit=True) as db:
            db.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(owner)))
        admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(owner)))
