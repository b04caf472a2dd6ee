"""The whole job on this machine, for a person to follow: `./dev demo`. Exits with 1 if a promise does not hold.

A real Postgres, a simulated APNs (production and sandbox, HTTP/2 over TLS) and a Secrets Manager are started; the real
handler runs in processes of its own, with the sample events; nothing is left behind.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from core.request import LARGEST_PAYLOAD
from devtools.local_postgres import LocalPostgres
from devtools.secrets_manager import LocalSecretsManager
from devtools.simulated_apns import Answer, Credentials, Ok, Push, Reject, Reset, Silence, SimulatedApns
from devtools.time_travel import advance

ROOT = Path(__file__).parent.parent
TICK, HALF_TICK = ROOT / "events" / "tick.json", ROOT / "events" / "half-tick.json"
LEASE_SECONDS, MAX_ATTEMPTS = 120, 5
PATIENCE_SECONDS = 60.0  # for a step that takes a second: a machine may be busy, but nothing here waits for ever
FLUSHED_WITHIN = timedelta(seconds=0.25)
KIND = re.compile(r" \d+(?=$|[:,])")


class Screen:
    """Colours on a terminal, plain text in a pipe."""

    def __init__(self) -> None:
        self._colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._began = time.monotonic()
        self.broken: list[str] = []

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours else text

    def title(self, text: str) -> None:
        print(
            f"\n{self._paint('1', text)}  {self._paint('2', f'[{time.monotonic() - self._began:.1f} s]')}", flush=True
        )

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def table(self, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
        texts = [header, *(tuple("" if cell is None else str(cell) for cell in row) for row in rows)]
        widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
        for number, row in enumerate(texts):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            print(f"  {self._paint('2', line) if number == 0 else line}", flush=True)

    def promise(self, text: str, *, holds: bool, seen: str) -> None:
        if not holds:
            self.broken.append(text)
        mark = self._paint("32", "holds ") if holds else self._paint("31;1", "BROKEN")
        print(f"  {mark}  {text} ({seen})", flush=True)


@dataclass(slots=True)
class Story:
    """One delivery of the demo: what was inserted, and what became of it step by step."""

    what: str
    delivery_id: int
    steps: list[str] = field(default_factory=list)


class Demo:
    """The servers, the actors, and what happened so far."""

    def __init__(self, stack: ExitStack) -> None:
        self.screen = Screen()
        self.postgres = stack.enter_context(LocalPostgres())
        self.production = stack.enter_context(SimulatedApns())
        self.sandbox = stack.enter_context(
            SimulatedApns(
                environment="sandbox", credentials=self.production.credentials, authority=self.production.authority
            )
        )
        self.secrets = stack.enter_context(LocalSecretsManager())
        self.secrets.put("apns-outbox/signing-key", "{}")
        self.db: psycopg.Connection[dict[str, Any]] = stack.enter_context(
            psycopg.connect(self.postgres.url("postgres"), autocommit=True, row_factory=dict_row)
        )
        self.environment = {
            **os.environ,
            **self.secrets.environment,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "DATABASE_URL": self.postgres.url("postgres"),
            "APNS_SECRET_ID": "apns-outbox/signing-key",
            "APNS_PRODUCTION_URL": self.production.url,
            "APNS_SANDBOX_URL": self.sandbox.url,
            "APNS_CA_FILE": str(self.production.ca_file),
            "LEASE_SECONDS": str(LEASE_SECONDS),
            "MAX_ATTEMPTS": str(MAX_ATTEMPTS),
            "DRAIN_BATCH_SIZE": "20",  # small, so that two drains at once share what is due
        }
        self.stories: dict[int, Story] = {}
        self.tallies: Counter[str] = Counter()
        self.output = ""
        self.tokens: list[str] = []
        self.in_flight: set[str] = set()  # apns-ids of what a killed drain had not settled

    # What a team does: devices register, services insert.

    def device(self, user: str, *answers: Answer, environment: str = "production", topic: str | None = None) -> str:
        token = secrets.token_hex(32)
        self.tokens.append(token)
        if answers:
            (self.production if environment == "production" else self.sandbox).answer(token, *answers)
        self.db.execute("SELECT register_push_token(%s, %s, %s, %s)", [user, token, environment, topic])
        return token

    def insert(self, what: str, user: str, alert: str = "Hello", **options: object) -> Story:
        named = "".join(f", {name} => %({name})s" for name in options)
        payload = json.dumps({"aps": {"alert": alert}})
        function = f"SELECT enqueue_notification(%(user_id)s, %(payload)s::jsonb{named}) AS id"
        # What is too large for APNs the function refuses; a plain INSERT gets as far as the drain.
        plain = "INSERT INTO notification_delivery (user_id, payload) VALUES (%(user_id)s, %(payload)s) RETURNING id"
        row = self.db.execute(
            plain if len(payload) > LARGEST_PAYLOAD else function,
            {"user_id": user, "payload": payload, **options},
        ).fetchone()
        assert row is not None
        return self.stories.setdefault(row["id"], Story(what, row["id"]))

    # What AWS does: it invokes.

    def invoke(self, event: Path, seconds: float = 25.0) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "devtools.invocation", str(event), str(seconds)],
            env=self.environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def finish(self, name: str, invocation: subprocess.Popen[str]) -> dict[str, int] | None:
        output, _ = invocation.communicate(timeout=PATIENCE_SECONDS)
        self.output += output
        if invocation.returncode != 0:
            self.screen.say(f"{name}: {_last_words(output)}")
            return None
        tally: dict[str, int] = json.loads(output.splitlines()[-1])
        self.tallies.update(tally)
        said = ", ".join(f"{key} {count}" for key, count in tally.items() if count) or "nothing was due"
        self.screen.say(f"{name}: {said}")
        return tally

    def drain(self, name: str = "a drain") -> dict[str, int] | None:
        tally = self.finish(name, self.invoke(TICK))
        self.note()
        return tally

    def kill(self, invocation: subprocess.Popen[str]) -> None:
        invocation.send_signal(signal.SIGKILL)
        self.output += invocation.communicate(timeout=PATIENCE_SECONDS)[0]

    # What a person asks.

    def rows(self) -> list[dict[str, Any]]:
        return self.db.execute("SELECT * FROM notification_delivery ORDER BY id").fetchall()

    def row(self, story: Story) -> dict[str, Any]:
        return next(row for row in self.rows() if row["id"] == story.delivery_id)

    def note(self) -> None:
        """Add to each delivery's story what has changed."""
        for row in self.rows():
            story = self.stories.get(row["id"])
            if story is None:
                what = f"  the same, for the other device of {row['user_id']}"
                story = self.stories[row["id"]] = Story(what, row["id"])
            step = f"{row['status']}{' ' + row['reason'] if row['reason'] else ''}"
            if row["claimed_at"] is not None:
                step = "leased"
            if step != "pending" and (not story.steps or story.steps[-1] != step):
                story.steps.append(step)

    def pushes(self) -> list[Push]:
        return sorted(self.production.journal + self.sandbox.journal, key=lambda push: push.at)


