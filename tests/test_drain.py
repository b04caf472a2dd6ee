import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.answer import Accepted, Answer, Rejected, Unanswered, Unsendable
from core.delivery import Delivery, Environment, Push
from core.drain import Drain, Pace, Settled, Swept, Tally
from core.proof import Fault
from core.recipient import Recipient
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
)
from tests.support.deliveries import a_delivery, a_device, a_push

PATIENCE = 10.0  # for a story that takes no time of its own
NINE = ("sent", "retried", "failed", "invalid_token", "skipped", "deferred", "withheld", "released", "lease_lost")

GONE = Rejected(410, "Unregistered")
OVERLOADED = Rejected(503, "ServiceUnavailable")
MALFORMED = Rejected(400, "BadCollapseId")
BAD_KEY = Rejected(403, "InvalidProviderToken")
BAD_TOPIC = Rejected(400, "TopicDisallowed")
BAD_TOKEN = Rejected(400, "BadDeviceToken")
# It proves nothing and blames nobody but one device: where it is all that is answered, pushes go one by one.
THROTTLED = Rejected(429, "TooManyRequests")


class DatabaseGone(Exception):  # noqa: N818  stands for the real one, which has the same name
    pass


@dataclass(slots=True)
class StoppedClock:
    """Time passes when a test says so."""

    now: float = 0.0
    ends_at: float = 60.0

    def left(self) -> float:
        return self.ends_at - self.now

    def elapsed(self) -> float:
        return self.now


def status_of(outcome: Outcome) -> str:
    match outcome:
        case Sent():
            return "sent"
        case Retry() | Deferred() | Withheld() | Released():
            return "pending"
        case Failed():
            return "failed"
        case InvalidToken():
            return "invalid_token"
        case Skipped():
            return "skipped"


@dataclass(slots=True, kw_only=True)
class MemoryOutbox:
    """What each claim is to find, and what became of it. `devices` has no entry for who has exactly one."""

    clock: StoppedClock
    claims: list[list[Delivery]] = field(default_factory=list)
    suspects: list[Delivery] = field(default_factory=list)
    dead: list[Swept] = field(default_factory=list)
    lately: set[Environment] = field(default_factory=set)
    devices: dict[int, list[Push]] = field(default_factory=dict)
    status: dict[int, str | None] = field(default_factory=dict)  # where the row says something else than our verdict
    claim_seconds: float = 0.0
    fault_of: dict[str, Exception] = field(default_factory=dict)  # of a verb, or of the settling of a delivery
    journal: list[str] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    settled: asyncio.Condition = field(default_factory=asyncio.Condition)

    def _note(self, verb: str, *ids: int) -> None:
        self.journal.append(" ".join([verb, *map(str, ids)]))
        if fault := self.fault_of.get(verb):
            raise fault

    async def sweep(self) -> Sequence[Swept]:
        self._note("sweep")
        return self.dead

    async def claim(self) -> Sequence[Delivery]:
        found = self.claims.pop(0) if self.claims else []
        self.clock.now += self.claim_seconds
        self._note("claim", *(each.id for each in found))
        return found

    async def claim_suspect(self) -> Sequence[Delivery]:
        found = [self.suspects.pop(0)] if self.suspects else []
        self._note("suspect", *(each.id for each in found))
        return found

    async def bind(self, deliveries: Sequence[Delivery]) -> Sequence[Push]:
        self._note("bind", *(each.id for each in deliveries))
        return [push for each in deliveries for push in self.devices.get(each.id, [Push(each, a_device(each.id))])]

    async def accepted_lately(self) -> Collection[Environment]:
        self._note("lately")
        return self.lately

    async def settle(
        self, outcomes: Sequence[tuple[Delivery, Outcome]], patience: Callable[[], float]
    ) -> Sequence[Settled]:
        assert patience() <= self.clock.left()
        ids = [delivery.id for delivery, _ in outcomes]
        self._note("settle", *ids)
        for each in ids:
            assert each not in self.outcomes, "settled twice"
            if fault := self.fault_of.get(f"settle {each}"):
                raise fault
        async with self.settled:
            self.outcomes |= {delivery.id: outcome for delivery, outcome in outcomes}
            self.settled.notify_all()
        return [
            Settled(delivery, outcome, self.status.get(delivery.id, status_of(outcome)))
            for delivery, outcome in outcomes
        ]


