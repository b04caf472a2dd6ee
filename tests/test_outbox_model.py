"""Several drains, devices that come and go, and time, against the real database and a model of what it should hold.

The model knows nothing of SQL: a dict of rows, a dict of devices, one clock. After every step the tables must equal it.
Few rows and devices, and steps only where they change something: so that the same row is met again and again, by the
drain that holds it, by the one that held it before, and by its own write sent twice.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, assert_never

import psycopg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.answer import Accepted, Answer, Rejected, Unanswered, Unbegun
from core.delivery import Delivery, Device, Push
from core.verdict import (
    Deferred,
    Failed,
    InvalidToken,
    Ladder,
    Outcome,
    Released,
    Retry,
    Sent,
    Skip,
    Skipped,
    Withheld,
    judge,
)
from tests.support.database import Database
from tests.support.outbox import Session, session
from tests.support.time_travel import install_clock, tick

# Of a clock in microseconds, which is what the database's dates are made of.
SECOND = 1_000_000
START = datetime(2030, 1, 1, tzinfo=UTC)
LEASE, GIVE_BACK = 120 * SECOND, 3600 * SECOND
DRAINS, BATCH, MAX_ATTEMPTS = 3, 2, 3
LADDER = Ladder(max_attempts=MAX_ATTEMPTS, base=60, cap=3600)
USERS, TOKENS = ("ann", "bob"), ("aa", "bb", "cc")
FEW = 4  # pending rows: they are met again and again
ROWS = """
    SELECT id, user_id, status, reason, attempts, push_token_id, fanned_out_from,
           (extract(epoch FROM next_attempt_at - %(start)s) * 1000000)::bigint AS due,
           (extract(epoch FROM claimed_at - %(start)s) * 1000000)::bigint AS claimed,
           (extract(epoch FROM first_claimed_at - %(start)s) * 1000000)::bigint AS first_claimed,
           (extract(epoch FROM sent_at - %(start)s) * 1000000)::bigint AS sent
    FROM notification_delivery
"""
DEVICES = """
    SELECT id, user_id, token, (extract(epoch FROM registered_at - %(start)s) * 1000000)::bigint AS registered,
           invalidated_at IS NULL AS live
    FROM push_token
"""


@dataclass(slots=True)
class Row:
    user: str
    due: int
    device: int | None
    origin: int | None = None
    status: str = "pending"
    reason: str | None = None
    attempts: int = 0
    claimed: int | None = None
    first_claimed: int | None = None
    sent: int | None = None


@dataclass(slots=True)
class Token:
    user: str
    text: str
    registered: int
    live: bool = True


@dataclass(frozen=True, slots=True)
class Held:
    """What a drain has in its hands. Until it is bound it has no device; a drain skips what stays without."""

    drain: int
    delivery: Delivery
    bound: bool = False
    device: Device | None = None


@dataclass(frozen=True, slots=True)
class World:
    """What the runs share: sessions, since opening them takes longer than a run's every step."""

    db: psycopg.Connection[Any]
    drains: list[Session]


