"""What becomes of a delivery, given what APNs said. Pure: no clock, no I/O, and the dice are handed in."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import assert_never

from core.answer import Accepted, Answer, Rejected, Unanswered, Unbegun, Unsendable
from core.delivery import Delivery, Device, Push
from core.reasons import Blame, blame, describe
from core.recipient import WAKING_SECONDS, quiet_until

WITHHELD_SECONDS = 300  # a key or a topic is mended by people; five minutes later is soon enough, and one push cheap


class Skip(StrEnum):
    """Why a delivery ends without a push. A decision, not an error."""

    NO_PUSH_TOKEN = "no_push_token"  # noqa: S105  a word, not a password
    UNCONFIGURED = "unconfigured"
    OPTED_OUT = "opted_out"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Sent:
    """APNs accepted it. Final."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `delay` seconds. The attempt counts."""

    reason: str
    error: str
    delay: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Given up. Final."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class InvalidToken:
    """The device is gone. Final, unless it registered again after `dead_since`: then `if_alive`."""

    reason: str
    error: str
    device: Device
    dead_since: datetime | None
    if_alive: Retry | Failed


@dataclass(frozen=True, slots=True)
class Skipped:
    """Nothing is pushed, by decision. Final."""

    why: Skip


@dataclass(frozen=True, slots=True)
class Deferred:
    """It is quiet hours where the recipient is. Due when they end, in `delay` seconds; the attempt is given back."""

    delay: float


@dataclass(frozen=True, slots=True)
class Withheld:
    """Nothing of the delivery was judged, since we or APNs are at fault. The attempt is given back."""

    reason: str
    error: str
    delay: float


@dataclass(frozen=True, slots=True)
class Released:
    """Its push never began. Due again at once, and the attempt is given back."""


type Outcome = Sent | Retry | Failed | InvalidToken | Skipped | Deferred | Withheld | Released


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """How often a delivery is tried, and how long it waits in between (seconds)."""

    max_attempts: int
    base: int
    cap: int

    def backoff(self, attempts: int, chance: float) -> float:
        """Seconds to wait after so many attempts: doubling from `base` up to `cap`, with equal jitter."""
        doublings = min(attempts - 1, 40)  # far above any cap, far below an overflow
        return jittered(min(self.base * 2**doublings, self.cap), chance)


def jittered(seconds: float, chance: float) -> float:
    """Give half of it for certain and the other half by chance (0 <= chance < 1).

    So what failed together does not return together.
    """
    return seconds / 2 + seconds / 2 * chance


def before_push(delivery: Delivery, chance: float) -> Skipped | Deferred | None:
    """Say what becomes of a delivery that is not to be pushed now, whatever devices there are; None: it is.

    Raises BadTimeZone if the recipient's is none.
    """
    recipient = delivery.recipient
    if delivery.is_expired:
        return Skipped(Skip.EXPIRED)
    if recipient is None:
        return None
    if not recipient.push_enabled:
        return Skipped(Skip.OPTED_OUT)
    if delivery.ignore_quiet_hours:
        return None
    now = datetime.fromtimestamp(delivery.claimed_at, UTC)
    if (end := quiet_until(recipient, now)) is None:
        return None
    return Deferred((end - now).total_seconds() + WAKING_SECONDS * chance)


def judge(push: Push, answer: Answer, ladder: Ladder, chance: float) -> Outcome:
    """Say what becomes of a push."""
    match answer:
        case Accepted():
            return Sent()
        case Rejected(reason=reason, dead_since=dead_since):
            error = describe(answer)
            match blame(answer):
                case Blame.DEVICE:
                    if_alive = _retry(push.delivery, reason, error, ladder, chance, floor=answer.floor)
                    return InvalidToken(reason, error, push.device, dead_since, if_alive)
                case Blame.NOTIFICATION:
                    return Failed(reason, error)
                case Blame.PROVIDER:
                    return withhold(push.delivery, reason, error, ladder, chance, floor=answer.floor)
                case Blame.APNS:
                    return _retry(push.delivery, reason, error, ladder, chance, floor=answer.floor)
                case unreachable:
                    assert_never(unreachable)
        case Unanswered(reason, error):
            return _retry(push.delivery, reason, error, ladder, chance)
        case Unsendable(reason, error):
            return Failed(reason, error)
        case Unbegun():
            return Released()
        case _:
            assert_never(answer)


def withhold(
    delivery: Delivery, reason: str, error: str, ladder: Ladder, chance: float, *, floor: float = 0.0
) -> Withheld | Retry | Failed:
    """Give the attempt back, unless the delivery was first claimed so long ago that every attempt counts."""
    if not delivery.may_give_back:
        return _retry(delivery, reason, error, ladder, chance, floor=floor)
    return Withheld(reason, error, _not_before(floor, jittered(WITHHELD_SECONDS, chance), chance))


def _retry(
    delivery: Delivery, reason: str, error: str, ladder: Ladder, chance: float, *, floor: float = 0.0
) -> Retry | Failed:
    attempts = delivery.lease.attempts
    if attempts >= ladder.max_attempts:
        return Failed(reason, error)
    return Retry(reason, error, _not_before(floor, ladder.backoff(attempts, chance), chance))


def _not_before(floor: float, delay: float, chance: float) -> float:
    """At least `floor` seconds, and then not all at that very moment."""
    return max(delay, floor + floor / 2 * chance)
