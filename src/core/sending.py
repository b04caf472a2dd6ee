"""In which order the pushes of a batch go out: one alone until it has proven its environment and its topic, then the
rest at once; of those that may go, the one that has been due longest.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from core.answer import Answer
from core.delivery import Environment, Push
from core.proof import Decided, Proof
from core.verdict import Released

# Pushes under way to one environment. What a crash leaves unsettled, so bounded; and APNs allows about 1,000 streams.
IN_FLIGHT = 500


async def send(
    pushes: Sequence[tuple[Push, str]],
    proof: Proof,
    *,
    push_one: Callable[[Push], Coroutine[Any, Any, Answer]],
    may_begin: Callable[[], Awaitable[bool]],
    decided: Callable[[Decided], None],
) -> None:
    """Push all of them, each with its topic. Environments do not wait for one another."""
    by_environment: dict[Environment, dict[str, deque[Push]]] = {}
    for push, topic in pushes:
        by_environment.setdefault(push.device.environment, {}).setdefault(topic, deque()).append(push)
    environments = [
        asyncio.create_task(_send(environment, waiting, proof, push_one=push_one, may_begin=may_begin, decided=decided))
        for environment, waiting in by_environment.items()
    ]
    try:
        await asyncio.gather(*environments)
    finally:
        await _end(environments)


async def _send(
    environment: Environment,
    waiting: dict[str, deque[Push]],
    proof: Proof,
    *,
    push_one: Callable[[Push], Coroutine[Any, Any, Answer]],
    may_begin: Callable[[], Awaitable[bool]],
    decided: Callable[[Decided], None],
) -> None:
    under_way: dict[asyncio.Task[Answer], tuple[Push, str]] = {}
    of_topic: Counter[str] = Counter()
    answers: asyncio.Queue[asyncio.Task[Answer]] = asyncio.Queue()

    def next_topic() -> str | None:
        """Give the topic whose push goes next: of those that need not wait, the one that has been due longest."""
        if len(under_way) >= (IN_FLIGHT if proof.is_proven(environment) else 1):
            return None
        free = (topic for topic in waiting if not of_topic[topic] or proof.is_open(environment, topic))
        return min(free, key=lambda topic: waiting[topic][0].delivery.due_at, default=None)

    try:
        while waiting or under_way:
            # What has been answered comes first: it may say that no more should go.
            if not answers.empty() or (topic := next_topic()) is None:
                task = await answers.get()
                push, topic = under_way.pop(task)
                of_topic[topic] -= 1
                decided(proof.answered(push, topic, task.result()))
                continue
            push = waiting[topic].popleft()
            if not waiting[topic]:
                del waiting[topic]
            if outcome := proof.barred(push, topic):
                decided([(push, outcome)])
            elif await may_begin():
                task = asyncio.create_task(push_one(push))
                under_way[task] = push, topic
                of_topic[topic] += 1
                task.add_done_callback(answers.put_nowait)
            else:
                decided([(push, Released())])
    finally:
        await _end(under_way)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