@dataclass(slots=True, kw_only=True)
class ScriptedApns:
    """Answers each push at once. Who is not in the script is accepted."""

    outbox: MemoryOutbox
    answers: dict[int, Answer] = field(default_factory=dict)
    seconds: float = 0.0  # that each push takes
    then: Callable[[Push], Awaitable[None]] | None = None  # before each answer

    def topic(self, push: Push) -> str:
        return push.device.topic or "com.example.app"

    async def push(self, push: Push) -> Answer:
        self.outbox.journal.append(f"push {push.delivery.id}")
        self.outbox.clock.now += self.seconds
        if self.then is not None:
            await self.then(push)
        return self.answers.get(push.delivery.id, Accepted())


@dataclass(slots=True)
class Log:
    told: list[Settled | Swept] = field(default_factory=list)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    bad_zones: list[tuple[int, str]] = field(default_factory=list)

    def swept(self, swept: Swept) -> None:
        self.told.append(swept)

    def answered(self, push: Push, answer: Answer) -> None:
        self.answers.append((push.delivery.id, answer))

    def withheld(self, fault: Fault) -> None:
        self.faults.append(fault)

    def bad_time_zone(self, delivery: Delivery, time_zone: str) -> None:
        self.bad_zones.append((delivery.id, time_zone))

    def settled(self, settled: Settled) -> None:
        self.told.append(settled)


@dataclass(slots=True)
class Scene:
    """A drain and all its doubles. They are made inside the event loop that they are used in."""

    clock: StoppedClock = field(default_factory=StoppedClock)
    log: Log = field(default_factory=Log)
    outbox: MemoryOutbox = field(init=False)
    apns: ScriptedApns = field(init=False)
    pace: Pace = field(default_factory=lambda: Pace(batch_size=50, max_batches=1, lease_seconds=120))
    configured: bool = True
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.outbox = MemoryOutbox(clock=self.clock)
        self.apns = ScriptedApns(outbox=self.outbox)

    @property
    def journal(self) -> list[str]:
        return self.outbox.journal

    def noted(self, verb: str) -> list[str]:
        return [note for note in self.journal if note.split()[0] == verb]

    async def drain(self) -> Tally:
        tally = await Drain(
            outbox=self.outbox,
            gateway=self.apns if self.configured else None,
            clock=self.clock,
            pace=self.pace,
            ladder=Ladder(max_attempts=5, base=60, cap=3600),
            dice=lambda: 0.5,
            witness=self.log,
            tally=self.tally,
        ).run()
        assert tally.claimed == sum(getattr(tally, name) for name in NINE)
        return tally


def drained(scene: Scene) -> Scene:
    """Run the drain of a scene, bounded in time, and see that it leaves no task behind."""

    async def run() -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await scene.drain()
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()

    asyncio.run(run())
    return scene


def counts(scene: Scene) -> dict[str, int]:
    return {name: count for name, count in asdict(scene.tally).items() if count}


def deliveries(*numbers: int) -> list[Delivery]:
    return [a_delivery(number) for number in numbers]


MIDNIGHT = datetime(2026, 6, 10, tzinfo=UTC).timestamp()


def to_sleepers(*numbers: int, time_zone: str = "UTC", **changes: Any) -> list[Delivery]:  # noqa: ANN401  any field
    """Make deliveries to people who sleep until seven, claimed at midnight."""
    sleeper = Recipient(push_enabled=True, time_zone=time_zone, quiet_from=22 * 3600, quiet_until=7 * 3600)
    return [replace(each, recipient=sleeper, claimed_at=MIDNIGHT, **changes) for each in deliveries(*numbers)]


def test_with_nothing_due_it_looks_once_and_ends() -> None:
    scene = drained(Scene())

    assert scene.journal[:2] == ["sweep", "claim"]
    assert set(scene.journal[2:]) == {"suspect"}
    assert counts(scene) == {}
    assert scene.log.told == []


def test_the_main_story() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3)]

    drained(scene)

    assert scene.journal[:3] == ["sweep", "claim 1 2 3", "bind 1 2 3"]
    assert scene.noted("push") == ["push 1", "push 2", "push 3"]
    assert scene.outbox.outcomes == {1: Sent(), 2: Sent(), 3: Sent()}
    assert counts(scene) == {"claimed": 3, "pushed": 3, "sent": 3}
    assert len(scene.log.told) == 3


def test_what_the_last_attempt_left_behind_is_counted_and_told() -> None:
    scene = Scene()
    scene.outbox.dead = [Swept(7, 5), Swept(8, 6)]

    drained(scene)

    assert counts(scene) == {"swept": 2}
    assert scene.log.told == [Swept(7, 5), Swept(8, 6)]


