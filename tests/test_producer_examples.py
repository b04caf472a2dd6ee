"""docs/producers.md: its examples run as they stand, what they queue reaches APNs, and its tables say what is so."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import errors

from core.request import LARGEST_PAYLOAD, LARGEST_VOIP_PAYLOAD, TOPIC_SUFFIX
from devtools.local_postgres import postgres_binaries
from tests.support.handler import Stack, only

pytest_plugins = ["tests.support.handler_fixtures"]

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "producers.md").read_text(encoding="utf-8")
PG_FOR_NODE = Path(__file__).parent / "support" / "producers"
MOST_SECONDS = 60
CONTENT = "content-state"


@dataclass(frozen=True, slots=True)
class Example:
    language: str  # as the fence says: for `sql owner` not to be run by a producer
    code: str

    def __str__(self) -> str:
        return self.code.split("\n", 1)[0][:40]


EXAMPLES = [Example(*found) for found in re.findall(r"^```([^`\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def written_in(*languages: str) -> list[Example]:
    return [example for example in EXAMPLES if example.language in languages]


def table(*header: str) -> list[list[str]]:
    """Read the table whose header begins with these cells, without its header."""
    lines = PAGE.partition(f"\n| {' | '.join(header)} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@dataclass(frozen=True, slots=True)
class Shop:
    """The service of the page: a login `shop`, and what its environment says of the database."""

    stack: Stack

    def run(self, example: Example) -> str:
        url = self.stack.database.url
        if example.language != "sql owner":
            url = url.replace("postgres@", "shop@")
        command = {
            "sql owner": [str(postgres_binaries() / "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", url],
            "sql": [str(postgres_binaries() / "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", url],
            "python": [sys.executable, "-"],
            "js": ["node", "--input-type=module", "-"],
        }[example.language]
        ran = subprocess.run(
            command,
            input=example.code,
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
            cwd=PG_FOR_NODE,  # where `import pg` finds it
            env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
            | {"DATABASE_URL": url},
        )
        assert ran.returncode == 0, f"{example}: {ran.stderr}"
        assert ran.stderr == ""
        return ran.stdout


@pytest.fixture
def shop(stack: Stack) -> Iterator[Shop]:
    stack.hidden += re.findall("[0-9a-f]{64}", PAGE)
    stack.db.execute("CREATE ROLE shop LOGIN")
    try:
        yield Shop(stack)
    finally:
        stack.db.execute("DROP OWNED BY shop CASCADE; DROP ROLE shop")


@pytest.fixture
def set_up(shop: Shop) -> Shop:
    """Run what the page runs before its first example in another language."""
    for example in EXAMPLES[: next(at for at, example in enumerate(EXAMPLES) if example.language == "python")]:
        shop.run(example)
    return shop


def queued(stack: Stack) -> list[tuple[Any, ...]]:
    return stack.db.execute(
        "SELECT id::text, payload, dedupe_key FROM notification_delivery ORDER BY notification_delivery.id"
    ).fetchall()


def test_there_is_an_example_in_each_language_and_every_block_is_run() -> None:
    assert {example.language for example in EXAMPLES} == {"sql", "sql owner", "python", "js"}
    assert len(EXAMPLES) == PAGE.count("\n```") / 2


def test_what_the_sql_of_the_page_queues_reaches_apns_as_the_page_says(shop: Shop) -> None:
    stack = shop.stack
    said = [shop.run(example) for example in written_in("sql", "sql owner")]
    assert "t\n" in said  # asked again, the same id
    bundle_id = stack.apns.secret()["topic"]

    assert stack.drain() == only(claimed=6, pushed=6, sent=6)

    assert [
        (
            push.token[:4],
            push.headers["apns-push-type"],
            push.headers["apns-topic"],
            push.headers["apns-priority"],
            {key: value for key, value in json.loads(push.body).items() if key != "aps"},
            json.loads(push.body)["aps"].keys(),
        )
        for push in sorted(stack.apns.journal, key=lambda push: stack.one(
            "SELECT id FROM notification_delivery WHERE apns_id = %s", push.apns_id))
    ] == [
        ("5f2c", "alert", bundle_id, "10", {}, {"alert", "sound"}),
        ("5f2c", "alert", bundle_id, "10", {"conversation": "c-17"}, {"alert", "badge", "sound"}),
        ("5f2c", "background", bundle_id, "5", {"refresh": "inbox"}, {"content-available"}),
        ("9c41", "voip", f"{bundle_id}.voip", "10", {"call": "k-9", "from": "Anna"}, set()),
        ("80ab", "liveactivity", f"{bundle_id}.push-type.liveactivity", "5", {}, {"timestamp", "event", CONTENT}),
        ("5f2c", "alert", bundle_id, "10", {}, {"alert"}),
    ]  # fmt: skip
    by_token = {push.token[:4]: push.headers for push in stack.apns.journal}
    assert int(by_token["9c41"]["apns-expiration"]) > 0
    later = stack.db.execute(
        "SELECT next_attempt_at - created_at = interval '6 hours', expires_at - created_at = interval '8 hours'"
        " FROM notification_delivery WHERE status = 'pending'"
    )
    assert later.fetchall() == [(True, True)]
    assert stack.db.execute("SELECT invalid_reason FROM push_token WHERE user_id = 'user-7'").fetchall() == [
        ("signed_out",)
    ]
    assert stack.db.execute("SELECT quiet_from, push_enabled FROM recipient").fetchall() == [(None, False)]


@pytest.mark.parametrize("example", [*written_in("python"), *written_in("js")], ids=lambda each: each.language)
def test_an_example_in_another_language_queues_with_its_change_or_changes_nothing(
    example: Example, set_up: Shop
) -> None:
    if example.language == "js":
        if shutil.which("node") is None:
            pytest.skip("there is no node here")
        if not (PG_FOR_NODE / "node_modules" / "pg").is_dir():
            pytest.skip(f"pg is not installed: npm ci --ignore-scripts --prefix {PG_FOR_NODE.relative_to(ROOT)}")
    stack, number = set_up.stack, {"python": "1002", "js": "1003"}[example.language]
    orders = f"SELECT state FROM orders WHERE id = {number}"

    said = set_up.run(example)

    id_, payload, dedupe_key = queued(stack)[-1]
    assert said == f"queued as {id_}\n"
    assert payload.pop("aps") == {"alert": {"title": f"Order {number}", "body": "It is on its way."}}
    assert payload == ({"order": 1003} if example.language == "js" else {})
    assert dedupe_key == f"order-{number}-shipped"
    assert stack.one(orders) == "shipped"
    assert set_up.run(example) == said
    assert stack.drain() == only(claimed=2, pushed=2, sent=2)

    # The notification cannot be queued: then the order is not shipped either, though it was written first.
    stack.db.execute("DELETE FROM notification_delivery; UPDATE orders SET state = 'new'")
    stack.db.execute("ALTER TABLE notification_delivery ADD CONSTRAINT out_of_paper CHECK (false)")
    with pytest.raises(AssertionError, match="out_of_paper"):
        set_up.run(example)
    assert stack.one(orders) == "new"


# The tables of the page.


def test_the_arguments_are_those_of_the_function(db: psycopg.Connection) -> None:
    named = [name for cells in table("argument") for name in in_code(cells[0])]

    assert db.execute("SELECT proargnames FROM pg_proc WHERE proname = 'enqueue_notification'").fetchone() == (named,)


def test_every_function_that_producers_may_call_is_on_the_page(db: psycopg.Connection) -> None:
    signatures = dict(re.findall(r"`(\w+)\(([\w,\s.]+)\)`", PAGE))
    found = db.execute(
        "SELECT proname, proargnames FROM pg_proc WHERE has_function_privilege('apns_outbox_producer', oid, 'EXECUTE')"
        " AND pronamespace = 'public'::regnamespace"
    ).fetchall()

    assert len(found) == 5
    for name, arguments in found:
        given = re.split(r",\s+", signatures[name])
        assert given == (["user_id", "payload", "..."] if name == "enqueue_notification" else arguments)


def test_the_columns_are_those_that_a_producer_may_set_with_their_defaults(db: psycopg.Connection) -> None:
    rows = table("column", "default")
    defaults = {in_code(name)[0]: default.strip("`") for name, default, _ in rows}
    called = {in_code(name)[0]: in_code(argument)[0] for name, _, argument in rows}
    granted = db.execute(
        """
        SELECT a.attname, a.attnotnull, pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = 'notification_delivery'::regclass AND a.attnum > 0
          AND has_column_privilege('apns_outbox_producer', a.attrelid, a.attnum, 'INSERT')
        """
    ).fetchall()

    assert defaults == {
        name: re.sub(r"^'(.*)'::text$", r"\1", default) if default else "" if required else "NULL"
        for name, required, default in granted
    }
    assert {name for name, argument in called.items() if name != argument} == {"next_attempt_at"}
    assert set(called.values()) < {name for cells in table("argument") for name in in_code(cells[0])}


def test_the_push_types_are_those_the_table_takes_and_go_where_the_drain_sends_them(db: psycopg.Connection) -> None:
    rows = {
        in_code(name)[0]: (in_code(topic), priority.split(", "), int(largest))
        for name, topic, priority, largest, _ in table("push type")
    }
    taken = db.execute(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'push_type_is_one_of_apples'"
    )

    assert set(rows) == set(re.findall(r"'(\w+)'::text", str(taken.fetchone())))
    for push_type, (topic, priorities, largest) in rows.items():
        assert topic == ([TOPIC_SUFFIX[push_type]] if push_type in TOPIC_SUFFIX else [])
        assert largest == (LARGEST_VOIP_PAYLOAD if push_type == "voip" else LARGEST_PAYLOAD)
        assert (priorities == ["5"]) == (push_type == "background")


def test_the_columns_of_the_status_are_explained(db: psycopg.Connection) -> None:
    explained = [name for cells in table("column", "meaning") for name in in_code(cells[0])]
    cursor = db.execute("SELECT * FROM notification_status LIMIT 0")

    assert cursor.description
    assert explained == [column.name for column in cursor.description]


def test_the_roles_on_the_page_are_those_that_there_are(db: psycopg.Connection) -> None:
    there = db.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'apns\\_outbox\\_%'").fetchall()

    assert sorted(in_code(cells[0])[0] for cells in table("role")) == sorted(name for (name,) in there)


@pytest.mark.parametrize("cells", table("driver"), ids=lambda cells: cells[0])
def test_the_statement_for_another_driver_is_one_that_postgres_takes(cells: list[str], db: psycopg.Connection) -> None:
    (statement,) = in_code(cells[1])
    numbers = iter(range(1, 10))
    prepared = re.sub(r"\?", lambda _: f"${next(numbers)}", statement)

    db.execute(f"PREPARE it AS {prepared}".encode())
    nothing = ", ".join(["NULL"] * (next(numbers) - 1 if "?" in statement else statement.count("$")))
    with pytest.raises(errors.CheckViolation, match="user_id is missing"):
        db.execute(f"EXECUTE it ({nothing})".encode())


def test_every_link_leads_somewhere_and_every_path_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGE) if not urlsplit(link).scheme]
    headings = {"#" + title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)}

    assert [link for link in links if link not in headings] == []
    assert [path for path in re.findall(r"`((?:docs|tests)/[\w./]+)`", PAGE) if not (ROOT / path).exists()] == []
