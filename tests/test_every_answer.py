"""Every answer that APNs can give, through everything that there is: what becomes of the row, of its attempts, of the
device token and of the others; and what is said about it.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest

from core.reasons import REASONS
from core.secret import KEEP_SECONDS
from devtools.simulated_apns import Credentials, Ok, Reject, SimulatedApns
from tests.support.handler import Invocation, Posted, Stack, Time, only, signed_by
from tests.support.tcp_proxy import TcpProxy

pytest_plugins = ["tests.support.handler_fixtures"]

# What an answer comes to. Of each: when it is all that the drain hears, and nothing was accepted lately; and when APNs
# accepts others.
type Fate = Literal["sent", "device", "notification", "provider", "topic", "apns"]


@dataclass(frozen=True, slots=True)
class Case:
    answer: Ok | Reject
    fate: Fate
    reason: str | None  # what the row says then
    wait: tuple[float, float] | None = None  # seconds until it is due again, where that is unlike its kind


def case(status: int, reason: str, fate: Fate, wait: tuple[float, float] | None = None) -> Case:
    return Case(Reject(status, reason), fate, reason, wait)


def odd(status: int, body: bytes, fate: Fate, reason: str | None = None) -> Case:
    return Case(Reject(status, "", body=body), fate, reason or f"status_{status}")


CASES = {
    # Apple's own, as its page has them: beside our table, and not made from it.
    "BadCollapseId": case(400, "BadCollapseId", "notification"),
    "BadDeviceToken": case(400, "BadDeviceToken", "device"),
    "BadExpirationDate": case(400, "BadExpirationDate", "notification"),
    "BadMessageId": case(400, "BadMessageId", "notification"),
    "BadPriority": case(400, "BadPriority", "notification"),
    "BadTopic": case(400, "BadTopic", "topic"),
    "DeviceTokenNotForTopic": case(400, "DeviceTokenNotForTopic", "device"),
    "DuplicateHeaders": case(400, "DuplicateHeaders", "notification"),
    "IdleTimeout": case(400, "IdleTimeout", "apns"),
    "InvalidPushType": case(400, "InvalidPushType", "notification"),
    "MissingDeviceToken": case(400, "MissingDeviceToken", "notification"),
    "MissingTopic": case(400, "MissingTopic", "topic"),
    "PayloadEmpty": case(400, "PayloadEmpty", "notification"),
    "TopicDisallowed": case(400, "TopicDisallowed", "topic"),
    "BadCertificate": case(403, "BadCertificate", "provider"),
    "BadCertificateEnvironment": case(403, "BadCertificateEnvironment", "provider"),
    "BadEnvironmentKeyIdInToken": case(403, "BadEnvironmentKeyIdInToken", "provider"),
    "BadEnvironmentKeyInToken": case(403, "BadEnvironmentKeyInToken", "provider"),
    "ExpiredProviderToken": case(403, "ExpiredProviderToken", "provider"),
    "Forbidden": case(403, "Forbidden", "provider"),
    "InvalidProviderToken": case(403, "InvalidProviderToken", "provider"),
    "MissingProviderToken": case(403, "MissingProviderToken", "provider"),
    "UnrelatedKeyIdInToken": case(403, "UnrelatedKeyIdInToken", "provider"),
    "BadPath": case(404, "BadPath", "notification"),
    "MethodNotAllowed": case(405, "MethodNotAllowed", "notification"),
    "ExpiredToken": case(410, "ExpiredToken", "device"),
    "Unregistered": case(410, "Unregistered", "device"),
    "PayloadTooLarge": case(413, "PayloadTooLarge", "notification"),
    # The token was minted a moment ago, within this module's first test; with the jitter, 20 to 30 minutes.
    "TooManyProviderTokenUpdates": case(429, "TooManyProviderTokenUpdates", "provider", (1000, 1800)),
    "TooManyRequests": case(429, "TooManyRequests", "apns"),
    "InternalServerError": case(500, "InternalServerError", "apns"),
    "ServiceUnavailable": case(503, "ServiceUnavailable", "apns"),
    "Shutdown": case(503, "Shutdown", "apns"),
    # What nobody has seen yet.
    "a new 400": case(400, "NotSeenYet", "notification"),
    "a new 403": case(403, "NotSeenYet", "provider"),
    "a new 404": case(404, "NotSeenYet", "notification"),
    "a new 405": case(405, "NotSeenYet", "notification"),
    "a new 410": case(410, "NotSeenYet", "device"),
    "a new 413": case(413, "NotSeenYet", "notification"),
    "a new 418": case(418, "NotSeenYet", "apns"),
    "a new 429": case(429, "NotSeenYet", "apns"),
    "a new 500": case(500, "NotSeenYet", "apns"),
    "a new 502": case(502, "NotSeenYet", "apns"),
    "a 204": odd(204, b"", "apns"),
    "a 302": odd(302, b"", "apns"),
    # What is hardly an answer.
    "a 200 with a body": Case(Ok(body=b'{"reason": "BadDeviceToken"}'), "sent", None),
    "empty": odd(400, b"", "notification"),
    "not JSON": odd(403, b"<html>Forbidden</html>", "provider"),
    "not UTF-8": odd(410, b'{"reason": "Unregist\xff\xfe"}', "device"),
    "huge": odd(503, b'{"reason": "' + b"x" * 200_000 + b'"}', "apns"),
    "a huge reason": odd(400, b'{"reason": "' + b"x" * 20_000 + b'"}', "notification", "x" * 100),
    "no object": odd(502, b"[1]", "apns"),
    "a reason that is a number": odd(403, b'{"reason": 7}', "provider"),
    "a reason that Postgres cannot store": odd(
        400, b'{"reason": "Not\\u0000\\ud800\\n Seen"}', "notification", "Not Seen"
    ),
    # 410 and its date.
    "a 410 of before the registration": Case(
        Reject(410, "Unregistered", timestamp=datetime(2020, 1, 1, tzinfo=UTC)), "apns", "Unregistered"
    ),
    "a 410 of after it": Case(
        Reject(410, "ExpiredToken", timestamp=datetime.now(UTC) + timedelta(days=9)), "device", "ExpiredToken"
    ),
    "a 410 with a date that is none": odd(
        410, b'{"reason": "Unregistered", "timestamp": "soon"}', "device", "Unregistered"
    ),
    # Retry-After, which Apple does not document, is a floor: 15 minutes, and with jitter up to half of it more.
    "a 503 with Retry-After": Case(
        Reject(503, "ServiceUnavailable", headers=(("retry-after", "900"),)), "apns", "ServiceUnavailable", (890, 1350)
    ),
    "a 429 with Retry-After": Case(
        Reject(429, "TooManyRequests", headers=(("retry-after", "900"),)), "apns", "TooManyRequests", (890, 1350)
    ),
    "a 403 with Retry-After": Case(
        Reject(403, "Forbidden", headers=(("retry-after", "900"),)), "provider", "Forbidden", (890, 1350)
    ),
    "a Retry-After that is sooner": Case(Reject(503, "Shutdown", headers=(("retry-after", "1"),)), "apns", "Shutdown"),
    "a Retry-After that is none": Case(
        Reject(503, "Shutdown", headers=(("retry-after", "-7 apples"),)), "apns", "Shutdown"
    ),
}
WITHHELD, RETRIED = (145, 300), (25, 60)  # seconds; less than half by what the drain itself takes


def test_every_reason_of_the_table_is_here() -> None:
    assert REASONS.keys() <= CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_is_all_that_a_drain_hears(shared_stack: Stack, name: str) -> None:
    stack, each = shared_stack, CASES[name]
    posted = stack.post(each.answer)

    tally = stack.drain()

    row = stack.row(posted)
    assert len(stack.pushes(posted)) == 1
    assert row.claimed_at is None
    assert row.reason == each.reason
    # A 410 has judged the row, whatever APNs has accepted; other errors of an APNs that is not known to work have not.
    retried = each.fate == "apns" and isinstance(each.answer, Reject) and each.answer.status == 410
    match each.fate:
        case "sent":
            assert (row.status, row.attempts, tally) == ("sent", 1, only(claimed=1, pushed=1, sent=1))
        case "device":
            assert (row.status, row.attempts, tally) == (
                "invalid_token",
                1,
                only(claimed=1, pushed=1, invalid_token=1),
            )
        case "notification":
            assert (row.status, row.attempts, tally) == ("failed", 1, only(claimed=1, pushed=1, failed=1))
        case "provider" | "topic" | "apns":
            expected = only(claimed=1, pushed=1, **{"retried" if retried else "withheld": 1})
            assert (row.status, row.attempts, tally) == ("pending", int(retried), expected)
            least, most = each.wait or (RETRIED if retried else WITHHELD)
            assert least < row.due_in <= most
    _see_what_is_said(stack, posted, each)


@pytest.mark.parametrize("name", CASES)
def test_an_answer_beside_others_that_are_accepted(shared_stack: Stack, name: str) -> None:
    stack, each = shared_stack, CASES[name]
    before, posted, behind = stack.post(), stack.post(each.answer), stack.post()

    tally = stack.drain()

    row = stack.row(posted)
    assert len(stack.pushes(posted)) == 1
    assert row.claimed_at is None
    assert row.reason == each.reason
    assert [stack.row(other).status for other in (before, behind)] == ["sent", "sent"]
    match each.fate:
        case "sent":
            assert (row.status, row.attempts, tally) == ("sent", 1, only(claimed=3, pushed=3, sent=3))
        case "device":
            counted = only(claimed=3, pushed=3, sent=2, invalid_token=1)
            assert (row.status, row.attempts, tally) == ("invalid_token", 1, counted)
        case "notification":
            assert (row.status, row.attempts, tally) == ("failed", 1, only(claimed=3, pushed=3, sent=2, failed=1))
        case "provider" | "topic":
            assert (row.status, row.attempts, tally) == ("pending", 0, only(claimed=3, pushed=3, sent=2, withheld=1))
            least, most = each.wait or WITHHELD
            assert least < row.due_in <= most
        case "apns":
            assert (row.status, row.attempts, tally) == ("pending", 1, only(claimed=3, pushed=3, sent=2, retried=1))
            least, most = each.wait or RETRIED
            assert least < row.due_in <= most
    _see_what_is_said(stack, posted, each)


def _see_what_is_said(stack: Stack, posted: Posted, each: Case) -> None:
    """Look at the row, the token, the log and the metrics: the same whether it was alone or not."""
    row = stack.row(posted)
    invalidated, invalid_reason = _token(stack, posted)
    assert (invalidated, invalid_reason) == ((True, each.reason) if each.fate == "device" else (False, None))
    if isinstance(each.answer, Reject):
        assert row.last_error.startswith(f"APNs answered {each.answer.status} {each.reason}")
        meaning = REASONS[each.reason].meaning if each.reason in REASONS else "which this version does not know"
        assert meaning in row.last_error
    else:
        assert row.last_error is None

    lines = [line for line in stack.log() if line["message"] not in ("drained", "APNs ends a connection")]
    match each.fate:
        case "notification":
            (line,) = lines
            assert (line["level"], line["message"]) == ("ERROR", "delivery failed")
            assert (line["delivery_id"], line["apns_id"], line["attempts"]) == (posted.id, str(row.apns_id), 1)
            assert (line["reason"], line["error"]) == (each.reason, row.last_error)
        case "provider" | "topic":
            (line,) = lines
            assert (line["level"], line["message"]) == ("ERROR", "withheld: the fault is on our side")
            assert (line["reason"], line["error"]) == (each.reason, row.last_error)
            assert line["environment"] == "production"
            assert line["topic"] == ("com.example.app" if each.fate == "topic" else "all")
        case "sent" | "device" | "apns":
            assert lines == []
    faults = int(each.fate in ("provider", "topic"))
    assert provider_faults(stack) == (faults, {each.reason: 1} if faults else {})
    (total,) = (line for line in stack.metrics() if "Sent" in line)
    assert (total["Outage"], total["PossibleDuplicate"]) == ([0.0], [0.0])


@pytest.mark.parametrize("warm", [True, False])
def test_a_key_that_apns_knows_no_more_costs_each_environment_one_push_a_drain(
    stack: Stack,
    sandbox: SimulatedApns,
    warm: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    if warm:
        stack.post()
        stack.post(environment="sandbox")
        assert stack.drain()["sent"] == 2
    stack.db.execute("TRUNCATE notification_delivery, push_token")
    for apns in (stack.apns, sandbox):
        apns.revoke()
        apns.forget()
    for topic in ("com.example.app", "com.example.one", "com.example.two", "com.example.three", None):
        stack.post_many(5, topic=topic)  # a key is the environment's, however many topics it has
        stack.post_many(5, topic=topic, environment="sandbox")

    assert stack.drain() == only(claimed=50, pushed=2, withheld=50)

    assert (len(stack.apns.journal), len(sandbox.journal)) == (1, 1)
    rows = list(stack.rows().values())
    assert {(row.status, row.reason, row.attempts) for row in rows} == {("pending", "InvalidProviderToken", 0)}
    assert all(WITHHELD[0] < row.due_in <= WITHHELD[1] for row in rows)
    assert len({round(row.due_in, 2) for row in rows}) > 40, "with jitter"
    assert stack.one("SELECT count(*) FROM push_token WHERE invalidated_at IS NOT NULL") == 0
    lines = stack.logged("withheld")
    assert sorted(line["environment"] for line in lines) == ["production", "sandbox"]
    for line in lines:
        assert (line["level"], line["message"]) == ("ERROR", "withheld: the fault is on our side")
        assert (line["topic"], line["reason"]) == ("all", "InvalidProviderToken")
        assert "check team_id, key_id and private_key in the secret, and that the key is not revoked" in line["error"]
    assert provider_faults(stack) == (2, {"InvalidProviderToken": 2})


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        pytest.param({"environment": "sandbox"}, "BadEnvironmentKeyInToken", id="of the other environment"),
        pytest.param({"topics": frozenset({"com.example.other"})}, "UnrelatedKeyIdInToken", id="unrelated"),
    ],
)
def test_a_key_that_is_not_for_this_environment_withholds_it_alone_until_it_is(
    stack: Stack, sandbox: SimulatedApns, limits: dict[str, Any], reason: str
) -> None:
    """And on a new connection: on the old one nothing that is mended at Apple's would help."""
    stack.apns.trust(stack.apns.credentials, **limits)
    stack.post_many(20)
    elsewhere = stack.post_many(20, environment="sandbox")

    assert stack.drain() == only(claimed=40, pushed=21, sent=20, withheld=20)

    assert (len(stack.apns.journal), len(sandbox.journal)) == (1, 20)
    ended = stack.ends()
    assert {ended.pop(each.id) for each in elsewhere} == {("sent", None, 1)}
    assert set(ended.values()) == {("pending", reason, 0)}
    assert provider_faults(stack) == (1, {reason: 1})
    stack.advance(301)
    assert stack.drain() == only(claimed=20, pushed=1, withheld=20)

    stack.apns.trust(stack.apns.credentials)
    stack.advance(301)
    assert stack.drain() == only(claimed=20, pushed=20, sent=20)


