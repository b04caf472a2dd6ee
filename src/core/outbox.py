"""The outbox in Postgres. The statements are in sql/, one file a verb."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, LiteralString, assert_never

from core.database import Database, DatabaseGone, StatementRefused
from core.delivery import Delivery, Device, Environment, Lease, Push
from core.drain import Settled, Swept
from core.recipient import Recipient
from core.verdict import Deferred, Failed, InvalidToken, Outcome, Released, Retry, Sent, Skip, Skipped, Withheld

LONGEST_ERROR = 500  # characters: the column's own CHECK
SWEEP_LIMIT = 500  # rows: a drain leases at most a few dozen, so even ten crashed ones are swept at once
BACKLOG_LIMIT = 100_000  # rows counted of each index: 10 ms of reading. Past that the exact number changes nothing
LATELY_SECONDS = 600  # long enough that a quiet outbox has pushed something, and short for an outage to go unnoticed
SETTLE_SECONDS = 10.0  # of patience with one statement, like every other
AGAIN_SECONDS = 0.1  # before a settle that failed is tried again; a server that restarts is away for about a second

_SKIPPED = {
    Skip.NO_PUSH_TOKEN: "The user has no live device, or the one that was asked for is not live or not the user's.",
    Skip.OPTED_OUT: "The recipient has opted out of pushes.",
    Skip.EXPIRED: "It expired before it could be pushed.",
    Skip.UNCONFIGURED: "APNs is not configured. Only what is inserted after it has been is pushed.",
}


def _statement(verb: str) -> LiteralString:
    # A file of ours, shipped beside this one: as literal as if it stood here.
    return (Path(__file__).parent / "sql" / f"{verb}.sql").read_text(encoding="utf-8")


SWEEP = _statement("sweep")
CLAIM = _statement("claim")
CLAIM_SUSPECT = _statement("claim_suspect")
BIND = _statement("bind")
SETTLE = _statement("settle")
RELEASE = _statement("release")
BACKLOG = _statement("backlog")
ACCEPTED_LATELY = _statement("accepted_lately")


type _Writer = Callable[[list[tuple[Delivery, Outcome]], float], Awaitable[dict[int, str]]]


@dataclass(frozen=True, slots=True)
class Backlog:
    """How many rows are due (counted up to 100,000 of each index), and for how long the oldest has been."""

    due: int
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresOutbox:
    """Every verb is one statement, and with autocommit a transaction of its own."""

    database: Database
    batch_size: int
    lease_seconds: int
    max_attempts: int
    give_back_hours: int

    async def backlog(self) -> Backlog:
        (row,) = await self.database.fetch(BACKLOG, {"limit": BACKLOG_LIMIT})
        return Backlog(row["due"], max(row["oldest_age_seconds"], 0.0))

    async def sweep(self) -> list[Swept]:
        rows = await self.database.fetch(SWEEP, {"max_attempts": self.max_attempts, "limit": SWEEP_LIMIT})
        return [Swept(row["id"], row["attempts"]) for row in rows]

    async def claim(self) -> list[Delivery]:
        rows = await self.database.fetch(
            CLAIM,
            {"limit": self.batch_size, "lease_seconds": self.lease_seconds, "give_back_hours": self.give_back_hours},
        )
        assert len(rows) <= self.batch_size, f"the claim returned {len(rows)} rows of at most {self.batch_size}"  # noqa: S101  promise 1
        return sorted(map(_delivery, rows), key=lambda each: (each.due_at, each.id))  # RETURNING has the plan's order

    async def claim_suspect(self) -> list[Delivery]:
        rows = await self.database.fetch(
            CLAIM_SUSPECT,
            {
                "max_attempts": self.max_attempts,
                "lease_seconds": self.lease_seconds,
                "give_back_hours": self.give_back_hours,
            },
        )
        return [_delivery(row) for row in rows]

    async def bind(self, deliveries: Sequence[Delivery]) -> list[Push]:
        """Bind deliveries to devices, siblings included. One that is not among them has no live device."""
        claimed = {each.id: each for each in deliveries}
        rows = await self.database.fetch(BIND, _fence(deliveries))
        pushes = [
            Push(
                replace(
                    claimed[row["claimed_id"]],
                    id=row["id"],
                    lease=Lease(row["attempts"], row["lease"]),
                    apns_id=row["apns_id"],
                ),
                Device(
                    push_token_id=row["push_token_id"],
                    token=row["token"],
                    environment=Environment(row["environment"]),
                    topic=row["topic"],
                ),
            )
            for row in rows
        ]
        return sorted(pushes, key=lambda push: (push.delivery.due_at, push.delivery.id))

    async def accepted_lately(self) -> set[Environment]:
        """Environments that accepted a push of any drain's in the last ten minutes."""
        rows = await self.database.fetch(ACCEPTED_LATELY, {"seconds": LATELY_SECONDS})
        return {Environment(row["environment"]) for row in rows}

    async def settle(
        self, outcomes: Sequence[tuple[Delivery, Outcome]], patience: Callable[[], float]
    ) -> list[Settled]:
        """Write outcomes down. While the database is away, try again for as long as `patience` (seconds) is left."""
        ordered = sorted(outcomes, key=lambda outcome: outcome[0].id)  # rows are locked in this order, by everyone
        released = [each for each in ordered if isinstance(each[1], Released)]
        judged = [each for each in ordered if not isinstance(each[1], Released)]
        return [
            settled
            for write, part in ((self._write_verdicts, judged), (self._write_releases, released))
            if part
            for settled in await self._persist(write, part, patience)
        ]

    async def _persist(
        self, write: _Writer, outcomes: list[tuple[Delivery, Outcome]], patience: Callable[[], float]
    ) -> list[Settled]:
        pause = AGAIN_SECONDS
        while True:
            try:
                status = await write(outcomes, max(min(SETTLE_SECONDS, patience()), AGAIN_SECONDS))
            except DatabaseGone:  # it is fenced: one that did go through changes nothing the second time
                if patience() <= pause:
                    raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)
            except StatementRefused:
                # One row's words fail the statement. The others must not wait for it, nor be pushed again; and of that
                # one the state matters more than the words.
                if len(outcomes) == 1:
                    if (plain := (outcomes[0][0], _without_words(outcomes[0][1]))) == outcomes[0]:
                        raise
                    outcomes = [plain]
                    continue
                return await self._persist_one_by_one(write, outcomes, patience)
            else:
                return [Settled(delivery, outcome, status.get(delivery.id)) for delivery, outcome in outcomes]

    async def _persist_one_by_one(
        self, write: _Writer, outcomes: list[tuple[Delivery, Outcome]], patience: Callable[[], float]
    ) -> list[Settled]:
        """Settle all that can be, before the one that cannot ends the run."""
        settled: list[Settled] = []
        refusal: StatementRefused | None = None
        for each in outcomes:
            try:
                settled += await self._persist(write, [each], patience)
            except StatementRefused as refused:
                refusal = refused
        if refusal is not None:
            raise refusal
        return settled

    async def _write_verdicts(self, outcomes: list[tuple[Delivery, Outcome]], deadline: float) -> dict[int, str]:
        writes = [_Write.of(delivery, outcome) for delivery, outcome in outcomes]
        columns = {name: [getattr(write, name) for write in writes] for name in _Write.__slots__}
        return {row["id"]: row["status"] for row in await self.database.fetch(SETTLE, columns, deadline=deadline)}

    async def _write_releases(self, outcomes: list[tuple[Delivery, Outcome]], deadline: float) -> dict[int, str]:
        released = [delivery for delivery, _ in outcomes]
        parameters = _fence(released) | {
            "give_backs": [each.may_give_back for each in released],
            "max_attempts": self.max_attempts,
        }
        return {row["id"]: row["status"] for row in await self.database.fetch(RELEASE, parameters, deadline=deadline)}


