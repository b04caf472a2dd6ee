import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.answer import Accepted, Answer, Rejected, Unanswered, Unsendable
from core.delivery import Environment, Push
from core.proof import Decided, Fault, Proof
from core.sending import IN_FLIGHT, send
from core.verdict import InvalidToken, Ladder, Outcome, Released, Sent, Withheld
from tests.support.deliveries import a_delivery, a_push

PRODUCTION, SANDBOX = Environment.PRODUCTION, Environment.SANDBOX
PATIENCE = 10.0  # for what takes no time of its own

OK = Accepted()
GONE = Rejected(410, "Unregistered")
BAD_TOKEN = Rejected(400, "BadDeviceToken")
MALFORMED = Rejected(400, "BadCollapseId")
BAD_KEY = Rejected(403, "InvalidProviderToken")
BAD_TOPIC = Rejected(400, "TopicDisallowed")
DOWN = Rejected(503, "ServiceUnavailable")
THROTTLED = Rejected(429, "TooManyRequests")
DEAD = Unanswered("timeout", "APNs did not answer.")
OVERSIZE = Unsendable("PayloadTooLarge", "The payload has 5000 bytes.")

type Batch = Sequence[tuple[Push, str]]


class Broken(Exception):  # noqa: N818  stands for whatever ends a drain
    pass


def pushes(
    numbers: Collection[int],
    topic: str = "app",
    environment: Environment = PRODUCTION,
    *,
    due_at: float = 0.0,
    token: str | None = None,
) -> list[tuple[Push, str]]:
    return [
        (a_push(each, replace(a_delivery(each), due_at=due_at), environment=environment, token=token), topic)
        for each in numbers
    ]


