"""The migrate function, as Lambda invokes it."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from core.database import DatabaseGone
from core.schema import REQUIRED_VERSION, SchemaFault
from core.settings import BadSettings
from handlers.migrate import handler
from tests.support.database import Database

SOURCE = Path(__file__).parent.parent / "src"


def test_an_empty_database_is_brought_to_the_required_version_and_then_left_alone(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database.url)

    first, second = handler({}, None), handler({"anything": 1}, None)

    assert first["version"] == second["version"] == REQUIRED_VERSION
    assert [name[:4] for name in first["applied"]] == [f"{n:04}" for n in range(1, REQUIRED_VERSION + 1)]
    assert second["applied"] == []
    json.dumps(first)


def test_it_needs_nothing_but_the_database_and_logs_one_line(empty_database: Database) -> None:
    program = "from handlers.migrate import handler; handler({}, None)"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "DATABASE_URL": empty_database.url}

    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )

    [line] = ran.stdout.splitlines()
    logged = json.loads(line)
    assert logged["message"] == "migrated"
    assert logged["version"] == REQUIRED_VERSION
    assert len(logged["applied"]) == REQUIRED_VERSION
    assert ran.stderr == ""


def test_what_went_wrong_is_raised_as_it_is(empty_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "")
    with pytest.raises(BadSettings, match=r"set .*DATABASE_URL"):
        handler({}, None)

    monkeypatch.setenv("DATABASE_URL", "postgresql://postgres@127.0.0.1:1/app")
    with pytest.raises(DatabaseGone, match="refused the connection"):
        handler({}, None)

    monkeypatch.setenv("DATABASE_URL", empty_database.url)
    with psycopg.connect(empty_database.dsn, autocommit=True) as db:
        db.execute("CREATE TABLE notification_delivery ()")
    with pytest.raises(SchemaFault, match='"notification_delivery" already exists'):
        handler({}, None)


def test_a_log_level_of_debug_does_not_print_secrets() -> None:
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.DEBUG)
    try:
        assert not logging.getLogger("botocore.parsers").isEnabledFor(logging.DEBUG)
    finally:
        root.setLevel(before)
