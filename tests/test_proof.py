import itertools
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.answer import Accepted, Answer, Rejected, Unanswered, Unbegun, Unsendable
from core.delivery import Environment, Push
from core.proof import MASS_REFUSAL, OUTAGE_ERRORS, OUTAGE_TRANSPORTS, Decided, Fault, Proof
from core.reasons import REASONS, Blame, blame, blames_the_topic
from core.verdict import Deferred, Failed, InvalidToken, Ladder, Outcome, Released, Retry, Sent, Skipped, Withheld
from tests.support.deliveries import a_delivery, a_push

PRODUCTION, SANDBOX = Environment.PRODUCTION, Environment.SANDBOX
LADDER = Ladder(max_attempts=5, base=60, cap=3600)

OK = Accepted()
GONE = Rejected(410, "Unregistered")
BAD_TOKEN = Rejected(400, "BadDeviceToken")
OTHER_TOPIC = Rejected(400, "DeviceTokenNotForTopic")
MALFORMED = Rejected(400, "BadCollapseId")
TOO_LARGE = Rejected(413, "PayloadTooLarge")
BAD_KEY = Rejected(403, "InvalidProviderToken")
BAD_TOPIC = Rejected(400, "TopicDisallowed")
DOWN = Rejected(503, "ServiceUnavailable")
THROTTLED = Rejected(429, "TooManyRequests")
DEAD = Unanswered("timeout", "APNs did not answer.")
OVERSIZE = Unsendable("PayloadTooLarge", "The payload has 5000 bytes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A push, and what APNs said of it. With no token it is of a device of its own."""

    answer: Answer
    topic: str = "app"
    environment: Environment = PRODUCTION
    token: str | None = None
    attempts: int = 1
    may_give_back: bool = True

    def push(self, number: int) -> Push:
        delivery = a_delivery(number, attempts=self.attempts, may_give_back=self.may_give_back)
        return a_push(number, delivery, token=self.token, environment=self.environment)


def at(topic: str, answer: Answer, environment: Environment = PRODUCTION) -> Step:
    return Step(topic=topic, answer=answer, environment=environment)


def sandbox(answer: Answer) -> Step:
    return Step(answer=answer, environment=SANDBOX)


def word(outcome: Outcome) -> str:
    match outcome:
        case Deferred():
            return "deferred"
        case Sent():
            return "sent"
        case Retry():
            return "retry"
        case Failed():
            return "failed"
        case InvalidToken():
            return "invalid"
        case Withheld():
            return "withheld"
        case Released():
            return "released"
        case Skipped():
            return "skipped"


@dataclass(slots=True)
class Drain:
    """A proof, and all that came of it. Each outcome has its time: how many answers were in."""

    faults: list[Fault] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    decided_at: dict[int, int | str] = field(default_factory=dict)
    answers: int = 0
    proof: Proof = field(init=False)

    def __post_init__(self) -> None:
        self.proof = Proof(LADDER, lambda: 0.5, self.faults.append)

    def hear(self, *steps: Answer | Step) -> "Drain":
        for given_step in steps:
            step = given_step if isinstance(given_step, Step) else Step(answer=given_step)
            self.answers += 1
            self._note(self.proof.answered(step.push(self.answers), step.topic, step.answer), self.answers)
        return self

    def close(self, accepted_lately: Collection[Environment] = ()) -> "Drain":
        self._note(self.proof.close(accepted_lately), "close")
        return self

    def barred(self, step: Step) -> Outcome | None:
        return self.proof.barred(step.push(1_000_000), step.topic)

    @property
    def story(self) -> list[str]:
        """What became of each push: the word alone if its own answer said so, else what it had to wait for."""
        return [
            word(self.outcomes[number])
            if self.decided_at[number] == number
            else f"{self.decided_at[number]}: {word(self.outcomes[number])}"
            for number in range(1, self.answers + 1)
        ]

    def _note(self, decided: Decided, when: int | str) -> None:
        for push, outcome in decided:
            assert push.delivery.id not in self.outcomes, "decided twice"
            self.outcomes[push.delivery.id] = outcome
            self.decided_at[push.delivery.id] = when


# Each line is a drain: what APNs answers, in this order, and what becomes of each push. "3: retry" was held until the
# third answer came, "close: retry" until the rows ran out.
STORIES: dict[str, tuple[Sequence[Answer | Step], list[str]]] = {
    # An environment is proven by an acceptance, a 410, or a rejection that blames the notification.
    "after an acceptance each answer stands for itself": (
        [OK, DOWN, DEAD, THROTTLED, MALFORMED, BAD_TOKEN, GONE],
        ["sent", "retry", "retry", "retry", "failed", "invalid", "invalid"],
    ),
    "an acceptance lets errors count": ([DOWN, DEAD, OK], ["3: retry", "3: retry", "sent"]),
    "a 410 lets errors count": ([DOWN, GONE], ["2: retry", "invalid"]),
    "a malformed notification lets errors count": ([DOWN, MALFORMED], ["2: retry", "close: failed"]),
    "a refused token lets no error count": ([DOWN, BAD_TOKEN], ["close: withheld", "close: invalid"]),
    "a provider's fault lets no error count": ([DOWN, BAD_KEY], ["2: withheld", "withheld"]),
    "a topic's fault lets no error of another topic count": (
        [DOWN, at("b", BAD_TOPIC)],
        ["close: withheld", "withheld"],
    ),
    "a throttled device proves nothing": ([DOWN, THROTTLED], ["close: withheld", "close: withheld"]),
    "an unsendable proves nothing": ([DOWN, OVERSIZE], ["close: withheld", "failed"]),
    "one environment does not prove the other": ([DOWN, sandbox(OK)], ["close: withheld", "sent"]),
    # Three pushes that met only 5xx, or two that met only a dead transport, are an outage.
    "three errors are an outage": ([DOWN, DOWN, DOWN], ["3: withheld", "3: withheld", "withheld"]),
    "two dead transports are an outage": ([DEAD, DEAD], ["2: withheld", "withheld"]),
    "a dead transport is an error": ([DOWN, DEAD, DOWN], ["3: withheld", "3: withheld", "withheld"]),
    "an outage is of all topics": ([at("a", DEAD), at("b", DEAD)], ["2: withheld", "withheld"]),
    "an outage is of one environment": ([DEAD, sandbox(DEAD)], ["close: withheld", "close: withheld"]),
    "throttled devices are no outage": ([THROTTLED] * 3 + [OK], ["4: retry"] * 3 + ["sent"]),
    "a proven environment has no outage": ([GONE, DEAD, DEAD, DOWN, DOWN, DOWN], ["invalid", *["retry"] * 5]),
    "refused tokens are withheld by an outage": ([BAD_TOKEN, DEAD, DEAD], ["3: withheld", "3: withheld", "withheld"]),
    # A provider's fault withholds its group, before the proof or after it.
    "a bad key withholds what was held": (
        [BAD_TOKEN, at("b", BAD_TOKEN), DOWN, THROTTLED, BAD_KEY],
        ["5: withheld"] * 4 + ["withheld"],
    ),
    "a bad key withholds its environment alone": (
        [sandbox(DOWN), BAD_KEY, sandbox(OK)],
        ["3: retry", "withheld", "sent"],
    ),
    "a bad topic withholds its topic alone": (
        [BAD_TOKEN, at("b", BAD_TOKEN), BAD_TOPIC, at("b", OK)],
        ["3: withheld", "4: invalid", "withheld", "sent"],
    ),
    "what is in flight when the key goes bad": (
        [OK, BAD_KEY, OK, BAD_KEY, DOWN, BAD_TOKEN, MALFORMED, GONE],
        ["sent", "withheld", "sent", "withheld", "withheld", "invalid", "failed", "invalid"],
    ),
    # Five device tokens of a topic refused and none accepted are our own mistake.
    "five refused tokens are our own mistake": ([BAD_TOKEN] * 5, ["5: withheld"] * 4 + ["withheld"]),
    "both reasons count together": ([BAD_TOKEN, OTHER_TOPIC] * 2 + [OTHER_TOPIC], ["5: withheld"] * 4 + ["withheld"]),
    "four refused tokens are believed": ([BAD_TOKEN] * 4, ["close: invalid"] * 4),
    "four and an acceptance are believed": ([BAD_TOKEN] * 4 + [OK], ["5: invalid"] * 4 + ["sent"]),
    "an acceptance first, and every token is believed": ([OK] + [BAD_TOKEN] * 6, ["sent"] + ["invalid"] * 6),
    "one token refused five times is one": ([Step(answer=BAD_TOKEN, token="aa")] * 5, ["close: invalid"] * 5),
    "each topic counts for itself": (
        [at("a", BAD_TOKEN)] * 4 + [at("b", BAD_TOKEN)] * 4,
        ["close: invalid"] * 8,
    ),
    "an acceptance of another topic vouches for none": (
        [at("b", OK)] + [BAD_TOKEN] * 5,
        ["sent"] + ["6: withheld"] * 4 + ["withheld"],
    ),
    "an acceptance vouches for its topic's tokens alone": (
        [at("b", OK), at("a", BAD_TOKEN), BAD_TOKEN, OK],
        ["sent", "close: invalid", "4: invalid", "sent"],
    ),
    "a 410 vouches for no other token": (
        [GONE] + [BAD_TOKEN] * 5,
        ["invalid"] + ["close: withheld"] * 5,
    ),
    "five refused in flight together, before an acceptance": (
        [GONE] + [BAD_TOKEN] * 6 + [OK, BAD_TOKEN],
        ["invalid"] + ["8: invalid"] * 6 + ["sent", "invalid"],
    ),
    # Five rows refused for one reason and none accepted are our own bug.
    "five malformed are our own bug": ([MALFORMED] * 6, ["close: withheld"] * 6),
    "four malformed are each at fault alone": ([MALFORMED] * 4, ["close: failed"] * 4),
    "five of two reasons are no bug of ours": ([MALFORMED] * 4 + [TOO_LARGE] * 4, ["close: failed"] * 8),
    "the bug is of one reason": ([MALFORMED] * 5 + [TOO_LARGE], ["close: withheld"] * 5 + ["close: failed"]),
    "five malformed of six are no bug of ours": ([MALFORMED] * 5 + [OK], ["6: failed"] * 5 + ["sent"]),
    "malformed after an acceptance fails alone": ([OK] + [MALFORMED] * 6, ["sent"] + ["failed"] * 6),
    "each environment has its own bugs": (
        [sandbox(OK)] + [MALFORMED] * 5 + [sandbox(MALFORMED)],
        ["sent"] + ["close: withheld"] * 5 + ["failed"],
    ),
    # What was never sent is decided at once and teaches nothing.
    "what was never sent waits for nobody": ([OVERSIZE] * 6 + [Unbegun()], ["failed"] * 6 + ["released"]),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_becomes_of_each_push_of(name: str) -> None:
    steps, expected = STORIES[name]

    assert Drain().hear(*steps).close().story == expected


@pytest.mark.parametrize("answer", [DOWN, DEAD, THROTTLED])
def test_an_error_with_no_proof_counts_if_the_environment_accepted_something_lately(answer: Answer) -> None:
    drain = Drain().hear(answer, sandbox(answer))

    assert drain.proof.undecided == {PRODUCTION, SANDBOX}
    assert drain.close([SANDBOX]).story == ["close: withheld", "close: retry"]


def test_nobody_is_asked_what_was_accepted_lately_when_no_error_is_held() -> None:
    assert not Drain().proof.undecided
    assert not Drain().hear(BAD_TOKEN, MALFORMED).proof.undecided
    assert not Drain().hear(DOWN, OK).proof.undecided
    assert not Drain().hear(DEAD, DEAD).proof.undecided


def test_an_error_that_is_believed_fails_a_delivery_on_its_last_attempt() -> None:
    last = Step(answer=DOWN, attempts=5)

    assert Drain().hear(last).close().story == ["close: withheld"]
    assert Drain().hear(last).close([PRODUCTION]).story == ["close: failed"]
    assert Drain().hear(OK, last).story == ["sent", "failed"]


@pytest.mark.parametrize(
    ("steps", "reason", "topic", "blamed"),
    [
        ([BAD_KEY] * 3, "InvalidProviderToken", None, Blame.PROVIDER),
        ([OK, BAD_KEY, OK, BAD_KEY], "InvalidProviderToken", None, Blame.PROVIDER),
        ([BAD_TOPIC] * 3, "TopicDisallowed", "app", Blame.PROVIDER),
        ([DEAD] * 4, "timeout", None, Blame.APNS),
        ([DOWN] * 5, "ServiceUnavailable", None, Blame.APNS),
        ([BAD_TOKEN] * 4 + [OTHER_TOPIC] * 4, "DeviceTokenNotForTopic", "app", Blame.PROVIDER),
        ([GONE] + [BAD_TOKEN] * 7, "BadDeviceToken", "app", Blame.PROVIDER),
        ([MALFORMED] * 9, "BadCollapseId", None, Blame.PROVIDER),
    ],
)
def test_a_fault_is_told_once(steps: list[Answer], reason: str, topic: str | None, blamed: Blame) -> None:
    drain = Drain().hear(*steps).close().hear(*steps).close()

    (fault,) = drain.faults
    assert (fault.environment, fault.topic, fault.reason, fault.blame) == (PRODUCTION, topic, reason, blamed)
    assert fault.error


@pytest.mark.parametrize(
    "steps", [[DOWN] * 2, [DEAD, THROTTLED], [BAD_TOKEN] * 4, [MALFORMED] * 4, [MALFORMED] * 5 + [OK]]
)
def test_what_is_no_fault_is_not_told(steps: list[Answer]) -> None:
    assert not Drain().hear(*steps).close().faults


def test_the_error_says_whose_mistake_it_is_and_names_no_device() -> None:
    drain = Drain().hear(*[Step(answer=BAD_TOKEN, token=f"{number}f00d") for number in range(5)]).close()

    (fault,) = drain.faults
    assert "5 different device tokens of app (production)" in fault.error
    assert "f00d" not in fault.error


def test_a_withheld_environment_bars_all_its_topics_and_not_the_other_environment() -> None:
    drain = Drain().hear(OK, BAD_KEY)

    for topic in ("app", "other"):
        assert drain.barred(at(topic, OK)) == Withheld("InvalidProviderToken", drain.faults[0].error, delay=225.0)
    assert drain.barred(sandbox(OK)) is None


def test_a_withheld_topic_bars_no_other() -> None:
    drain = Drain().hear(OK, BAD_TOPIC)

    assert isinstance(drain.barred(at("app", OK)), Withheld)
    assert drain.barred(at("other", OK)) is None
    assert drain.barred(at("app", OK, SANDBOX)) is None


@pytest.mark.parametrize("steps", [[DOWN] * 3, [DEAD] * 2, [BAD_TOKEN] * 5])
def test_what_errors_or_refusals_withhold_is_barred_too(steps: list[Answer]) -> None:
    assert isinstance(Drain().hear(*steps).barred(Step(answer=OK)), Withheld)


def test_nothing_is_barred_by_what_stands_for_itself() -> None:
    drain = Drain().hear(OK, *[MALFORMED] * 6, *[BAD_TOKEN] * 6, *[DOWN] * 6, GONE, OVERSIZE).close()

    assert drain.barred(Step(answer=OK)) is None


def test_malformed_notifications_bar_nobody_since_the_next_may_be_sound() -> None:
    drain = Drain().hear(*[MALFORMED] * 6).close()

    assert drain.barred(Step(answer=OK)) is None
    assert drain.hear(MALFORMED, OK, MALFORMED).story[6:] == ["withheld", "sent", "failed"]


def test_tokens_refused_in_earlier_batches_of_the_drain_count() -> None:
    drain = Drain().hear(*[BAD_TOKEN] * 4).close().hear(BAD_TOKEN)

    assert drain.story == ["close: invalid"] * 4 + ["withheld"]
    assert isinstance(drain.barred(Step(answer=OK)), Withheld)


def test_tokens_refused_in_flight_together_bar_their_topic_from_the_next_batch_on() -> None:
    drain = Drain().hear(GONE, *[BAD_TOKEN] * 5)

    assert drain.barred(Step(answer=OK)) is None
    assert isinstance(drain.close().barred(Step(answer=OK)), Withheld)


def test_errors_of_earlier_batches_of_the_drain_count_towards_an_outage() -> None:
    drain = Drain().hear(DEAD).close().hear(DEAD)

    assert drain.story == ["close: withheld", "withheld"]
    assert [fault.blame for fault in drain.faults] == [Blame.APNS]


def test_a_device_that_apns_throttles_is_left_alone_for_the_rest_of_the_drain() -> None:
    drain = Drain().hear(OK, Step(answer=THROTTLED, token="aa"))

    assert drain.story == ["sent", "retry"]
    assert isinstance(drain.barred(Step(answer=OK, token="aa")), Withheld)
    assert isinstance(drain.barred(Step(answer=OK, token="aa", topic="other")), Withheld)
    assert drain.barred(Step(answer=OK, token="bb")) is None
    assert drain.barred(Step(answer=OK, token="aa", environment=SANDBOX)) is None
    assert not drain.faults
    drain.hear(Step(answer=THROTTLED, token="cc", environment=SANDBOX))
    assert isinstance(drain.barred(Step(answer=OK, token="cc", environment=SANDBOX)), Withheld)
    assert drain.barred(Step(answer=OK, token="cc")) is None


def test_a_throttled_device_is_left_alone_before_any_proof_too() -> None:
    drain = Drain().hear(Step(answer=THROTTLED, token="aa"))

    assert isinstance(drain.barred(Step(answer=OK, token="aa")), Withheld)
    assert drain.barred(Step(answer=OK, token="bb")) is None


def test_one_push_at_a_time_until_the_environment_is_proven() -> None:
    for proves in (OK, GONE, MALFORMED):
        assert Drain().hear(proves).proof.is_proven(PRODUCTION)
        assert not Drain().hear(proves).proof.is_proven(SANDBOX)
    for proves_not in (DOWN, DEAD, THROTTLED, BAD_TOKEN, BAD_KEY, BAD_TOPIC, OVERSIZE, Unbegun()):
        assert not Drain().hear(proves_not).proof.is_proven(PRODUCTION)


def test_one_push_at_a_time_until_the_topic_is_proven() -> None:
    for proves in (OK, GONE, MALFORMED):
        proof = Drain().hear(proves).proof
        assert proof.is_open(PRODUCTION, "app")
        assert not proof.is_open(PRODUCTION, "other")
        assert not proof.is_open(SANDBOX, "app")
    for proves_not in (BAD_TOKEN, OTHER_TOPIC, BAD_TOPIC, BAD_KEY, OVERSIZE):
        assert not Drain().hear(OK, at("other", proves_not)).proof.is_open(PRODUCTION, "other")


@pytest.mark.parametrize("error", [DOWN, DEAD, THROTTLED])
def test_an_error_of_an_apns_that_works_is_no_reason_to_go_on_one_by_one(error: Answer) -> None:
    assert Drain().hear(OK, at("other", error)).proof.is_open(PRODUCTION, "other")
    assert not Drain().hear(error).proof.is_open(PRODUCTION, "app")


def test_a_retry_after_is_a_floor_for_all_that_an_outage_withholds() -> None:
    drain = Drain().hear(DOWN, DOWN, replace(DOWN, floor=1000.0))
    delays = [outcome.delay for outcome in drain.outcomes.values() if isinstance(outcome, Withheld)]
    barred = drain.barred(Step(answer=OK))

    assert delays == [1250.0] * 3
    assert isinstance(barred, Withheld)
    assert barred.delay == 1250.0


def test_what_is_withheld_waits_for_its_own_retry_after_if_that_is_longer() -> None:
    drain = Drain().hear(replace(DOWN, floor=2000.0), replace(BAD_KEY, floor=1000.0))

    assert [outcome.delay for outcome in drain.outcomes.values() if isinstance(outcome, Withheld)] == [1250.0, 2500.0]


def test_the_wait_for_a_new_provider_token_is_a_floor_for_the_whole_environment() -> None:
    drain = Drain().hear(BAD_TOKEN, Rejected(429, "TooManyProviderTokenUpdates", floor=1200.0))
    barred = drain.barred(Step(answer=OK, topic="other"))

    assert [outcome.delay for outcome in drain.outcomes.values() if isinstance(outcome, Withheld)] == [1500.0] * 2
    assert isinstance(barred, Withheld)
    assert barred.delay == 1500.0


def test_a_retry_after_is_a_floor_for_what_is_withheld_at_the_end_and_for_the_throttled_device() -> None:
    drain = Drain().hear(replace(DOWN, floor=1000.0), Step(answer=replace(THROTTLED, floor=2000.0), token="aa"))
    barred = drain.barred(Step(answer=OK, token="aa"))
    drain.close()

    assert [outcome.delay for outcome in drain.outcomes.values() if isinstance(outcome, Withheld)] == [1250.0, 2500.0]
    assert isinstance(barred, Withheld)
    assert barred.delay == 2500.0


# Whatever the fault, a delivery that may give nothing back any more spends its attempt, or has failed on its last.
@pytest.mark.parametrize(
    "steps",
    [
        [BAD_KEY],
        [OK, BAD_KEY],
        [BAD_TOPIC],
        [DEAD] * 2,
        [DOWN] * 3,
        [BAD_TOKEN] * 5,
        [MALFORMED] * 5,
        [DOWN],
        [THROTTLED],
    ],
)
def test_a_delivery_that_may_give_nothing_back_spends_its_attempt(steps: list[Answer]) -> None:
    for attempts, expected in (1, {"retry"}), (5, {"failed"}):
        old = [Step(answer=answer, attempts=attempts, may_give_back=False) for answer in steps if answer != OK]
        drain = Drain().hear(*[OK] * (OK in steps), *old).close()
        assert {word(outcome) for outcome in drain.outcomes.values()} - {"sent"} == expected


def test_a_delivery_that_may_give_nothing_back_spends_its_attempt_when_it_is_barred() -> None:
    bad_key = Drain().hear(BAD_KEY)
    throttled = Drain().hear(OK, Step(answer=THROTTLED, token="aa"))
    for attempts, expected in (1, Retry), (5, Failed):
        old = Step(answer=OK, token="aa", attempts=attempts, may_give_back=False)
        assert isinstance(bad_key.barred(old), expected)
        assert isinstance(throttled.barred(old), expected)


@pytest.mark.parametrize(
    ("status", "unproven", "proven"),
    [
        (400, "close: failed", "failed"),
        (404, "close: failed", "failed"),
        (405, "close: failed", "failed"),
        (413, "close: failed", "failed"),
        (403, "withheld", "withheld"),
        (410, "invalid", "invalid"),
        (429, "close: withheld", "retry"),
        (500, "close: withheld", "retry"),
        (503, "close: withheld", "retry"),
        (599, "close: withheld", "retry"),
        (204, "close: withheld", "retry"),
        (302, "close: withheld", "retry"),
        (418, "close: withheld", "retry"),
    ],
)
def test_a_reason_that_nobody_has_seen_is_judged_by_its_status(status: int, unproven: str, proven: str) -> None:
    unheard_of = Rejected(status, "NobodyHasSeenThis")

    assert Drain().hear(unheard_of).close().story == [unproven]
    assert Drain().hear(OK, unheard_of).close().story == ["sent", proven]


@pytest.mark.parametrize("reason", [reason for reason, each in REASONS.items() if each.blame is Blame.PROVIDER])
def test_every_fault_of_the_provider_costs_one_push_and_spends_no_attempt(reason: str) -> None:
    answer = Rejected(REASONS[reason].status, reason)
    for before in [], [OK], [GONE], [BAD_TOKEN, DOWN]:
        drain = Drain().hear(*before, answer)
        assert word(drain.outcomes[drain.answers]) == "withheld"
        assert isinstance(drain.barred(Step(answer=OK)), Withheld)
        assert (drain.barred(at("other", OK)) is None) == blames_the_topic(answer)


TOPICS, TOKENS = ("a", "b"), tuple(f"{number:02x}" for number in range(7))

answers: st.SearchStrategy[Answer] = st.one_of(
    st.sampled_from([OK, DEAD, OVERSIZE, Unbegun()]),
    # Those that hold others, or are held, more often than their share of the table.
    st.sampled_from([BAD_TOKEN, OTHER_TOPIC, MALFORMED, DOWN, THROTTLED, GONE, BAD_TOPIC]),
    st.sampled_from(sorted(REASONS)).map(lambda reason: Rejected(REASONS[reason].status, reason)),
    st.sampled_from([204, 400, 403, 404, 410, 429, 500]).map(lambda status: Rejected(status, f"status_{status}")),
)
steps_of_a_drain = st.lists(
    st.one_of(
        st.builds(
            Step,
            answer=answers,
            topic=st.sampled_from(TOPICS),
            environment=st.sampled_from(Environment),
            token=st.sampled_from(TOKENS),
            attempts=st.integers(1, 5),
            may_give_back=st.sampled_from([True, True, True, False]),
        ),
        st.frozensets(st.sampled_from(Environment)),  # the rows run out, and this is what was accepted lately
    ),
    max_size=60,
)


@dataclass(slots=True)
class Seen:
    """What the test itself knows of the drain so far, kept as simply as it can be."""

    proven: set[Environment] = field(default_factory=set)
    accepted: set[tuple[Environment, str]] = field(default_factory=set)
    refused: set[tuple[Environment, str, str]] = field(default_factory=set)
    malformed: Counter[tuple[Environment, str]] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        match step.answer:
            case Accepted():
                self.accepted.add((step.environment, step.topic))
                self.proven.add(step.environment)
            case Rejected() as answer if blame(answer) is Blame.NOTIFICATION:
                self.malformed[step.environment, answer.reason] += 1
                self.proven.add(step.environment)
            case Rejected(status=410):
                self.proven.add(step.environment)
            case Rejected() as answer if blame(answer) is Blame.DEVICE:
                self.refused.add((step.environment, step.topic, str(step.token)))
            case _:
                pass

    def tokens_refused(self, step: Step) -> int:
        return sum((environment, topic) == (step.environment, step.topic) for environment, topic, _ in self.refused)

    def environment_accepted(self, step: Step) -> bool:
        return any(environment is step.environment for environment, _ in self.accepted)


def check_outcome(step: Step, outcome: Outcome, seen: Seen, lately: Collection[Environment] | None) -> None:
    """Check one outcome by the sentences of the design. `lately` is None if it was decided before the rows ran out."""
    if not step.may_give_back:
        assert not isinstance(outcome, Withheld)
        if isinstance(outcome, Retry | Failed):
            return  # a withheld one looks like these
    match step.answer:
        case Accepted():
            assert outcome == Sent()
        case Unbegun():
            assert outcome == Released()
        case Unsendable():
            assert isinstance(outcome, Failed)
        case Rejected(status=410):
            assert isinstance(outcome, InvalidToken)
        case Rejected() as answer if blame(answer) is Blame.PROVIDER:
            assert isinstance(outcome, Withheld)
        case Rejected() as answer if blame(answer) is Blame.DEVICE:
            assert isinstance(outcome, InvalidToken | Withheld)
            if isinstance(outcome, InvalidToken) and (step.environment, step.topic) not in seen.accepted:
                assert lately is not None
                assert seen.tokens_refused(step) < MASS_REFUSAL
        case Rejected() as answer if blame(answer) is Blame.NOTIFICATION:
            assert isinstance(outcome, Failed | Withheld)
            if isinstance(outcome, Failed) and not seen.environment_accepted(step):
                assert lately is not None
                assert seen.malformed[step.environment, answer.reason] < MASS_REFUSAL
        case Rejected() | Unanswered():
            assert isinstance(outcome, Retry | Failed | Withheld)
            if not isinstance(outcome, Withheld):
                assert step.environment in seen.proven or step.environment in (lately or ())


@settings(max_examples=300, deadline=None)
@given(events=steps_of_a_drain, heeds_bars=st.booleans())
@example(events=[replace(at("a", BAD_TOKEN), token=token) for token in TOKENS], heeds_bars=False)
@example(events=[at("a", GONE), *[replace(at("a", BAD_TOKEN), token=token) for token in TOKENS]], heeds_bars=True)
def test_whatever_apns_answers_every_push_is_decided_once_and_by_the_rules(
    events: list[Step | frozenset[Environment]],
    heeds_bars: bool,  # noqa: FBT001  what Hypothesis draws, given by name
) -> None:
    faults: list[Fault] = []
    proof, seen = Proof(LADDER, lambda: 0.5, faults.append), Seen()
    waiting: dict[int, Step] = {}

    def check(decided: Decided, lately: Collection[Environment] | None) -> None:
        for push, outcome in decided:
            check_outcome(waiting.pop(push.delivery.id), outcome, seen, lately)  # a KeyError: decided twice

    for number, event in enumerate([*events, frozenset[Environment]()]):
        if isinstance(event, Step):
            push = event.push(number)
            if (outcome := proof.barred(push, event.topic)) and heeds_bars:
                assert isinstance(outcome, Withheld if event.may_give_back else Retry | Failed)
                continue
            waiting[number] = event
            seen.add(event)
            check(proof.answered(push, event.topic, event.answer), None)
        else:
            check(proof.close(event), event)
            assert not waiting, "held beyond the end of the rows"
            assert not proof.undecided

    assert len({(fault.environment, fault.topic, fault.reason) for fault in faults}) == len(faults)


@settings(max_examples=100, deadline=None)
@given(st.lists(answers, max_size=40), st.frozensets(st.sampled_from(Environment)))
def test_what_was_answered_by_nobody_but_a_broken_apns_spends_no_attempt(
    said: list[Answer], lately: frozenset[Environment]
) -> None:
    errors = [a for a in said if isinstance(a, Unanswered) or (isinstance(a, Rejected) and blame(a) is Blame.APNS)]
    drain = Drain().hear(*errors).close(lately - {PRODUCTION})

    assert all(isinstance(outcome, Withheld) for outcome in drain.outcomes.values())
    hard = [error for error in errors if not (isinstance(error, Rejected) and error.status == 429)]
    dead = [error for error in hard if isinstance(error, Unanswered)]
    assert bool(drain.faults) == (len(hard) >= OUTAGE_ERRORS or len(dead) >= OUTAGE_TRANSPORTS)


def test_a_batch_that_is_malformed_as_a_whole_is_decided_in_time_proportional_to_its_size() -> None:
    """After a deploy, say: a thousand rows with twenty devices each, none of which is decided before the last."""

    def calls(rows: int) -> int:
        count = itertools.count()
        proof = Proof(LADDER, lambda: 0.5, lambda _fault: None)
        pushes = [a_push(number) for number in range(rows)]
        sys.setprofile(lambda *_: next(count))
        try:
            for push in pushes:
                proof.answered(push, "app", MALFORMED)
            decided = proof.close(())
        finally:
            sys.setprofile(None)
        assert len(decided) == rows
        return next(count)

    assert calls(400) < 6 * calls(100)


def test_dice_are_cast_for_each_push_so_that_what_was_withheld_together_does_not_return_together() -> None:
    chances = iter(number / 10 for number in range(10))
    proof = Proof(LADDER, lambda: next(chances), lambda _fault: None)

    delays = {
        outcome.delay
        for number in range(5)
        for _, outcome in proof.answered(a_push(number), "app", BAD_TOKEN)
        if isinstance(outcome, Withheld)
    }
    assert len(delays) == 5
