"""Settled as it goes: outcomes are written down while other pushes are still in flight.

A drain that is killed leaves unsettled what is in flight, and what was answered since the last write began. So writes
are frequent, and when they fall behind nothing new is begun.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

FLUSH_SECONDS = 0.1  # a write of 50 rows takes 2 ms: often enough to lose little, seldom enough to batch a lot
OVERDUE_SECONDS = 0.25  # promised: an answer is at most this old before no further push is begun
LAST_WORDS_SECONDS = 1.0  # for what is still unwritten when the drain ends by an exception


class Settling[T]:
    """Collects outcomes and hands them to `write` in batches, one batch at a time.

    What `write` raises is raised by `caught_up` and at the end.
    """

    def __init__(self, write: Callable[[list[T]], Awaitable[None]], elapsed: Callable[[], float]) -> None:
        self._write, self._elapsed = write, elapsed
        self._waiting: list[T] = []
        self._waiting_since = self._writing_since = float("inf")
        self._some, self._closing, self._written = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        self._some.set()
        try:
            async with asyncio.timeout(None if error is None else LAST_WORDS_SECONDS):
                await self._writer
        except Exception:
            if error is None:  # else the drain ends of that one already
                raise

    def put(self, item: T) -> None:
        """Have it written, soon."""
        if not self._waiting:
            self._waiting_since = self._elapsed()
        self._waiting.append(item)
        self._some.set()

    async def caught_up(self) -> None:
        """Return once no outcome is overdue."""
        while self._elapsed() - min(self._waiting_since, self._writing_since) > OVERDUE_SECONDS:
            if self._writer.done():
                break
            self._written.clear()
            await self._written.wait()
        if self._writer.done():
            self._writer.result()

    async def _run(self) -> None:
        try:
            while not self._closing.is_set() or self._waiting:
                await self._some.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_SECONDS):
                        await self._closing.wait()
                if not self._closing.is_set():
                    self._some.clear()
                batch, self._waiting = self._waiting, []
                self._writing_since, self._waiting_since = self._waiting_since, float("inf")
                if batch:
                    await self._write(batch)
                self._writing_since = float("inf")
                self._written.set()
        finally:
            self._written.set()  # whoever waits must learn that nothing more will be written