def test_a_broken_topic_costs_one_push_however_many_wait_and_the_others_go_out_in_the_same_drain(stack: Stack) -> None:
    broken = stack.post_many(2000, topic="com.example.gone", next_attempt_at=datetime.now(UTC) - timedelta(hours=1))
    good = stack.post_many(50)

    tally = stack.drain(context=Invocation(passing=True))  # so in less than the 12 s in which a drain begins anything

    assert tally == only(claimed=2050, pushed=51, sent=50, withheld=2000)
    assert Counter(push.headers["apns-topic"] for push in stack.apns.journal) == {
        "com.example.gone": 1,
        "com.example.app": 50,
    }
    ended = stack.ends()
    assert {ended[each.id] for each in broken} == {("pending", "TopicDisallowed", 0)}
    assert {ended[each.id] for each in good} == {("sent", None, 1)}
    (line,) = stack.logged("withheld")
    assert (line["environment"], line["topic"], line["reason"]) == ("production", "com.example.gone", "TopicDisallowed")
    assert "check that the key's team owns it" in line["error"]
    assert provider_faults(stack) == (1, {"TopicDisallowed": 1})


WRONG = ("BadDeviceToken", "DeviceTokenNotForTopic")


def _misplace(stack: Stack, posted: Posted, reason: str) -> None:
    """Let the device be registered elsewhere than push_token says, so that APNs answers this."""
    if reason == "BadDeviceToken":
        stack.apns.register(posted.token, environment="sandbox")
    else:
        stack.apns.register(posted.token, topic="com.example.other")


