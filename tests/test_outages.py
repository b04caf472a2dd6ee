"""An APNs that is out, and a key that is bad, for minutes and for hours: nothing that has not expired is lost by it.

The database's time is moved between drains, a drain every five minutes; APNs' and the handler's own is not.
"""

import socket
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from h2.errors import ErrorCodes

from devtools.simulated_apns import Answer, Credentials, Hangup, Ok, Reject, Reset, SimulatedApns
from tests.support.handler import Invocation, Stack, only

pytest_plugins = ["tests.support.handler_fixtures"]

STEP = 300  # seconds between drains
HOURS = 3600
DOWN = Reject(503, "ServiceUnavailable")


@pytest.fixture
def refusing() -> str:
    """Give the URL of a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"https://127.0.0.1:{listener.getsockname()[1]}"


def _outage(stack: Stack) -> dict[str, object]:
    (line,) = stack.logged("withheld")
    assert (line["level"], line["message"]) == ("ERROR", "withheld: APNs is out")
    (total,) = (metrics for metrics in stack.metrics() if "Sent" in metrics)
    assert (total["Outage"], total["ProviderFault"]) == ([1.0], [0.0])
    assert len(stack.metrics()) == 1, "no metric by reason: it is not our fault"
    return line


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("answer", [DOWN, Reject(500, "InternalServerError"), Reject(502, "", body=b"<html>")])
def test_three_pushes_that_meet_errors_alone_are_an_outage_of_that_environment(
    stack: Stack, sandbox: SimulatedApns, rows: int, answer: Reject
) -> None:
    stack.apns.answer_all(answer)
    posted = stack.post_many(rows)
    elsewhere = stack.post_many(rows, environment="sandbox")
    stack.setenv(DRAIN_BATCH_SIZE=100)

    assert stack.drain() == only(claimed=2 * rows, pushed=3 + rows, sent=rows, withheld=rows)

    assert (len(stack.apns.journal), len(sandbox.journal)) == (3, rows)
    ended = stack.ends()
    assert {ended[each.id] for each in elsewhere} == {("sent", None, 1)}
    reason = answer.reason or "status_502"
    assert {ended[each.id] for each in posted} == {("pending", reason, 0)}
    due = [stack.row(each).due_in for each in posted]
    assert all(145 < seconds <= 300 for seconds in due)
    assert len(set(due)) == rows, "with jitter"
    line = _outage(stack)
    assert (line["environment"], line["topic"], line["reason"]) == ("production", "all", reason)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        pytest.param(Hangup(), "connection_lost", id="lost on the way"),
        pytest.param(Hangup(received=True), "connection_lost", id="answer lost"),
        pytest.param(Reset(ErrorCodes.INTERNAL_ERROR), "stream_reset", id="stream reset"),
    ],
)
def test_two_dead_transports_are_an_outage_and_each_push_is_a_possible_duplicate(
    stack: Stack, sandbox: SimulatedApns, loss: Answer, reason: str
) -> None:
    stack.apns.answer_all(loss)
    posted = stack.post_many(20)
    stack.post_many(20, environment="sandbox")

    assert stack.drain() == only(claimed=40, pushed=22, sent=20, withheld=20)

    assert stack.apns.connections == 2, "each was one of its own"
    assert len(sandbox.journal) == 20
    ended = stack.ends()
    assert {ended[each.id] for each in posted} == {("pending", reason, 0)}
    assert len(stack.logged("outcome unknown")) == 2
    (line,) = stack.metrics()
    assert line["PossibleDuplicate"] == [2.0]
    assert _outage(stack)["reason"] == reason


def test_an_apns_that_refuses_connections_is_an_outage_without_duplicates(stack: Stack, refusing: str) -> None:
    stack.setenv(APNS_PRODUCTION_URL=refusing)
    stack.post_many(20)
    elsewhere = stack.post_many(20, environment="sandbox")

    assert stack.drain() == only(claimed=40, pushed=22, sent=20, withheld=20)

    ended = stack.ends()
    assert {ended.pop(each.id) for each in elsewhere} == {("sent", None, 1)}
    assert set(ended.values()) == {("pending", "connection_failed", 0)}
    assert _outage(stack)["reason"] == "connection_failed"
    (line,) = stack.metrics()
    assert line["PossibleDuplicate"] == [0.0]


@pytest.mark.parametrize("rows", [1, 2])
def test_too_few_rows_to_tell_cost_no_attempt_either_unless_apns_is_known_to_work(stack: Stack, rows: int) -> None:
    def drained(accepted_before: float | None, environment: str = "production") -> dict[str, int]:
        """Drain rows that all meet an error, so many seconds after something else was accepted."""
        stack.db.execute("TRUNCATE notification_delivery, push_token")
        stack.apns.answer_all(Ok())
        if accepted_before is not None:
            stack.post(environment=environment)
            assert stack.drain()["sent"] == 1
            stack.advance(accepted_before)
        stack.apns.answer_all(DOWN)
        stack.post_many(rows)
        return stack.drain()

    withheld = only(claimed=rows, pushed=rows, withheld=rows)
    assert drained(None) == withheld
    assert set(stack.ends().values()) == {("pending", "ServiceUnavailable", 0)}
    assert drained(accepted_before=605) == withheld
    assert drained(accepted_before=5, environment="sandbox") == withheld, "of the other one"
    assert drained(accepted_before=590) == only(claimed=rows, pushed=rows, retried=rows)
    assert sorted(stack.ends().values())[:rows] == [("pending", "ServiceUnavailable", 1)] * rows
    assert stack.logged("withheld") == []


def test_what_another_drain_was_told_counts_as_well(stack: Stack) -> None:
    other = stack.another_environment()
    stack.post()
    assert stack.drain(environment=other)["sent"] == 1
    stack.post(DOWN)

    assert stack.drain() == only(claimed=1, pushed=1, retried=1)


# What is wrong for hours: how it begins, and how it ends.
type Trouble = tuple[Callable[[Stack, str], None], Callable[[Stack], None]]


def _set_down(stack: Stack, _: str) -> None:
    stack.apns.answer_all(DOWN)


def _set_hanging_up(stack: Stack, _: str) -> None:
    stack.apns.answer_all(Hangup())


def _set_up(stack: Stack) -> None:
    stack.apns.answer_all(Ok())


def _refuse(stack: Stack, refusing: str) -> None:
    stack.setenv(APNS_PRODUCTION_URL=refusing)


def _take_connections(stack: Stack) -> None:
    stack.setenv(APNS_PRODUCTION_URL=stack.apns.url)


def _revoke(stack: Stack, _: str) -> None:
    stack.apns.revoke()


def _issue_another(stack: Stack) -> None:
    stack.rotate(stack.issue())


TROUBLES: dict[str, Trouble] = {
    "answers 503": (_set_down, _set_up),
    "hangs up": (_set_hanging_up, _set_up),
    "refuses connections": (_refuse, _take_connections),
    "the key is revoked": (_revoke, _issue_another),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_six_hours_of_it_with_a_full_outbox_end_with_everything_sent_that_has_not_expired(
    stack: Stack, refusing: str, trouble: str
) -> None:
    begin, end = TROUBLES[trouble]
    stack.post()
    assert stack.drain()["sent"] == 1  # APNs has worked until a moment ago, and is thought to for ten minutes
    begin(stack, refusing)
    posted = stack.post_many(300)
    pushed, most_pushed = 0, 0
    for hour in range(6):
        posted += stack.post_many(5)  # and they keep coming
        for _ in range(HOURS // STEP):
            tally = stack.drain()
            assert tally["failed"] == tally["invalid_token"] == tally["sent"] == 0, hour
            pushed += tally["pushed"]
            most_pushed = max(most_pushed, tally["pushed"])
            stack.advance(STEP)
    assert most_pushed <= 3, "that is what it costs"
    assert {status for status, _, _ in stack.ends().values()} == {"pending", "sent"}
    assert max(attempts for _, _, attempts in stack.ends().values()) <= 1

    end(stack)
    stack.apns.forget()
    for _ in range(12):  # 330 rows, 50 a drain, due within 300 s
        stack.drain(context=Invocation())
        stack.advance(STEP)

    assert set(Counter(status for status, _, _ in stack.ends().values())) == {"sent"}
    assert max(attempts for _, _, attempts in stack.ends().values()) <= 2
    assert Counter(push.token for push in stack.apns.journal if push.answer == Ok()) == {
        each.token: 1 for each in posted
    }
    assert stack.one("SELECT count(*) FROM push_token WHERE invalidated_at IS NOT NULL") == 0
    assert stack.logged("delivery failed") == []


def test_a_key_that_stays_bad_for_days_fails_what_waits_in_the_end(stack: Stack) -> None:
    """Nothing circles for ever: three days after its first claim a delivery's attempts count, whoever is at fault."""
    stack.rotate(stack.hide(Credentials.generate()))
    old = stack.post_many(40)
    assert stack.drain() == only(claimed=40, pushed=1, withheld=40)
    stack.advance(71.9 * HOURS)
    assert stack.drain() == only(claimed=40, pushed=1, withheld=40)
    assert {attempts for _, _, attempts in stack.ends().values()} == {0}
    young = stack.post_many(5)

    tallies = []
    for _ in range(6):
        stack.advance(HOURS + 1)
        tallies.append(stack.drain())

    ended = stack.ends()
    assert {ended[each.id] for each in old} == {("failed", "InvalidProviderToken", 5)}
    assert {ended[each.id] for each in young} == {("pending", "InvalidProviderToken", 0)}
    assert [tally["failed"] for tally in tallies] == [0, 0, 0, 0, 40, 0]
    assert [tally["retried"] for tally in tallies] == [40, 40, 40, 40, 0, 0]
    assert len(stack.logged("delivery failed")) == 40
    assert stack.one("SELECT count(*) FROM push_token WHERE invalidated_at IS NOT NULL") == 0


def test_an_outage_ends_for_what_was_withheld_within_five_minutes(stack: Stack) -> None:
    stack.apns.answer_all(DOWN)
    posted = stack.post_many(30, expires_at=datetime.now(UTC) + timedelta(hours=9))
    assert stack.drain()["withheld"] == 30
    stack.apns.answer_all(Ok())

    stack.advance(301)

    assert stack.drain() == only(claimed=30, pushed=30, sent=30)
    assert {stack.row(each).attempts for each in posted} == {1}
