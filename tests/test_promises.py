"""The promises of the design, each by its number, kept by everything together: nothing here is a double but APNs."""

import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from h2.errors import ErrorCodes

from core.settings import BadSettings
from devtools.local_postgres import LocalPostgres
from devtools.simulated_apns import Answer, Credentials, Hangup, Ok, Reject, Reset, Silence
from tests.support.handler import LEASE, Invocation, Stack, only
from tests.support.invoke import DIED
from tests.support.tcp_proxy import TcpProxy
from tests.support.time_travel import install_clock, tick

pytest_plugins = ["tests.support.handler_fixtures"]

IN_FLIGHT = 500  # pushes to one environment, once it has proven to work
FLUSH_SECONDS = 0.25  # promised: how old an unsettled answer may be

# One of each kind, and what a row says that ends of it at its second attempt.
KINDS: dict[str, Answer] = {
    "200": Ok(),
    "503": Reject(503, "ServiceUnavailable"),
    "410": Reject(410, "Unregistered"),
    "400": Reject(400, "BadCollapseId"),
    "403": Reject(403, "InvalidProviderToken"),
}
ENDS = {
    "200": ("sent", None, 2),
    "503": ("pending", "ServiceUnavailable", 2),
    "410": ("invalid_token", "Unregistered", 2),
    "400": ("failed", "BadCollapseId", 2),
    "403": ("pending", "InvalidProviderToken", 1),  # given back: as many attempts as the late drain holds it with
}
COUNTED = {"200": "sent", "503": "retried", "410": "invalid_token", "400": "failed", "403": "withheld"}