@dataclass(slots=True)
class Story:
    """What the model remembers of a run."""

    now: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    tokens: dict[int, Token] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    said: list[tuple[int, list[tuple[Delivery, Outcome]]]] = field(default_factory=list)  # to be said once more
    ends: dict[int, tuple[str, str | None, int | None]] = field(default_factory=dict)
    dull: bool = False  # nothing has come of the last step: the next one shall be a drain's

    def pending(self) -> Iterator[tuple[int, Row]]:
        return ((id_, row) for id_, row in self.rows.items() if row.status == "pending")

    def claim(self, id_: int) -> None:
        row = self.rows[id_]
        row.attempts += 1
        row.due, row.claimed = self.now + LEASE, self.now
        row.first_claimed = self.now if row.first_claimed is None else row.first_claimed

    def is_held(self, delivery: Delivery) -> bool:
        """Compare the fence."""
        row = self.rows[delivery.id]
        return (row.due, row.attempts) == (since_start(delivery.lease.until), delivery.lease.attempts)

    def passes(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Say whether an outcome may be written: it is still ours to say, or said already, or APNs' acceptance."""
        row = self.rows[delivery.id]
        status, reason = wording(outcome)
        if self.is_held(delivery) and (row.status == "pending" or (row.status, row.reason) == (status, reason)):
            return True
        return isinstance(outcome, Sent) and row.status in ("pending", "failed", "sent")

    def settle(self, outcomes: list[tuple[Delivery, Outcome]]) -> dict[int, str]:
        """Write down what passes, and say how those rows end."""
        passed = [(delivery, outcome) for delivery, outcome in outcomes if self.passes(delivery, outcome)]
        for delivery, outcome in passed:
            if isinstance(outcome, InvalidToken) and self.rows[delivery.id].status == "pending":
                token = self.tokens[outcome.device.push_token_id]
                registered = token.registered // 1000 * 1000
                if outcome.dead_since is None or registered <= since_start(outcome.dead_since):
                    token.live = False
        for delivery, outcome in passed:
            self._write(self.rows[delivery.id], delivery, outcome)
        return {delivery.id: self.rows[delivery.id].status for delivery, _ in passed}

    def _write(self, row: Row, delivery: Delivery, outcome: Outcome) -> None:
        row.claimed = None
        match outcome:
            case Sent():
                row.status, row.reason = "sent", None
                row.sent = self.now if row.sent is None else row.sent
            case Retry(reason, _, delay):
                row.reason, row.due = reason, self.now + round(delay * SECOND)
            case Withheld(reason, _, delay):
                row.reason, row.due = reason, self.now + round(delay * SECOND)
                row.attempts -= 1
            case Deferred(delay):
                row.reason, row.due = "quiet_hours", self.now + round(delay * SECOND)
                row.attempts -= 1
            case Failed(reason, _):
                row.status, row.reason = "failed", reason
            case Skipped(why):
                row.status, row.reason = "skipped", why.value
            case InvalidToken() if row.status != "pending":
                pass  # said again: the end stays, also where the device is back since
            case InvalidToken(reason, _, device, _, if_alive):
                if self.tokens[device.push_token_id].live:
                    self._write(row, delivery, if_alive)
                else:
                    row.status, row.reason = "invalid_token", reason
            case Released():
                row.due = self.now
                if delivery.may_give_back:
                    row.attempts -= 1
                elif row.attempts >= MAX_ATTEMPTS:
                    row.status, row.reason = "failed", "out_of_time"
            case _:
                assert_never(outcome)


def since_start(instant: datetime) -> int:
    return (instant - START) // timedelta(microseconds=1)


def wording(outcome: Outcome) -> tuple[str, str | None]:
    """Say what an outcome would leave behind if it were an end."""
    match outcome:
        case Sent():
            return "sent", None
        case Failed(reason, _):
            return "failed", reason
        case Skipped(why):
            return "skipped", why.value
        case InvalidToken(reason=reason):
            return "invalid_token", reason
        case Retry() | Deferred() | Withheld() | Released():
            return "pending", None
        case _:
            assert_never(outcome)


def delays(outcome: Outcome) -> int:
    match outcome:
        case Retry(delay=delay) | Deferred(delay) | Withheld(delay=delay) | InvalidToken(if_alive=Retry(delay=delay)):
            return round(delay * SECOND)
        case _:
            return 0


class Drains(RuleBasedStateMachine):
    world: ClassVar[World]
    # What is said of a delivery before it is bound to a device.
    UNWANTED: ClassVar[list[Outcome]] = [Deferred(60.0), *map(Skipped, set(Skip) - {Skip.NO_PUSH_TOKEN})]

    def __init__(self) -> None:
        super().__init__()
        self.story = Story()
        self.world.db.execute("TRUNCATE notification_delivery, push_token")
        self.world.db.execute("UPDATE test_clock.clock SET instant = %s", [START])

    def pass_time(self, microseconds: int) -> None:
        self.story.now += microseconds
        tick(self.world.db, microseconds / SECOND)

    def step_aside(self, outcomes: list[tuple[Delivery, Outcome]]) -> None:
        """Write no date that is the end of a lease somebody remembers: by a clock that runs it would not happen."""
        self.step_past({delays(outcome) for _, outcome in outcomes})

    def step_past(self, intervals: set[int]) -> None:
        remembered = [each.delivery for each in self.story.held] + [
            delivery for _, said in self.story.said for delivery, _ in said
        ]
        leases = {since_start(each.lease.until) for each in remembered}
        while any(self.story.now + interval in leases for interval in intervals):
            self.pass_time(1)

    # Producers and devices.

    @initialize()
    def begin(self) -> None:
        """Give both users something to do: one has a device, one has two."""
        for user, text in zip((USERS[0], *USERS), TOKENS, strict=True):
            self.register(user, text)
        for user in USERS:
            self.insert(user, self.story.now, None)

    def insert(self, user: str, due: int, named: int | None) -> None:
        row = self.world.db.execute(
            "INSERT INTO notification_delivery (user_id, payload, next_attempt_at, push_token_id)"
            " VALUES (%s, '{}', %s, %s) RETURNING id",
            [user, START + timedelta(microseconds=due), named],
        ).fetchone()
        assert row is not None
        self.story.rows[row[0]] = Row(user, due, named)

    @precondition(lambda self: sum(1 for _ in self.story.pending()) < FEW)
    @rule(user=st.sampled_from(USERS), wait=st.sampled_from([0, 0, 0, 60]), data=st.data())
    def enqueue(self, user: str, wait: int, data: st.DataObject) -> None:
        named = data.draw(st.sampled_from([None, None, None, *self.story.tokens]))
        self.insert(user, self.story.now + wait * SECOND, named)
        self.story.dull = False

    @precondition(lambda self: not self.story.dull)
    @rule(user=st.sampled_from(USERS), text=st.sampled_from(TOKENS))
    def somebody_registers(self, user: str, text: str) -> None:
        """With a new device, or again with one there is, or with one that was somebody else's."""
        self.register(user, text)
        self.story.dull = True

    def register(self, user: str, text: str) -> None:
        row = self.world.db.execute("SELECT register_push_token(%s, %s)", [user, text]).fetchone()
        assert row is not None
        known = [id_ for id_, token in self.story.tokens.items() if token.text == text]
        assert row[0] in known or (not known and row[0] not in self.story.tokens)
        self.story.tokens[row[0]] = Token(user, text, self.story.now)

    @precondition(lambda self: not self.story.dull and sum(each.live for each in self.story.tokens.values()) > 2)
    @rule(data=st.data())
    def log_out(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from([id_ for id_, token in self.story.tokens.items() if token.live]))
        self.world.db.execute("UPDATE push_token SET invalidated_at = now() WHERE id = %s", [id_])
        self.story.tokens[id_].live = False
        self.story.dull = True

    # Drains.

    def take(self, drain: int, claimed: list[Delivery], expected: list[int]) -> None:
        story = self.story
        assert [each.id for each in claimed] == expected
        for delivery in claimed:
            due = story.rows[delivery.id].due
            story.claim(delivery.id)
            row = story.rows[delivery.id]
            assert story.is_held(delivery)
            assert delivery.due_at == (START + timedelta(microseconds=due)).timestamp()
            assert row.first_claimed is not None
            assert delivery.may_give_back == (row.first_claimed > story.now - GIVE_BACK)
            story.held.append(Held(drain, delivery))
        story.dull = False

    def due(self, *, suspects: bool) -> list[int]:
        story = self.story
        return [
            id_
            for _, id_ in sorted(
                (row.due, id_)
                for id_, row in story.pending()
                if row.due <= story.now and (row.claimed is not None) == suspects
            )
            if not suspects or story.rows[id_].attempts < MAX_ATTEMPTS
        ]

    def something_comes_due(self, *, suspects: bool) -> bool:
        """Say whether a claim would find something, now or a microsecond later."""
        return any(
            row.due <= self.story.now + 1 and (row.claimed is not None) == suspects for _, row in self.story.pending()
        )

    @precondition(lambda self: self.something_comes_due(suspects=False))
    @rule(drain=st.integers(0, DRAINS - 1), binds=st.sampled_from([True, True, True, False]))
    def claim(self, drain: int, *, binds: bool) -> None:
        self.step_past({LEASE})
        self.take(drain, self.world.drains[drain].claim(), self.due(suspects=False)[:BATCH])
        if binds:
            self.bind_what_is_claimed(drain)

    @precondition(lambda self: self.something_comes_due(suspects=True))
    @rule(drain=st.integers(0, DRAINS - 1), binds=st.sampled_from([True, True, True, False]))
    def claim_suspect(self, drain: int, *, binds: bool) -> None:
        self.step_past({LEASE})
        self.take(drain, self.world.drains[drain].claim_suspect(), self.due(suspects=True)[:1])
        if binds:
            self.bind_what_is_claimed(drain)

    @precondition(
        lambda self: any(
            row.claimed is not None and row.due <= self.story.now + 1 and row.attempts >= MAX_ATTEMPTS - 1
            for _, row in self.story.pending()
        )
    )
    @rule(drain=st.integers(0, DRAINS - 1))
    def sweep(self, drain: int) -> None:
        story = self.story
        dead = {
            id_
            for id_, row in story.pending()
            if row.claimed is not None and row.due <= story.now and row.attempts >= MAX_ATTEMPTS
        }
        assert {each.id for each in self.world.drains[drain].sweep()} == dead
        for id_ in dead:
            story.rows[id_].status, story.rows[id_].reason, story.rows[id_].claimed = "failed", "lease_expired", None

    @precondition(lambda self: any(not each.bound for each in self.story.held))
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        """Bind late: a drain that was frozen in between may have lost what it claimed."""
        self.bind_what_is_claimed(
            data.draw(st.sampled_from(sorted({each.drain for each in self.story.held if not each.bound})))
        )

    def bind_what_is_claimed(self, drain: int) -> None:
        story = self.story
        unbound = {each.delivery.id: each.delivery for each in story.held if each.drain == drain and not each.bound}
        expected: set[tuple[int, int]] = set()
        for id_, delivery in unbound.items():
            row = story.rows[id_]
            if row.status != "pending" or not story.is_held(delivery):
                continue
            live = sorted(
                ((token.registered, token_id) for token_id, token in story.tokens.items()
                 if token.live and token.user == row.user),
                reverse=True,
            )  # fmt: skip
            devices = [token_id for _, token_id in live]
            if row.device is not None:
                devices = [row.device] if row.device in devices else []
            elif devices:
                row.device = devices[0]
            expected |= {(id_, device) for device in devices}

        pushes = self.world.drains[drain].bind(list(unbound.values()))

        origins: dict[int, int] = dict(
            self.world.db.execute(
                "SELECT id, fanned_out_from FROM notification_delivery WHERE id = ANY(%s) AND NOT id = ANY(%s)",
                [[push.delivery.id for push in pushes], list(unbound)],
            ).fetchall()
        )
        assert {
            (origins.get(push.delivery.id, push.delivery.id), push.device.push_token_id) for push in pushes
        } == expected
        assert len({push.delivery.apns_id for push in pushes}) == len(pushes) == len(expected)
        for id_, origin in origins.items():
            first = story.rows[origin]
            (device,) = (push.device.push_token_id for push in pushes if push.delivery.id == id_)
            story.rows[id_] = Row(
                first.user,
                first.due,
                device,
                origin,
                attempts=1,
                claimed=story.now,
                first_claimed=first.first_claimed,
            )
        story.held = [each for each in story.held if each.drain != drain or each.bound]
        for push in pushes:
            assert story.is_held(push.delivery)
            assert push.device.token == story.tokens[push.device.push_token_id].text
            story.held.append(Held(drain, push.delivery, bound=True, device=push.device))
        bound = {push.delivery.id for push in pushes}
        story.held += [Held(drain, unbound[id_], bound=True) for id_ in unbound if id_ not in bound]

    def answer(self, data: st.DataObject, device: Device) -> Answer:
        registered = START + timedelta(milliseconds=self.story.tokens[device.push_token_id].registered // 1000)
        answers: list[Answer] = [
            *[Unanswered("timeout", "No answer came.")] * 2,  # often, since what comes back is met again
            *[Rejected(403, "Forbidden")] * 2,
            Accepted(),
            Rejected(413, "PayloadTooLarge"),
            Rejected(410, "Unregistered", registered),
            Rejected(410, "Unregistered", registered - timedelta(milliseconds=1)),
            Rejected(400, "BadDeviceToken"),
            Unbegun(),
        ]
        return data.draw(st.sampled_from(answers))

    @precondition(lambda self: self.story.held)
    @rule(data=st.data(), chance=st.sampled_from([0.0, 0.5]))
    def settle(self, data: st.DataObject, chance: float) -> None:
        """Let a drain say what became of some of what it holds, or believes to hold."""
        self.settle_some(data, chance, self.story.held)

    @precondition(lambda self: any(not self.story.is_held(each.delivery) for each in self.story.held))
    @rule(data=st.data(), chance=st.sampled_from([0.0, 0.5]))
    def settle_late(self, data: st.DataObject, chance: float) -> None:
        self.settle_some(data, chance, [each for each in self.story.held if not self.story.is_held(each.delivery)])

    def settle_some(self, data: st.DataObject, chance: float, among: list[Held]) -> None:
        story = self.story
        drain = data.draw(st.sampled_from(sorted({each.drain for each in among})))
        # It may hold one row twice, by an old lease and by a new one, and never settles both at once.
        holds = {each.delivery.id: each for each in among if each.drain == drain}
        chosen = data.draw(st.lists(st.sampled_from(sorted(holds)), min_size=1, max_size=3, unique=True))
        outcomes: list[tuple[Delivery, Outcome]] = []
        for id_ in chosen:
            held = holds[id_]
            if not held.bound:
                outcomes.append((held.delivery, data.draw(st.sampled_from(self.UNWANTED))))
            elif held.device is None:
                outcomes.append((held.delivery, Skipped(Skip.NO_PUSH_TOKEN)))
            else:
                push = Push(held.delivery, held.device)
                outcomes.append((held.delivery, judge(push, self.answer(data, held.device), LADDER, chance)))
        self.step_aside(outcomes)
        story.held = [each for each in story.held if each not in [holds[id_] for id_ in chosen]]

        self.say(drain, outcomes)
        # What may have failed by one of two names is left to a test of its own: from outside the name does not show.
        if not any(isinstance(each, InvalidToken) and isinstance(each.if_alive, Failed) for _, each in outcomes):
            story.said = [*story.said[-2:], (drain, outcomes)]
        story.dull = False

    @precondition(lambda self: self.story.said)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        """Say it once more, as a drain does whose connection broke before the answer came."""
        drain, outcomes = self.story.said.pop(data.draw(st.integers(0, len(self.story.said) - 1)))
        self.step_aside(outcomes)
        self.say(drain, outcomes)

    def say(self, drain: int, outcomes: list[tuple[Delivery, Outcome]]) -> None:
        settled = self.world.drains[drain].settle(outcomes)
        expected = self.story.settle([each for each in outcomes if not isinstance(each[1], Released)])
        expected |= self.story.settle([each for each in outcomes if isinstance(each[1], Released)])
        assert {each.delivery.id: each.status for each in settled} == {
            delivery.id: expected.get(delivery.id) for delivery, _ in outcomes
        }

    @precondition(lambda self: len(self.story.held) > FEW and not self.story.dull)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Forget what one drain holds."""
        drain = data.draw(st.sampled_from(sorted({each.drain for each in self.story.held})))
        self.story.held = [each for each in self.story.held if each.drain != drain]
        self.story.dull = True

    # Time.

    @precondition(lambda self: any(row.due > self.story.now for _, row in self.story.pending()))
    @rule(short=st.sampled_from([0, 0, 0, 1]), data=st.data())
    def time_passes_until_something_is_due(self, short: int, data: st.DataObject) -> None:
        """Or until a microsecond before."""
        later = sorted({row.due for _, row in self.story.pending() if row.due > self.story.now})
        self.pass_time(max(data.draw(st.sampled_from(later)) - short - self.story.now, 0))

    @precondition(lambda self: not self.story.dull)
    @rule(seconds=st.sampled_from([1, 30, 3600]))
    def time_passes(self, seconds: int) -> None:
        self.pass_time(seconds * SECOND + 7)  # so that few dates fall together by accident
        self.story.dull = True

    # What must hold after every step.

    @invariant()
    def the_tables_equal_the_model(self) -> None:
        story, start = self.story, {"start": START}
        rows = {row[0]: row[1:] for row in self.world.db.execute(ROWS, start).fetchall()}
        assert rows == {
            id_: (
                row.user, row.status, row.reason, row.attempts, row.device, row.origin,
                row.due, row.claimed, row.first_claimed, row.sent,
            )
            for id_, row in story.rows.items()
        }  # fmt: skip
        devices = {row[0]: row[1:] for row in self.world.db.execute(DEVICES, start).fetchall()}
        assert devices == {
            id_: (token.user, token.text, token.registered, token.live) for id_, token in story.tokens.items()
        }

    @invariant()
    def no_row_is_in_two_live_leases(self) -> None:
        live = [each.delivery.id for each in self.story.held if since_start(each.delivery.lease.until) > self.story.now]
        assert max(Counter(live).values(), default=0) <= 1

    @invariant()
    def attempts_are_bounded(self) -> None:
        assert all(0 <= row.attempts <= MAX_ATTEMPTS for row in self.story.rows.values())

    @invariant()
    def an_end_is_final_but_for_an_acceptance(self) -> None:
        for id_, row in self.story.rows.items():
            if row.status == "pending":
                assert id_ not in self.story.ends, f"{id_} came back"
                continue
            end = (row.status, row.reason, row.sent)
            before = self.story.ends.setdefault(id_, end)
            assert end == before or (before[0] == "failed" and end[0] == "sent")
            self.story.ends[id_] = end

    def teardown(self) -> None:
        """Nothing circles for ever: a fault of ours that nobody mends ends every row all the same."""
        drain = self.world.drains[0]
        for _ in range(20):
            self.world.db.execute(
                "UPDATE test_clock.clock SET instant = greatest(instant, (SELECT max(next_attempt_at)"
                " FROM notification_delivery WHERE status = 'pending')) + %s * interval '1 second'",
                [GIVE_BACK // SECOND // 4],  # faster than a tick, and still several rounds of giving back
            )
            drain.sweep()
            claimed = []
            while batch := drain.claim() + drain.claim_suspect():
                claimed += batch
            if not claimed:
                break
            pushes = drain.bind(claimed)
            bound = {push.delivery.id for push in pushes}
            drain.settle(
                [(push.delivery, judge(push, Rejected(403, "Forbidden"), LADDER, 0.999)) for push in pushes]
                + [(each, Skipped(Skip.NO_PUSH_TOKEN)) for each in claimed if each.id not in bound]
            )
        pending = self.world.db.execute("SELECT count(*) FROM notification_delivery WHERE status = 'pending'")
        assert pending.fetchone() == (0,)


def test_whatever_drains_devices_and_time_do_the_tables_hold_what_they_should(
    db: psycopg.Connection, database: Database
) -> None:
    install_clock(db, at=START)
    with ExitStack() as opened:
        drains = [
            opened.enter_context(
                session(
                    database,
                    batch_size=BATCH,
                    lease_seconds=LEASE // SECOND,
                    max_attempts=MAX_ATTEMPTS,
                    give_back_hours=GIVE_BACK // SECOND // 3600,
                )
            )
            for _ in range(DRAINS)
        ]

        class OnThisDatabase(Drains):
            world = World(db, drains)

        run_state_machine_as_test(
            OnThisDatabase,
            settings=settings(
                max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "40")),
                stateful_step_count=40,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