def test_without_a_key_everything_due_is_skipped_and_not_one_batch_of_it() -> None:
    scene = Scene(configured=False, pace=Pace(batch_size=2, max_batches=1, lease_seconds=120))
    scene.outbox.claims = [deliveries(1, 2), deliveries(3, 4), deliveries(5)]

    drained(scene)

    assert scene.outbox.outcomes == dict.fromkeys(range(1, 6), Skipped(Skip.UNCONFIGURED))
    assert counts(scene) == {"claimed": 5, "skipped": 5}
    assert scene.noted("bind") == []  # a device more or less changes nothing


def test_who_has_no_device_is_skipped_and_the_others_are_pushed() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3)]
    scene.outbox.devices = {2: []}

    drained(scene)

    assert scene.outbox.outcomes == {1: Sent(), 2: Skipped(Skip.NO_PUSH_TOKEN), 3: Sent()}
    assert counts(scene) == {"claimed": 3, "pushed": 2, "sent": 2, "skipped": 1}


def test_every_device_of_a_user_is_pushed_and_its_siblings_count_as_claimed() -> None:
    scene = Scene(pace=Pace(batch_size=2, max_batches=1, lease_seconds=120))
    scene.outbox.claims = [deliveries(1, 2), deliveries(3)]
    scene.outbox.devices = {1: [a_push(1), a_push(101), a_push(102)]}

    drained(scene)

    assert sorted(scene.outbox.outcomes) == [1, 2, 101, 102]  # what a claim leased is pushed, whatever the batch size
    assert counts(scene) == {"claimed": 4, "pushed": 4, "sent": 4}


def test_a_delivery_whose_siblings_live_while_it_has_no_device_is_skipped_alone() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1)]
    scene.outbox.devices = {1: [a_push(101)]}

    drained(scene)

    assert scene.outbox.outcomes == {1: Skipped(Skip.NO_PUSH_TOKEN), 101: Sent()}
    assert counts(scene) == {"claimed": 2, "pushed": 1, "sent": 1, "skipped": 1}


def test_each_answer_is_judged_for_itself() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3, 4, 5, 6)]
    scene.apns.answers = {
        2: GONE,
        3: OVERLOADED,
        4: Unanswered("timeout", "No answer."),
        5: MALFORMED,
        6: Unsendable("PayloadTooLarge", "Too large."),
    }

    drained(scene)

    assert [type(scene.outbox.outcomes[number]) for number in range(1, 7)] == [
        Sent, InvalidToken, Retry, Retry, Failed, Failed,
    ]  # fmt: skip
    retry = scene.outbox.outcomes[3]
    assert isinstance(retry, Retry)
    assert retry.delay == 45.0  # of the first minute half is certain, and of the other half the dice gave half
    assert counts(scene) == {
        "claimed": 6,
        "pushed": 5,  # nothing was sent of the sixth
        "sent": 1,
        "invalid_token": 1,
        "retried": 2,
        "failed": 2,
    }


def test_every_answer_is_told_even_one_that_nothing_was_sent_for() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3)]
    too_large = Unsendable("PayloadTooLarge", "Too large.")
    scene.apns.answers = {2: GONE, 3: too_large}

    drained(scene)

    assert sorted(scene.log.answers, key=lambda told: told[0]) == [(1, Accepted()), (2, GONE), (3, too_large)]


# In the light of the other answers. What that light is, test_proof says.


def test_a_fault_of_ours_costs_one_push_no_attempt_and_is_told_once() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(*range(1, 51))]
    scene.apns.answers = dict.fromkeys(range(1, 51), BAD_KEY)

    drained(scene)

    assert {type(outcome) for outcome in scene.outbox.outcomes.values()} == {Withheld}
    assert counts(scene) == {"claimed": 50, "pushed": 1, "withheld": 50}
    assert [(fault.environment, fault.topic, fault.reason) for fault in scene.log.faults] == [
        (Environment.PRODUCTION, None, "InvalidProviderToken")
    ]


def test_a_fault_of_one_topic_withholds_the_pushes_that_carry_it_and_no_others() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3, 4)]
    scene.outbox.devices = {number: [a_push(number, topic="com.example.broken")] for number in (1, 3)}
    scene.apns.answers = {1: BAD_TOPIC, 3: BAD_TOPIC}

    drained(scene)

    assert scene.noted("push") == ["push 1", "push 2", "push 4"]
    assert counts(scene) == {"claimed": 4, "pushed": 3, "sent": 2, "withheld": 2}
    assert [fault.topic for fault in scene.log.faults] == ["com.example.broken"]


