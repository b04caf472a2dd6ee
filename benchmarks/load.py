"""What every client that is measured has to do, and how it is timed: the same for all, in a process of its own.

A job comes on standard input, the figures go to standard output, both as JSON. Nothing here may cost a client anything
that its rivals do not pay: only the standard library is imported, and the pushes are made before the clock runs.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import batched
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`batches` times `batch` pushes on one connection, each batch begun when the one before is answered."""

    host: str
    port: int
    ca_file: str
    key_file: str  # the signing key, for clients that sign for themselves
    key_id: str
    team_id: str
    bearer: str  # the provider token, for those that do not
    topic: str
    tokens: tuple[str, ...]
    streams: int  # what the server allows at once
    batch: int
    batches: int
    began: float  # epoch seconds, just before the process was started

    @classmethod
    def read(cls) -> Self:
        job = json.load(sys.stdin)
        return cls(**job | {"tokens": tuple(job["tokens"])})

    def pushes(self) -> Iterator["Push"]:
        """Make as many as the job has, each one different, and one before them to make the connection with."""
        for number in range(1 + self.batch * self.batches):
            yield Push(
                self.tokens[number % len(self.tokens)],
                f"7f7af6c0-0000-4000-8000-{number:012x}",
                {
                    "aps": {
                        "alert": {"title": f"Order {number:06d}", "body": "It has left the kitchen and is on its way."},
                        "sound": "default",
                    }
                },
            )


@dataclass(frozen=True, slots=True)
class Push:
    token: str
    apns_id: str
    payload: dict[str, object]

    def body(self) -> bytes:
        return json.dumps(self.payload, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds. What is cold is all from the start of the process to the first answer; it is not part of the rest."""

    cold_cpu: float
    cold_wall: float
    cpu: float
    wall: float
    accepted: int


async def measure[T](
    job: Job, pushes: Iterable[T], push: Callable[[T], Awaitable[bool]], *, at_once: int | None = None
) -> None:
    """Push the job's pushes: all of a batch at once, or `at_once` of them for clients that are the better for it."""
    several = iter(pushes)
    assert await push(next(several)), "the first push was not accepted"
    cold_cpu, cold_wall = _cpu(), time.time() - job.began
    batches = list(batched(several, job.batch))
    cpu, wall, accepted = _cpu(), time.perf_counter(), 0
    for batch in batches:
        accepted += await _all(batch, push) if at_once is None else await _few(batch, push, at_once)
    cpu, wall = _cpu() - cpu, time.perf_counter() - wall
    json.dump(
        asdict(Measured(cold_cpu=cold_cpu, cold_wall=cold_wall, cpu=cpu, wall=wall, accepted=accepted)), sys.stdout
    )


async def _all[T](batch: Iterable[T], push: Callable[[T], Awaitable[bool]]) -> int:
    return sum(await asyncio.gather(*map(push, batch)))


async def _few[T](batch: Iterable[T], push: Callable[[T], Awaitable[bool]], at_once: int) -> int:
    rest = iter(batch)

    async def one_by_one() -> int:
        return sum([await push(each) for each in rest])

    return sum(await asyncio.gather(*(one_by_one() for _ in range(at_once))))


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
