"""What the simulated APNs can answer to a push."""

import json
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Ok:
    """Accepted: 200, with Apple's empty body or one that is not Apple's."""

    _: KW_ONLY
    body: bytes = b""
    after: float = 0


@dataclass(frozen=True, slots=True)
class Reject:
    """Rejected, in Apple's words. `body` replaces Apple's JSON where a test wants something that is not Apple's, and
    `headers` are what Apple does not document and might send all the same: a Date, a Retry-After.
    """

    status: int
    reason: str
    _: KW_ONLY
    timestamp: datetime | None = None
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    after: float = 0

    def __post_init__(self) -> None:
        if self.timestamp is None:
            return
        if self.status != 410:
            raise ValueError(
                f"Apple sends a timestamp with 410 only, not with {self.status}; use body= for anything else"
            )
        if self.timestamp.tzinfo is None:
            raise ValueError("the timestamp needs a time zone")

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        document: dict[str, str | int] = {"reason": self.reason}
        if self.timestamp is not None:
            document["timestamp"] = (self.timestamp - EPOCH) // timedelta(milliseconds=1)
        return json.dumps(document).encode()


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer, ever; the connection stays open."""


@dataclass(frozen=True, slots=True)
class Reset:
    """RST_STREAM with this error code; the connection stays open."""

    code: int
    _: KW_ONLY
    after: float = 0


@dataclass(frozen=True, slots=True)
class Hangup:
    """The TCP connection is cut without an answer. To the client both kinds look the same: the push was lost on its
    way (it is not in the journal), or it was `received` (it is) and only the answer was lost.
    """

    _: KW_ONLY
    received: bool = False
    after: float = 0


type Answer = Ok | Reject | Silence | Reset | Hangup


class Told:
    """A sequence of answers, of which the last one repeats."""

    def __init__(self, answers: tuple[Answer, ...], *, before_checks: bool) -> None:
        if not answers:
            raise ValueError("tell at least one answer; Ok() is what an untold token gets")
        self.before_checks = before_checks
        self._answers = list(answers)

    def next(self) -> Answer:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