def test_what_a_batch_has_found_holds_for_the_batches_and_the_suspects_after_it() -> None:
    scene = Scene(pace=Pace(batch_size=2, max_batches=2, lease_seconds=120))
    scene.outbox.claims = [deliveries(1, 2), deliveries(3, 4)]
    scene.outbox.suspects = deliveries(90)
    scene.apns.answers = {1: BAD_KEY}

    drained(scene)

    assert scene.noted("push") == ["push 1"]
    assert counts(scene) == {"claimed": 5, "pushed": 1, "withheld": 5}


@pytest.mark.parametrize(
    ("lately", "outcome"),
    [({Environment.PRODUCTION}, Retry), (set(), Withheld), ({Environment.SANDBOX}, Withheld)],
    ids=["accepted lately", "nothing accepted", "accepted by the other environment"],
)
def test_an_error_of_an_unproven_apns_counts_only_if_it_has_accepted_something_lately(
    lately: set[Environment], outcome: type[Outcome]
) -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1)]
    scene.outbox.lately = lately
    scene.apns.answers = {1: OVERLOADED}

    drained(scene)

    assert isinstance(scene.outbox.outcomes[1], outcome)
    assert scene.noted("lately") == ["lately"]


def test_what_was_accepted_lately_is_not_asked_where_nothing_depends_on_it() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3)]
    scene.apns.answers = {1: BAD_TOKEN, 2: MALFORMED, 3: GONE}

    drained(scene)

    assert scene.noted("lately") == []
    assert sorted(scene.outbox.outcomes) == [1, 2, 3]


def test_an_outage_costs_three_pushes_and_no_attempt() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(*range(1, 51))]
    scene.apns.answers = dict.fromkeys(range(1, 51), OVERLOADED)

    drained(scene)

    assert counts(scene) == {"claimed": 50, "pushed": 3, "withheld": 50}


def test_five_refused_tokens_and_none_accepted_invalidate_nothing() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(*range(1, 51))]
    scene.apns.answers = dict.fromkeys(range(1, 51), BAD_TOKEN)

    drained(scene)

    assert counts(scene) == {"claimed": 50, "pushed": 5, "withheld": 50}


def test_one_push_goes_alone_and_when_it_is_accepted_the_rest_goes_at_once() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(*range(1, 11))]
    under_way: set[int] = set()
    most: list[int] = []
    all_there = asyncio.Event()

    async def wait_for_the_others(push: Push) -> None:
        under_way.add(push.delivery.id)
        most.append(len(under_way))
        if push.delivery.id > 1:
            if len(under_way) == 9:
                all_there.set()
            await all_there.wait()  # for ever, if they went one by one
        under_way.remove(push.delivery.id)

    scene.apns.then = wait_for_the_others

    drained(scene)

    assert most == list(map(int, "1123456789"))
    assert counts(scene) == {"claimed": 10, "pushed": 10, "sent": 10}


# How many batches.


def test_it_claims_no_more_once_it_has_begun_so_many_pushes() -> None:
    scene = Scene(pace=Pace(batch_size=2, max_batches=3, lease_seconds=120))
    scene.outbox.claims = [deliveries(2 * n, 2 * n + 1) for n in range(1, 10)]

    drained(scene)

    assert len(scene.noted("claim")) == 3
    assert scene.tally.pushed == 6


def test_a_claim_that_is_not_full_is_no_reason_to_stop_and_an_empty_one_is() -> None:
    scene = Scene(pace=Pace(batch_size=10, max_batches=3, lease_seconds=120))
    scene.outbox.claims = [deliveries(1), deliveries(2, 3), [], deliveries(4)]

    drained(scene)

    assert scene.noted("claim") == ["claim 1", "claim 2 3", "claim"]


def test_one_push_less_than_a_batch_is_reason_to_claim_again() -> None:
    scene = Scene(pace=Pace(batch_size=3, max_batches=1, lease_seconds=120))
    scene.outbox.claims = [deliveries(1, 2), deliveries(3, 4, 5), deliveries(6)]

    drained(scene)

    assert scene.noted("claim") == ["claim 1 2", "claim 3 4 5"]  # burst: at most one claim above the bound
    assert scene.tally.pushed == 5


def test_rows_that_end_without_a_push_do_not_use_up_the_batch() -> None:
    scene = Scene(pace=Pace(batch_size=2, max_batches=1, lease_seconds=120))
    scene.outbox.claims = [deliveries(2 * n, 2 * n + 1) for n in range(1, 101)] + [deliveries(1001, 1002)]
    scene.outbox.devices = {number: [] for number in range(2, 202)}
    scene.outbox.claims[50] = deliveries(301, 302)
    scene.apns.answers = {number: Unsendable("PayloadTooLarge", "Too large.") for number in (301, 302)}

    drained(scene)

    assert scene.noted("push") == ["push 301", "push 302", "push 1001", "push 1002"]
    assert scene.tally.pushed == 2