@pytest.fixture
def nobody_answers() -> Iterator[socket.socket]:
    """Listen, so that a connection comes about, and never say a word on it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        yield listener


# Promise 1
def test_a_claim_takes_no_more_than_a_batch_and_leaves_the_rest_as_it_was(stack: Stack) -> None:
    posted = [stack.post() for _ in range(60)]

    assert stack.drain() == only(claimed=50, pushed=50, sent=50)

    ended = stack.ends()
    assert [ended[each.id] for each in posted] == [("sent", None, 1)] * 50 + [("pending", None, 0)] * 10


def test_drains_at_once_push_every_row_once(stack: Stack) -> None:
    posted = [stack.post() for _ in range(120)]

    drains = [stack.spawn() for _ in range(3)]
    tallies = [stack.outcome(drain) for drain in drains]

    assert sum(tally["sent"] for tally in tallies) == 120
    assert max(tally["claimed"] for tally in tallies) <= 50
    assert Counter(push.token for push in stack.apns.journal) == {each.token: 1 for each in posted}
    assert set(stack.ends().values()) == {("sent", None, 1)}


def test_a_row_that_is_leased_is_not_claimed_again_before_its_lease_is_over(stack: Stack) -> None:
    posted = stack.post()
    stack.apns.hold()
    stack.kill(_once_received(stack, 1))
    stack.apns.answer_again()

    assert stack.drain() == only()
    stack.advance(115)
    assert stack.drain() == only()
    stack.advance(6)
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert stack.row(posted).attempts == 2


# Promise 2
def test_the_attempt_is_counted_and_the_lease_runs_before_apns_has_the_push(stack: Stack) -> None:
    posted = stack.post()
    stack.apns.hold()
    drain = stack.begin()
    stack.apns.wait_for_pushes(1, timeout=20)

    row = stack.row(posted)
    assert (row.status, row.attempts) == ("pending", 1)
    assert row.claimed_at == row.first_claimed_at is not None
    assert 100 < row.due_in <= 120

    stack.apns.release()
    assert drain.result(timeout=30) == only(claimed=1, pushed=1, sent=1)


# Promise 3
@pytest.mark.parametrize("first", ["newer", "late"])
def test_of_two_drains_with_the_same_row_the_late_one_changes_nothing_unless_it_was_accepted(
    stack: Stack, first: str
) -> None:
    """Every pair of outcomes. A drain holds a row for longer than its lease; meanwhile another claims it."""
    install_clock(stack.db)
    newer_drain = stack.another_environment()
    works = stack.post()
    assert stack.drain()["sent"] == 1
    ended, expected = {}, {}
    for (late, late_answer), (newer, newer_answer) in product(KINDS.items(), repeat=2):
        # APNs accepted something a moment ago, or its errors would count for nothing.
        stack.db.execute("UPDATE notification_delivery SET updated_at = now() + interval '5 minutes'")
        posted = stack.post(late_answer, newer_answer)
        stack.apns.hold()
        stack.apns.forget()
        late_result = stack.begin()
        stack.apns.wait_for_pushes(1, timeout=20)
        tick(stack.db, LEASE)
        newer_result = stack.begin(environment=newer_drain)
        stack.apns.wait_for_pushes(2, timeout=20)
        assert len(set(stack.pushes(posted))) == 1, "both pushes carry one apns-id"

        results: dict[str, dict[str, int]] = {}
        order = {"late": late_result, "newer": newer_result}
        for which in order if first == "late" else reversed(order):
            stack.apns.release_one(1 if which == "newer" and not results else 0)
            results[which] = order[which].result(timeout=30)

        row = stack.row(posted)
        ended[late, newer] = (
            (row.status, row.reason, row.attempts),
            _counted(results["late"]),
            _counted(results["newer"]),
        )
        expected[late, newer] = _expected(late, newer, first)
        # The device is gone if the drain that held the lease says so, and only then.
        gone = stack.one("SELECT invalidated_at IS NOT NULL FROM push_token WHERE id = %s", posted.push_token_id)
        assert gone == (row.status == "invalid_token"), (late, newer)
        lost = [line["delivery_id"] for line in stack.logged("lease lost")]
        assert lost.count(posted.id) == sum("lease_lost" in each for each in ended[late, newer]), (late, newer)
        stack.db.execute("DELETE FROM notification_delivery WHERE id <> %s", [works.id])
    assert ended == expected


def _expected(late: str, newer: str, first: str) -> tuple[object, str, str]:
    if first == "newer":
        # Only what is pending or failed still learns that the earlier push was accepted.
        heard = late == "200" and newer != "410"
        end = ("sent", None, ENDS[newer][2]) if heard else ENDS[newer]
        return end, ("sent" if heard else "lease_lost"), COUNTED[newer]
    if late == "200":
        return ENDS["200"], "sent", "sent" if newer == "200" else "lease_lost"
    return ENDS[newer], "lease_lost", COUNTED[newer]


def _counted(tally: dict[str, int]) -> str:
    (end,) = (name for name, count in tally.items() if count and name not in ("claimed", "pushed"))
    return end


def test_what_only_a_late_drain_knows_stays_said_when_the_newer_one_dies(stack: Stack) -> None:
    posted = stack.post()
    stack.apns.hold()
    late = stack.begin()
    stack.apns.wait_for_pushes(1, timeout=20)
    stack.advance(LEASE)
    newer = stack.spawn()
    stack.apns.wait_for_pushes(2, timeout=20)
    stack.kill(newer)

    stack.apns.release()

    assert late.result(timeout=30) == only(claimed=1, pushed=1, sent=1)
    assert stack.ends() == {posted.id: ("sent", None, 2)}
    stack.advance(LEASE)
    assert stack.drain() == only()


# Promise 4
def test_killed_between_claim_and_push_the_rows_come_back_and_are_sent(
    stack: Stack, nobody_answers: socket.socket
) -> None:
    posted = [stack.post() for _ in range(8)]
    other = stack.post(send_at=datetime.now(UTC) + timedelta(hours=1))
    stack.setenv(APNS_PRODUCTION_URL=f"https://127.0.0.1:{nobody_answers.getsockname()[1]}")
    child = stack.spawn()
    connection, _ = nobody_answers.accept()  # so all of them are claimed and bound
    with connection:
        stack.kill(child)
    ended = stack.ends()
    assert [ended[each.id] for each in posted] == [("pending", None, 1)] * 8

    stack.setenv(APNS_PRODUCTION_URL=stack.apns.url)
    assert stack.drain() == only()
    stack.advance(LEASE)
    assert stack.drain() == only(claimed=8, pushed=8, sent=8)

    ended = stack.ends()
    assert [ended[each.id] for each in posted] == [("sent", None, 2)] * 8
    assert ended[other.id] == ("pending", None, 0)
    assert [len(stack.pushes(each)) for each in posted] == [1] * 8


def test_killed_between_push_and_settle_both_pushes_carry_the_same_ids(stack: Stack) -> None:
    stack.post()
    posted = [stack.post(), stack.post(), stack.post(collapse_id="score")]
    stack.apns.hold(after=1)
    stack.kill(_once_received(stack, 4))
    stack.apns.release()

    stack.advance(LEASE)
    assert stack.drain()["sent"] >= 3

    for each in posted:
        row = stack.row(each)
        assert (row.status, row.attempts) == ("sent", 2)
        assert stack.pushes(each) == [str(row.apns_id)] * 2
        collapse_ids = {push.headers["apns-collapse-id"] for push in stack.apns.journal if push.token == each.token}
        assert collapse_ids == {"score" if each is posted[2] else str(row.apns_id)}


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        pytest.param(Hangup(received=True), "connection_lost", id="the connection"),
        pytest.param(Reset(ErrorCodes.INTERNAL_ERROR), "stream_reset", id="the stream"),
    ],
)
@pytest.mark.parametrize("warm", [True, False])
def test_a_push_whose_answer_was_lost_is_sent_again_later_with_the_same_ids(
    stack: Stack,
    loss: Answer,
    reason: str,
    warm: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    stack.post()
    assert stack.drain()["sent"] == 1
    if not warm:
        stack.fresh_start()
    posted = stack.post(loss, Ok())

    assert stack.drain() == only(claimed=1, pushed=1, retried=1)
    assert stack.apns.connections == (1 if warm else 2)
    assert len(stack.pushes(posted)) == 1
    assert stack.ends()[posted.id] == ("pending", reason, 1)
    (line,) = stack.logged("outcome unknown")
    assert (line["level"], line["delivery_id"], line["reason"]) == ("WARNING", posted.id, reason)
    assert line["apns_id"] == str(stack.row(posted).apns_id)
    assert [line["PossibleDuplicate"] for line in stack.metrics() if "Sent" in line] == [[0.0], [1.0]]
    stack.advance(61)
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)

    assert stack.pushes(posted) == [str(stack.row(posted).apns_id)] * 2
    collapse_ids = {push.headers["apns-collapse-id"] for push in stack.apns.journal if push.token == posted.token}
    assert collapse_ids == {str(stack.row(posted).apns_id)}


def test_one_batch_meets_every_answer_and_each_row_ends_for_itself(stack: Stack) -> None:
    gone = Reject(410, "Unregistered", timestamp=datetime.now(UTC) + timedelta(minutes=1))
    known: dict[str, tuple[Answer, tuple[str, str | None, int]]] = {
        "accepted": (Ok(), ("sent", None, 1)),
        "unregistered": (gone, ("invalid_token", "Unregistered", 1)),
        "expired": (Reject(410, "ExpiredToken"), ("invalid_token", "ExpiredToken", 1)),
        "unavailable": (Reject(503, "ServiceUnavailable"), ("pending", "ServiceUnavailable", 1)),
        "error": (Reject(500, "InternalServerError"), ("pending", "InternalServerError", 1)),
        "too many": (Reject(429, "TooManyRequests"), ("pending", "TooManyRequests", 1)),
        "silent": (Silence(), ("pending", "timeout", 1)),
        "lost": (Reset(ErrorCodes.INTERNAL_ERROR), ("pending", "stream_reset", 1)),
        "malformed": (Reject(400, "BadCollapseId"), ("failed", "BadCollapseId", 1)),
    }
    posted = {name: stack.post(answer) for name, (answer, _) in known.items()}
    unreachable = stack.enqueue("nobody")

    tally = stack.drain()

    assert tally == only(claimed=10, pushed=9, sent=1, invalid_token=2, retried=5, failed=1, skipped=1)
    ended = stack.ends()
    assert {name: ended[each.id] for name, each in posted.items()} == {name: end for name, (_, end) in known.items()}
    assert ended[unreachable] == ("skipped", "no_push_token", 1)
    assert {name: len(stack.pushes(each)) for name, each in posted.items()} == dict.fromkeys(known, 1)
    rows = stack.rows()
    for name in ("unavailable", "error", "too many", "silent", "lost"):
        assert 20 < rows[posted[name].id].due_in <= 60, name  # half of 60 s and up, less the 8 of the silent one
    assert all(row.claimed_at is None for row in rows.values())
    dead = stack.db.execute("SELECT token, invalid_reason FROM push_token WHERE invalidated_at IS NOT NULL").fetchall()
    assert sorted(dead) == sorted(
        [(posted["unregistered"].token, "Unregistered"), (posted["expired"].token, "ExpiredToken")]
    )


def test_a_fault_of_ours_beside_other_answers_withholds_its_environment_and_takes_nothing_back(stack: Stack) -> None:
    works, other_works = stack.post(), stack.enqueue("sandbox-user")
    stack.device("sandbox-user", environment="sandbox")
    answers = (Reject(410, "Unregistered"), Reject(503, "ServiceUnavailable"), Ok(), Reject(400, "BadCollapseId"))
    refused = stack.post(Reject(403, "Forbidden"))
    posted = [stack.post(answer) for answer in answers]
    stack.apns.hold(after=2)  # the two that come first: one to each environment
    drain = stack.begin()
    stack.apns.wait_for_pushes(7, timeout=20)  # all, for the environment has proven to work
    stack.apns.release()

    assert drain.result(timeout=30) == only(
        claimed=7, pushed=7, sent=3, withheld=2, invalid_token=1, failed=1
    )  # fmt: skip

    ended = stack.ends()
    assert ended[works.id] == ended[other_works] == ("sent", None, 1)
    assert ended[refused.id] == ("pending", "Forbidden", 0)
    assert [ended[each.id] for each in posted] == [
        ("invalid_token", "Unregistered", 1),
        ("pending", "ServiceUnavailable", 0),  # of an environment that does not hear us, no error counts
        ("sent", None, 1),
        ("failed", "BadCollapseId", 1),
    ]
    rows = stack.rows()
    for each in (refused, posted[1]):
        assert 140 < rows[each.id].due_in <= 300
    assert stack.one("SELECT count(*) FROM push_token WHERE invalidated_at IS NOT NULL") == 1


# Promise 5
def test_killed_in_mid_batch_what_was_settled_stays_and_little_is_not(stack: Stack) -> None:
    posted = [stack.post(Ok(after=0.03 * place)) for place in range(50)]  # once all are under way, an answer each 30 ms
    child = _once_received(stack, 50)
    answered_at = {push.token: push.at + timedelta(seconds=_delay(push.answer)) for push in stack.apns.journal}
    while datetime.now(UTC) < answered_at[posted[30].token]:
        time.sleep(0.01)
    stack.kill(child)
    killed_at = datetime.now(UTC)

    ended = stack.ends()
    unsettled = [each for each in posted if ended[each.id][0] != "sent"]
    fresh_or_in_flight = killed_at - timedelta(seconds=FLUSH_SECONDS)
    assert len(unsettled) <= sum(at >= fresh_or_in_flight for at in answered_at.values()) + 4
    assert 10 <= len(unsettled) <= 40  # in numbers: of 50 that were under way, by far not the whole batch

    stack.apns.answer_all(Ok())
    for each in posted:
        stack.apns.answer(each.token, Ok())
    stack.advance(LEASE)
    assert stack.drain()["sent"] == len(unsettled)
    assert {status for status, _, _ in stack.ends().values()} == {"sent"}
    doubled = [each for each in posted if len(stack.pushes(each)) == 2]
    assert {each.id for each in doubled} == {each.id for each in unsettled}


def test_what_is_answered_is_settled_while_the_others_are_in_flight(stack: Stack) -> None:
    posted = [stack.post() for _ in range(20)]
    stack.apns.hold(after=1)
    child = _once_received(stack, 20)
    for _ in range(9):
        stack.apns.release_one(0)
    _until(lambda: sum(status == "sent" for status, _, _ in stack.ends().values()) == 10)
    stack.kill(child)

    assert Counter(stack.ends().values()) == {("sent", None, 1): 10, ("pending", None, 1): 10}
    stack.apns.release()
    stack.advance(LEASE)
    assert stack.drain() == only(claimed=10, pushed=10, sent=10)
    assert sorted(len(stack.pushes(each)) for each in posted) == [1] * 10 + [2] * 10


def test_a_settle_whose_connection_broke_is_made_on_a_new_one(stack: Stack) -> None:
    posted = [stack.post() for _ in range(6)]
    stack.apns.hold(after=1)
    drain = stack.begin()
    stack.apns.wait_for_pushes(6, timeout=20)
    (backend,) = stack.backends()
    stack.one("SELECT pg_terminate_backend(%s, 10000)", backend)
    stack.apns.release()

    assert drain.result(timeout=30) == only(claimed=6, pushed=6, sent=6)
    assert set(stack.ends().values()) == {("sent", None, 1)}
    assert [len(stack.pushes(each)) for each in posted] == [1] * 6


# Promise 6
def test_postgres_restarted_under_a_drain_loses_nothing_and_doubles_nothing(
    own_stack: Stack, own_postgres: LocalPostgres
) -> None:
    stack = own_stack
    count = IN_FLIGHT + 60
    stack.setenv(DRAIN_BATCH_SIZE=count)
    posted = stack.post_many(count)
    stack.apns.hold(after=1)
    drain = stack.begin()
    stack.apns.wait_for_pushes(IN_FLIGHT + 1, timeout=20)
    own_postgres.crash()  # so that the first settles meet nobody
    for _ in range(30):
        stack.apns.release_one(0)
    time.sleep(1)  # long enough for all the rest: but with answers that nobody can write down, little new is begun
    begun = len(stack.apns.journal)
    assert begun < count - 20
    stack.apns.answer_again()
    own_postgres.restart()
    stack.apns.release()

    assert drain.result(timeout=30) == only(claimed=count, pushed=count, sent=count)
    stack.reconnect()
    assert set(stack.ends().values()) == {("sent", None, 1)}
    assert [len(stack.pushes(each)) for each in posted] == [1] * count

    own_postgres.restart()  # and between two invocations
    stack.reconnect()
    stack.post()
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert set(stack.ends().values()) == {("sent", None, 1)}


def test_a_postgres_that_stays_away_fails_the_drain_and_the_rows_come_back(
    own_stack: Stack, own_postgres: LocalPostgres
) -> None:
    stack = own_stack
    posted = [stack.post() for _ in range(10)]
    stack.apns.hold()
    invocation = Invocation(passing=True)
    drain = stack.begin(context=invocation)
    stack.apns.wait_for_pushes(1, timeout=20)
    own_postgres.crash()
    invocation.spend(22.5)
    stack.apns.release()
    with pytest.raises(Exception, match=r"see that (it|Postgres) is up"):
        drain.result(timeout=30)
    (line,) = stack.logged("drain ended early")
    assert line["level"] == "ERROR"

    own_postgres.restart()
    stack.reconnect()
    stack.advance(LEASE)
    assert stack.drain() == only(claimed=10, pushed=10, sent=10)
    assert set(stack.ends().values()) == {("sent", None, 2)}
    assert sorted(len(stack.pushes(each)) for each in posted) == [1] * 9 + [2]  # all else was not begun in time


def test_a_database_that_falls_silent_ends_the_drain_in_time_and_the_next_one_works(
    stack: Stack, postgres: LocalPostgres
) -> None:
    posted = [stack.post() for _ in range(10)]
    with TcpProxy(postgres.address) as network:
        stack.setenv(DATABASE_URL=f"postgresql://postgres@127.0.0.1:{network.port}/{stack.database.name}")
        stack.apns.hold()
        invocation = Invocation(passing=True)
        drain = stack.begin(context=invocation)
        stack.apns.wait_for_pushes(1, timeout=20)
        network.hang()
        invocation.spend(23)
        stack.apns.release()
        with pytest.raises(Exception, match="gave no answer within"):
            drain.result(timeout=10)

        # A function with less time than the database takes to be given up is cut short itself.
        with pytest.raises(Exception, match=r"the drain did not finish in the time that the function has|no answer"):
            stack.begin(context=Invocation(3)).result(timeout=10)

        network.cut()
        network.resume()
        stack.advance(LEASE)
        assert stack.drain() == only(claimed=10, pushed=10, sent=10)
    assert set(stack.ends().values()) == {("sent", None, 2)}
    assert sorted(len(stack.pushes(each)) for each in posted) == [1] * 9 + [2]  # all else was not begun in time


def test_the_fifth_attempts_crash_is_swept(stack: Stack) -> None:
    posted = stack.post()
    stack.db.execute("UPDATE notification_delivery SET attempts = 4, first_claimed_at = now()")
    stack.apns.hold()
    stack.kill(_once_received(stack, 1))
    assert stack.ends() == {posted.id: ("pending", None, 5)}
    stack.apns.release()

    assert stack.drain() == only()
    stack.advance(LEASE)
    assert stack.drain() == only(swept=1)

    row = stack.row(posted)
    assert (row.status, row.reason, row.attempts) == ("failed", "lease_expired", 5)
    assert row.last_error.startswith("The drain died during attempt 5")
    (line,) = stack.logged("delivery failed")
    assert (line["level"], line["delivery_id"], line["reason"]) == ("ERROR", posted.id, "lease_expired")
    assert stack.metrics()[-1]["Swept"] == [1.0]
    assert len(stack.pushes(posted)) == 1
    stack.advance(LEASE)
    assert stack.drain() == only()


def test_every_claim_that_is_not_given_back_brings_a_row_nearer_to_its_end(stack: Stack) -> None:
    posted = stack.post(Reject(503, "ServiceUnavailable"))

    for attempt in range(1, 5):
        stack.post()  # so that APNs is seen to work
        assert stack.drain() == only(claimed=2, pushed=2, sent=1, retried=1)
        row = stack.row(posted)
        assert (row.status, row.attempts) == ("pending", attempt)
        step = 60 * 2 ** (attempt - 1)
        assert step / 2 - 2 < row.due_in <= step
        stack.advance(step + 1)
    stack.post()
    assert stack.drain() == only(claimed=2, pushed=2, sent=1, failed=1)

    assert stack.ends()[posted.id] == ("failed", "ServiceUnavailable", 5)
    (line,) = stack.logged("delivery failed")
    assert (line["delivery_id"], line["attempts"], line["reason"]) == (posted.id, 5, "ServiceUnavailable")
    assert line["apns_id"] == str(stack.row(posted).apns_id)


# Promise 7
def test_a_row_that_kills_its_drain_burns_nobody_elses_attempts(stack: Stack) -> None:
    posted = [stack.post() for _ in range(50)]
    killer = posted.pop(19)

    stack.outcome(stack.spawn(dies_of=killer.token), exit_code=DIED)
    stack.advance(LEASE)
    stack.outcome(stack.spawn(dies_of=killer.token), exit_code=DIED)  # the suspects before it are settled by now
    assert stack.row(killer).attempts == 2
    assert _held(stack) == [killer.id], "the one that kills is leased alone"
    survivors = stack.drain()
    assert survivors["sent"] == survivors["claimed"] > 0
    ended = stack.ends()
    assert {ended[each.id][:2] for each in posted} == {("sent", None)}
    assert max(ended[each.id][2] for each in posted) <= 2

    for attempt in range(3, 6):
        stack.advance(LEASE)
        newcomer = stack.post()
        stack.outcome(stack.spawn(dies_of=killer.token), exit_code=DIED)
        assert stack.row(killer).attempts == attempt
        assert _held(stack) == [killer.id]
        assert stack.ends()[newcomer.id] == ("sent", None, 1), "the batch goes before the suspects"
    stack.advance(LEASE)
    assert stack.drain() == only(swept=1)

    assert stack.ends().pop(killer.id) == ("failed", "lease_expired", 5)
    assert {status for id_, (status, _, _) in stack.ends().items() if id_ != killer.id} == {"sent"}
    assert stack.pushes(killer) == []
    assert max(len(stack.pushes(each)) for each in posted) <= 2


def _held(stack: Stack) -> list[int]:
    return [row.id for row in stack.rows().values() if row.claimed_at is not None and row.due_in > 0]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        pytest.param(Reject(400, "Bad\0Thing"), "BadThing", id="NUL"),
        pytest.param(Reject(400, "", body=b'{"reason": "Bad\\ud800Thing"}'), "BadThing", id="half a surrogate"),
        pytest.param(Reject(400, "x" * 10_000), "x" * 100, id="too long"),
        pytest.param(Reject(400, "", body=b"<html>no\x00\xff"), "status_400", id="not JSON"),
        pytest.param(Reject(400, "", body=b"[" * 30_000), "status_400", id="nested"),
        pytest.param(Reject(400, "", body=b'{"reason": "\\u0000\\ud800"}'), "status_400", id="nothing that is left"),
        pytest.param(Reject(400, "", body=b'{"reason": 7}'), "status_400", id="a number"),
    ],
)
def test_whatever_apns_says_of_one_row_it_is_settled_and_so_are_the_others(
    stack: Stack, said: Reject, reason: str
) -> None:
    before, odd, behind = stack.post(), stack.post(said), stack.post()

    assert stack.drain() == only(claimed=3, pushed=3, sent=2, failed=1)

    assert stack.ends() == {
        before.id: ("sent", None, 1),
        odd.id: ("failed", reason, 1),
        behind.id: ("sent", None, 1),
    }


def test_a_410_with_an_absurd_date_is_judged_as_one_without(stack: Stack) -> None:
    posted = [
        stack.post(Reject(410, "", body=b'{"reason": "Unregistered", "timestamp": %s}' % date))
        for date in (b"1e400", b"-1e30", b'"soon"', b"true", b"9" * 5000, b"253402300800000")
    ]

    tally = stack.drain()

    assert tally["claimed"] == 6
    assert tally["invalid_token"] + tally["retried"] == 6
    assert {stack.row(each).reason for each in posted} <= {"Unregistered", "status_410"}


def test_a_payload_that_is_too_large_fails_alone_and_unsent(stack: Stack) -> None:
    before, large, behind = stack.post(), stack.post(text="x" * 4096), stack.post()

    assert stack.drain() == only(claimed=3, pushed=2, sent=2, failed=1)

    assert stack.ends() == {
        before.id: ("sent", None, 1),
        large.id: ("failed", "PayloadTooLarge", 1),
        behind.id: ("sent", None, 1),
    }
    assert stack.pushes(large) == []
    (line,) = stack.logged("delivery failed")
    assert (line["delivery_id"], line["reason"]) == (large.id, "PayloadTooLarge")


def test_words_that_the_table_refuses_cost_the_row_its_words_and_not_its_end(stack: Stack) -> None:
    stack.db.execute(
        "ALTER TABLE notification_delivery ADD CONSTRAINT of_a_later_release CHECK (reason <> 'BadCollapseId')"
    )
    before, odd, behind = stack.post(), stack.post(Reject(400, "BadCollapseId")), stack.post()

    assert stack.drain() == only(claimed=3, pushed=3, sent=2, failed=1)

    assert stack.ends() == {
        before.id: ("sent", None, 1),
        odd.id: ("failed", "unrecordable", 1),
        behind.id: ("sent", None, 1),
    }


def test_a_row_that_the_table_lets_nobody_settle_does_not_keep_the_others_from_it(stack: Stack) -> None:
    """As a trigger of somebody's own might. The drain fails, loudly; what it pushed of the others is not sent again."""
    first, stuck, last = stack.post(), stack.post(), stack.post()
    stack.db.execute(
        f"ALTER TABLE notification_delivery ADD CONSTRAINT broken CHECK (id <> {stuck.id} OR status = 'pending')"
    )

    with pytest.raises(Exception, match=r'cannot take the data: new row .* violates check constraint "broken"'):
        stack.drain()

    assert stack.ends() == {
        first.id: ("sent", None, 1),
        stuck.id: ("pending", None, 1),
        last.id: ("sent", None, 1),
    }


