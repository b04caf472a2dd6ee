"""The whole of it, as a test sees it: the real handler, a real Postgres, APNs over HTTP/2 and TLS, Secrets Manager.

Whatever a test makes happen, at its end no secret of it may have been said anywhere: that promise is kept everywhere or
nowhere, so it is checked after each test, with every logger that there is at DEBUG.
"""

import asyncio
import importlib.util
import json
import logging
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import jwt
import psycopg
import pytest
from psycopg.rows import namedtuple_row

from devtools.secrets_manager import LocalSecretsManager
from devtools.simulated_apns import Answer, Credentials, Push, SimulatedApns
from devtools.simulated_apns.connection import Connection
from devtools.simulated_apns.rules import Request
from handlers import drain
from tests.support.database import Database
from tests.support.time_travel import advance

ROOT = Path(__file__).parents[2]
ENDS = ("sent", "retried", "failed", "invalid_token", "skipped", "deferred", "withheld", "released", "lease_lost")
TALLY = ("claimed", "pushed", *ENDS, "swept")
LEASE = 121  # seconds: long enough for a lease of 120 to be over


class Handler(Protocol):
    """One execution environment of Lambda's: what it keeps warm is its own."""

    def handler(self, event: object, context: drain.LambdaContext) -> dict[str, int]: ...
    def let_go(self) -> None: ...


def another_environment() -> Handler:
    """Make an execution environment beside the one that `handlers.drain` is, in this same process."""
    assert drain.__file__
    spec = importlib.util.spec_from_file_location("drain_of_another_environment", drain.__file__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Handler, module)


@dataclass(slots=True)
class Invocation:
    """Lambda's context. Its time passes only when it is spent, so that limits are exact, unless it is `passing`."""

    left: float = 25.0
    passing: bool = False
    aws_request_id: str = "c6af9ac6-7b61-11e6-9a41-93e8deadbeef"
    _began: float = field(default_factory=time.monotonic)

    def get_remaining_time_in_millis(self) -> int:
        passed = time.monotonic() - self._began if self.passing else 0
        return max(round((self.left - passed) * 1000), 0)

    def spend(self, seconds: float) -> None:
        self.left -= seconds


@dataclass(slots=True)
class Time:
    """The handler's `time`, to be moved."""

    ahead: float = 0.0  # of the wall clock
    elapsed: float = 0.0  # more than really was

    def time(self) -> float:
        return time.time() + self.ahead

    def monotonic(self) -> float:
        return time.monotonic() + self.elapsed


class HeldApns(SimulatedApns):
    """A simulated APNs that can keep its answers back: a push is in flight for exactly as long as a test needs."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  the other's own
        super().__init__(**options)
        self._lock = threading.Lock()
        self._holding = False
        self._before_holding = 0
        self._kept: list[tuple[Connection, Callable[[], None]]] = []
        self._seen: set[Connection] = set()
        self._turns: asyncio.AbstractEventLoop | None = None

    def hold(self, *, after: int = 0) -> None:
        """Answer `after` more pushes, which is proof that it works, and then nothing that comes."""
        with self._lock:
            self._holding, self._before_holding = True, after

    def answer_again(self) -> None:
        """Answer what comes from now on; what was kept back stays so."""
        with self._lock:
            self._holding = False

    def release(self) -> None:
        """Give the answers that were kept back, and answer what comes."""
        with self._lock:
            self._holding = False
            going, self._kept = self._kept, []
        for connection, act in going:
            self._do(act)
            self._do(connection.flush)

    def release_one(self, place: int) -> None:
        """Give one of the answers that were kept back, by their order, and go on holding."""
        with self._lock:
            connection, act = self._kept.pop(place)
        self._do(act)
        self._do(connection.flush)

    def close_connections(self) -> None:
        """Close them in good order, as a server does with idle ones."""
        for connection in tuple(self._seen):
            self._do(connection.transport.close)
        self._seen.clear()

    def _do(self, act: Callable[[], None]) -> None:
        async def turn() -> None:
            act()

        assert self._turns
        asyncio.run_coroutine_threadsafe(turn(), self._turns).result(timeout=10)

    def received(self, connection: Connection, stream_id: int, request: Request) -> None:
        self._turns = asyncio.get_running_loop()
        self._seen.add(connection)
        holder = _Holder(connection, lambda act: self._keep(connection, act))
        super().received(cast(Connection, holder), stream_id, request)

    def _keep(self, connection: Connection, act: Callable[[], None]) -> bool:
        with self._lock:
            if self._holding and self._before_holding:
                self._before_holding -= 1
                return False
            if self._holding:
                self._kept.append((connection, act))
            return self._holding


class _Holder:
    """A connection that asks, before it answers, whether it may."""

    def __init__(self, connection: Connection, keep: Callable[[Callable[[], None]], bool]) -> None:
        self._connection, self._keep = connection, keep

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever a connection has
        return getattr(self._connection, name)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        if not self._keep(act):
            self._connection.after(seconds, act)


@dataclass(frozen=True, slots=True)
class Posted:
    """A delivery to a user with one device."""

    id: int
    user: str
    token: str = field(repr=False)
    push_token_id: int


class Everything(logging.Handler):
    """Hears every record that reaches the root, whatever its level."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{self.format(record)} {record.__dict__}")


