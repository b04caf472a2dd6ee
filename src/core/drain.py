"""The drain: one invocation's work.

    1. Sweep: what its last attempt left behind with an expired lease has failed.
    2. Claim a batch of what is due. No other drain can take it until the lease expires; if we die, it expires by
       itself and the rows are due again.
    3. Look at what the recipient wants now: opted out or too late is skipped, quiet hours defer. Bind each of the
       others to its user's devices. One with no device is skipped.
    4. Push, as long as time and lease allow; what was not begun is released. One alone first, until APNs has proven to
       work and to hear us: an outage or a bad key costs a push or two, and no row its attempts.
    5. Judge each answer in that light, and settle it while the others are still in flight.
    6. After the batch, a suspect: a delivery whose drain died is claimed, pushed and settled alone, so that if it was
       the cause it takes nobody along.
    7. Again from 2, until nothing is due, enough was pushed or time is short; then the remaining suspects.

At least once is what we promise: a crash between an answer and its settling sends that one notification twice.

What becomes of one delivery is an Outcome, and the run goes on. What ends the run is an exception.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from core.answer import Answer, Unsendable
from core.delivery import Delivery, Environment, Push
from core.proof import Decided, Fault, Proof
from core.recipient import BadTimeZone
from core.sending import send
from core.settling import Settling
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
    before_push,
)

PUSH_SECONDS = 3 + 8  # the longest that a push may take: to connect, and to be answered
CLOSING_SECONDS = 2  # of the invocation, for the last settle and the log
LEASE_MARGIN_SECONDS = 10  # of the lease beyond the push, so that its settle is on time even when the database is slow


@dataclass(frozen=True, slots=True)
class Settled:
    """What the row says after a write: its status, or None if it was no longer ours to write."""

    delivery: Delivery
    outcome: Outcome
    status: str | None


@dataclass(frozen=True, slots=True)
class Swept:
    """A row that the sweep has failed."""

    id: int
    attempts: int


class Outbox(Protocol):
    """The table. Every write is fenced on the lease that the claim returned."""

    async def sweep(self) -> Sequence[Swept]: ...
    async def claim(self) -> Sequence[Delivery]: ...
    async def claim_suspect(self) -> Sequence[Delivery]: ...
    async def bind(self, deliveries: Sequence[Delivery]) -> Sequence[Push]: ...
    async def accepted_lately(self) -> Collection[Environment]: ...
    async def settle(
        self, outcomes: Sequence[tuple[Delivery, Outcome]], patience: Callable[[], float]
    ) -> Sequence[Settled]: ...


class Gateway(Protocol):
    """APNs. Each push gets exactly one answer, or none within a deadline of its own, which is an answer too."""

    def topic(self, push: Push) -> str: ...
    async def push(self, push: Push) -> Answer: ...


class Clock(Protocol):
    """Seconds: what is left of the invocation, and since some fixed moment."""

    def left(self) -> float: ...
    def elapsed(self) -> float: ...


class Witness(Protocol):
    """Is told what happens, to log it."""

    def swept(self, swept: Swept) -> None: ...
    def answered(self, push: Push, answer: Answer) -> None: ...
    def withheld(self, fault: Fault) -> None: ...
    def bad_time_zone(self, delivery: Delivery, time_zone: str) -> None: ...
    def settled(self, settled: Settled) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much a drain may take on."""

    batch_size: int
    max_batches: int
    lease_seconds: int


@dataclass(slots=True)
class Tally:
    """What happened. `claimed` is the sum of the nine from `sent` to `lease_lost`."""

    claimed: int = 0
    pushed: int = 0
    sent: int = 0
    retried: int = 0
    failed: int = 0
    invalid_token: int = 0
    skipped: int = 0
    deferred: int = 0
    withheld: int = 0
    released: int = 0
    lease_lost: int = 0
    swept: int = 0

    def count(self, settled: Settled) -> None:
        """Count one row under what it has become, which the row's status decides where it differs from our verdict."""
        match settled.status, settled.outcome:
            case None, _:
                self.lease_lost += 1
            case "failed", _:
                self.failed += 1
            case _, Sent():
                self.sent += 1
            case "pending", Retry() | InvalidToken():
                self.retried += 1
            case _, InvalidToken():
                self.invalid_token += 1
            case _, Skipped():
                self.skipped += 1
            case _, Deferred():
                self.deferred += 1
            case _, Withheld():
                self.withheld += 1
            case _, Released():
                self.released += 1
            case _, Retry() | Failed():
                raise AssertionError(settled)  # a retry is pending and a failure failed: the SQL and we disagree
            case _, unreachable:
                assert_never(unreachable)