@pytest.mark.parametrize("reason", WRONG)
def test_five_tokens_refused_and_none_accepted_are_our_own_mistake(shared_stack: Stack, reason: str) -> None:
    stack = shared_stack
    posted = stack.post_many(50)
    for each in posted:
        _misplace(stack, each, reason)

    assert stack.drain() == only(claimed=50, pushed=5, withheld=50)

    assert set(stack.ends().values()) == {("pending", reason, 0)}
    assert stack.one("SELECT count(*) FROM push_token WHERE invalidated_at IS NOT NULL") == 0
    (line,) = stack.logged("withheld")
    assert (line["level"], line["environment"], line["topic"]) == ("ERROR", "production", "com.example.app")
    assert "the environment recorded in push_token, or the topic, must be wrong" in line["error"]
    assert provider_faults(stack) == (1, {reason: 1})


@pytest.mark.parametrize("reason", WRONG)
def test_four_tokens_refused_are_believed(shared_stack: Stack, reason: str) -> None:
    stack = shared_stack
    for each in stack.post_many(4):
        _misplace(stack, each, reason)

    assert stack.drain() == only(claimed=4, pushed=4, invalid_token=4)

    assert set(stack.ends().values()) == {("invalid_token", reason, 1)}
    assert stack.one("SELECT count(*) FROM push_token WHERE invalid_reason = %s", reason) == 4
    assert stack.logged("withheld") == []