# What recipients want.


def test_what_its_recipient_does_not_want_now_is_settled_before_the_others_are_bound() -> None:
    scene = Scene()
    (declined,), (expired,) = to_sleepers(2), to_sleepers(3, is_expired=True)
    assert declined.recipient
    declined = replace(declined, recipient=replace(declined.recipient, push_enabled=False))
    scene.outbox.claims = [[*deliveries(1), declined, expired, *to_sleepers(4), *deliveries(5)]]

    drained(scene)

    assert scene.noted("bind") == ["bind 1 5"]
    assert scene.noted("push") == ["push 1", "push 5"]
    assert scene.outbox.outcomes == {
        1: Sent(),
        2: Skipped(Skip.OPTED_OUT),
        3: Skipped(Skip.EXPIRED),
        4: Deferred(7 * 3600 + 30.0),  # of the minute in which a city wakes the dice gave half
        5: Sent(),
    }
    assert counts(scene) == {"claimed": 5, "pushed": 2, "sent": 2, "skipped": 2, "deferred": 1}


def test_where_nobody_wants_anything_nothing_is_bound() -> None:
    scene = Scene()
    scene.outbox.claims = [to_sleepers(1, 2)]

    drained(scene)

    assert scene.noted("bind") == []
    assert counts(scene) == {"claimed": 2, "deferred": 2}


def test_what_is_not_wanted_now_does_not_use_up_the_batch() -> None:
    scene = Scene(pace=Pace(batch_size=2, max_batches=1, lease_seconds=120))
    crowd = [to_sleepers(n, n + 1, is_expired=n % 4 == 0) for n in range(2, 202, 2)]
    scene.outbox.claims = [*crowd, deliveries(1001, 1002), deliveries(1003)]

    drained(scene)

    assert scene.noted("push") == ["push 1001", "push 1002"]
    assert counts(scene) == {"claimed": 202, "pushed": 2, "sent": 2, "skipped": 100, "deferred": 100}


def test_without_a_key_nobody_is_asked_what_they_want() -> None:
    """Or what is deferred now would be pushed when there is a key, and it was inserted before there was one."""
    scene = Scene(configured=False)
    scene.outbox.claims = [[*to_sleepers(1), *to_sleepers(2, time_zone="Mars"), *to_sleepers(3, is_expired=True)]]

    drained(scene)

    assert scene.outbox.outcomes == dict.fromkeys((1, 2, 3), Skipped(Skip.UNCONFIGURED))
    assert scene.log.bad_zones == []


def test_whose_time_zone_is_none_is_pushed_and_it_is_told() -> None:
    scene = Scene()
    scene.outbox.claims = [[*to_sleepers(1), *to_sleepers(2, time_zone="Mars/Olympus_Mons"), *to_sleepers(3)]]

    drained(scene)

    assert scene.noted("push") == ["push 2"]
    assert scene.log.bad_zones == [(2, "Mars/Olympus_Mons")]
    assert counts(scene) == {"claimed": 3, "pushed": 1, "sent": 1, "deferred": 2}


def test_a_suspect_that_is_not_wanted_now_is_not_bound_either() -> None:
    scene = Scene()
    scene.outbox.suspects = [*to_sleepers(90), *deliveries(91)]

    drained(scene)

    assert scene.noted("bind") == ["bind 91"]
    assert counts(scene) == {"claimed": 2, "pushed": 1, "sent": 1, "deferred": 1}


# Suspects.


def test_a_suspect_is_claimed_pushed_and_settled_alone_after_the_batch_is_settled() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2)]
    scene.outbox.suspects = deliveries(90, 91)

    drained(scene)

    settled_by = [index for index, note in enumerate(scene.journal) if note in ("settle 1 2", "settle 2", "settle 1")]
    first_suspect = scene.journal.index("suspect 90")
    assert max(settled_by) < first_suspect
    alone = [note for note in scene.journal[first_suspect:] if note not in ("claim", "suspect")]
    assert alone == [
        "suspect 90", "bind 90", "push 90", "settle 90",
        "suspect 91", "bind 91", "push 91", "settle 91",
    ]  # fmt: skip
    assert counts(scene) == {"claimed": 4, "pushed": 4, "sent": 4}


