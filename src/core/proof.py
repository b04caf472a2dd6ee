"""What one drain has learnt of APNs, and what an answer means in that light.

An answer can say less about its delivery than about us or about APNs: a 503 of an APNs that answers nobody is no
failure of this notification, and BadDeviceToken is also what every token earns in the wrong environment. So in each
drain every environment starts unproven, and so does every topic in it, and an answer may be held until others have told
what it means:

    blames APNs              stands once the environment is proven; three such before, or two dead transports, are an
                             outage
    blames the notification  stands once the environment has accepted one; five such for one reason, and none accepted,
                             are our bug
    blames the device        stands once the topic has accepted one, and a 410 at once; five such tokens, and none
                             accepted, are our mistake
    blames the provider      is our mistake, whatever was proven before

An acceptance, a 410 and a rejection that blames the notification prove the environment: it works, and it hears us. An
outage and a mistake of ours withhold what they were found by and, in their group, all that has not been pushed yet; a
bug withholds only what it was found by, since the next may be sound.

Pure. What is held when the rows have run out is decided by `close`, which is told what other drains have seen.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import assert_never

from core.answer import Accepted, Answer, Rejected, Unanswered, Unbegun, Unsendable
from core.delivery import Environment, Push
from core.reasons import Blame, blame, blames_the_topic, describe
from core.verdict import Ladder, Outcome, judge, withhold

# How many pushes must have met nothing but errors for it to be an outage. Dead transports are believed sooner: each one
# was a connection of its own, and costs up to eleven seconds to find out.
OUTAGE_ERRORS = 3
OUTAGE_TRANSPORTS = 2
# How many device tokens of a topic, or rows for one reason, must have been refused for it to be our own fault.
MASS_REFUSAL = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """What is withheld in this drain, and why. With no topic it is of the whole environment."""

    environment: Environment
    topic: str | None
    reason: str
    error: str
    blame: Blame = Blame.PROVIDER  # or APNS: an outage
    floor: float = 0.0  # seconds before which trying again is no use


@dataclass(slots=True)
class _Environment:
    proven: bool = False
    accepted: bool = False
    fault: Fault | None = None
    errors: int = 0  # pushes that met 5xx or a dead transport
    transports: int = 0  # those of them that met a dead transport
    refused: Counter[str] = field(default_factory=Counter)  # rows, by reason
    our_bugs: set[str] = field(default_factory=set)  # those of the reasons


@dataclass(slots=True)
class _Topic:
    proven: bool = False
    accepted: bool = False
    fault: Fault | None = None
    refused: dict[str, str] = field(default_factory=dict)  # device tokens, and each one's reason


@dataclass(frozen=True, slots=True)
class _Doubtful:
    push: Push
    topic: str
    answer: Rejected | Unanswered


type Decided = list[tuple[Push, Outcome]]


class Proof:
    """One drain's knowledge of APNs."""

    def __init__(self, ladder: Ladder, dice: Callable[[], float], on_fault: Callable[[Fault], None]) -> None:
        self._ladder, self._dice, self._on_fault = ladder, dice, on_fault
        self._environments: defaultdict[Environment, _Environment] = defaultdict(_Environment)
        self._topics: defaultdict[tuple[Environment, str], _Topic] = defaultdict(_Topic)
        self._throttled: dict[tuple[Environment, str], Rejected] = {}
        self._held: list[_Doubtful] = []

    def is_proven(self, environment: Environment) -> bool:
        """Whether more than one push at a time may be under way to this environment."""
        return self._environments[environment].proven

    def is_open(self, environment: Environment, topic: str) -> bool:
        """Whether more than one push at a time may be under way to this topic."""
        return self._topics[environment, topic].proven

    def barred(self, push: Push, topic: str) -> Outcome | None:
        """Say what becomes of a push without its being sent: its group is withheld, or its device wants a rest."""
        environment = push.device.environment
        if fault := self._environments[environment].fault or self._topics[environment, topic].fault:
            return self._withhold(push, fault.reason, fault.error, fault.floor)
        if said := self._throttled.get((environment, push.device.token)):
            return self._withhold(push, said.reason, describe(said), said.floor)
        return None

    def answered(self, push: Push, topic: str, answer: Answer) -> Decided:
        """Take in an answer. Returns what is decided by now: this push, others that were held, or nothing yet."""
        before = self._standing(push, topic)
        self._learn(push, topic, answer)
        match answer:
            case Accepted() | Rejected(status=410) | Unsendable() | Unbegun():
                decided = [(push, self._judge(push, answer))]
            case Rejected() | Unanswered():
                decided = self._decide([_Doubtful(push, topic, answer)])
            case _:
                assert_never(answer)
        if self._standing(push, topic) != before:
            held, self._held = self._held, []
            decided += self._decide(held)
        return decided

    @property
    def undecided(self) -> frozenset[Environment]:
        """Environments of which `close` must know whether they accepted anything lately."""
        return frozenset(said.push.device.environment for said in self._held if _blamed(said.answer) is Blame.APNS)

    def close(self, accepted_lately: Collection[Environment]) -> Decided:
        """Decide what is still held, since the rows have run out and every answer is in.

        A refusal is believed; an error counts against the row only if it came from an APNs that works.
        """
        for environment, topic in list(self._topics):
            self._suspect_tokens(environment, topic)
        for environment in list(self._environments):
            self._suspect_requests(environment)
        held, self._held = self._held, []
        return [(said.push, self._meaning(said) or self._last_word(said, accepted_lately)) for said in held]

    def _learn(self, push: Push, topic: str, answer: Answer) -> None:
        """Draw from an answer what it tells of its environment and its topic."""
        where = push.device.environment
        environment, group = self._environments[where], self._topics[where, topic]
        match answer:
            case Unsendable() | Unbegun():
                pass  # APNs has not been asked
            case Accepted():
                environment.proven = environment.accepted = group.proven = group.accepted = True
            case Rejected(status=410):
                environment.proven = group.proven = True
            case Unanswered():
                self._learn_error(push, topic, answer)
            case Rejected():
                match blame(answer):
                    case Blame.PROVIDER:
                        of_topic = topic if blames_the_topic(answer) else None
                        self._found(Fault(where, of_topic, answer.reason, describe(answer), floor=answer.floor))
                    case Blame.DEVICE:
                        group.refused[push.device.token] = answer.reason
                        if not group.proven:  # else others are under way, and one of them may yet be accepted
                            self._suspect_tokens(where, topic)
                    case Blame.NOTIFICATION:
                        environment.proven = group.proven = True
                        environment.refused[answer.reason] += 1
                    case Blame.APNS:
                        self._learn_error(push, topic, answer)
                    case unreachable:
                        assert_never(unreachable)
            case _:
                assert_never(answer)

    def _learn_error(self, push: Push, topic: str, answer: Rejected | Unanswered) -> None:
        where = push.device.environment
        environment = self._environments[where]
        if environment.proven:
            # It is no fault of the topic's: its other rows need not wait for one another.
            self._topics[where, topic].proven = True
        if isinstance(answer, Rejected) and answer.status == 429:
            self._throttled[where, push.device.token] = answer  # about one device: neither proof nor outage
        elif not environment.proven:
            environment.errors += 1
            environment.transports += isinstance(answer, Unanswered)
            if environment.errors >= OUTAGE_ERRORS or environment.transports >= OUTAGE_TRANSPORTS:
                error = f"APNs ({where}) is out: nothing but errors. {_words(answer)}"
                self._found(Fault(where, None, answer.reason, error, Blame.APNS, _floor(answer)))

    def _suspect_tokens(self, where: Environment, name: str) -> None:
        topic = self._topics[where, name]
        if len(topic.refused) >= MASS_REFUSAL and not topic.accepted:
            error = (
                f"APNs refused {len(topic.refused)} different device tokens of {name} ({where}) and accepted none:"
                " the environment recorded in push_token, or the topic, must be wrong."
            )
            self._found(Fault(where, name, next(reversed(topic.refused.values())), error))

    def _suspect_requests(self, where: Environment) -> None:
        environment = self._environments[where]
        for reason, rows in environment.refused.items():
            if rows >= MASS_REFUSAL and not environment.accepted and reason not in environment.our_bugs:
                environment.our_bugs.add(reason)
                error = (
                    f"APNs ({where}) refused {rows} deliveries with {reason} and accepted none: what is sent must be"
                    " malformed by a bug, of ours or of a producer after a deploy."
                )
                self._on_fault(Fault(where, None, reason, error))

    def _found(self, fault: Fault) -> None:
        group = (
            self._environments[fault.environment]
            if fault.topic is None
            else self._topics[fault.environment, fault.topic]
        )
        if group.fault is None:
            group.fault = fault
            self._on_fault(fault)

    def _decide(self, asked: list[_Doubtful]) -> Decided:
        """Decide what can be, and hold the rest."""
        decided = []
        for said in asked:
            if outcome := self._meaning(said):
                decided.append((said.push, outcome))
            else:
                self._held.append(said)
        return decided

    def _meaning(self, said: _Doubtful) -> Outcome | None:
        """Say what an answer comes to by what is known now, or None while that is open."""
        where, answer = said.push.device.environment, said.answer
        environment, topic = self._environments[where], self._topics[where, said.topic]
        match _blamed(answer):
            case Blame.PROVIDER:
                stands = False
            case Blame.DEVICE:
                stands = topic.accepted
            case Blame.NOTIFICATION:
                stands = environment.accepted
            case Blame.APNS:
                stands = environment.proven and not environment.fault
            case unreachable:
                assert_never(unreachable)
        if stands:
            return self._judge(said.push, answer)
        if fault := environment.fault or topic.fault:
            return self._withhold(said.push, answer.reason, _words(answer), max(_floor(answer), fault.floor))
        if answer.reason in environment.our_bugs:
            return self._withhold(said.push, answer.reason, _words(answer), _floor(answer))
        return None

    def _last_word(self, said: _Doubtful, accepted_lately: Collection[Environment]) -> Outcome:
        if _blamed(said.answer) is Blame.APNS and said.push.device.environment not in accepted_lately:
            return self._withhold(said.push, said.answer.reason, _words(said.answer), _floor(said.answer))
        return self._judge(said.push, said.answer)

    def _standing(self, push: Push, topic: str) -> tuple[object, ...]:
        """All that the meaning of what is held depends on."""
        environment = self._environments[push.device.environment]
        group = self._topics[push.device.environment, topic]
        return environment.proven, environment.accepted, environment.fault, group.accepted, group.fault

    def _judge(self, push: Push, answer: Answer) -> Outcome:
        return judge(push, answer, self._ladder, self._dice())

    def _withhold(self, push: Push, reason: str, error: str, floor: float = 0.0) -> Outcome:
        return withhold(push.delivery, reason, error, self._ladder, self._dice(), floor=floor)


def _blamed(answer: Rejected | Unanswered) -> Blame:
    return blame(answer) if isinstance(answer, Rejected) else Blame.APNS


def _words(answer: Rejected | Unanswered) -> str:
    return describe(answer) if isinstance(answer, Rejected) else answer.error


def _floor(answer: Rejected | Unanswered) -> float:
    return answer.floor if isinstance(answer, Rejected) else 0.0