@pytest.mark.parametrize("reason", WRONG)
def test_however_many_tokens_are_refused_they_are_believed_of_a_topic_that_is_known_to_be_good(
    shared_stack: Stack, reason: str
) -> None:
    stack = shared_stack
    stack.post()
    for each in stack.post_many(30):
        _misplace(stack, each, reason)

    assert stack.drain() == only(claimed=31, pushed=31, sent=1, invalid_token=30)
    assert stack.logged("withheld") == []


def test_one_token_refused_for_many_deliveries_is_one_token(shared_stack: Stack) -> None:
    stack = shared_stack
    _, token = stack.device("alice")
    stack.apns.register(token, environment="sandbox")
    for _ in range(8):
        stack.enqueue("alice")

    tally = stack.drain()

    assert tally["invalid_token"] == tally["claimed"] == 8
    assert stack.one("SELECT count(*) FROM push_token WHERE invalid_reason = 'BadDeviceToken'") == 1


@pytest.mark.parametrize("answer", [Reject(413, "PayloadTooLarge"), Reject(400, "BadCollapseId"), Reject(400, "New")])
def test_five_deliveries_refused_for_one_reason_and_none_accepted_are_our_own_bug(
    shared_stack: Stack, answer: Reject
) -> None:
    stack = shared_stack

    def drained(refused: int, accepted: int) -> dict[str, int]:
        stack.db.execute("TRUNCATE notification_delivery, push_token")
        for _ in range(refused):
            stack.post(answer)
        stack.post_many(accepted)
        return stack.drain()

    assert drained(refused=20, accepted=0) == only(claimed=20, pushed=20, withheld=20)
    assert set(stack.ends().values()) == {("pending", answer.reason, 0)}
    (line,) = stack.logged("withheld")
    assert (line["level"], line["topic"], line["reason"]) == ("ERROR", "all", answer.reason)
    assert "what is sent must be malformed by a bug" in line["error"]
    assert stack.logged("delivery failed") == []
    assert provider_faults(stack) == (1, {answer.reason: 1})

    assert drained(refused=4, accepted=0) == only(claimed=4, pushed=4, failed=4)
    assert drained(refused=20, accepted=1) == only(claimed=21, pushed=21, sent=1, failed=20)
    assert len(stack.logged("withheld")) == 1