def test_a_suspect_is_claimed_even_when_the_batch_used_up_all_that_may_be_pushed() -> None:
    scene = Scene(pace=Pace(batch_size=2, max_batches=1, lease_seconds=120))
    scene.outbox.claims = [deliveries(1, 2), deliveries(3, 4)]
    scene.outbox.suspects = deliveries(90)

    drained(scene)

    assert sorted(scene.outbox.outcomes) == [1, 2, 90]


def test_a_suspect_has_its_turn_after_the_first_batch_even_if_the_others_take_all_the_time() -> None:
    scene = Scene(clock=StoppedClock(ends_at=60.0), pace=Pace(batch_size=1, max_batches=9, lease_seconds=120))
    scene.outbox.claims = [deliveries(number) for number in range(1, 10)]
    scene.outbox.suspects = deliveries(90)
    scene.apns.seconds = 16.0

    drained(scene)

    assert scene.noted("push") == ["push 1", "push 90", "push 2"]


def test_suspects_are_claimed_when_nothing_else_is_due() -> None:
    scene = Scene()
    scene.outbox.suspects = deliveries(90, 91, 92)

    drained(scene)

    assert sorted(scene.outbox.outcomes) == [90, 91, 92]


def test_a_drain_takes_at_most_a_batch_of_suspects() -> None:
    scene = Scene(pace=Pace(batch_size=3, max_batches=1, lease_seconds=120))
    scene.outbox.claims = [deliveries(1)]
    scene.outbox.suspects = deliveries(*range(90, 99))

    drained(scene)

    assert sorted(scene.outbox.outcomes) == [1, 90, 91, 92]


def test_many_batches_are_no_reason_for_more_suspects_than_one_batch() -> None:
    scene = Scene(pace=Pace(batch_size=2, max_batches=5, lease_seconds=120))
    scene.outbox.claims = [deliveries(2 * n, 2 * n + 1) for n in range(1, 6)]
    scene.outbox.suspects = deliveries(*range(90, 99))

    drained(scene)

    assert [number for number in sorted(scene.outbox.outcomes) if number >= 90] == [90, 91]


def test_a_row_that_fails_the_drain_every_time_leaves_the_batch_before_it_settled() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2)]
    scene.outbox.suspects = deliveries(90)
    scene.outbox.fault_of = {"settle 90": DatabaseGone()}

    with pytest.raises(DatabaseGone):
        drained(scene)

    assert scene.outbox.outcomes == {1: Sent(), 2: Sent()}


# Time. A push takes at most 3 + 8 s, the invocation's end 2, and of the lease 10 must be left behind the push.


@pytest.mark.parametrize(("left", "claims"), [(13.0, 1), (12.9, 0), (0.0, 0), (-5.0, 0)])
def test_nothing_is_claimed_when_the_time_left_is_too_short_for_a_push(left: float, claims: int) -> None:
    scene = Scene(clock=StoppedClock(ends_at=left))
    scene.outbox.claims = [deliveries(1)]
    scene.outbox.suspects = deliveries(90)

    drained(scene)

    assert len(scene.noted("claim")) >= claims
    assert sorted(scene.outbox.outcomes) == ([1, 90] if claims else [])
    assert scene.noted("sweep") == ["sweep"]  # takes no time, and is what ends a row that kills drains


def test_when_time_runs_out_in_the_middle_the_rest_is_released() -> None:
    scene = Scene(clock=StoppedClock(ends_at=60.0))
    scene.outbox.claims = [deliveries(1, 2, 3, 4, 5)]
    scene.outbox.lately = {Environment.PRODUCTION}
    scene.apns.answers = dict.fromkeys((1, 2, 3), THROTTLED)
    scene.apns.seconds = 20.0

    drained(scene)

    # The third began at 40 s, with 20 left; the fourth would have at 60.
    assert scene.noted("push") == ["push 1", "push 2", "push 3"]
    assert {number for number, outcome in scene.outbox.outcomes.items() if outcome == Released()} == {4, 5}
    assert counts(scene) == {"claimed": 5, "pushed": 3, "retried": 3, "released": 2}


def test_a_batch_that_used_up_the_time_is_followed_by_no_suspect_which_would_only_be_released() -> None:
    # A released row is no suspect any more: the next drain would take it into its batch, and if it kills drains, ...
    scene = Scene(clock=StoppedClock(ends_at=60.0))
    scene.outbox.claims = [deliveries(1, 2, 3)]
    scene.outbox.suspects = deliveries(90)
    scene.apns.answers = dict.fromkeys((1, 2, 3), THROTTLED)
    scene.apns.seconds = 16.0

    drained(scene)

    assert scene.noted("push") == ["push 1", "push 2", "push 3"]
    assert scene.noted("suspect") == []