# Promise 8
def test_a_fault_of_ours_costs_no_attempt_and_no_token(stack: Stack) -> None:
    stack.configure(stack.apns.secret() | {"private_key": Credentials.generate().private_key()})  # of another team
    posted = [stack.post() for _ in range(6)]

    tally = stack.drain()

    assert tally["withheld"] == tally["claimed"] == 6
    for row in stack.rows().values():
        assert (row.status, row.reason, row.attempts) == ("pending", "InvalidProviderToken", 0)
        assert row.claimed_at is None
        assert 140 < row.due_in <= 300
    assert len({row.due_in for row in stack.rows().values()}) == 6, "with jitter"
    assert stack.one("SELECT count(*) FROM push_token WHERE invalidated_at IS NULL") == 6

    stack.configure(stack.apns.secret())
    stack.advance(301)
    stack.fresh_start()
    assert stack.drain() == only(claimed=6, pushed=6, sent=6)
    assert [stack.row(each).attempts for each in posted] == [1] * 6


def test_giving_back_ends_after_three_days(stack: Stack) -> None:
    posted = stack.post(Reject(403, "InvalidProviderToken"))
    assert stack.drain()["withheld"] == 1
    stack.advance(71 * 3600)
    assert stack.drain()["withheld"] == 1
    assert stack.row(posted).attempts == 0

    stack.advance(3601)
    ends = []
    for _ in range(5):
        tally = stack.drain()
        ends.append((_counted(tally), stack.row(posted).attempts))
        stack.advance(3601)

    assert ends == [("retried", 1), ("retried", 2), ("retried", 3), ("retried", 4), ("failed", 5)]
    assert stack.ends() == {posted.id: ("failed", "InvalidProviderToken", 5)}


