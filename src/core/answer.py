"""What APNs said of one push. Every answer is a value; none is an exception."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

LONGEST_REASON = 100  # characters. Apple's longest has 27; a proxy's error page must not become a reason


@dataclass(frozen=True, slots=True)
class Accepted:
    """200: APNs has it. Not that the device has."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """APNs has refused it, in its own words."""

    status: int
    reason: str  # verbatim: one that nobody has seen yet must still reach the row and the log
    dead_since: datetime | None = None  # 410: since when the token is dead, to the millisecond
    floor: float = 0.0  # seconds before which asking again is no use
    note: str = ""  # what we know beside it, for people


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer came."""

    reason: str
    error: str
    maybe_processed: bool = True  # False: APNs surely has nothing of it


@dataclass(frozen=True, slots=True)
class Unsendable:
    """There is no request to be made of it, whatever APNs would say. Nothing was sent."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Unbegun:
    """Time ran out before its push began. Nothing was sent."""


type Answer = Accepted | Rejected | Unanswered | Unsendable | Unbegun


def read(status: int, body: bytes) -> Accepted | Rejected:
    """Read a response. Whatever the body holds, this is an answer: the status alone says enough."""
    if status == 200:
        return Accepted()
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested a thousand deep
        said = None
    if not isinstance(said, dict):
        said = {}
    reason = said.get("reason")
    return Rejected(
        status,
        (_printable(reason) if isinstance(reason, str) else "") or f"status_{status}",
        _instant(said.get("timestamp")) if status == 410 else None,
    )


def _printable(text: str) -> str:
    """Without what Postgres cannot store (NUL, half a surrogate pair) or a log line should not hold."""
    return "".join(c for c in text[:LONGEST_REASON] if c.isprintable()).strip()


def _instant(milliseconds: object) -> datetime | None:
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # not an instant that Python, or Apple, could mean
        return None