@pytest.mark.parametrize(
    ("claim_seconds", "released"),
    [(0.0, False), (99.0, False), (99.1, True), (120.0, True), (500.0, True)],
)
def test_a_push_that_could_outlast_its_lease_is_not_begun(*, claim_seconds: float, released: bool) -> None:
    # The lease counts from before the claim, since the database wrote it at some moment after that.
    scene = Scene(clock=StoppedClock(ends_at=1000.0))
    scene.outbox.claims = [deliveries(1)]
    scene.outbox.claim_seconds = claim_seconds

    drained(scene)

    assert scene.outbox.outcomes == {1: Released() if released else Sent()}


def test_each_claim_has_a_lease_of_its_own() -> None:
    scene = Scene(clock=StoppedClock(ends_at=1000.0), pace=Pace(batch_size=2, max_batches=3, lease_seconds=120))
    scene.outbox.claims = [deliveries(1, 2), deliveries(3, 4), deliveries(5, 6)]
    scene.apns.seconds = 60.0

    drained(scene)

    assert counts(scene) == {"claimed": 6, "pushed": 6, "sent": 6}


# What ends the run.


@pytest.mark.parametrize("verb", ["sweep", "claim", "bind", "settle"])
def test_what_the_database_raises_ends_the_run(verb: str) -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1)]
    scene.outbox.fault_of = {verb: DatabaseGone()}

    with pytest.raises(DatabaseGone):
        drained(scene)

    assert scene.outbox.outcomes == {}
    assert scene.journal[-1].startswith(verb)


def test_when_the_database_goes_what_was_settled_stays_settled_and_nothing_more_is_begun() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3, 4)]
    # 2 goes with 3, which is the first of its topic; so 4 has to wait for 3's answer.
    scene.outbox.devices = {number: [a_push(number, topic="com.example.other")] for number in (3, 4)}
    scene.outbox.fault_of = {"settle 2": DatabaseGone()}

    async def until_it_is_tried(push: Push) -> None:
        if push.delivery.id == 3:
            while not any("2" in note.split() for note in scene.noted("settle")):  # noqa: ASYNC110  a list tells nobody
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
        elif push.delivery.id == 2:
            async with scene.outbox.settled:
                await scene.outbox.settled.wait_for(lambda: 1 in scene.outbox.outcomes)

    scene.apns.then = until_it_is_tried

    with pytest.raises(DatabaseGone):
        drained(scene)

    assert scene.outbox.outcomes == {1: Sent()}
    assert scene.noted("push") == ["push 1", "push 2", "push 3"]
    assert counts(scene) == {"claimed": 4, "pushed": 3, "sent": 1}


def test_an_answer_is_settled_while_others_are_still_in_flight() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3)]

    async def until_the_one_before_is_settled(push: Push) -> None:
        async with scene.outbox.settled:
            await scene.outbox.settled.wait_for(
                lambda: push.delivery.id == 1 or push.delivery.id - 1 in scene.outbox.outcomes
            )

    scene.apns.then = until_the_one_before_is_settled

    drained(scene)  # or it would wait for ever

    assert scene.noted("settle") == ["settle 1", "settle 2", "settle 3"]


def test_skips_are_settled_before_the_pushes_are_through() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2)]
    scene.outbox.devices = {2: []}

    async def until_the_other_is_settled(_: Push) -> None:
        async with scene.outbox.settled:
            await scene.outbox.settled.wait_for(lambda: 2 in scene.outbox.outcomes)

    scene.apns.then = until_the_other_is_settled

    assert counts(drained(scene)) == {"claimed": 2, "pushed": 1, "sent": 1, "skipped": 1}


def test_a_drain_that_is_cut_off_settles_what_was_answered() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3)]

    async def second_never_ends(push: Push) -> None:
        if push.delivery.id == 2:
            await asyncio.Event().wait()

    async def run() -> None:
        scene.apns.then = second_never_ends
        drain = asyncio.create_task(scene.drain())
        while len(scene.log.answers) < 2:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0)
        for _turn in range(5):  # of the loop, in which an answer is judged
            await asyncio.sleep(0)
        assert scene.noted("settle") == []
        drain.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drain
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())

    assert scene.outbox.outcomes == {1: Sent(), 3: Sent()}


# The tally.

RETRY, FAILED, WITHHELD = Retry("timeout", "", 1.0), Failed("timeout", ""), Withheld("Forbidden", "", 1.0)
INVALID = InvalidToken("Unregistered", "", a_device(), None, RETRY)


