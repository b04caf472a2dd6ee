"""Eight drains at once, each in a process of its own, over one outbox."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psycopg

from core.answer import Accepted, Answer, Rejected
from core.database import Database as Connected
from core.delivery import Delivery, Push
from core.drain import Drain, Pace, Settled, Swept
from core.outbox import PostgresOutbox
from core.proof import Fault
from core.settings import DatabaseUrl
from core.verdict import Ladder
from tests.support.database import Database
from tests.support.outbox import BATCH_SIZE, GIVE_BACK_HOURS, LEASE_SECONDS, MAX_ATTEMPTS

ROOT = Path(__file__).parent.parent
DRAINS, DELIVERIES, USERS = 8, 20_000, 4_000
PATIENCE_SECONDS = 120  # until a process that ought to be done is given up

# What APNs makes of a token, by the digits it begins with. The rest of the users have no device.
ACCEPTED, TOO_LARGE, UNREGISTERED = "aa", "bb", "cc"
ANSWERS: dict[str, Answer] = {
    ACCEPTED: Accepted(),
    TOO_LARGE: Rejected(413, "PayloadTooLarge"),
    UNREGISTERED: Rejected(410, "Unregistered"),
}


@dataclass(frozen=True, kw_only=True)  # no slots, or `super()` would not work before Python 3.14
class Remembering(PostgresOutbox):
    """The outbox, remembering what it leased."""

    leased: list[int] = field(default_factory=list)

    async def claim(self) -> list[Delivery]:
        return self._remember(await super().claim())

    async def claim_suspect(self) -> list[Delivery]:
        return self._remember(await super().claim_suspect())

    async def bind(self, deliveries: Sequence[Delivery]) -> list[Push]:
        claimed = {each.id for each in deliveries}
        pushes = await super().bind(deliveries)
        self._remember([push.delivery for push in pushes if push.delivery.id not in claimed])
        return pushes

    def _remember(self, deliveries: list[Delivery]) -> list[Delivery]:
        self.leased.extend(each.id for each in deliveries)
        return deliveries


@dataclass(slots=True)
class Oracle:
    """Answers as the token says, and counts what it was sent."""

    pushed: Counter[str] = field(default_factory=Counter)

    def topic(self, push: Push) -> str:
        return push.device.topic or "com.example.app"

    async def push(self, push: Push) -> Answer:
        self.pushed[str(push.delivery.apns_id)] += 1
        return ANSWERS[push.device.token[:2]]


class Unhurried:
    """A clock with a quarter of an hour left, for ever."""

    def left(self) -> float:
        return 900.0

    def elapsed(self) -> float:
        return time.monotonic()


class Silent:
    """A witness that says nothing."""

    def swept(self, swept: Swept) -> None: ...
    def answered(self, push: Push, answer: Answer) -> None: ...
    def withheld(self, fault: Fault) -> None: ...
    def bad_time_zone(self, delivery: Delivery, time_zone: str) -> None: ...
    def settled(self, settled: Settled) -> None: ...


async def drain_until_nothing_is_due(url: str) -> None:
    """Run in a process of its own: drain when told to, then tell what was done."""
    database, oracle = Connected(DatabaseUrl(url)), Oracle()
    outbox = Remembering(
        database=database,
        batch_size=BATCH_SIZE,
        lease_seconds=LEASE_SECONDS,
        max_attempts=MAX_ATTEMPTS,
        give_back_hours=GIVE_BACK_HOURS,
    )
    drain = Drain(
        outbox=outbox,
        gateway=oracle,
        clock=Unhurried(),
        pace=Pace(batch_size=BATCH_SIZE, max_batches=DELIVERIES, lease_seconds=LEASE_SECONDS),
        ladder=Ladder(max_attempts=MAX_ATTEMPTS, base=60, cap=3600),
        dice=lambda: 0.5,
        witness=Silent(),
    )
    await database.ready()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    tally = await drain.run()
    await database.close()
    json.dump({"tally": asdict(tally), "leased": outbox.leased, "pushed": oracle.pushed}, sys.stdout)


@contextmanager
def process(url: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, __file__, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def fill(db: psycopg.Connection) -> None:
    """Insert 20,000 deliveries: of ten users six have a device, one has three, one's is too small, one's is gone."""
    db.execute(
        """
        INSERT INTO push_token (user_id, token, environment)
        SELECT 'user' || u, prefix || lpad(to_hex(u * 4 + n), 62, '0'), 'production'
        FROM generate_series(1, %s) u,
             LATERAL (SELECT CASE u %% 10 WHEN 7 THEN %s WHEN 8 THEN %s ELSE %s END) AS kind (prefix),
             generate_series(1, CASE u %% 10 WHEN 6 THEN 3 WHEN 9 THEN 0 ELSE 1 END) n
        """,
        [USERS, TOO_LARGE, UNREGISTERED, ACCEPTED],
    )
    # The oldest have the largest ids, and those that meet in a batch belong to many users.
    db.execute(
        "INSERT INTO notification_delivery (user_id, payload, next_attempt_at)"
        " SELECT 'user' || 1 + g %% %s, '{}', now() - g * interval '1 ms' FROM generate_series(1, %s) g",
        [USERS, DELIVERIES],
    )


def test_eight_drains_over_twenty_thousand_rows_claim_nothing_twice_and_end_every_row(
    db: psycopg.Connection, database: Database
) -> None:
    fill(db)
    with ExitStack() as running:
        drains = [running.enter_context(process(database.url)) for _ in range(DRAINS)]
        for drain in drains:
            assert drain.stdout is not None
            assert drain.stdout.readline() == "ready\n"
        for drain in drains:
            assert drain.stdin is not None
            drain.stdin.write("go\n")
            drain.stdin.flush()
        reports = [json.loads(drain.communicate(timeout=PATIENCE_SECONDS)[0]) for drain in drains]
        assert [drain.returncode for drain in drains] == [0] * DRAINS

    rows: dict[int, str] = dict(db.execute("SELECT id, status FROM notification_delivery").fetchall())
    ends = Counter(rows.values())
    assert ends.keys() == {"sent", "failed", "invalid_token", "skipped"}
    assert len(rows) == DELIVERIES + 2 * DELIVERIES // 10  # every tenth has two siblings

    leased = [id_ for report in reports for id_ in report["leased"]]
    assert len(leased) == len(set(leased)), "claimed twice within a lease"
    assert set(leased) == rows.keys()
    assert all(report["leased"] for report in reports), "a drain found nothing to do: they did not run at once"

    total = Counter[str]()
    for report in reports:
        total.update(report["tally"])
    assert +total == Counter(ends) + Counter(claimed=len(rows), pushed=len(rows) - ends["skipped"])
    pushed = Counter[str]()
    for report in reports:
        pushed.update(report["pushed"])
    assert set(pushed.values()) == {1}
    assert ends["sent"] == DELIVERIES * 6 // 10 + 3 * DELIVERIES // 10
    assert ends["failed"] == DELIVERIES // 10
    assert ends["invalid_token"] + ends["skipped"] == 2 * DELIVERIES // 10
    assert db.execute(
        "SELECT count(*) FROM notification_delivery WHERE attempts <> 1 OR claimed_at IS NOT NULL"
    ).fetchone() == (0,)


if __name__ == "__main__":
    asyncio.run(drain_until_nothing_is_due(sys.argv[1]))