def _delivery(row: dict[str, Any]) -> Delivery:
    return Delivery(
        id=row["id"],
        lease=Lease(row["attempts"], row["lease"]),
        due_at=row["due_at"],
        payload=row["payload"],
        push_type=row["push_type"],
        priority=row["priority"],
        collapse_id=row["collapse_id"],
        expires_at=row["expires_at"],
        apns_id=row["apns_id"],
        claimed_at=row["claimed_at"],
        is_expired=bool(row["is_expired"]),
        ignore_quiet_hours=row["ignore_quiet_hours"],
        recipient=None
        if row["time_zone"] is None
        else Recipient(
            push_enabled=row["push_enabled"],
            time_zone=row["time_zone"],
            quiet_from=row["quiet_from"],
            quiet_until=row["quiet_until"],
        ),
        may_give_back=row["may_give_back"],
    )


def _fence(deliveries: Sequence[Delivery]) -> dict[str, Any]:
    return {
        "ids": [each.id for each in deliveries],
        "attempts": [each.lease.attempts for each in deliveries],
        "leases": [each.lease.until for each in deliveries],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """One row of settle.sql's input. The fields are its columns, in any order."""

    ids: int
    attempts: int
    leases: object
    statuses: str
    reasons: str | None = None
    errors: str | None = None
    delays: float | None = None
    give_backs: bool = False
    push_token_ids: int | None = None
    tokens: str | None = None
    dead_since: object = None
    statuses_if_alive: str | None = None

    @classmethod
    def of(cls, delivery: Delivery, outcome: Outcome) -> "_Write":
        row: dict[str, Any] = {"ids": delivery.id, "attempts": delivery.lease.attempts, "leases": delivery.lease.until}
        match outcome:
            case Sent():
                return cls(**row, statuses="sent")
            case Retry(reason, error, delay):
                return cls(**row, statuses="pending", reasons=reason, errors=storable(error), delays=delay)
            case Deferred(delay):
                return cls(
                    **row,
                    statuses="pending",
                    reasons="quiet_hours",
                    errors="It is quiet hours where the recipient is.",
                    delays=delay,
                    give_backs=True,
                )
            case Withheld(reason, error, delay):
                return cls(
                    **row, statuses="pending", reasons=reason, errors=storable(error), delays=delay, give_backs=True
                )
            case Failed(reason, error):
                return cls(**row, statuses="failed", reasons=reason, errors=storable(error))
            case Skipped(why):
                return cls(**row, statuses="skipped", reasons=why.value, errors=_SKIPPED[why])
            case InvalidToken(reason, error, device, dead_since, if_alive):
                return cls(
                    **row,
                    statuses="invalid_token",
                    reasons=reason,
                    errors=storable(error),
                    push_token_ids=device.push_token_id,
                    tokens=device.token,
                    dead_since=dead_since,
                    statuses_if_alive="pending" if isinstance(if_alive, Retry) else "failed",
                    delays=if_alive.delay if isinstance(if_alive, Retry) else None,
                )
            case Released():
                raise AssertionError(outcome)  # release.sql's
            case _:
                assert_never(outcome)


def storable(error: str) -> str:
    """Keep what Postgres can store of a text: no NUL, no half of a surrogate pair, at most 500 characters."""
    return error.replace("\0", "").encode(errors="replace").decode()[:LONGEST_ERROR]


def _without_words(outcome: Outcome) -> Outcome:
    reason, error = "unrecordable", "Its words could not be stored."
    match outcome:
        case Retry():
            return replace(outcome, reason=reason, error=error)
        case Withheld():
            return replace(outcome, reason=reason, error=error)
        case Failed():
            return replace(outcome, reason=reason, error=error)
        case InvalidToken():
            return replace(outcome, reason=reason, error=error)
        case Sent() | Skipped() | Deferred() | Released():
            return outcome
        case _:
            assert_never(outcome)