@pytest.mark.parametrize(
    ("outcome", "status", "counted"),
    [
        (Sent(), "sent", "sent"),  # in its lease or late: either way it is written down
        (Sent(), None, "lease_lost"),
        (RETRY, "pending", "retried"),
        (RETRY, None, "lease_lost"),
        (FAILED, "failed", "failed"),
        (FAILED, None, "lease_lost"),
        (INVALID, "invalid_token", "invalid_token"),
        (INVALID, "pending", "retried"),  # the device has come back
        (INVALID, "failed", "failed"),  # the same on the last attempt
        (INVALID, None, "lease_lost"),
        (Skipped(Skip.NO_PUSH_TOKEN), "skipped", "skipped"),
        (Skipped(Skip.UNCONFIGURED), "skipped", "skipped"),
        (Skipped(Skip.UNCONFIGURED), None, "lease_lost"),
        (Deferred(1.0), "pending", "deferred"),
        (Deferred(1.0), None, "lease_lost"),
        (WITHHELD, "pending", "withheld"),
        (WITHHELD, None, "lease_lost"),
        (Released(), "pending", "released"),
        (Released(), "failed", "failed"),  # given back too often for too long
        (Released(), None, "lease_lost"),
    ],
)
def test_a_row_is_counted_under_what_it_says_after_the_write(
    outcome: Outcome, status: str | None, counted: str
) -> None:
    tally = Tally()

    tally.count(Settled(a_delivery(), outcome, status))

    assert {name: count for name, count in asdict(tally).items() if count} == {counted: 1}


def test_a_row_that_was_not_ours_any_more_is_counted_and_told_and_dropped() -> None:
    scene = Scene()
    scene.outbox.claims = [deliveries(1, 2, 3)]
    scene.outbox.status = {2: None}
    scene.apns.answers = {3: GONE}

    drained(scene)

    assert counts(scene) == {"claimed": 3, "pushed": 3, "sent": 1, "lease_lost": 1, "invalid_token": 1}
    assert [told.status for told in scene.log.told if isinstance(told, Settled)] == ["sent", None, "invalid_token"]


ROW = st.sampled_from(
    [
        "sent",
        "gone",
        "retry",
        "malformed",
        "bad key",
        "bad topic",
        "bad token",
        "throttled",
        "no device",
        "unsendable",
        "lost",
        "two",
        "asleep",
        "bad zone",
        "expired",
    ]
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(ROW, max_size=6), max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.0, 0.0, 15.0]),  # with 15 time runs out, and each push waits for a write of the one before
)
def test_every_row_that_was_claimed_is_counted_exactly_once(
    claims: list[list[str]], batch_size: int, max_batches: int, seconds: float
) -> None:
    scene = Scene(pace=Pace(batch_size=batch_size, max_batches=max_batches, lease_seconds=120))
    scene.apns.seconds = seconds
    number = 0
    for claim in claims:
        batch = []
        for row in claim:
            number += 1
            batch.append(a_delivery(number))
            match row:
                case "gone":
                    scene.apns.answers[number] = GONE
                case "retry":
                    scene.apns.answers[number] = OVERLOADED
                case "malformed":
                    scene.apns.answers[number] = MALFORMED
                case "bad key":
                    scene.apns.answers[number] = BAD_KEY
                case "bad topic":
                    scene.apns.answers[number] = BAD_TOPIC
                case "bad token":
                    scene.apns.answers[number] = BAD_TOKEN
                case "throttled":
                    scene.apns.answers[number] = THROTTLED
                case "no device":
                    scene.outbox.devices[number] = []
                case "unsendable":
                    scene.apns.answers[number] = Unsendable("unsendable", "It is not to be sent.")
                case "lost":
                    scene.outbox.status[number] = None
                case "two":
                    scene.outbox.devices[number] = [a_push(number), a_push(number + 1000)]
                case "asleep":
                    batch[-1:] = to_sleepers(number)
                case "bad zone":
                    batch[-1:] = to_sleepers(number, time_zone="Mars")
                case "expired":
                    batch[-1:] = to_sleepers(number, is_expired=True)
        scene.outbox.claims.append(batch)

    drained(scene)

    claimed = [int(each) for note in scene.noted("claim") for each in note.split()[1:]]
    siblings = [number + 1000 for number in claimed if len(scene.outbox.devices.get(number, [])) == 2]
    assert sorted(scene.outbox.outcomes) == sorted(claimed + siblings)
    assert scene.tally.claimed == len(claimed) + len(siblings)
    assert len(scene.log.told) == scene.tally.claimed
    assert scene.tally.pushed <= batch_size * max_batches - 1 + 2 * 6  # the last claim may go over