def test_an_apns_that_takes_no_connection_costs_no_attempt_and_no_token(stack: Stack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        stack.setenv(APNS_PRODUCTION_URL=f"https://127.0.0.1:{nobody.getsockname()[1]}")
    posted = stack.post()

    assert stack.drain() == only(claimed=1, pushed=1, withheld=1)

    row = stack.row(posted)
    assert (row.status, row.reason, row.attempts) == ("pending", "connection_failed", 0)


# Promise 9. See also `assert_discreet` in tests/support/handler.py, which looks at all that was said after each test.
def test_no_level_of_any_logger_makes_a_secret_come_out(stack: Stack) -> None:
    """In a process of its own, since levels are read when it starts."""
    posted = [stack.post(answer) for answer in KINDS.values()]
    posted += [stack.post(Reject(403, "InvalidProviderToken")), stack.post(Hangup())]
    stack.post(text="x" * 4096)

    child = stack.spawn(
        POWERTOOLS_LOG_LEVEL="DEBUG", AWS_LAMBDA_LOG_LEVEL="TRACE", POWERTOOLS_DEV="true", PYTHONASYNCIODEBUG="1"
    )
    tally = stack.outcome(child)

    assert tally["claimed"] == len(posted) + 1
    assert "DEBUG:asyncio" in "".join(stack.said), "the root logger hears everything"
    for logger in ("httpx", "httpcore", "hpack", "botocore", "urllib3", "psycopg"):
        assert f"DEBUG:{logger}" not in "".join(stack.said)


@pytest.mark.parametrize(
    "breaking",
    [
        pytest.param("ADD CONSTRAINT broken CHECK (status = 'pending') NOT VALID", id="settle"),
        pytest.param("ADD CONSTRAINT broken CHECK (attempts = 0) NOT VALID", id="claim"),
        pytest.param("ADD CONSTRAINT broken CHECK (push_token_id IS NULL) NOT VALID", id="bind"),
        pytest.param("DROP first_claimed_at", id="column"),
    ],
)
def test_a_database_that_refuses_a_statement_quotes_nothing_through_us(stack: Stack, breaking: str) -> None:
    posted = stack.post()
    stack.db.execute(f"ALTER TABLE notification_delivery {breaking}")

    with pytest.raises(Exception, match="the database test_"):
        stack.drain()

    (line,) = stack.logged("drain ended early")
    assert posted.user not in "".join(stack.said)
    assert line["fault"] in ("StatementRefused", "DatabaseFault")


# Promise 10
@pytest.mark.parametrize(
    ("lease", "timeout", "refused"), [(36, 25.0, False), (35, 25.0, True), (36, 25.4, True), (120, 110.0, True)]
)
def test_a_lease_that_does_not_outlast_the_function_is_refused_before_a_row_is_touched(
    stack: Stack,
    lease: int,
    timeout: float,
    refused: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    stack.post()
    stack.setenv(LEASE_SECONDS=lease)
    before = stack.tables()

    if refused:
        with pytest.raises(BadSettings, match=f"LEASE_SECONDS \\({lease}\\) must be more than"):
            stack.drain(context=Invocation(timeout))
        assert stack.tables() == before
    else:
        assert stack.drain(context=Invocation(timeout))["sent"] == 1


def _once_received(stack: Stack, count: int) -> subprocess.Popen[str]:
    """Start a drain in a process, and return once APNs has so many of its pushes."""
    child = stack.spawn()
    stack.apns.wait_for_pushes(count, timeout=30)
    return child


def _delay(answer: Answer) -> float:
    assert isinstance(answer, Ok)
    return answer.after


def _until(reached: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < give_up
        time.sleep(0.01)
