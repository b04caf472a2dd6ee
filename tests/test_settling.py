import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from core.settling import Settling

PATIENCE = 10.0  # for what should happen at once, on a machine whose cores are busy


class DatabaseGone(Exception):  # noqa: N818  stands for the real one, which has the same name
    pass


@dataclass(slots=True)
class Ledger:
    """What was written, in batches. A test may hold the writes up and let them end one by one, or have them fail."""

    now: float = 0.0
    batches: list[list[int]] = field(default_factory=list)
    fault: Exception | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1000))
    writing: int = 0
    most_at_once: int = 0

    def elapsed(self) -> float:
        return self.now

    def hold(self) -> None:
        self.permits = asyncio.Semaphore(0)

    def let_one_end(self) -> None:
        self.began.clear()
        self.permits.release()

    async def write(self, batch: list[int]) -> None:
        self.writing += 1
        self.most_at_once = max(self.most_at_once, self.writing)
        self.began.set()
        try:
            await self.permits.acquire()
            if self.fault is not None:
                raise self.fault
            self.batches.append(batch)
        finally:
            self.writing -= 1
            self.ended.set()

    @property
    def written(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


def settle(story: Callable[[Ledger], Awaitable[None]]) -> Ledger:
    """Run a story, bounded in time, and see that it leaves no task behind."""

    async def told() -> Ledger:
        ledger = Ledger()
        try:
            async with asyncio.timeout(PATIENCE):
                await story(ledger)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()
        return ledger

    return asyncio.run(told())


async def is_waiting(task: asyncio.Task[None]) -> bool:
    """Whether it still waits after the loop has gone round often enough for whatever was ready to happen."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not task.done()


def test_everything_that_was_put_is_written_by_the_end_and_in_order() -> None:
    async def story(ledger: Ledger) -> None:
        async with Settling(ledger.write, ledger.elapsed) as settling:
            for item in range(100):
                settling.put(item)

    assert settle(story).written == list(range(100))


def test_nothing_put_is_nothing_written() -> None:
    async def story(ledger: Ledger) -> None:
        async with Settling(ledger.write, ledger.elapsed) as settling:
            await settling.caught_up()

    assert settle(story).batches == []


def test_what_comes_together_is_one_write() -> None:
    async def story(ledger: Ledger) -> None:
        async with Settling(ledger.write, ledger.elapsed) as settling:
            for item in range(50):
                settling.put(item)
                await asyncio.sleep(0)

    assert settle(story).batches == [list(range(50))]


def test_it_writes_while_others_are_still_in_flight_and_not_only_at_the_end() -> None:
    async def story(ledger: Ledger) -> None:
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            await ledger.ended.wait()
            ledger.ended.clear()
            settling.put(2)
            await ledger.ended.wait()
            assert ledger.batches == [[1], [2]]

    assert settle(story).batches == [[1], [2]]


def test_at_most_one_write_runs_at_a_time_and_what_comes_meanwhile_is_the_next_one() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(0)
            await ledger.began.wait()
            for item in range(1, 10):
                settling.put(item)
            await asyncio.sleep(0.3)  # three times what it gathers for: time enough for a second write to begin
            ledger.let_one_end()
            ledger.let_one_end()

    ledger = settle(story)
    assert ledger.batches == [[0], list(range(1, 10))]
    assert ledger.most_at_once == 1


def test_what_is_put_while_the_last_write_runs_is_written_too() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()

        async def put_late(settling: Settling[int]) -> None:
            await ledger.began.wait()
            settling.put(2)
            ledger.let_one_end()
            ledger.let_one_end()

        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            late = asyncio.create_task(put_late(settling))
        await late

    assert settle(story).batches == [[1], [2]]


def test_nobody_waits_while_the_writes_keep_up() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            await settling.caught_up()
            settling.put(1)
            await settling.caught_up()
            await ledger.began.wait()
            ledger.now = 0.25  # promised: at most this old
            await settling.caught_up()
            ledger.let_one_end()

    settle(story)


def test_an_answer_that_waits_to_be_written_for_more_than_a_quarter_second_holds_up_the_next_push() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            ledger.now = 0.26  # the loop was busy elsewhere, say
            caught_up = asyncio.create_task(settling.caught_up())
            assert await is_waiting(caught_up)
            ledger.let_one_end()
            await caught_up
            assert ledger.written == [1]

    settle(story)


def test_an_answer_in_a_write_that_takes_more_than_a_quarter_second_holds_up_the_next_push() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            await ledger.began.wait()
            ledger.now = 0.26
            waiting = [asyncio.create_task(settling.caught_up()) for _ in range(4)]
            assert all([await is_waiting(each) for each in waiting])
            ledger.let_one_end()
            await asyncio.gather(*waiting)
            assert ledger.written == [1]

    settle(story)


def test_the_age_that_counts_is_that_of_the_oldest_answer_not_yet_written() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            await ledger.began.wait()
            ledger.now = 0.20
            settling.put(2)  # waits for the write of the first
            ledger.now = 0.24
            settling.put(3)
            ledger.let_one_end()
            await ledger.began.wait()  # the write of both
            ledger.now = 0.44
            await settling.caught_up()
            ledger.now = 0.46
            caught_up = asyncio.create_task(settling.caught_up())
            assert await is_waiting(caught_up)
            ledger.let_one_end()
            await caught_up

    settle(story)


def test_an_age_is_forgotten_once_it_is_written() -> None:
    async def story(ledger: Ledger) -> None:
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            await ledger.ended.wait()
            await asyncio.sleep(0)
            ledger.now = 1000.0
            await settling.caught_up()
            settling.put(2)
            await settling.caught_up()

    settle(story)


def test_a_write_that_fails_ends_the_run_at_the_next_push() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.fault = DatabaseGone()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            await ledger.ended.wait()
            await asyncio.sleep(0)
            await settling.caught_up()
            pytest.fail("it went on")

    with pytest.raises(DatabaseGone):
        settle(story)


def test_a_write_that_fails_wakes_whoever_waits_for_it() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            await ledger.began.wait()
            ledger.now = 0.26
            caught_up = asyncio.create_task(settling.caught_up())
            assert await is_waiting(caught_up)
            ledger.fault = DatabaseGone()
            ledger.let_one_end()
            await caught_up
            pytest.fail("it went on")

    with pytest.raises(DatabaseGone):
        settle(story)


def test_a_write_that_fails_is_told_at_the_end_if_nobody_asked_before() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.fault = DatabaseGone()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)

    with pytest.raises(DatabaseGone):
        settle(story)


def test_when_the_drain_ends_by_an_exception_what_waits_is_written_all_the_same() -> None:
    ledgers = []

    async def story(ledger: Ledger) -> None:
        ledgers.append(ledger)
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            settling.put(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        settle(story)

    assert ledgers[0].written == [1, 2]


def test_when_the_drain_ends_by_an_exception_it_is_that_one_that_is_told_and_not_the_writes() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.fault = DatabaseGone()
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        settle(story)


def test_when_the_drain_ends_by_an_exception_a_write_that_hangs_is_given_up_after_a_second() -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()  # for ever
        async with Settling(ledger.write, ledger.elapsed) as settling:
            settling.put(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # and not the TimeoutError of the patience we have
        settle(story)


def test_a_drain_that_is_cancelled_writes_what_waits_and_leaves_no_task() -> None:
    async def story(ledger: Ledger) -> None:
        put = asyncio.Event()

        async def drain() -> None:
            async with Settling(ledger.write, ledger.elapsed) as settling:
                settling.put(1)
                put.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(drain())
        await put.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ledger.written == [1]

    settle(story)


@pytest.mark.parametrize("ends_well", [True, False], ids=["in its end", "in an end by an exception"])
def test_a_drain_that_is_cancelled_again_leaves_no_task_either(*, ends_well: bool) -> None:
    async def story(ledger: Ledger) -> None:
        ledger.hold()

        async def drain() -> None:
            async with Settling(ledger.write, ledger.elapsed) as settling:
                settling.put(1)
                if not ends_well:
                    raise ZeroDivisionError

        task = asyncio.create_task(drain())
        await ledger.began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ledger.writing == 0

    settle(story)