def _last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def main() -> int:
    with ExitStack() as stack:
        demo = Demo(stack)
        _migrate(demo)
        _before_there_is_a_key(demo)
        _everyday(demo)
        _a_drain_is_killed(demo)
        _a_row_kills_its_drains(demo)
        _time_runs_out(demo)
        _the_key_is_wrong(demo)
        _time_heals(demo)
        _what_became_of_each(demo)
        _promises(demo)
        if demo.screen.broken:
            demo.screen.title(f"{len(demo.screen.broken)} promise(s) BROKEN")
            return 1
        demo.screen.title("Every promise holds.")
        return 0


def _migrate(demo: Demo) -> None:
    demo.screen.title("A Postgres, an APNs (simulated, HTTP/2 and TLS) and a Secrets Manager are up")
    migrated = subprocess.run(
        [sys.executable, "-c", "from handlers.migrate import handler; handler({}, None)"],
        env=demo.environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    demo.output += migrated.stdout
    version = demo.db.execute("SELECT split_part(version(), ' on ', 1) AS version").fetchone()
    assert version is not None
    demo.screen.say(f"{version['version']}, migrated: {json.loads(migrated.stdout.splitlines()[0])['applied']}")


def _before_there_is_a_key(demo: Demo) -> None:
    demo.screen.title("1  The signing key's secret is still empty, and services insert already")
    demo.device("anna")
    for number in (1, 2):
        demo.insert(f"early bird {number}, before there was a key", "anna")
    demo.drain()
    demo.screen.say("Skipped for good: configuring APNs later pushes only what is new, never a backlog.")
    demo.secrets.put("apns-outbox/signing-key", json.dumps(demo.production.secret()))
    demo.screen.say("Now the secret holds the key.")


def _everyday(demo: Demo) -> None:
    demo.screen.title("2  An everyday mix is inserted, then two ticks come at the same moment")
    now = datetime.now(UTC).replace(microsecond=0)
    for number in range(1, 25):
        demo.device(f"user {number}")
        demo.insert(f"plain {number}", f"user {number}", f"Message {number}")
    demo.device("bea")
    demo.device("bea", environment="sandbox")
    demo.insert("two devices, one of them on sandbox", "bea")
    demo.device("carl", Reject(410, "Unregistered", timestamp=now + timedelta(minutes=1)))
    demo.insert("410: the app was removed", "carl")
    demo.device("dora", Reject(400, "BadDeviceToken"))
    demo.insert("400: a bad device token", "dora")
    demo.device("kim", Reject(410, "Unregistered", timestamp=now - timedelta(days=1)), Ok())
    demo.insert("410 of yesterday, but the device came back today", "kim")
    demo.device("emil", Reject(503, "ServiceUnavailable"), Ok())
    demo.insert("503 once", "emil")
    demo.device("finn", Reject(500, "InternalServerError"))
    demo.insert("500 for ever", "finn")
    demo.device("gina", Reset(2), Ok())
    demo.insert("reset before the answer: APNs may have it", "gina")
    demo.device("lars", Reject(429, "TooManyRequests"), Ok())
    demo.insert("429 once", "lars")
    demo.device("hugo")
    demo.insert("a payload of 5 kB", "hugo", "x" * 5000)
    demo.insert("a user without a device", "iris")
    demo.device("jan", topic="com.example.unknown")
    demo.insert("a topic that is not ours", "jan")
    demo.device("nina")
    demo.insert("scheduled: in an hour", "nina", send_at=now + timedelta(hours=1))
    demo.insert("deduplicated: inserted twice", "nina", dedupe_key="welcome-nina")
    demo.insert("deduplicated: inserted twice", "nina", dedupe_key="welcome-nina")
    demo.device("paul")
    demo.db.execute(
        "SELECT set_quiet_hours('paul', (%(now)s - interval '1 h')::time, (%(now)s + interval '1 h')::time, 'UTC')",
        {"now": now.replace(tzinfo=None)},
    )
    demo.insert("quiet hours where the recipient is", "paul")
    demo.device("quinn")
    demo.db.execute("SELECT set_push_enabled('quinn', false)")
    demo.insert("the recipient has opted out", "quinn")
    demo.device("rosa")
    expired = demo.insert("expired before it could be pushed", "rosa", expires_at=now + timedelta(minutes=5))
    demo.db.execute("UPDATE notification_delivery SET expires_at = now() WHERE id = %s", [expired.delivery_id])
    demo.device("otto")
    demo.insert("silent, in the background", "otto", push_type="background", priority=10)
    _table_of_what_was_inserted(demo)
    both = [("the tick", demo.invoke(TICK)), ("the half tick, by way of the queue", demo.invoke(HALF_TICK))]
    for name, invocation in both:
        demo.finish(name, invocation)
    demo.note()
    demo.drain("the next tick")
    withheld = demo.row(next(story for story in demo.stories.values() if "not ours" in story.what))
    token = demo.db.execute("SELECT invalidated_at FROM push_token WHERE user_id = 'jan'").fetchone()
    demo.screen.promise(
        "A fault of ours costs no row its attempts and invalidates no token",
        holds=withheld["attempts"] == 0 and token is not None and token["invalidated_at"] is None,
        seen=f"{withheld['reason']}, attempts = {withheld['attempts']}, token alive",
    )


def _table_of_what_was_inserted(demo: Demo) -> None:
    rows = demo.db.execute(
        """SELECT nd.id, nd.user_id, nd.push_type, octet_length(nd.payload::text) AS size,
                  (SELECT count(*) FROM push_token pt WHERE pt.user_id = nd.user_id) AS devices
           FROM notification_delivery nd WHERE nd.status = 'pending' ORDER BY nd.id"""
    ).fetchall()
    plain = [row for row in rows if demo.stories[row["id"]].what.startswith("plain")]
    others = [row for row in rows if row not in plain]
    demo.screen.table(
        ("id", "user", "devices", "type", "bytes", "what it meets"),
        [
            (f"{plain[0]['id']}-{plain[-1]['id']}", "user 1-24", 1, "alert", plain[0]["size"], "plain"),
            *(
                (row["id"], row["user_id"], row["devices"], row["push_type"], row["size"], demo.stories[row["id"]].what)
                for row in others
            ),
        ],
    )


def _a_drain_is_killed(demo: Demo) -> None:
    demo.screen.title("3  A drain is killed (SIGKILL) in the middle of its batch")
    slow = []
    for number in range(1, 13):
        demo.device(f"slow {number}", Ok(after=0.1 * number))
        slow.append(demo.insert(f"slow {number}: APNs takes its time", f"slow {number}"))
    invocation = demo.invoke(TICK)
    _until(lambda: sum(demo.row(story)["status"] == "sent" for story in slow) >= 5)
    demo.kill(invocation)
    killed_at = datetime.now(UTC)
    mine = {str(row["apns_id"]): row for row in demo.rows() if row["user_id"].startswith("slow")}
    pushes = [push for push in demo.pushes() if push.apns_id in mine]
    sent = sum(row["status"] == "sent" for row in mine.values())
    unsettled = [row for row in mine.values() if row["status"] == "pending"]
    demo.in_flight |= {str(row["apns_id"]) for row in unsettled}
    answered = [push for push in pushes if push.at + _delay(push) < killed_at - FLUSHED_WITHIN]
    demo.note()
    demo.screen.say(
        f"{len(pushes)} of 12 had reached APNs, {sent} were settled, {len(unsettled)} are left under its lease."
    )
    demo.screen.promise(
        "Settled as it goes: all that was answered more than a quarter second before the kill is settled",
        holds=all(mine[push.apns_id]["status"] == "sent" for push in answered) and sent >= 5,
        seen=f"{len(answered)} answered by then, {sent} settled",
    )
    demo.screen.promise(
        "Attempts are raised before anything is sent",
        holds=all(row["attempts"] == 1 for row in unsettled),
        seen=f"{len(unsettled)} rows with attempts = 1",
    )
    demo.drain("a drain while the lease lasts")
    advance(demo.db, LEASE_SECONDS + 1)
    demo.screen.say(f"{LEASE_SECONDS + 1} s pass. No reaper ran; the lease is over by itself.")
    demo.drain("the next drain")
    demo.screen.promise(
        "Whatever dies, no row is lost or stuck",
        holds=all(demo.row(story)["status"] == "sent" for story in demo.stories.values() if "slow" in story.what),
        seen="all 12 sent",
    )


def _delay(push: Push) -> timedelta:
    return timedelta(seconds=push.answer.after if isinstance(push.answer, Ok | Reject | Reset) else 0)


def _a_row_kills_its_drains(demo: Demo) -> None:
    demo.screen.title("4  One row kills every drain that handles it")
    demo.device("kurt", Silence())
    killer = demo.insert("kills its drain", "kurt")
    for number in range(1, 4):
        demo.insert(f"bystander {number}", f"user {number}", "In the same batch as the killer")
    killers_id = str(demo.row(killer)["apns_id"])
    bystanders = [story for story in demo.stories.values() if story.what.startswith("bystander")]
    for attempt in range(1, MAX_ATTEMPTS + 1):
        invocation = demo.invoke(TICK)
        _until(lambda: sum(push.apns_id == killers_id for push in demo.production.journal) >= attempt)  # noqa: B023  called at once
        # The first time the bystanders are in its batch. Afterwards it is alone, whatever else is due.
        _until(lambda: all(demo.row(story)["status"] == "sent" for story in bystanders))
        demo.kill(invocation)
        demo.in_flight.add(killers_id)
        demo.note()
        advance(demo.db, LEASE_SECONDS + 1)
    demo.screen.say(f"{MAX_ATTEMPTS} drains died of it, each time alone with it but for the first.")
    demo.drain("the next drain")
    row = demo.row(killer)
    demo.screen.promise(
        "A row whose last lease expires is failed, so that nothing circles for ever",
        holds=(row["status"], row["reason"], row["attempts"]) == ("failed", "lease_expired", MAX_ATTEMPTS),
        seen=f"{row['status']} {row['reason']} after {row['attempts']} attempts",
    )
    attempts = [demo.row(story)["attempts"] for story in bystanders]
    demo.screen.promise(
        "It burned nobody else's attempts", holds=attempts == [1, 1, 1], seen=f"bystanders' attempts: {attempts}"
    )


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError("the demo waited a minute for what should take a second")
        time.sleep(0.05)


def _time_runs_out(demo: Demo) -> None:
    demo.screen.title("5  An invocation has hardly any time left")
    for number in range(1, 7):
        demo.device(f"late {number}", Ok(after=2.0 if number == 1 else 0.0))
        demo.insert(f"late {number}: behind one that takes 2 s", f"late {number}")
    tally = demo.finish("a drain with 14.5 s, of which a push may need 13", demo.invoke(TICK, 14.5))
    demo.note()
    released = [row for row in demo.rows() if row["status"] == "pending" and row["user_id"].startswith("late")]
    demo.screen.promise(
        "What was not begun is given back: due at once, no attempt spent",
        holds=tally is not None
        and tally["released"] == len(released) > 0
        and all(row["attempts"] == 0 for row in released),
        seen=f"{len(released)} released",
    )
    demo.drain("the next drain")
    refused = demo.finish("a drain whose timeout outlasts its lease", demo.invoke(TICK, 900))
    demo.screen.promise(
        "Lease > function timeout + margin, or it refuses to start", holds=refused is None, seen="refused"
    )


def _the_key_is_wrong(demo: Demo) -> None:
    demo.screen.title("6  Somebody puts a wrong key into the secret")
    wrong = {**demo.production.secret(), "private_key": Credentials.generate().private_key()}
    demo.secrets.put("apns-outbox/signing-key", json.dumps(wrong))
    stories = [demo.insert(f"wrong key {number}", f"user {number}") for number in range(1, 11)]
    before = len(demo.pushes())
    demo.drain("a drain with the wrong key")
    cost = len(demo.pushes()) - before
    demo.screen.promise(
        "A bad key costs one push a drain, and no row its attempts",
        holds=cost == 1 and all(demo.row(story)["attempts"] == 0 for story in stories),
        seen=f"{cost} push, {len(stories)} rows withheld",
    )
    demo.secrets.put("apns-outbox/signing-key", json.dumps(demo.production.secret()))
    demo.screen.say("The secret holds the right key again.")


def _time_heals(demo: Demo) -> None:
    demo.screen.title("7  Time passes: backoff after backoff, and somebody mends the topic")
    demo.db.execute("UPDATE push_token SET topic = NULL WHERE user_id = 'jan'")
    asleep = demo.row(next(story for story in demo.stories.values() if "quiet hours" in story.what))
    demo.screen.promise(
        "Quiet hours defer and never drop",
        holds=(asleep["status"], asleep["reason"], asleep["attempts"]) == ("pending", "quiet_hours", 0),
        seen=f"{asleep['status']} {asleep['reason']}, attempts = {asleep['attempts']}",
    )
    demo.db.execute("SELECT set_quiet_hours('paul', NULL, NULL)")
    demo.screen.say("Morning comes for paul.")
    for _ in range(MAX_ATTEMPTS + 1):
        advance(demo.db, 3600)
        demo.drain("an hour later")
        if not any(row["status"] == "pending" for row in demo.rows()):
            break


def _what_became_of_each(demo: Demo) -> None:
    demo.screen.title("What became of each delivery")
    pushes = Counter(push.apns_id for push in demo.pushes())
    told: dict[tuple[object, ...], list[int]] = {}  # those of one kind with one journey share a line
    for row in demo.rows():
        story = demo.stories[row["id"]]
        kind = KIND.sub("", story.what)
        told.setdefault((kind, row["attempts"], pushes[str(row["apns_id"])], " > ".join(story.steps)), []).append(
            row["id"]
        )
    demo.screen.table(
        ("id", "delivery", "attempts", "pushes", "journey"),
        [(_range(ids), *what) for what, ids in told.items()],
    )
    received = Counter(
        f"{push.environment}: {push.answer.reason if isinstance(push.answer, Reject) else type(push.answer).__name__}"
        for push in demo.pushes()
    )
    demo.screen.title("What APNs received, and how it answered")
    demo.screen.table(("answer", "pushes"), sorted(received.items()))


def _range(ids: list[int]) -> str:
    return str(ids[0]) if len(ids) == 1 else f"{ids[0]}..{ids[-1]} ({len(ids)})"


def _promises(demo: Demo) -> None:
    demo.screen.title("The promises")
    rows, pushes = demo.rows(), demo.pushes()
    by_id: dict[str, list[Push]] = {}
    for push in pushes:
        by_id.setdefault(push.apns_id, []).append(push)
    doubled = {key for key, same in by_id.items() if sum(isinstance(push.answer, Ok | Reset) for push in same) > 1}
    unknown = {push.apns_id for push in pushes if isinstance(push.answer, Reset)}
    ours = {
        key: demo.tallies[key]
        for key in (
            "sent",
            "retried",
            "failed",
            "invalid_token",
            "skipped",
            "deferred",
            "withheld",
            "released",
            "lease_lost",
        )
    }
    demo.screen.promise(
        "Every delivery has ended",
        holds=not any(row["status"] == "pending" for row in rows),
        seen=", ".join(f"{count} {status}" for status, count in sorted(Counter(row["status"] for row in rows).items())),
    )
    demo.screen.promise(
        "Every row that a drain claimed is accounted for in its tally",
        holds=demo.tallies["claimed"] == sum(ours.values()),
        seen=f"{demo.tallies['claimed']} claimed",
    )
    demo.screen.promise(
        "A push is doubled only by a kill or a lost answer, and then with the same apns-id and collapse id",
        holds=doubled <= demo.in_flight | unknown
        and all(len({push.headers["apns-collapse-id"] for push in same}) == 1 for same in by_id.values()),
        seen=f"{len(doubled)} doubled",
    )
    again = demo.db.execute(
        "SELECT count(*) AS n FROM notification_delivery WHERE dedupe_key = 'welcome-nina'"
    ).fetchone()
    demo.screen.promise(
        "A dedupe key queues once", holds=again is not None and again["n"] == 1, seen="1 row for 2 inserts"
    )
    unwanted = {row["user_id"]: row["reason"] for row in rows if row["user_id"] in {"quinn", "rosa"}}
    demo.screen.promise(
        "Who opted out is not pushed to, nor is what has expired",
        holds=unwanted == {"quinn": "opted_out", "rosa": "expired"},
        seen=", ".join(f"{user} {reason}" for user, reason in unwanted.items()),
    )
    early = [row for row in rows if row["user_id"] == "anna"]
    demo.screen.promise(
        "What was skipped before APNs was configured is never pushed",
        holds=all(str(row["apns_id"]) not in by_id and row["reason"] == "unconfigured" for row in early),
        seen=f"{len(early)} rows, 0 pushes",
    )
    invalid = {
        row["user_id"] for row in demo.db.execute("SELECT user_id FROM push_token WHERE invalidated_at IS NOT NULL")
    }
    demo.screen.promise(
        "A dead token is invalidated, and no other", holds=invalid == {"carl", "dora"}, seen=", ".join(sorted(invalid))
    )
    key = demo.production.secret()["private_key"].splitlines()[1]
    leaks = [secret for secret in [*demo.tokens, key, "Message 7"] if secret in demo.output]
    demo.screen.promise(
        "No device token, key or payload in any log",
        holds=not leaks,
        seen=f"{len(demo.output.splitlines())} lines looked through",
    )


if __name__ == "__main__":
    sys.exit(main())