@dataclass(kw_only=True)
class Stack:
    """What one test needs. `drain` invokes the handler here, `begin` in a thread, `spawn` in a process."""

    database: Database
    db: psycopg.Connection[Any]
    apns: HeldApns
    secrets: LocalSecretsManager
    secret_id: str
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str] | None  # of the test that runs now
    said: list[str] = field(default_factory=list)  # whatever left a handler, in any way
    hidden: list[str] = field(default_factory=list)  # what must not be in it: device tokens,
    keys: list[str] = field(default_factory=list)  # and signing keys beside APNs' first
    word: str = field(default_factory=lambda: "word" + secrets.token_hex(6))  # is in each payload
    _environments: list[Handler] = field(default_factory=lambda: [cast(Handler, drain)])
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(thread_name_prefix="drain"))
    _children: list[subprocess.Popen[str]] = field(default_factory=list)
    _log_read: list[dict[str, Any]] = field(default_factory=list)

    def setenv(self, **variables: str | int | None) -> None:
        for name, value in variables.items():
            if value is None:
                self.monkeypatch.delenv(name, raising=False)
            else:
                self.monkeypatch.setenv(name, str(value))

    def configure(self, secret: object) -> None:
        """Put this into the secret: text as it is, anything else as JSON."""
        self.secrets.put(self.secret_id, secret if isinstance(secret, str) else json.dumps(secret))

    def issue(self, **good_for: Any) -> Credentials:  # noqa: ANN401  what `trust` takes
        """Have Apple issue one more key to our team."""
        key = replace(Credentials.generate(), team_id=self.apns.credentials.team_id)
        self.apns.trust(key, **good_for)
        return self.hide(key)

    def hide(self, key: Credentials) -> Credentials:
        """See that nothing is said of this key either."""
        self.keys.append(key.private_key())
        return key

    def rotate(self, key: Credentials) -> None:
        """Put this key into the secret."""
        named = {"team_id": key.team_id, "key_id": key.key_id, "private_key": key.private_key()}
        self.configure(self.apns.secret() | named)

    def device(
        self, user: str, *, token: str | None = None, environment: str = "production", topic: str | None = None
    ) -> tuple[int, str]:
        """Register a device; return the id of the push token, and the token."""
        token = token or secrets.token_hex(32)
        self.hidden.append(token)
        return self.one("SELECT register_push_token(%s, %s, %s, %s)", user, token, environment, topic), token

    def enqueue(self, user: str, *, text: str = "", **options: object) -> int:
        """Queue a delivery by the function that producers use; what it may refuse, by a plain INSERT."""
        payload = json.dumps({"aps": {"alert": f"{self.word} {text}"}})
        if len(text) >= 4096 or "expires_at" in options:
            columns = {"user_id": user, "payload": payload, **options}
            names, marks = ", ".join(columns), ", ".join(["%s"] * len(columns))
            plain = f"INSERT INTO notification_delivery ({names}) VALUES ({marks}) RETURNING id"
            return int(self.one(plain, *columns.values()))
        named = "".join(f", {name} => %s" for name in options)
        return int(self.one(f"SELECT enqueue_notification(%s, %s::jsonb{named})", user, payload, *options.values()))

    def post(
        self,
        *answers: Answer,
        text: str = "",
        environment: str = "production",
        topic: str | None = None,
        **options: object,
    ) -> Posted:
        """Queue a delivery to a new user with one device, to whose token APNs is to answer this (200 if nothing)."""
        user = f"user-{secrets.token_hex(4)}"
        push_token_id, token = self.device(user, environment=environment, topic=topic)
        if answers:
            self.apns.answer(token, *answers)
        return Posted(self.enqueue(user, text=text, **options), user, token, push_token_id)

    def post_many(
        self, count: int, *, environment: str = "production", topic: str | None = None, **columns: object
    ) -> list[Posted]:
        """Queue so many in three statements, each to a new user with one device. `columns` are the deliveries' own."""
        tokens = [secrets.token_hex(32) for _ in range(count)]
        self.hidden += tokens
        users = [f"user-{token[:8]}" for token in tokens]
        devices = self.db.execute(
            "INSERT INTO push_token (user_id, token, environment, topic) SELECT *, %s, %s FROM"
            " unnest(%s::text[], %s::text[]) RETURNING token, id",
            [environment, topic, users, tokens],
        ).fetchall()
        named = "".join(f", {name}" for name in columns)
        deliveries = self.db.execute(
            f"INSERT INTO notification_delivery (user_id, payload{named})"
            f" SELECT u, %s::jsonb{', %s' * len(columns)} FROM unnest(%s::text[]) u RETURNING user_id, id",
            [json.dumps({"aps": {"alert": self.word}}), *columns.values(), users],
        ).fetchall()
        device_of, delivery_of = dict(devices), dict(deliveries)
        return [
            Posted(delivery_of[user], user, token, device_of[token]) for user, token in zip(users, tokens, strict=True)
        ]

    def another_environment(self) -> Handler:
        self._environments.append(another_environment())
        return self._environments[-1]

    def drain(
        self, event: object = None, *, context: Invocation | None = None, environment: Handler | None = None
    ) -> dict[str, int]:
        """Invoke the handler. Its tally always adds up."""
        try:
            tally = (environment or self._environments[0]).handler(
                {} if event is None else event, context or Invocation()
            )
        except Exception as error:
            self.said += traceback.format_exception(error)  # what Lambda prints, and more
            self.said.append(repr(error))
            raise
        return adds_up(tally)

    def begin(
        self, *, context: Invocation | None = None, environment: Handler | None = None
    ) -> "Future[dict[str, int]]":
        return self._threads.submit(self.drain, context=context, environment=environment)

    def spawn(self, *, dies_of: str | None = None, **environ: str) -> subprocess.Popen[str]:
        """Invoke the handler in a process of its own. With `dies_of` the process dies of the push to that token."""
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.invoke", *([dies_of] if dies_of else [])],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._children.append(child)
        return child

    def outcome(self, child: subprocess.Popen[str], exit_code: int = 0) -> dict[str, int]:
        """Wait for a process; return its tally, unless it was to end in another way."""
        out, err = child.communicate(timeout=40)
        self.said += [out, err]
        assert child.returncode == exit_code, err
        return {} if exit_code else adds_up(json.loads(out.splitlines()[-1]))

    def kill(self, child: subprocess.Popen[str]) -> None:
        """As the machine's end would: nothing is said, nothing is cleared away."""
        child.kill()
        self.outcome(child, exit_code=-9)

    def fresh_start(self) -> None:
        """Forget what is warm, as a new execution environment would."""
        for environment in self._environments:
            environment.let_go()

    def reconnect(self) -> None:
        """Open the test's own session anew, after the server was away."""
        self.db.close()
        self.db = psycopg.connect(self.database.dsn, autocommit=True)

    def advance(self, seconds: float) -> None:
        advance(self.db, seconds)

    def one(self, sql: str, *values: object) -> Any:  # noqa: ANN401  what the query selects
        row = self.db.execute(sql.encode(), values).fetchone()
        assert row is not None
        return row[0]

    def rows(self) -> dict[int, Any]:
        """Every delivery by its id; `due_in` is in seconds from now."""
        cursor = self.db.cursor(row_factory=namedtuple_row)
        cursor.execute(
            "SELECT *, extract(epoch FROM next_attempt_at - now())::float8 AS due_in FROM notification_delivery"
        )
        found: list[Any] = cursor.fetchall()
        return {row.id: row for row in found}

    def row(self, posted: Posted | int) -> Any:  # noqa: ANN401  a named tuple of the columns
        return self.rows()[posted if isinstance(posted, int) else posted.id]

    def ends(self) -> dict[int, tuple[str, str | None, int]]:
        """Status, reason and attempts of every delivery."""
        found = self.db.execute("SELECT id, status, reason, attempts FROM notification_delivery ORDER BY id")
        return {id_: (status, reason, attempts) for id_, status, reason, attempts in found}

    def tables(self) -> list[tuple[Any, ...]]:
        """Everything, down to which transaction wrote each row: equal only if nothing was written at all."""
        return [
            row
            for table in ("notification_delivery", "push_token", "recipient")
            for row in self.db.execute(
                f"SELECT '{table}', xmin::text, ctid::text, t::text FROM {table} t ORDER BY ctid"
            )
        ]

    def pushes(self, posted: Posted) -> list[str]:
        """Give the apns-ids of the pushes that APNs has received for it."""
        return [push.apns_id for push in self.apns.journal if push.token == posted.token]

    def log(self) -> list[dict[str, Any]]:
        """Read what handlers in this process have logged so far, without the metrics."""
        self._read()
        return [line for line in self._log_read if "_aws" not in line]

    def logged(self, message: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["message"].startswith(message)]

    def metrics(self) -> list[dict[str, Any]]:
        self._read()
        return [line for line in self._log_read if "_aws" in line]

    def share(self, capsys: pytest.CaptureFixture[str] | None) -> None:
        """Hand it to the next test of a module that shares it, or with None take it from the one before."""
        self._read()
        self.capsys = capsys
        self._log_read.clear()
        self._note_what_is_stored()
        self.db.execute("TRUNCATE notification_delivery, push_token, recipient")

    def _read(self) -> None:
        if self.capsys is None:
            return
        out, err = self.capsys.readouterr()
        self.said += [out, err]
        self._log_read += [json.loads(line) for line in out.splitlines()]

    def backends(self) -> set[int]:
        """Find the handlers' sessions, by the process id of each."""
        return {
            pid
            for (pid,) in self.db.execute(
                "SELECT pid FROM pg_stat_activity"
                " WHERE application_name = 'apns-outbox' AND datname = current_database()"
            )
        }

    def close(self) -> None:
        self.apns.release() if self.apns._turns else None
        for child in self._children:
            child.kill()
            child.communicate(timeout=10)
        self._threads.shutdown()
        self.fresh_start()
        self._read()

    def assert_discreet(self) -> None:
        """See that no device token, nor 16 characters of one, no key, no provider token, no payload was said."""
        with suppress(psycopg.OperationalError):  # a test that failed may have left the server down
            self._note_what_is_stored()
        said = "\n".join(self.said)
        hexes = " ".join(re.findall("[0-9a-f]{16,}", said.lower()))  # the only places where 16 of a token can be
        for token in self.hidden:
            parts = {token[at : at + 16].lower() for at in range(max(len(token) - 15, 1))}
            assert not [part for part in parts if part in hexes], "a device token was said"
        for key in (self.apns.credentials.private_key(), *self.keys):
            assert not [line for line in key.splitlines()[1:-1] if line in said], "a signing key was said"
        for push in self.apns.journal:
            for part in push.headers.get("authorization", "").removeprefix("bearer ").split("."):
                assert len(part) < 16 or part not in said, "a provider token was said"
        assert self.word not in said, "a payload was said"

    def _note_what_is_stored(self) -> None:
        for stored in ("reason, last_error FROM notification_delivery", "invalid_reason FROM push_token"):
            self.said += [str(line) for line in self.db.execute(f"SELECT {stored}").fetchall()]


def adds_up(tally: dict[str, int]) -> dict[str, int]:
    assert tuple(tally) == TALLY
    assert all(type(count) is int for count in tally.values())
    assert tally["claimed"] == sum(tally[end] for end in ENDS), tally
    return tally


def only(**counts: int) -> dict[str, int]:
    """Make a tally of these counts and else zeros."""
    assert counts.keys() <= set(TALLY)
    return dict.fromkeys(TALLY, 0) | counts


def signed_by(push: Push) -> str:
    """Say which key has signed it, by its id."""
    return str(jwt.get_unverified_header(push.headers["authorization"].removeprefix("bearer "))["kid"])