@dataclass(kw_only=True, slots=True)
class Drain:
    """One drain and all that it needs. `gateway` is None when APNs is not configured: then what is due is skipped."""

    outbox: Outbox
    gateway: Gateway | None
    clock: Clock
    pace: Pace
    ladder: Ladder
    dice: Callable[[], float]
    witness: Witness
    tally: Tally = field(default_factory=Tally)
    proof: Proof = field(init=False)

    def __post_init__(self) -> None:
        self.proof = Proof(self.ladder, self.dice, self.witness.withheld)

    async def run(self) -> Tally:
        """Do it. What ends it early is the database's exception; what was settled until then stays settled."""
        await self._sweep()
        suspects = self.pace.batch_size
        while self.tally.pushed < self.pace.batch_size * self.pace.max_batches and self._has_time():
            batch = await self._deliver(self.outbox.claim)
            if suspects > 0 and self._has_time():
                suspects -= await self._deliver(self.outbox.claim_suspect)
            if not batch:
                break
        while suspects > 0 and self._has_time() and await self._deliver(self.outbox.claim_suspect):
            suspects -= 1
        return self.tally

    async def _sweep(self) -> None:
        for swept in await self.outbox.sweep():
            self.tally.swept += 1
            self.witness.swept(swept)

    async def _deliver(self, claim: Callable[[], Awaitable[Sequence[Delivery]]]) -> int:
        """Claim, bind, push, settle. Returns how many rows the claim leased."""
        began = self.clock.elapsed()  # before the claim, so that by our clock the lease never seems longer than it is
        deliveries = await claim()
        self.tally.claimed += len(deliveries)
        if not deliveries:
            return 0
        async with Settling(self._settle, self.clock.elapsed) as settling:
            wanted = []
            for delivery in deliveries:
                if unwanted := self._before_push(delivery):
                    settling.put((delivery, unwanted))
                else:
                    wanted.append(delivery)
            if self.gateway is None or not wanted:
                return len(deliveries)

            pushes = await self.outbox.bind(wanted)
            bound = {push.delivery.id for push in pushes}
            self.tally.claimed += len(bound - {delivery.id for delivery in wanted})
            for delivery in wanted:
                if delivery.id not in bound:
                    settling.put((delivery, Skipped(Skip.NO_PUSH_TOKEN)))

            async def may_begin() -> bool:
                await settling.caught_up()
                lease_left = began + self.pace.lease_seconds - self.clock.elapsed()
                return self._has_time() and lease_left >= PUSH_SECONDS + LEASE_MARGIN_SECONDS

            def decided(outcomes: Decided) -> None:
                for push, outcome in outcomes:
                    settling.put((push.delivery, outcome))

            topics = [(push, self.gateway.topic(push)) for push in pushes]
            await send(topics, self.proof, push_one=self._push, may_begin=may_begin, decided=decided)
            decided(self.proof.close(await self.outbox.accepted_lately() if self.proof.undecided else ()))
        return len(deliveries)

    def _before_push(self, delivery: Delivery) -> Outcome | None:
        if self.gateway is None:
            return Skipped(Skip.UNCONFIGURED)
        try:
            return before_push(delivery, self.dice())
        except BadTimeZone as fault:  # one recipient's fault is theirs alone, and better at night than never
            self.witness.bad_time_zone(delivery, str(fault))
            return None

    async def _push(self, push: Push) -> Answer:
        assert self.gateway is not None  # noqa: S101  else nothing is pushed
        answer = await self.gateway.push(push)
        if not isinstance(answer, Unsendable):
            self.tally.pushed += 1
        self.witness.answered(push, answer)
        return answer

    async def _settle(self, outcomes: list[tuple[Delivery, Outcome]]) -> None:
        for settled in await self.outbox.settle(outcomes, patience=lambda: self.clock.left() - CLOSING_SECONDS / 2):
            self.tally.count(settled)
            self.witness.settled(settled)

    def _has_time(self) -> bool:
        return self.clock.left() >= PUSH_SECONDS + CLOSING_SECONDS