async def at_rest() -> None:
    """Let everything go on until nothing can but by what the test does next: nothing here waits for time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def always() -> bool:
    return True


@dataclass(slots=True)
class Wire:
    """APNs, which answers when the test says so, or at once by `script` for the numbers in it."""

    script: dict[int, Answer] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    under_way: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    most: int = 0  # under way at once

    async def push_one(self, push: Push) -> Answer:
        number = push.delivery.id
        self.begun.append(number)
        self.under_way[number] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.under_way))
        if number in self.script:
            self.under_way[number].set_result(self.script[number])
        try:
            return await self.under_way[number]
        except asyncio.CancelledError:
            await at_rest()  # a connection is not closed at once either
            self.cancelled.append(number)
            raise
        finally:
            del self.under_way[number]

    async def answer(self, *numbers: int, by: Answer | Exception = OK) -> None:
        for number in numbers:
            if isinstance(by, Exception):
                self.under_way[number].set_exception(by)
            else:
                self.under_way[number].set_result(by)
        await at_rest()


@dataclass(slots=True)
class Sending:
    """One call of `send`, and what comes of it."""

    batch: Batch
    wire: Wire = field(default_factory=Wire)
    may_begin: Callable[[], Awaitable[bool]] = always
    faults: list[Fault] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    in_order: list[int] = field(default_factory=list)  # as they were decided
    proof: Proof = field(init=False)

    def __post_init__(self) -> None:
        self.proof = Proof(Ladder(max_attempts=5, base=60, cap=3600), lambda: 0.5, self.faults.append)

    def decided(self, outcomes: Decided) -> None:
        for push, outcome in outcomes:
            assert push.delivery.id not in self.outcomes, "decided twice"
            self.outcomes[push.delivery.id] = outcome
            self.in_order.append(push.delivery.id)

    async def run(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await send(
                self.batch,
                self.proof,
                push_one=self.wire.push_one,
                may_begin=self.may_begin,
                decided=self.decided,
            )

    def to_its_end(self) -> "Sending":
        async def story() -> None:
            await self.run()
            assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"

        asyncio.run(story())
        self.decided(self.proof.close(()))
        return self

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[Wire]:
        """Send while the test looks on. At the end everything that is still under way is accepted."""
        task = asyncio.create_task(self.run())
        try:
            await at_rest()
            yield self.wire
            while not task.done():
                await self.wire.answer(*self.wire.under_way)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def of_kind(self, kind: type[Outcome]) -> list[int]:
        return sorted(number for number, outcome in self.outcomes.items() if isinstance(outcome, kind))


def scripted(batch: Batch, *exceptions: tuple[Collection[int], Answer], default: Answer = OK) -> Sending:
    """Send a batch to an APNs that answers everything at once."""
    script = {push.delivery.id: default for push, _ in batch}
    for numbers, answer in exceptions:
        script |= dict.fromkeys(numbers, answer)
    return Sending(batch, Wire(script))


def test_nothing_to_send_is_sent() -> None:
    assert not Sending([]).to_its_end().outcomes


@pytest.mark.parametrize("proves", [OK, GONE, MALFORMED])
def test_one_push_goes_alone_until_it_has_proven_the_environment_then_the_rest_at_once(proves: Answer) -> None:
    async def story() -> None:
        async with Sending(pushes(range(50))).under_way() as wire:
            assert wire.begun == [0]
            await wire.answer(0, by=proves)
            assert wire.begun == [*range(50)]
            assert len(wire.under_way) == 49

    asyncio.run(story())


@pytest.mark.parametrize("proves_not", [DOWN, DEAD, THROTTLED, BAD_TOKEN])
def test_the_next_goes_alone_too_while_nothing_is_proven(proves_not: Answer) -> None:
    async def story() -> None:
        async with Sending(pushes(range(50))).under_way() as wire:
            await wire.answer(0, by=proves_not)
            assert wire.begun == [0, 1]
            assert [*wire.under_way] == [1]

    asyncio.run(story())


def test_while_the_environment_is_unproven_another_topic_does_not_go_beside_the_first() -> None:
    async def story() -> None:
        batch = [*pushes(range(3), "a"), *pushes(range(3, 6), "b")]
        async with Sending(batch).under_way() as wire:
            assert wire.begun == [0]

    asyncio.run(story())


def test_once_the_environment_is_proven_each_other_topic_sends_one_alone_beside_the_rest_of_the_first() -> None:
    async def story() -> None:
        batch = [*pushes(range(3), "a"), *pushes(range(3, 6), "b"), *pushes(range(6, 9), "c")]
        async with Sending(batch).under_way() as wire:
            await wire.answer(0)
            assert wire.begun == [0, 1, 2, 3, 6]
            await wire.answer(6)
            assert wire.begun == [0, 1, 2, 3, 6, 7, 8]
            await wire.answer(3, by=GONE)
            assert wire.begun == [0, 1, 2, 3, 6, 7, 8, 4, 5]

    asyncio.run(story())


def test_an_error_of_a_proven_environment_does_not_make_the_rest_of_the_topic_queue() -> None:
    async def story() -> None:
        batch = [*pushes([0], "a"), *pushes(range(1, 50), "b")]
        async with Sending(batch).under_way() as wire:
            await wire.answer(0)
            assert wire.begun == [0, 1]
            await wire.answer(1, by=DEAD)
            assert len(wire.under_way) == 48

    asyncio.run(story())


def test_environments_do_not_wait_for_one_another_and_prove_nothing_for_one_another() -> None:
    async def story() -> None:
        batch = [*pushes(range(5)), *pushes(range(5, 10), environment=SANDBOX)]
        async with Sending(batch).under_way() as wire:
            assert wire.begun == [0, 5]
            await wire.answer(5)
            assert wire.begun == [0, 5, 6, 7, 8, 9]
            await wire.answer(0, by=DEAD)
            assert wire.begun == [0, 5, 6, 7, 8, 9, 1]

    asyncio.run(story())


def test_of_those_that_may_go_the_one_that_has_been_due_the_longest_goes_first() -> None:
    batch = [
        (push, topic)
        for number in range(30)
        for push, topic in pushes([number], f"topic {number % 3}", due_at=float(number))
    ]
    # All topics are known, so that only the order of due is left.
    sending = scripted([*pushes([100, 101, 102], "topic 0"), *batch])
    for number, topic in enumerate(("topic 0", "topic 1", "topic 2")):
        sending.proof.answered(a_push(1000 + number), topic, OK)

    assert sending.to_its_end().wire.begun == [100, 101, 102, *range(30)]


def test_while_pushes_go_one_by_one_topics_take_turns_by_the_order_of_due() -> None:
    batch = [
        *pushes([0], "a", due_at=0.0),
        *pushes([3], "a", due_at=3.0),
        *pushes([1], "b", due_at=1.0),
        *pushes([2], "c", due_at=2.0),
    ]

    assert scripted(batch, default=THROTTLED).to_its_end().wire.begun == [0, 1, 2, 3]


def test_what_is_under_way_to_one_environment_is_bounded() -> None:
    async def story() -> None:
        async with Sending(pushes(range(IN_FLIGHT + 20))).under_way() as wire:
            await wire.answer(0)
            assert len(wire.under_way) == IN_FLIGHT
            await wire.answer(1, 2, 3)
            assert len(wire.under_way) == IN_FLIGHT
            assert wire.begun == [*range(IN_FLIGHT + 4)]

    asyncio.run(story())


def test_each_outcome_is_handed_on_while_others_are_under_way() -> None:
    async def story() -> None:
        sending = Sending(pushes(range(5)))
        async with sending.under_way() as wire:
            await wire.answer(0)
            await wire.answer(3, by=GONE)
            assert sending.in_order == [0, 3]
            assert [*wire.under_way] == [1, 2, 4]

    asyncio.run(story())


@pytest.mark.parametrize("is_proven", [False, True])
def test_a_bad_key_costs_one_push_of_fifty(is_proven: bool) -> None:  # noqa: FBT001  a parameter of the test
    sending = scripted(pushes(range(50)), default=BAD_KEY)
    if is_proven:  # by another topic, in a batch before
        sending.proof.answered(a_push(100), "other", OK)
    sending.to_its_end()

    assert sending.wire.begun == [0]
    assert sending.of_kind(Withheld) == [*range(50)]
    assert [(fault.reason, fault.topic) for fault in sending.faults] == [("InvalidProviderToken", None)]


def test_a_bad_key_of_one_environment_stops_it_alone() -> None:
    batch = [*pushes(range(50)), *pushes(range(50, 100), environment=SANDBOX)]
    sending = scripted(batch, (range(50), BAD_KEY)).to_its_end()

    assert len(sending.wire.begun) == 51
    assert sending.of_kind(Withheld) == [*range(50)]
    assert sending.of_kind(Sent) == [*range(50, 100)]


@pytest.mark.parametrize("order", [("broken", "sound"), ("sound", "broken")])
def test_a_broken_topic_costs_one_push_and_the_others_go_on(order: tuple[str, str]) -> None:
    numbers = {"broken": range(50), "sound": range(50, 100)}
    batch = [each for topic in order for each in pushes(numbers[topic], topic)]
    sending = scripted(batch, (numbers["broken"], BAD_TOPIC)).to_its_end()

    assert sorted(sending.wire.begun) == [0, *numbers["sound"]]
    assert sending.of_kind(Withheld) == [*numbers["broken"]]
    assert sending.of_kind(Sent) == [*numbers["sound"]]


@pytest.mark.parametrize("is_proven", [False, True])
def test_fifty_refused_tokens_cost_five_pushes_and_invalidate_nothing(is_proven: bool) -> None:  # noqa: FBT001  a parameter
    batch = [*pushes(range(50)), *pushes(range(50, 100), "other")]
    sending = scripted(batch, (range(50), BAD_TOKEN))
    if is_proven:
        sending.proof.answered(a_push(100), "other", OK)
    sending.to_its_end()

    assert [number for number in sending.wire.begun if number < 50] == [*range(5)]
    assert sending.of_kind(Withheld) == [*range(50)]
    assert sending.of_kind(Sent) == [*range(50, 100)]


def test_four_refused_tokens_before_an_acceptance_cost_nobody_else_anything() -> None:
    sending = scripted(pushes(range(50)), (range(4), BAD_TOKEN)).to_its_end()

    assert sending.of_kind(InvalidToken) == [*range(4)]
    assert sending.of_kind(Sent) == [*range(4, 50)]
    assert not sending.faults


def test_refused_tokens_that_are_under_way_with_good_ones_are_no_mistake_of_ours() -> None:
    async def story() -> Sending:
        sending = Sending(pushes(range(50)))
        async with sending.under_way() as wire:
            await wire.answer(0, by=GONE)
            await wire.answer(*range(1, 9), by=BAD_TOKEN)
        return sending

    sending = asyncio.run(story())
    assert sending.of_kind(InvalidToken) == [*range(9)]
    assert sending.of_kind(Sent) == [*range(9, 50)]
    assert not sending.faults


@pytest.mark.parametrize(("answer", "cost"), [(DOWN, 3), (DEAD, 2)])
def test_an_outage_costs_as_few_pushes_as_it_takes_to_see_it(answer: Answer, cost: int) -> None:
    sending = scripted([*pushes(range(25), "a"), *pushes(range(25, 50), "b")], default=answer).to_its_end()

    assert len(sending.wire.begun) == cost
    assert sending.of_kind(Withheld) == [*range(50)]


def test_a_group_withheld_in_an_earlier_batch_is_not_pushed_at_all() -> None:
    sending = scripted(
        [*pushes(range(5), "broken"), *pushes(range(5, 10)), *pushes(range(10, 15), environment=SANDBOX)]
    )
    sending.proof.answered(a_push(100), "broken", BAD_TOPIC)
    sending.proof.answered(a_push(101, environment=SANDBOX), "app", BAD_KEY)
    sending.to_its_end()

    assert sending.wire.begun == [*range(5, 10)]
    assert sending.of_kind(Withheld) == [*range(5), *range(10, 15)]


def test_a_withheld_group_does_not_ask_whether_there_is_time() -> None:
    async def never() -> bool:
        raise AssertionError

    sending = Sending(pushes(range(5)), may_begin=never)
    sending.proof.answered(a_push(100), "app", BAD_KEY)

    assert sending.to_its_end().of_kind(Withheld) == [*range(5)]


def test_the_other_rows_of_a_throttled_device_are_not_pushed() -> None:
    batch = [*pushes([0]), *pushes(range(1, 5), token="aa"), *pushes(range(5, 9), token="aa"), *pushes([9])]
    sending = Sending(batch)

    async def story() -> None:
        async with sending.under_way() as wire:
            await wire.answer(0, by=DOWN)
            assert wire.begun == [0, 1]
            await wire.answer(1, by=THROTTLED)
            assert wire.begun == [0, 1, 9]

    asyncio.run(story())
    assert sending.of_kind(Withheld) == [*range(2, 9)]


def test_the_bad_answer_that_comes_while_it_waits_for_time_stops_what_has_not_begun() -> None:
    """`may_begin` waits while settling is behind; what came in meanwhile is heard before the next push begins."""

    async def story() -> None:
        gate = asyncio.Semaphore(2)

        async def may_begin() -> bool:
            await gate.acquire()
            return True

        sending = Sending(pushes(range(50)), may_begin=may_begin)
        async with sending.under_way() as wire:
            await wire.answer(0)
            assert wire.begun == [0, 1]  # and number 2 is waiting to begin
            await wire.answer(1, by=BAD_KEY)
            gate.release()
            await at_rest()
            assert wire.begun == [0, 1, 2]
            assert sending.of_kind(Withheld) == [1, *range(3, 50)]

    asyncio.run(story())


def test_when_time_is_up_what_has_not_begun_is_released_and_what_is_under_way_is_awaited() -> None:
    async def story() -> None:
        left = iter([True] * 10 + [False] * 100)

        async def may_begin() -> bool:
            return next(left)

        sending = Sending([*pushes(range(30)), *pushes(range(30, 40), "other")], may_begin=may_begin)
        async with sending.under_way() as wire:
            await wire.answer(0)
            assert wire.begun == [*range(10)]
            assert sending.of_kind(Released) == [*range(10, 40)]
            assert len(wire.under_way) == 9
        assert sending.of_kind(Sent) == [*range(10)]

    asyncio.run(story())


def test_when_time_is_up_at_once_everything_is_released_and_nothing_pushed() -> None:
    async def may_begin() -> bool:
        return False

    batch = [*pushes(range(5)), *pushes(range(5, 10), environment=SANDBOX)]
    sending = Sending(batch, may_begin=may_begin).to_its_end()

    assert not sending.wire.begun
    assert sending.of_kind(Released) == [*range(10)]


def test_what_cannot_be_sent_makes_nobody_wait_and_proves_nothing() -> None:
    async def story() -> None:
        sending = Sending(pushes(range(10)), Wire(dict.fromkeys(range(5), OVERSIZE)))
        async with sending.under_way() as wire:
            assert wire.begun == [*range(6)]
            assert [*wire.under_way] == [5]

    asyncio.run(story())


def no_task_is_left() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


def test_an_exception_of_a_push_ends_everything_and_leaves_no_task() -> None:
    async def story() -> None:
        sending = Sending([*pushes(range(10)), *pushes(range(10, 20), environment=SANDBOX)])
        task = asyncio.create_task(sending.run())
        await at_rest()
        await sending.wire.answer(0, 10)
        await sending.wire.answer(4, by=Broken())
        with pytest.raises(Broken):
            await task
        assert sorted(sending.wire.cancelled) == [1, 2, 3, *range(5, 10), *range(11, 20)]
        assert no_task_is_left()

    asyncio.run(story())


def test_two_pushes_that_break_at_once_end_it_like_one() -> None:
    async def story() -> None:
        sending = Sending(pushes(range(10)))
        task = asyncio.create_task(sending.run())
        await at_rest()
        await sending.wire.answer(0)
        await sending.wire.answer(4, 5, by=Broken())
        with pytest.raises(Broken):
            await task
        assert sorted(sending.wire.cancelled) == [1, 2, 3, *range(6, 10)]
        assert no_task_is_left()

    asyncio.run(story())


def test_an_exception_of_may_begin_ends_everything_and_leaves_no_task() -> None:
    async def story() -> None:
        left = iter([True] * 5)

        async def may_begin() -> bool:
            await asyncio.sleep(0)  # so that those before it have begun
            if not next(left, False):
                raise Broken
            return True

        sending = Sending([*pushes(range(10)), *pushes([10], environment=SANDBOX)], may_begin=may_begin)
        task = asyncio.create_task(sending.run())
        await at_rest()
        await sending.wire.answer(0)
        with pytest.raises(Broken):
            await task
        assert sorted(sending.wire.cancelled) == [1, 2, 3, 10]
        assert no_task_is_left()

    asyncio.run(story())


def test_an_exception_of_whoever_is_told_ends_everything_and_leaves_no_task() -> None:
    async def story() -> None:
        wire = Wire()

        def decided(_outcomes: Decided) -> None:
            raise Broken

        proof = Sending([]).proof
        task = asyncio.create_task(
            send(pushes(range(5)), proof, push_one=wire.push_one, may_begin=always, decided=decided)
        )
        await at_rest()
        await wire.answer(0)
        with pytest.raises(Broken):
            await task
        assert no_task_is_left()

    asyncio.run(story())


def test_a_drain_that_is_cancelled_leaves_no_task() -> None:
    async def story() -> None:
        sending = Sending([*pushes(range(10)), *pushes(range(10, 20), environment=SANDBOX)])
        task = asyncio.create_task(sending.run())
        await at_rest()
        await sending.wire.answer(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(sending.wire.cancelled) == [*range(1, 11)]
        assert no_task_is_left()

    asyncio.run(story())


answers = st.sampled_from([OK, OK, GONE, BAD_TOKEN, MALFORMED, BAD_KEY, BAD_TOPIC, DOWN, DEAD, THROTTLED, OVERSIZE])
rows = st.tuples(answers, st.sampled_from("abc"), st.sampled_from(Environment), st.sampled_from(["aa", "bb", None]))


@settings(max_examples=150, deadline=None)
@given(drawn=st.lists(rows, max_size=40), time=st.integers(0, 60), chance=st.randoms(use_true_random=False))
def test_whatever_is_answered_and_in_whatever_order_every_push_is_sent_at_most_once_and_decided_once(
    drawn: list[tuple[Answer, str, Environment, str | None]], time: int, chance: Random
) -> None:
    batch = [
        each
        for number, (_, topic, environment, token) in enumerate(drawn)
        for each in pushes([number], topic, environment, token=token)
    ]
    left = iter([True] * time)

    async def may_begin() -> bool:
        return next(left, False)

    sending = Sending(batch, may_begin=may_begin)

    async def story() -> None:
        async with sending.under_way() as wire:
            while wire.under_way:
                for environment in Environment:
                    under_way = [number for number in wire.under_way if drawn[number][2] is environment]
                    assert len(under_way) <= 1 or sending.proof.is_proven(environment)
                number = chance.choice([*wire.under_way])
                await wire.answer(number, by=drawn[number][0])

    asyncio.run(story())
    pushed = sending.wire.begun
    assert len(set(pushed)) == len(pushed) <= time
    for number in set(range(len(drawn))) - set(pushed):
        assert isinstance(sending.outcomes[number], Withheld | Released)
    assert not set(sending.of_kind(Released)) & set(pushed)
    sending.decided(sending.proof.close(()))
    assert sorted(sending.outcomes) == [*range(len(drawn))]
    assert sending.of_kind(Sent) == sorted(number for number in pushed if drawn[number][0] == OK)
