"""A pytest plugin: the fixtures for tests of the whole. A test module names it in `pytest_plugins`."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest

from devtools.local_postgres import LocalPostgres
from devtools.secrets_manager import LocalSecretsManager
from tests.support.database import Database
from tests.support.handler import Everything, HeldApns, Stack


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
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Stack]:
    with ExitStack() as ends:
        apns = ends.enter_context(HeldApns())
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
