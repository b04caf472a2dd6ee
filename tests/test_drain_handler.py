"""The scheduled function as Lambda sees it: events in; a tally, a log and metrics out; what it keeps warm; its time."""

import ast
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from h2.errors import ErrorCodes

from core.secret import KEEP_SECONDS
from devtools.local_postgres import LocalPostgres
from devtools.simulated_apns import Ok, Reject, Reset, SimulatedApns
from handlers import drain
from tests.support.handler import LEASE, ROOT, TALLY, Invocation, Posted, Stack, Time, only, signed_by
from tests.support.tcp_proxy import TcpProxy

pytest_plugins = ["tests.support.handler_fixtures"]

# Below this many seconds nothing is begun: 3 to connect, 8 for the answer, 2 to write it down.
LIMIT = 13


def test_every_sample_event_makes_it_drain(stack: Stack) -> None:
    files = sorted((ROOT / "events").glob("*.json"))
    assert len(files) >= 3

    for file in files:
        stack.post()
        event = json.loads(file.read_text())
        assert stack.drain(event) == only(claimed=1, pushed=1, sent=1), file.name

    ticks = {file.name: line["tick"] for file, line in zip(files, stack.logged("drained"), strict=True)}
    assert ticks["by-hand.json"] == "by hand"
    assert ticks["half-tick.json"] == "queue (1)"
    assert ticks["tick.json"] == "rule 2026-01-01T00:00:00Z"


def test_any_other_event_makes_it_drain_too(stack: Stack) -> None:
    odd = [
        [],
        "x",
        7,
        None,
        True,
        {"Records": None},
        {"Records": []},
        {"Records": "x"},
        {"source": 3},
        [{"Records": 1}],
    ]

    for event in odd:
        stack.post()
        assert drain.handler(event, Invocation()) == only(claimed=1, pushed=1, sent=1), event


def test_a_drain_is_one_line_of_log_with_its_tally(stack: Stack) -> None:
    stack.post()
    stack.post(Reject(503, "ServiceUnavailable"))
    stack.advance(100)

    tally = stack.drain()

    (line,) = stack.log()
    assert (line["level"], line["message"], line["service"]) == ("INFO", "drained", "apns-outbox")
    assert line["tally"] == tally == only(claimed=2, pushed=2, sent=1, retried=1)
    assert type(line["duration_ms"]) is int
    assert 0 < line["duration_ms"] < 30_000
    assert 100 <= line["oldest_due_age_seconds"] < 130
    assert line["due_backlog"] == 2
    assert line["request_id"] == Invocation().aws_request_id


def test_a_drain_with_nothing_to_do_says_so_and_no_more(stack: Stack) -> None:
    stack.post(send_at=datetime.now(UTC) + timedelta(hours=1))

    assert stack.drain() == only()

    (line,) = stack.log()
    assert (line["message"], line["tally"], line["due_backlog"]) == ("drained", only(), 0)
    assert line["oldest_due_age_seconds"] == 0


def test_each_failed_delivery_is_one_line_and_nothing_else_is(stack: Stack) -> None:
    stack.post()
    stack.post(Reject(410, "Unregistered"))
    stack.post(Reject(503, "ServiceUnavailable"))
    stack.enqueue("nobody")
    failed = [stack.post(Reject(400, "BadCollapseId")), stack.post(Reject(400, "BadExpirationDate"))]

    stack.drain()

    assert len(stack.log()) == 3
    lines = stack.logged("delivery failed")
    assert sorted(line["delivery_id"] for line in lines) == [each.id for each in failed]
    for line in lines:
        row = stack.row(line["delivery_id"])
        assert line["level"] == "ERROR"
        assert (line["reason"], line["error"], line["attempts"]) == (row.reason, row.last_error, 1)
        assert (line["apns_id"], line["outcome"]) == (str(row.apns_id), "failed")


