"""The README says what is so: its commands, its table of variables, its SQL, and the tests it names."""

import inspect
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree as ET

import psycopg
import pytest

from core import database, schema, secret, settings
from core.drain import Tally
from core.settings import BadSettings, Settings
from core.verdict import Sent
from handlers import drain, migrate
from tests.support.database import Database
from tests.support.outbox import columns, gone, session

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SQL = re.findall(r"^```sql\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
GRANTS = next(block for block in SQL if "GRANT" in block)

BY_URL = {"DATABASE_URL": "postgresql://localhost/outbox"}
BY_IAM = {"DB_HOST": "db.example", "DB_NAME": "outbox", "DB_USER": "apns_drain"}
BY_SECRET = BY_IAM | {"DB_AUTH": "secret", "DB_SECRET_ID": "outbox/login"}


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table(title: str, first_cell: str) -> list[list[str]]:
    """Read the table of that section whose header begins with this cell, without its header."""
    lines = section(title).partition(f"\n| {first_cell} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    headings = {"#" + title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", README, re.MULTILINE)}

    lost = [link for link in links if not (link in headings if link.startswith("#") else (ROOT / link).exists())]

    assert links
    assert lost == []


def test_every_path_that_is_named_is_there() -> None:
    named = re.findall(r"(?:src|tests|devtools|events|docs|\.ci)/[\w./-]*\w", README)

    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_names_every_module() -> None:
    modules = {
        path.relative_to(ROOT).as_posix()
        for folder in ("core", "handlers")
        for path in (ROOT / "src" / folder).glob("*.py")
        if path.name != "__init__.py"
    }

    named = {path for cells in table("How it is built", "file") for path in in_code(cells[0]) if path.endswith(".py")}

    assert named == modules


def test_the_picture_is_a_picture_on_its_own_with_its_text_as_text() -> None:
    svg = ET.fromstring((ROOT / "docs" / "flow.svg").read_bytes())  # noqa: S314  ours
    words = " ".join(svg.itertext())

    assert "notification_delivery" in words
    assert "Secrets Manager" in words
    assert [node.tag for node in svg.iter() if node.tag.endswith(("}image", "}use", "}script", "}foreignObject"))] == []


def test_every_command_that_is_named_is_one() -> None:
    offered = subprocess.run([ROOT / "dev", "help"], check=True, capture_output=True, text=True, timeout=10).stdout

    assert set(re.findall(r"\./dev ([a-z]+)", README)) == set(re.findall(r"^\./dev ([a-z]+)", offered, re.MULTILINE))
    assert offered in README


def test_the_promises_of_the_demo_are_those_that_it_checks() -> None:
    demo = (ROOT / "devtools" / "demo.py").read_text(encoding="utf-8")
    quoted = re.findall(r"^  (?:holds|BROKEN) +(.*) \([^()]*(?:\([^()]*\))?[^()]*\)$", README, re.MULTILINE)

    assert len(quoted) == README.count("\n  holds ")
    assert [promise for promise in quoted if f'"{promise}"' not in demo] == []


def test_every_promise_has_its_tests() -> None:
    promises = table("How it is built", "promise")
    missing = [
        name
        for _, tests in promises
        for file, _, name in (reference.partition("::") for reference in in_code(tests))
        if f"\ndef {name}(" not in (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
    ]

    assert len(promises) == 10
    assert all("::test_" in tests for _, tests in promises)
    assert missing == []


class Asked(Mapping[str, str]):
    """An environment that remembers what it was asked for."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env, self.names = env, set[str]()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return self._env[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)


VARIABLES = {
    in_code(name)[0]: (default.strip("`"), bounds) for name, default, bounds, *_ in table("Configuration", "variable")
}
WITHOUT_DEFAULT = {
    "DATABASE_URL", "DB_HOST", "DB_NAME", "DB_USER", "DB_SECRET_ID", "APNS_SECRET_ID", "APNS_CA_FILE",
}  # fmt: skip


def test_the_table_of_variables_holds_all_that_are_read_and_no_other() -> None:
    environments = [Asked(env) for env in (BY_URL, BY_IAM, BY_SECRET)]
    for env in environments:
        Settings.from_env(env)

    assert set(VARIABLES) == set.union(*(env.names for env in environments))


@pytest.mark.parametrize("name", VARIABLES)
def test_a_default_in_the_table_is_the_default(name: str) -> None:
    default, _ = VARIABLES[name]
    base = BY_IAM if name.startswith("DB_") else BY_URL

    assert (default == "none") == (name in WITHOUT_DEFAULT)
    if default != "none":
        assert Settings.from_env(base | {name: default}) == Settings.from_env(base)


@pytest.mark.parametrize("name", [name for name, (_, bounds) in VARIABLES.items() if re.match(r"\d+ to", bounds)])
def test_bounds_in_the_table_are_the_bounds(name: str) -> None:
    base = (BY_IAM if name.startswith("DB_") else BY_URL) | {
        "BACKOFF_BASE_SECONDS": "1",  # so that neither bounds the other
        "BACKOFF_CAP_SECONDS": "604800",
    }
    low, high = map(int, VARIABLES[name][1].split(" to "))

    for good in (low, high):
        Settings.from_env(base | {name: str(good)})
    for bad in (low - 1, high + 1):
        with pytest.raises(BadSettings, match=name):
            Settings.from_env(base | {name: str(bad)})


def test_every_whole_number_has_its_bounds_in_the_table() -> None:
    numbers = {name for name, (default, _) in VARIABLES.items() if default.isdecimal()}

    assert numbers == {name for name, (_, bounds) in VARIABLES.items() if re.fullmatch(r"\d+ to \d+", bounds)}


def test_the_kinds_of_fault_are_those_that_can_be_raised() -> None:
    named = {in_code(cells[0])[0] for cells in table("When something is wrong", "`fault`")}
    raised = {
        kind.__name__
        for module in (settings, secret, schema, database)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == module.__name__
    }

    assert named == raised | {TimeoutError.__name__}


def test_what_a_message_is_said_to_begin_with_stands_in_the_code() -> None:
    code = " ".join(re.sub(r'"\n +f?"', "", path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py"))
    begins = [words for cells in table("When something is wrong", "`fault`") for words in in_code(cells[1])]
    parts = [part.strip() for words in begins for part in re.split(r"…|DRAIN_BATCH_SIZE|\(120\)|0002_|\.sql", words)]

    assert [part for part in parts if part not in code] == []


def test_every_line_that_is_logged_is_explained_and_no_other() -> None:
    explained = {in_code(cells[0])[0] for cells in table("When something is wrong", "line")} | {"drain ended early"}
    code = inspect.getsource(drain) + inspect.getsource(migrate)

    logged = re.findall(r'logger\.(?:info|warning|error)\(\s*"([^"]+)"', code) + re.findall(
        r'"(withheld: [^"]+)"', code
    )
    assert explained == set(logged)
    assert "`drain ended early`" in section("When something is wrong")


def test_every_metric_is_explained_and_no_other() -> None:
    explained = {name for cells in table("When something is wrong", "metric") for name in in_code(cells[0])}
    counted = {"".join(map(str.title, field.name.split("_"))) for field in fields(Tally)}
    measured = set(re.findall(r'name="([A-Z]\w+)"', inspect.getsource(drain)))

    assert explained == counted | measured


@pytest.fixture
def roles(db: psycopg.Connection) -> Iterator[tuple[str, str]]:
    names = ("your_service", "apns_drain")
    for name in names:
        db.execute(f"CREATE ROLE {name} LOGIN")
    yield names
    db.execute("RESET ROLE")
    for name in names:
        db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_every_statement_runs_with_the_grants_that_are_said_to_be_enough(
    db: psycopg.Connection, roles: tuple[str, str]
) -> None:
    your_service, _ = roles
    looking = [statement for statement in SQL if "GROUP BY" in statement]
    assert len(looking) == 1
    db.execute(GRANTS)
    db.execute(f"SET ROLE {your_service}")

    for statement in SQL:
        if statement != GRANTS and statement not in looking:
            db.execute(statement)
    db.execute("SET ROLE apns_outbox_reader")
    db.execute(looking[0])
    db.execute("RESET ROLE")

    queued = db.execute("SELECT dedupe_key, status FROM notification_delivery ORDER BY id").fetchall()
    devices = db.execute("SELECT environment, topic, invalid_reason FROM push_token ORDER BY id").fetchall()
    assert queued == [(None, "pending"), ("table-7-reminder", "pending"), ("welcome-user-42", "pending")]
    assert devices == [("production", None, "signed_out"), ("sandbox", "com.example.beta", None)]


def test_a_plain_insert_with_a_dedupe_key_that_was_used_queues_nothing(db: psycopg.Connection) -> None:
    (statement,) = [block for block in SQL if "ON CONFLICT DO NOTHING" in block]

    db.execute(statement)
    db.execute(statement)

    assert db.execute("SELECT count(*) FROM notification_delivery").fetchone() == (1,)


def test_enqueue_schedules_and_names_what_is_said(db: psycopg.Connection) -> None:
    (statement,) = [block for block in SQL if "enqueue_notification(" in block]

    first = db.execute(statement).fetchone()
    second = db.execute(statement).fetchone()

    assert first == second
    assert db.execute(
        "SELECT next_attempt_at - created_at = interval '6 hours', expires_at - created_at = interval '8 hours',"
        " collapse_id, dedupe_key FROM notification_delivery"
    ).fetchall() == [(True, True, "table-7", "table-7-reminder")]


def test_the_arguments_in_the_table_are_those_of_the_function(db: psycopg.Connection) -> None:
    named = [name for cells in table("How to insert a row", "argument") for name in in_code(cells[0])]

    assert db.execute("SELECT proargnames FROM pg_proc WHERE proname = 'enqueue_notification'").fetchone() == (named,)


def test_the_drain_can_do_its_work_with_the_grants_that_are_said_to_be_enough(
    db: psycopg.Connection, database: Database, roles: tuple[str, str]
) -> None:
    _, apns_drain = roles
    for token in ("aa", "bb"):
        db.execute("SELECT register_push_token('user', %s)", [token])
    for _ in range(2):
        db.execute("SELECT enqueue_notification('user', '{}')")
    db.execute(GRANTS)
    own = Database(name=database.name, dsn=database.dsn, url=database.url.replace("postgres@", f"{apns_drain}@"))

    with session(own) as drain:
        drain.runner.run(schema.require_version(drain.outbox.database))
        drain.backlog()
        drain.sweep()
        first, second, *siblings = drain.bind(drain.claim())
        drain.settle([(first.delivery, Sent()), (second.delivery, gone(second.device))])
        drain.release([push.delivery for push in siblings])
        drain.claim_suspect()

    assert columns(db, first.delivery.id, "status") == "sent"
    assert columns(db, second.delivery.id, "status") == "invalid_token"
    assert len(siblings) == 2


def test_without_the_grants_the_roles_may_do_nothing(db: psycopg.Connection, roles: tuple[str, str]) -> None:
    for role in roles:
        db.execute(f"SET ROLE {role}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute("SELECT FROM notification_delivery")
        with suppress(psycopg.Error):
            db.execute("RESET ROLE")