@pytest.mark.parametrize("works", [True, False])
def test_a_device_that_wants_a_rest_gets_it_for_all_its_deliveries(
    shared_stack: Stack,
    works: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    stack = shared_stack
    if works:
        stack.post()
        assert stack.drain()["sent"] == 1
    _, token = stack.device("alice")
    stack.apns.answer(token, Reject(429, "TooManyRequests"))
    first, *others = [stack.enqueue("alice") for _ in range(5)]
    neighbour = stack.post()

    tally = stack.drain()

    assert sum(push.token == token for push in stack.apns.journal) == 1
    # The neighbour's acceptance proves that APNs works, whether others were accepted before or not.
    assert tally == only(claimed=6, pushed=2, sent=1, retried=1, withheld=4)
    ended = stack.ends()
    assert ended[first] == ("pending", "TooManyRequests", 1)
    assert {ended[each] for each in others} == {("pending", "TooManyRequests", 0)}
    assert ended[neighbour.id] == ("sent", None, 1)
    assert stack.logged("withheld") == [], "it is nobody's fault"


def test_a_key_that_was_rotated_is_read_at_once_when_apns_knows_the_old_one_no_more(stack: Stack) -> None:
    stack.post()
    assert stack.drain()["sent"] == 1
    new = stack.issue()
    stack.rotate(new)
    stack.apns.revoke()
    stack.apns.forget()
    stack.post_many(30)

    assert stack.drain() == only(claimed=30, pushed=30, sent=30)

    signers = [signed_by(push) for push in stack.apns.journal]
    assert signers == [stack.apns.credentials.key_id] + [new.key_id] * 30
    assert len({push.connection for push in stack.apns.journal}) == 2, "on a connection of its own"
    assert {(status, attempts) for status, _, attempts in stack.ends().values()} == {("sent", 1)}
    assert stack.logged("withheld") == []


def test_the_good_old_key_is_used_after_a_new_one_that_apns_does_not_know(stack: Stack, clocks: Time) -> None:
    old = stack.apns.credentials
    stack.post()
    assert stack.drain()["sent"] == 1
    unknown = stack.hide(Credentials.generate())
    stack.rotate(unknown)

    for expected in ([unknown, *[old] * 10], [old] * 10, [old] * 10):
        clocks.ahead += KEEP_SECONDS + 1  # the secret is looked at again; what it holds is known to be no good
        stack.apns.ahead = clocks.ahead
        stack.apns.forget()
        stack.post_many(10)
        assert stack.drain() == only(claimed=10, pushed=10, sent=10)
        assert [signed_by(push) for push in stack.apns.journal] == [key.key_id for key in expected]
    lines = stack.logged("APNs does not know the key that the secret holds")
    assert [(line["level"], line["secret_id"]) for line in lines] == [("WARNING", stack.secret_id)] * 3

    third = stack.issue()
    stack.rotate(third)
    clocks.ahead += KEEP_SECONDS + 1
    stack.apns.forget()
    stack.post()
    assert stack.drain()["sent"] == 1
    assert [signed_by(push) for push in stack.apns.journal] == [third.key_id]
    assert len(stack.logged("APNs does not know the key that the secret holds")) == 3


def test_the_old_key_is_left_when_apns_says_otherwise_and_nothing_is_lost_while_none_is_good(
    stack: Stack, clocks: Time
) -> None:
    stack.post()
    assert stack.drain()["sent"] == 1
    unknown = stack.hide(replace(Credentials.generate(), team_id=stack.apns.credentials.team_id))
    stack.rotate(unknown)
    clocks.ahead += KEEP_SECONDS + 1
    stack.post()
    assert stack.drain()["sent"] == 1  # with the old one

    stack.apns.revoke()
    stack.post_many(20)
    stack.apns.forget()
    for _ in range(3):
        assert stack.drain() == only(claimed=20, pushed=1, withheld=20)
        stack.advance(301)
    assert len(stack.apns.journal) <= 6  # in a drain, each key that there is once
    assert provider_faults(stack) == (3, {"InvalidProviderToken": 3})

    stack.apns.trust(unknown)
    assert stack.drain() == only(claimed=20, pushed=20, sent=20)
    assert {attempts for _, _, attempts in stack.ends().values()} == {1}


def test_a_new_secret_that_is_malformed_leaves_the_old_key_in_use_with_a_warning(stack: Stack, clocks: Time) -> None:
    stack.post()
    assert stack.drain()["sent"] == 1
    stack.configure(stack.apns.secret() | {"private_key": "-----BEGIN PRIVATE KEY-----"})
    clocks.ahead += KEEP_SECONDS + 1
    stack.post()

    assert stack.drain() == only(claimed=1, pushed=1, sent=1)

    (line,) = stack.logged("the signing key's secret cannot be read")
    assert line["level"] == "WARNING"
    assert f"the secret {stack.secret_id} has a private_key that" in line["error"]
    stack.configure(stack.apns.secret())
    assert stack.drain() == only()
    assert len(stack.logged("the signing key's secret cannot be read")) == 1, "it is mended"


def test_a_secrets_manager_that_is_away_leaves_the_last_good_key_in_use_with_a_warning(
    stack: Stack, clocks: Time
) -> None:
    with TcpProxy(("127.0.0.1", int(stack.secrets.url.rpartition(":")[2]))) as network:
        stack.setenv(AWS_ENDPOINT_URL=f"http://127.0.0.1:{network.port}")
        stack.post()
        assert stack.drain()["sent"] == 1
        network.refuse()
        network.cut()
        for _ in range(2):
            clocks.ahead += KEEP_SECONDS + 1
            stack.post()
            assert stack.drain() == only(claimed=1, pushed=1, sent=1)

        lines = stack.logged("the signing key's secret cannot be read")
        assert [line["level"] for line in lines] == ["WARNING"] * 2
        assert "Secrets Manager was not reached" in lines[0]["error"]

        new = stack.issue()
        stack.rotate(new)
        network.resume()
        stack.post()
        assert stack.drain()["sent"] == 1
        assert signed_by(stack.apns.journal[-1]) == new.key_id
        assert len(stack.logged("the signing key's secret cannot be read")) == 2


def test_in_a_day_on_one_connection_no_provider_token_is_too_old_or_comes_too_soon(stack: Stack, clocks: Time) -> None:
    for _ in range(24 * 6):
        stack.post()
        clocks.ahead += 600 - 1
        stack.apns.ahead = clocks.ahead
        assert stack.drain() == only(claimed=1, pushed=1, sent=1)

    assert stack.apns.connections == 1
    tokens = {push.headers["authorization"] for push in stack.apns.journal}
    assert 24 <= len(tokens) <= 3 * 24


def test_a_provider_token_that_apns_calls_expired_is_replaced_once_and_on_a_new_connection(
    stack: Stack, clocks: Time
) -> None:
    """The machine's clock is put 40 minutes back, say: by it, the token is not due for renewal yet."""
    stack.post()
    assert stack.drain()["sent"] == 1
    clocks.ahead += 1300
    stack.apns.ahead = clocks.ahead + 2400
    stack.apns.forget()
    stack.post_many(30)

    assert stack.drain() == only(claimed=30, pushed=30, sent=30)

    assert len(stack.apns.journal) == 31
    assert [push.connection for push in stack.apns.journal] == [1] + [2] * 30
    assert len({push.headers["authorization"] for push in stack.apns.journal[1:]}) == 1


def test_a_young_token_that_apns_calls_expired_is_our_clock_and_it_is_said_by_how_much(
    stack: Stack, clocks: Time
) -> None:
    stack.apns.ahead = clocks.ahead + 4000
    stack.post_many(30)

    assert stack.drain() == only(claimed=30, pushed=1, withheld=30)

    assert len(stack.apns.journal) == 1, "another one would be as old"
    (line,) = stack.logged("withheld")
    assert line["reason"] == "ExpiredProviderToken"
    assert _clock_is_off(line["error"], "behind") == pytest.approx(4000, abs=60)
    assert provider_faults(stack) == (1, {"ExpiredProviderToken": 1})

    clocks.ahead += 1300  # now it may be replaced; but the clock is still wrong
    stack.apns.ahead += 1300
    stack.advance(1300)
    stack.apns.forget()
    assert stack.drain() == only(claimed=30, pushed=1, withheld=30)
    assert len(stack.apns.journal) == 2, "once more, and not again"

    clocks.ahead += 4000
    stack.advance(1300)
    assert stack.drain() == only(claimed=30, pushed=30, sent=30)


def test_a_clock_that_is_ahead_is_named_as_well(stack: Stack, clocks: Time) -> None:
    stack.apns.ahead = clocks.ahead - 7200
    stack.post()

    assert stack.drain() == only(claimed=1, pushed=1, withheld=1)

    (line,) = stack.logged("withheld")
    assert line["reason"] == "InvalidProviderToken"
    assert _clock_is_off(line["error"], "ahead of") == pytest.approx(7200, abs=60)


def _clock_is_off(error: str, how: str) -> int:
    said = re.search(rf"Our clock is (\d+) s {how} APNs': mend it", error)
    assert said, error
    return int(said[1])


def test_a_token_renewed_too_soon_is_kept_and_the_pause_lasts_until_it_may_be_renewed(
    stack: Stack, clocks: Time
) -> None:
    """As when others push with the same key from behind the same address."""
    stack.post()
    assert stack.drain()["sent"] == 1
    clocks.ahead += 300
    posted = stack.post(Reject(429, "TooManyProviderTokenUpdates"), Ok())

    assert stack.drain() == only(claimed=1, pushed=1, withheld=1)

    row = stack.row(posted)
    assert (row.status, row.attempts) == ("pending", 0)
    assert 900 - 5 < row.due_in <= 1.5 * 900  # it was minted five minutes ago, and there is jitter
    stack.advance(1351)
    assert stack.drain()["sent"] == 1
    assert len({push.headers["authorization"] for push in stack.apns.journal}) == 1, "the old one is kept"
    assert stack.apns.connections == 2, "and the connection is not"


def _token(stack: Stack, posted: Posted) -> tuple[bool, str | None]:
    found = stack.db.execute(
        "SELECT invalidated_at IS NOT NULL, invalid_reason FROM push_token WHERE id = %s", [posted.push_token_id]
    ).fetchone()
    assert found
    return found[0], found[1]


def provider_faults(stack: Stack) -> tuple[int, dict[str, int]]:
    """Read the metric ProviderFault: how many in all, and how many by reason."""
    total, by_reason = 0, Counter[str]()
    for line in stack.metrics():
        (declared,) = line["_aws"]["CloudWatchMetrics"]
        names = {metric["Name"] for metric in declared["Metrics"]}
        if "Sent" in names:
            assert declared["Dimensions"] == [["service"]]
            total += int(line["ProviderFault"][0])
        else:
            assert (declared["Namespace"], names) == ("ApnsOutbox", {"ProviderFault"})
            assert [sorted(dimensions) for dimensions in declared["Dimensions"]] == [["reason", "service"]]
            by_reason[line["reason"]] += int(line["ProviderFault"][0])
    return total, dict(by_reason)