def test_the_metrics_are_the_tally_the_backlog_and_its_age(stack: Stack) -> None:
    for answer in (Ok(), Ok(), Reject(410, "Unregistered"), Reject(503, "Shutdown"), Reject(400, "BadPriority")):
        stack.post(answer)
    stack.enqueue("nobody")
    stack.advance(50)

    tally = stack.drain()

    (line,) = stack.metrics()
    (declared,) = line["_aws"]["CloudWatchMetrics"]
    assert declared["Namespace"] == "ApnsOutbox"
    assert declared["Dimensions"] == [["service"]]
    assert line["service"] == "apns-outbox"
    units = {metric["Name"]: metric["Unit"] for metric in declared["Metrics"]}
    names = {name: "".join(word.capitalize() for word in name.split("_")) for name in TALLY}
    assert units == dict.fromkeys(names.values(), "Count") | {
        "DueBacklog": "Count",
        "OldestDueAgeSeconds": "Seconds",
        "PossibleDuplicate": "Count",
        "ProviderFault": "Count",
        "Outage": "Count",
    }
    assert {name: line[metric] for name, metric in names.items()} == {name: [float(tally[name])] for name in TALLY}
    assert tally == only(claimed=6, pushed=5, sent=2, retried=1, failed=1, invalid_token=1, skipped=1)
    assert line["DueBacklog"] == [6.0]
    assert 50 <= line["OldestDueAgeSeconds"][0] < 80
    assert line["PossibleDuplicate"] == line["ProviderFault"] == line["Outage"] == [0.0]


def test_each_invocation_has_metrics_of_its_own(stack: Stack) -> None:
    stack.post()
    stack.drain()
    stack.drain()

    assert [line["Sent"] for line in stack.metrics()] == [[1.0], [0.0]]


def test_a_drain_that_fails_is_one_error_and_no_tally(stack: Stack) -> None:
    stack.configure("{")
    stack.post()

    with pytest.raises(Exception, match="is not JSON") as raised:
        stack.drain()

    (line,) = stack.log()
    assert (line["level"], line["message"], line["fault"]) == ("ERROR", "drain ended early", "SecretFault")
    assert line["error"] == str(raised.value)
    assert stack.metrics() == []


def test_what_is_warm_is_used_again(stack: Stack) -> None:
    for _ in range(8):
        stack.post()
    stack.drain()
    (backend,) = stack.backends()
    assert stack.apns.connections == 1

    for _ in range(3):
        for _ in range(8):
            stack.post()
        assert stack.drain() == only(claimed=8, pushed=8, sent=8)

    assert stack.backends() == {backend}
    assert stack.apns.connections == 1
    assert len({push.headers["authorization"] for push in stack.apns.journal}) == 1, "and so is the provider token"


def test_connections_that_were_closed_meanwhile_are_made_anew_and_nobody_hears_of_it(stack: Stack) -> None:
    with TcpProxy(("127.0.0.1", stack.apns.port)) as network:
        stack.setenv(APNS_PRODUCTION_URL=f"https://127.0.0.1:{network.port}")
        posted = [stack.post() for _ in range(4)]
        stack.drain()
        (backend,) = stack.backends()

        for end in (stack.apns.close_connections, network.cut):
            stack.one("SELECT pg_terminate_backend(%s, 10000)", stack.backends().pop())
            end()
            posted += [stack.post() for _ in range(4)]
            assert stack.drain() == only(claimed=4, pushed=4, sent=4)

    assert stack.backends() != {backend}
    assert set(stack.ends().values()) == {("sent", None, 1)}
    assert [len(stack.pushes(each)) for each in posted] == [1] * 12
    assert {line["message"] for line in stack.log()} == {"drained"}


def test_after_a_drain_that_failed_the_next_one_works(stack: Stack, postgres: LocalPostgres) -> None:
    with TcpProxy(postgres.address) as network:
        stack.setenv(DATABASE_URL=f"postgresql://postgres@127.0.0.1:{network.port}/{stack.database.name}")
        stack.post()
        assert stack.drain()["sent"] == 1
        stack.post()
        network.refuse()
        network.cut()
        with pytest.raises(Exception, match="refused the connection: see that Postgres is up"):
            stack.drain()
        network.resume()
        assert stack.drain() == only(claimed=1, pushed=1, sent=1)


def test_a_changed_environment_is_heeded(stack: Stack) -> None:
    for _ in range(6):
        stack.post()
    stack.setenv(DRAIN_BATCH_SIZE=2)
    assert stack.drain()["sent"] == 2
    (backend,) = stack.backends()

    stack.setenv(DRAIN_BATCH_SIZE=3)
    assert stack.drain()["sent"] == 3
    assert backend not in stack.backends(), "everything was built anew"

    with SimulatedApns(credentials=stack.apns.credentials, authority=stack.apns.authority) as elsewhere:
        stack.setenv(APNS_PRODUCTION_URL=elsewhere.url)
        assert stack.drain()["sent"] == 1
        assert len(elsewhere.journal) == 1


