"""A pytest plugin: the fixtures for tests of the whole. A test module names it in `pytest_plugins`."""

import io
import logging
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest

from devtools.local_postgres import LocalPostgres
from devtools.secrets_manager import LocalSecretsManager
from devtools.simulated_apns import SimulatedApns
from handlers import drain
from tests.support.database import Database, create, drop
from tests.support.handler import Everything, HeldApns, Stack, Time


class _StandardOutput(io.TextIOBase):
    """Whatever standard output is at the moment: pytest puts in another for each phase of a test."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)


@pytest.fixture(scope="session")
def secrets_manager() -> Iterator[LocalSecretsManager]:
    with LocalSecretsManager() as started:
        yield started


@contextmanager
def _stack(
    database: Database,
    secrets_manager: LocalSecretsManager,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str] | None,
) -> Iterator[Stack]:
    with ExitStack() as ends:
        apns = ends.enter_context(HeldApns(one_stream_until_authorized=True, remembering=True))
        stack = Stack(
            database=database,
            db=psycopg.connect(database.dsn, autocommit=True),
            apns=apns,
            secrets=secrets_manager,
            secret_id=f"apns-{database.name}",
            monkeypatch=monkeypatch,
            capsys=capsys,
        )
        ends.callback(lambda: stack.db.close())  # noqa: PLW0108  by then the session may be another
        stack.setenv(
            **secrets_manager.environment,
            DATABASE_URL=database.url,
            APNS_SECRET_ID=stack.secret_id,
            APNS_PRODUCTION_URL=apns.url,
            APNS_SANDBOX_URL=apns.url,
            APNS_CA_FILE=str(apns.ca_file),
            POWERTOOLS_LOG_LEVEL="DEBUG",
        )
        stack.configure(apns.secret())
        # The handler's logger goes on writing to what was standard output when it was made.
        ours = logging.getLogger("apns-outbox")
        for handler in ours.handlers:
            monkeypatch.setattr(handler, "stream", _StandardOutput())
        everything, root = Everything(), logging.getLogger()
        levels = {logger: logger.level for logger in (ours, root)}
        root.addHandler(everything)
        try:
            for logger in levels:
                logger.setLevel(logging.DEBUG)
            yield stack
        finally:
            try:
                stack.close()
            finally:
                root.removeHandler(everything)
                for logger, level in levels.items():
                    logger.setLevel(level)
        stack.said += everything.lines
        stack.assert_discreet()


@pytest.fixture
def stack(
    database: Database,
    secrets_manager: LocalSecretsManager,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Stack]:
    """Put everything together, on a database of the run's server."""
    with _stack(database, secrets_manager, monkeypatch, capsys) as made:
        yield made


@pytest.fixture
def own_stack(
    own_postgres: LocalPostgres,
    secrets_manager: LocalSecretsManager,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Stack]:
    """Put everything together, on a server of its own that may be stopped."""
    with _stack(Database.on(own_postgres, "postgres"), secrets_manager, monkeypatch, capsys) as made:
        yield made


@pytest.fixture(scope="module")
def _shared_stack(
    postgres: LocalPostgres,
    admin: psycopg.Connection,
    _template: str,
    secrets_manager: LocalSecretsManager,
) -> Iterator[Stack]:
    name = f"shared_{secrets.token_hex(4)}"
    create(admin, name, _template)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        _stack(Database.on(postgres, name), secrets_manager, monkeypatch, None) as made,
    ):
        yield made
    drop(admin, name)


@pytest.fixture
def shared_stack(_shared_stack: Stack, capsys: pytest.CaptureFixture[str]) -> Iterator[Stack]:
    """Use what the module's tests before have left warm, with empty tables: a tenth of a `stack`'s time."""
    _shared_stack.share(capsys)
    yield _shared_stack
    _shared_stack.share(None)


@pytest.fixture
def sandbox(stack: Stack) -> Iterator[SimulatedApns]:
    """Have the sandbox beside: without it, one simulated APNs is both."""
    with SimulatedApns(
        environment="sandbox",
        credentials=stack.apns.credentials,
        authority=stack.apns.authority,
        one_stream_until_authorized=True,
        remembering=True,
    ) as beside:
        stack.setenv(APNS_SANDBOX_URL=beside.url)
        yield beside


@pytest.fixture
def clocks(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Time:
    """Let a test move the handler's clocks. It is ten seconds past a half hour, to which provider tokens are dated."""
    moved = Time(ahead=10 - time.time() % 1800)
    monkeypatch.setattr(drain, "time", moved)
    stack.apns.ahead = moved.ahead
    return moved