def test_a_new_key_is_picked_up_within_five_minutes_on_new_connections(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Time()
    monkeypatch.setattr(drain, "time", clocks)
    stack.post()
    assert stack.drain()["sent"] == 1
    new = stack.issue()
    stack.rotate(new)

    stack.post()
    clocks.ahead = KEEP_SECONDS - 10
    assert stack.drain()["sent"] == 1
    assert stack.apns.connections == 1
    stack.post()
    clocks.ahead = KEEP_SECONDS + 10
    assert stack.drain()["sent"] == 1
    assert stack.apns.connections == 2
    assert [signed_by(push) for push in stack.apns.journal] == [stack.apns.credentials.key_id] * 2 + [new.key_id]

    stack.configure("{}")
    stack.post()
    clocks.ahead = 2 * KEEP_SECONDS + 30
    assert stack.drain()["skipped"] == 1


def test_with_too_little_time_nothing_is_claimed(stack: Stack) -> None:
    stack.post()
    before = stack.tables()
    assert stack.drain(context=Invocation(LIMIT - 0.001)) == only()
    assert stack.tables() == before

    assert stack.drain(context=Invocation(LIMIT)) == only(claimed=1, pushed=1, sent=1)


def test_what_was_not_begun_when_time_runs_out_is_released(stack: Stack) -> None:
    posted = [stack.post() for _ in range(20)]
    stack.apns.hold()
    invocation = Invocation()
    running = stack.begin(context=invocation)
    stack.apns.wait_for_pushes(1, timeout=20)  # the others wait until it has proven that APNs works
    invocation.spend(25 - LIMIT + 0.001)
    stack.apns.release()

    assert running.result(timeout=30) == only(claimed=20, pushed=1, sent=1, released=19)

    rows = stack.rows()
    for each in posted[1:]:
        row = rows[each.id]
        assert (row.status, row.reason, row.attempts, row.claimed_at) == ("pending", None, 0, None)
        assert -30 < row.due_in <= 0
        assert stack.pushes(each) == []
    assert rows[posted[0].id].status == "sent"
    assert stack.drain() == only(claimed=19, pushed=19, sent=19)
    assert {rows.attempts for rows in stack.rows().values()} == {1}


def test_what_was_not_begun_when_the_lease_is_nearly_over_is_released(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease must outlast the push by ten seconds more, so that its settle is on time."""
    clocks = Time()
    monkeypatch.setattr(drain, "time", clocks)
    for _ in range(8):
        stack.post()
    stack.apns.hold()
    running = stack.begin()
    stack.apns.wait_for_pushes(1, timeout=20)
    clocks.elapsed = 120 - 21
    stack.apns.release()

    # The other seven were due again at once, and there was time enough to claim them under a new lease.
    assert running.result(timeout=30) == only(claimed=15, pushed=8, sent=8, released=7)
    assert set(stack.ends().values()) == {("sent", None, 1)}


def test_suspects_are_not_begun_either_when_time_is_short(stack: Stack) -> None:
    posted = [stack.post() for _ in range(3)]
    stack.apns.hold()
    child = stack.spawn()
    stack.apns.wait_for_pushes(1, timeout=30)  # by then all three are claimed
    stack.kill(child)
    stack.apns.answer_again()
    stack.advance(LEASE)
    before = stack.tables()

    assert stack.drain(context=Invocation(LIMIT - 0.001)) == only()

    assert stack.tables() == before
    assert stack.drain() == only(claimed=3, pushed=3, sent=3)
    assert [stack.row(each).attempts for each in posted] == [2, 2, 2]


def test_a_drain_that_is_cut_short_says_so(stack: Stack, postgres: LocalPostgres) -> None:
    with TcpProxy(postgres.address) as network:
        stack.setenv(DATABASE_URL=f"postgresql://postgres@127.0.0.1:{network.port}/{stack.database.name}")
        stack.post()
        network.hang()
        before = stack.tables()
        with pytest.raises(
            TimeoutError, match=r"did not finish in the time that the function has.*raise the function's"
        ):
            stack.begin(context=Invocation(1.2)).result(timeout=10)
        network.cut()
        network.resume()
        assert stack.tables() == before
        assert stack.drain()["sent"] == 1


def test_batches_follow_while_rows_come_and_the_burst_stays_bounded(stack: Stack) -> None:
    stack.setenv(DRAIN_BATCH_SIZE=5, DRAIN_MAX_BATCHES=2)
    for _ in range(12):
        stack.post()
    assert stack.drain() == only(claimed=10, pushed=10, sent=10)
    assert stack.drain() == only(claimed=2, pushed=2, sent=2)


def test_a_suspect_has_its_turn_after_each_batch(stack: Stack) -> None:
    """Or in a rush that takes all the time there is, it would never have one."""
    suspect = stack.post()
    stack.db.execute("UPDATE notification_delivery SET claimed_at = now(), attempts = 1")
    posted = [stack.post() for _ in range(3)]
    stack.setenv(DRAIN_BATCH_SIZE=1, DRAIN_MAX_BATCHES=9)

    assert stack.drain() == only(claimed=4, pushed=4, sent=4)

    order = [push.token for push in stack.apns.journal]
    assert order == [each.token for each in (posted[0], suspect, *posted[1:])]


def test_rows_that_end_without_a_push_do_not_use_up_the_batch(stack: Stack) -> None:
    stack.setenv(DRAIN_BATCH_SIZE=5)
    for _ in range(12):
        stack.enqueue("nobody")
    stack.post()

    assert stack.drain() == only(claimed=13, pushed=1, skipped=12, sent=1)


def test_each_device_of_a_user_is_pushed_and_has_a_row_of_its_own(stack: Stack) -> None:
    (_, phone), (_, tablet) = stack.device("alice"), stack.device("alice")
    stack.apns.answer(phone, Reject(410, "Unregistered"))
    inserted = stack.enqueue("alice", priority=5)

    assert stack.drain() == only(claimed=2, pushed=2, sent=1, invalid_token=1)

    rows = stack.rows()
    (sibling,) = rows.keys() - {inserted}
    assert rows[sibling].fanned_out_from == inserted
    assert rows[inserted].fanned_out_from is None
    by_token = {push.token: push for push in stack.apns.journal}
    assert by_token.keys() == {phone, tablet}
    assert {push.headers["apns-priority"] for push in stack.apns.journal} == {"5"}
    assert {push.apns_id for push in stack.apns.journal} == {str(row.apns_id) for row in rows.values()}
    assert by_token[phone].body == by_token[tablet].body
    assert {row.status for row in rows.values()} == {"sent", "invalid_token"}

    stack.enqueue("alice")
    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert stack.apns.journal[-1].token == tablet


def test_a_named_device_alone_is_pushed(stack: Stack) -> None:
    (first, token), _ = stack.device("alice"), stack.device("alice")
    stack.enqueue("alice", push_token_id=first)

    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    assert [push.token for push in stack.apns.journal] == [token]


def test_a_device_that_changed_hands_is_not_shown_what_was_for_its_former_owner(stack: Stack) -> None:
    works = stack.post()
    bound = stack.post(Reject(503, "ServiceUnavailable"))
    unbound_user, token = "carol", stack.device("carol")[1]
    stack.drain()
    unbound = stack.enqueue(unbound_user)
    for each in (bound.token, token):
        stack.device("mallory", token=each)
    stack.apns.forget()
    stack.advance(61)

    assert stack.drain() == only(claimed=2, skipped=2)

    assert stack.apns.journal == []
    assert stack.ends() == {
        works.id: ("sent", None, 1),
        bound.id: ("skipped", "no_push_token", 2),
        unbound: ("skipped", "no_push_token", 1),
    }


def test_two_environments_are_two_hosts(stack: Stack) -> None:
    with SimulatedApns(
        environment="sandbox", credentials=stack.apns.credentials, authority=stack.apns.authority
    ) as sandbox:
        stack.setenv(APNS_SANDBOX_URL=sandbox.url)
        _, production_token = stack.device("alice")
        _, sandbox_token = stack.device("alice", environment="sandbox")
        stack.enqueue("alice")

        assert stack.drain() == only(claimed=2, pushed=2, sent=2)

        assert [push.token for push in stack.apns.journal] == [production_token]
        assert [push.token for push in sandbox.journal] == [sandbox_token]


def test_the_headers_are_what_the_row_says(stack: Stack) -> None:
    plain = stack.post()
    background = stack.post(push_type="background", priority=10)
    call = stack.post(push_type="voip", priority=1)
    expiring = stack.post(collapse_id="score", expires_at=datetime(2033, 5, 18, 3, 33, 20, tzinfo=UTC))

    assert stack.drain() == only(claimed=4, pushed=4, sent=4)

    received = {push.token: push for push in stack.apns.journal}

    def headers(posted: Posted) -> dict[str, str]:
        names = ("apns-push-type", "apns-priority", "apns-topic", "apns-expiration", "apns-collapse-id", "apns-id")
        return {name: value for name, value in received[posted.token].headers.items() if name in names}

    ids = {each: str(stack.row(each).apns_id) for each in (plain, background, call, expiring)}
    topic = "com.example.app"
    assert headers(plain) == {
        "apns-push-type": "alert",
        "apns-priority": "10",
        "apns-topic": topic,
        "apns-id": ids[plain],
        "apns-collapse-id": ids[plain],
    }
    assert headers(background) == {
        "apns-push-type": "background",
        "apns-priority": "5",
        "apns-topic": topic,
        "apns-id": ids[background],
        "apns-collapse-id": ids[background],
    }
    assert headers(call) == {
        "apns-push-type": "voip",
        "apns-priority": "1",
        "apns-topic": f"{topic}.voip",
        "apns-id": ids[call],
        "apns-collapse-id": ids[call],
    }
    assert headers(expiring) == {
        "apns-push-type": "alert",
        "apns-priority": "10",
        "apns-topic": topic,
        "apns-id": ids[expiring],
        "apns-collapse-id": "score",
        "apns-expiration": "2000000000",
    }
    assert json.loads(received[plain.token].body) == {"aps": {"alert": f"{stack.word} "}}


def test_a_tokens_own_topic_comes_before_the_secrets(stack: Stack) -> None:
    _, token = stack.device("alice", topic="com.example.other")
    stack.enqueue("alice")

    tally = stack.drain()  # of the simulated APNs the key knows com.example.app alone

    assert tally["withheld"] == 1
    (push,) = stack.apns.journal
    assert (push.token, push.headers["apns-topic"]) == (token, "com.example.other")
    assert {row.reason for row in stack.rows().values()} == {"TopicDisallowed"}


def test_the_oldest_producers_insert_is_enough(stack: Stack) -> None:
    _, token = stack.device("alice")
    stack.db.execute(
        "INSERT INTO notification_delivery (user_id, payload) VALUES ('alice', %s)", [json.dumps({"aps": {"badge": 3}})]
    )

    assert stack.drain() == only(claimed=1, pushed=1, sent=1)
    (push,) = stack.apns.journal
    assert (push.token, push.body) == (token, b'{"aps":{"badge":3}}')


def test_a_device_that_came_back_since_is_kept_and_tried_again(stack: Stack) -> None:
    died = datetime.now(UTC) - timedelta(hours=1)
    posted = stack.post(Reject(410, "Unregistered", timestamp=died))

    assert stack.drain() == only(claimed=1, pushed=1, retried=1)

    assert stack.ends() == {posted.id: ("pending", "Unregistered", 1)}
    assert stack.one("SELECT invalidated_at IS NULL FROM push_token")
    stack.db.execute("UPDATE push_token SET registered_at = %s", [died - timedelta(days=1)])
    stack.advance(61)
    assert stack.drain() == only(claimed=1, pushed=1, invalid_token=1)
    assert stack.ends() == {posted.id: ("invalid_token", "Unregistered", 2)}


def test_no_time_zone_changes_a_date(stack: Stack) -> None:
    """Neither the process's, nor libpq's, nor the database's."""
    expires = datetime(2033, 5, 18, 3, 33, 20, tzinfo=UTC)
    zones = ["UTC", "Asia/Jakarta", "America/New_York"]
    found = {}
    for process, database in zip(zones, reversed(zones), strict=True):
        stack.db.execute(f"ALTER DATABASE {stack.database.name} SET timezone = '{database}'")
        stack.apns.forget()
        sent = stack.post(expires_at=expires)
        retried = stack.post(Reset(ErrorCodes.CANCEL))
        withheld = stack.post(Reject(403, "Forbidden"), environment="sandbox")
        dead = stack.post(Reject(410, "Unregistered", timestamp=datetime.now(UTC) + timedelta(minutes=5)))
        alive = stack.post(Reject(410, "Unregistered", timestamp=datetime.now(UTC) - timedelta(minutes=5)))
        later = stack.post(send_at=datetime.now(UTC) + timedelta(minutes=5))

        tally = stack.outcome(stack.spawn(TZ=process, PGTZ=process))

        rows = stack.rows()
        assert 20 < rows[retried.id].due_in <= 60
        assert 140 < rows[withheld.id].due_in <= 300
        assert 20 < rows[alive.id].due_in <= 60
        assert 270 < rows[later.id].due_in <= 300
        (push,) = [push for push in stack.apns.journal if push.token == sent.token]
        ended = [rows[each.id].status for each in (sent, retried, withheld, dead, alive, later)]
        age = stack.one(
            "SELECT extract(epoch FROM now() - sent_at)::int FROM notification_delivery WHERE id = %s", sent.id
        )
        found[process] = tally, push.headers["apns-expiration"], ended, 0 <= age < 30
        stack.db.execute("DELETE FROM notification_delivery")

    expected = (
        only(claimed=5, pushed=5, sent=1, retried=2, withheld=1, invalid_token=1),
        "2000000000",
        ["sent", "pending", "pending", "invalid_token", "pending", "pending"],
        True,
    )
    assert found == dict.fromkeys(zones, expected)


def test_importing_the_handler_needs_nothing_and_does_nothing() -> None:
    """Lambda imports it before there is an event; a fault of the settings is the invocation's."""
    imported = subprocess.run(
        [sys.executable, "-c", "import handlers.drain, sys; assert 'boto3' not in sys.modules"],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (imported.returncode, imported.stdout, imported.stderr) == (0, "", "")


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_batch_of_fifty_costs_two_round_trips_the_proof_and_the_rest(stack: Stack, warm: bool) -> None:  # noqa: FBT001
    """A server that delays every answer sees it: what arrives without an answer in between is one round trip."""
    if warm:
        stack.post()
        stack.drain()
    before, connections = len(stack.apns.journal), stack.apns.connections
    stack.post_many(50)
    stack.apns.hold()

    drained = stack.begin()

    stack.apns.wait_for_pushes(before + 1, timeout=20)
    time.sleep(0.3)  # in which the others would have come, if any came without the first one's answer
    assert len(stack.apns.journal) == before + 1
    stack.apns.release_one(0)
    stack.apns.wait_for_pushes(before + 50, timeout=20)
    stack.apns.release()
    assert drained.result(timeout=20) == only(claimed=50, pushed=50, sent=50)
    assert stack.apns.connections == connections + (not warm)


OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_operators_page_has_every_metric_with_its_unit_and_no_other(stack: Stack) -> None:
    stack.post(Reject(403, "Forbidden"))  # for a ProviderFault by its reason, too
    stack.drain()

    sent = {
        (metric["Name"], metric["Unit"])
        for line in stack.metrics()
        for declared in line["_aws"]["CloudWatchMetrics"]
        for metric in declared["Metrics"]
    }
    page = OPERATIONS.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, flags=re.MULTILINE)) == sent


def test_the_operators_page_has_every_line_of_log_with_its_level_and_its_fields_and_no_other() -> None:
    page = OPERATIONS.partition("\n## Log lines\n")[2]
    documented = {
        (message, level): set(re.findall(r"`(\w+)`", fields))
        for message, level, fields in re.findall(
            r"^### `(.+)`\n\n([A-Z]+)\b[^.]*\. Fields: ([^.]*)\.$", page, flags=re.MULTILINE
        )
    }
    assert len(documented) == page.count("\n### "), "each has a level and its fields"
    assert documented == _log_lines()


def _log_lines() -> dict[tuple[str, str], set[str]]:
    """Find what the handler logs, in its source: message and level, and the fields beside."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    tree = ast.parse((ROOT / "src" / "handlers" / "drain.py").read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        named = {  # dictionaries that have a name
            target.id: _keys(assigned.value)
            for assigned in ast.walk(function)
            if isinstance(assigned, ast.Assign)
            for target in assigned.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(function):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name("logger"), attr=level), args=[message]):
                    (extra,) = (keyword.value for keyword in call.keywords if keyword.arg == "extra")
                    fields = _keys(extra).union(
                        *(named.get(name.id, set()) for name in ast.walk(extra) if isinstance(name, ast.Name))
                    )
                    # What a condition chooses between are two lines.
                    texts = [message.body, message.orelse] if isinstance(message, ast.IfExp) else [message]
                    for text in texts:
                        assert isinstance(text, ast.Constant), ast.dump(text)
                        found[str(text.value), level.upper()] |= fields
    return dict(found)


def _keys(expression: ast.AST) -> set[str]:
    """Find the keys of the dictionaries in it, but not of those that are values in another."""
    match expression:
        case ast.Dict(keys=keys):
            return {str(key.value) for key in keys if isinstance(key, ast.Constant)}
        case ast.BinOp(left=left, right=right):
            return _keys(left) | _keys(right)
        case ast.IfExp(body=body, orelse=orelse):
            return _keys(body) | _keys(orelse)
        case _:
            return set()
