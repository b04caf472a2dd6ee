import asyncio
import gc
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm
from jwt.utils import base64url_decode, base64url_encode

from devtools.simulated_apns import (
    Authority,
    Credentials,
    Hangup,
    Ok,
    Reject,
    Reset,
    Silence,
    SimulatedApns,
)
from devtools.simulated_apns.rules import (
    RENEWAL_INTERVAL,
    TOPIC_SUFFIX,
    Key,
    Memory,
    Provider,
    Request,
    Signed,
    refusal,
)

# Long enough for a machine whose cores are busy, short enough for a person to wait for.
PATIENCE = 20.0
# Long enough for an answer that is on its way to arrive first.
A_LITTLE = 0.2

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
APP = "com.example.app"
TOKEN = "a1" * 32
CREDENTIALS = Credentials.generate()
ONE_APP, SANDBOX_ONLY, STRANGER = Credentials.generate(), Credentials.generate(), Credentials.generate()


def key_of(credentials: Credentials, *, topics: frozenset[str] | None = None, sandbox_only: bool = False) -> Key:
    return Key(
        team_id=credentials.team_id,
        public_key=credentials.key.public_key(),
        topics=topics,
        environment="sandbox" if sandbox_only else None,
    )


PROVIDER = Provider(
    keys={
        CREDENTIALS.key_id: key_of(CREDENTIALS),
        ONE_APP.key_id: key_of(ONE_APP, topics=frozenset({"com.example.other"})),
        SANDBOX_ONLY.key_id: key_of(SANDBOX_ONLY, sandbox_only=True),
    },
    topics=frozenset({APP, "com.example.other"}),
    topic_of_token={"bb" * 32: "com.example.other"},
    environment_of_token={"cc" * 32: "sandbox", "dd" * 32: "production"},
)


def provider_token(
    credentials: Credentials = CREDENTIALS,
    *,
    issued_at: object = int(NOW.timestamp()),
    algorithm: str = "ES256",
    claims: dict[str, object] | None = None,
    key_id: str | None = None,
) -> str:
    return jwt.encode(
        {"iss": credentials.team_id, "iat": issued_at} if claims is None else claims,
        credentials.key if algorithm == "ES256" else "a secret of more than thirty-two bytes",
        algorithm=algorithm,
        headers={"kid": key_id or credentials.key_id},
    )


def request(
    *,
    without: tuple[str, ...] = (),
    and_again: tuple[tuple[str, str], ...] = (),
    method: str = "POST",
    path: str = f"/3/device/{TOKEN}",
    body: bytes = b'{"aps":{"alert":"Hello"}}',
    **headers: str,
) -> Request:
    """Make a push that breaks no rule, but for these differences; `apns_topic="x"` sets the header apns-topic."""
    sent = good_headers(provider_token(), **headers).items()
    kept = tuple((name, value) for name, value in sent if name not in without)
    return Request(method=method, path=path, headers=kept + and_again, body=body)


def good_headers(signed: str, **changes: str) -> dict[str, str]:
    good = {
        "authorization": f"bearer {signed}",
        "apns-id": "123e4567-e89b-12d3-a456-426614174000",
        "apns-push-type": "alert",
        "apns-topic": APP,
        "apns-priority": "10",
        "apns-expiration": "1772370000",
        "apns-collapse-id": "score",
    }
    return good | {name.replace("_", "-"): value for name, value in changes.items()}


RULES = [
    (request(), None),
    # the request line
    (request(method="GET"), (405, "MethodNotAllowed")),
    (request(path="/"), (404, "BadPath")),
    (request(path=f"/2/device/{TOKEN}"), (404, "BadPath")),
    (request(path=f"/3/device/{TOKEN}/"), (404, "BadPath")),
    (request(path=f"/3/devices/{TOKEN}"), (404, "BadPath")),
    (request(path="/3/device"), (400, "MissingDeviceToken")),
    (request(path="/3/device/"), (400, "MissingDeviceToken")),
    (request(path="/3/device/a1b"), (400, "BadDeviceToken")),
    (request(path="/3/device/xyzw"), (400, "BadDeviceToken")),
    (request(path=f"/3/device/{TOKEN}?a=b"), (400, "BadDeviceToken")),
    (request(path=f"/3/device/{'AbCd' * 50}"), None),
    # headers sent twice
    (request(and_again=(("apns-topic", APP),)), (400, "DuplicateHeaders")),
    (request(and_again=(("authorization", "bearer x"),)), (400, "DuplicateHeaders")),
    (request(and_again=(("accept", "a"), ("accept", "b"))), None),
    # the provider token
    (request(without=("authorization",)), (403, "MissingProviderToken")),
    (request(authorization="bearer"), (403, "MissingProviderToken")),
    (request(authorization=f"basic {provider_token()}"), (403, "MissingProviderToken")),
    (request(authorization=f"Bearer {provider_token()}"), None),
    # topic and push type
    (request(without=("apns-topic",)), (400, "MissingTopic")),
    (request(apns_topic=""), (400, "MissingTopic")),
    (request(apns_push_type="Alert"), (400, "InvalidPushType")),
    (request(apns_push_type=""), (400, "InvalidPushType")),
    (request(without=("apns-push-type",)), None),
    (request(apns_topic="com.example.unknown"), (400, "TopicDisallowed")),
    (request(apns_topic="com.example.unknown.voip", apns_push_type="voip"), (400, "TopicDisallowed")),
    (request(apns_topic=f"{APP}.voip"), (400, "BadTopic")),
    (request(apns_topic=f"{APP}.voip.voip", apns_push_type="voip"), (400, "TopicDisallowed")),
    (request(path=f"/3/device/{'bb' * 32}"), (400, "DeviceTokenNotForTopic")),
    (request(path=f"/3/device/{'BB' * 32}"), (400, "DeviceTokenNotForTopic")),
    (request(path=f"/3/device/{'bb' * 32}", apns_topic="com.example.other"), None),
    # the device's environment
    (request(path=f"/3/device/{'CC' * 32}"), (400, "BadDeviceToken")),
    (request(path=f"/3/device/{'dd' * 32}"), None),
    # what the key is good for
    (request(authorization=f"bearer {provider_token(ONE_APP)}"), (403, "UnrelatedKeyIdInToken")),
    (request(authorization=f"bearer {provider_token(ONE_APP)}", apns_topic="com.example.other"), None),
    (request(authorization=f"bearer {provider_token(SANDBOX_ONLY)}"), (403, "BadEnvironmentKeyInToken")),
    # priority
    (request(apns_priority="5"), None),
    (request(apns_priority="1"), None),
    (request(apns_priority="7"), (400, "BadPriority")),
    (request(apns_priority="010"), (400, "BadPriority")),
    (request(apns_priority=""), (400, "BadPriority")),
    (request(without=("apns-priority",)), None),
    (request(apns_push_type="background", apns_priority="5"), None),
    (request(apns_push_type="background", apns_priority="10"), (400, "BadPriority")),
    (request(apns_push_type="background", without=("apns-priority",)), (400, "BadPriority")),
    # collapse id: bytes, not characters, and of whatever encoding
    (request(apns_collapse_id="c" * 64), None),
    (request(apns_collapse_id="c" * 65), (400, "BadCollapseId")),
    (request(apns_collapse_id="é" * 33), (400, "BadCollapseId")),
    (request(apns_collapse_id="\udce9" * 64), None),
    (request(apns_collapse_id="\udce9" * 65), (400, "BadCollapseId")),
    # apns-id
    (request(without=("apns-id",)), None),
    (request(apns_id="123E4567-E89B-12D3-A456-426614174000"), (400, "BadMessageId")),
    (request(apns_id="123e4567e89b12d3a456426614174000"), (400, "BadMessageId")),
    (request(apns_id=""), (400, "BadMessageId")),
    # expiration
    (request(without=("apns-expiration",)), None),
    (request(apns_expiration="0"), None),
    (request(apns_expiration="-1"), (400, "BadExpirationDate")),
    (request(apns_expiration="1772370000.5"), (400, "BadExpirationDate")),
    (request(apns_expiration="٣"), (400, "BadExpirationDate")),
    (request(apns_expiration=""), (400, "BadExpirationDate")),
    (request(apns_expiration="9" * 5000), None),
    # payload
    (request(body=b""), (400, "PayloadEmpty")),
    (request(body=b"p" * 4096), None),
    (request(body=b"p" * 4097), (413, "PayloadTooLarge")),
    (request(body=b"p" * 5120, apns_push_type="voip", apns_topic=f"{APP}.voip"), None),
    (request(body=b"p" * 5121, apns_push_type="voip", apns_topic=f"{APP}.voip"), (413, "PayloadTooLarge")),
]


@pytest.mark.parametrize(("push", "refused"), RULES)
def test_a_push_is_refused_for_the_first_rule_of_apple_that_it_breaks(
    push: Request,
    refused: tuple[int, str] | None,
) -> None:
    assert refusal(push, PROVIDER, NOW) == (refused and Reject(*refused))


@pytest.mark.parametrize(("push_type", "suffix"), TOPIC_SUFFIX.items())
def test_each_push_type_has_its_topic(push_type: str, suffix: str) -> None:
    push = request(apns_push_type=push_type, apns_topic=APP + suffix, apns_priority="5")
    suffix_of_another_type = ".voip" if suffix != ".voip" else ".voip-ptt"

    assert refusal(push, PROVIDER, NOW) is None
    assert refusal(replace(push, path="/3/device/" + "bb" * 32), PROVIDER, NOW) == Reject(400, "DeviceTokenNotForTopic")
    wrong = request(apns_push_type=push_type, apns_topic=APP + suffix_of_another_type, apns_priority="5")
    assert refusal(wrong, PROVIDER, NOW) == Reject(400, "BadTopic")


def seconds_ago(seconds: int) -> int:
    return int(NOW.timestamp()) - seconds


def with_its_signature_cut(token: str) -> str:
    return token[:-4]


def with_a_longer_signature(token: str) -> str:
    """Write the same two numbers with 33 bytes for the second."""
    signed, _, signature = token.rpartition(".")
    numbers = base64url_decode(signature)
    return f"{signed}.{base64url_encode(numbers[:32] + bytes(1) + numbers[32:]).decode()}"


def padded(token: str) -> str:
    return token + "=="


def signed_under_another_name(algorithm: str) -> str:
    """Sign with ES256 what claims to be signed otherwise."""
    header = {"alg": algorithm, "kid": CREDENTIALS.key_id}
    claims = {"iss": CREDENTIALS.team_id, "iat": seconds_ago(0)}
    signed = b".".join(base64url_encode(json.dumps(part).encode()) for part in (header, claims))
    signature = ECAlgorithm(ECAlgorithm.SHA256).sign(signed, CREDENTIALS.key)
    return (signed + b"." + base64url_encode(signature)).decode()


ANOTHER_KEY = replace(CREDENTIALS, key=ec.generate_private_key(ec.SECP256R1()))
PROVIDER_TOKENS = [
    (provider_token(), None),
    (provider_token(issued_at=seconds_ago(3600)), None),
    (provider_token(issued_at=seconds_ago(3601)), "ExpiredProviderToken"),
    (provider_token(issued_at=0), "ExpiredProviderToken"),
    (provider_token(issued_at=seconds_ago(-60)), None),
    (provider_token(issued_at=seconds_ago(-61)), "InvalidProviderToken"),
    (provider_token(issued_at=int(NOW.timestamp() * 1000)), "InvalidProviderToken"),
    (provider_token(issued_at=10**400), "InvalidProviderToken"),
    (provider_token(issued_at=NOW.timestamp()), "InvalidProviderToken"),
    (provider_token(claims={"iss": CREDENTIALS.team_id}), "InvalidProviderToken"),
    (provider_token(claims={"iss": CREDENTIALS.team_id, "iat": True}), "InvalidProviderToken"),
    (provider_token(claims={"iat": seconds_ago(0)}), "InvalidProviderToken"),
    (provider_token(claims={"iss": "ANOTHER123", "iat": seconds_ago(0)}), "InvalidProviderToken"),
    (provider_token(key_id="ANOTHER123"), "InvalidProviderToken"),
    (provider_token(STRANGER), "InvalidProviderToken"),
    (provider_token(ONE_APP, claims={"iss": CREDENTIALS.team_id, "iat": seconds_ago(0)}), "InvalidProviderToken"),
    (provider_token(ANOTHER_KEY), "InvalidProviderToken"),
    (provider_token(ANOTHER_KEY, issued_at=0), "InvalidProviderToken"),
    (provider_token(algorithm="HS256"), "InvalidProviderToken"),
    (signed_under_another_name("ES256"), None),
    (signed_under_another_name("ES384"), "InvalidProviderToken"),
    (signed_under_another_name("none"), "InvalidProviderToken"),
    (with_its_signature_cut(provider_token()), "InvalidProviderToken"),
    (with_a_longer_signature(provider_token()), "InvalidProviderToken"),
    (padded(provider_token()), "InvalidProviderToken"),
    ("not a token", "InvalidProviderToken"),
    ("a.b.c", "InvalidProviderToken"),
]


@pytest.mark.parametrize(("token", "reason"), PROVIDER_TOKENS)
def test_a_provider_token_is_signed_by_the_known_key_of_the_known_team_within_the_hour(
    token: str,
    reason: str | None,
) -> None:
    assert refusal(request(authorization=f"bearer {token}"), PROVIDER, NOW) == (reason and Reject(403, reason))


@settings(max_examples=100, deadline=None, database=None)
@given(
    path=st.text(),
    headers=st.lists(
        st.tuples(st.sampled_from(["authorization", "apns-topic", "apns-id", "apns-priority"]), st.text())
    ),
    body=st.binary(max_size=10),
)
def test_whatever_a_client_sends_gets_a_verdict(path: str, headers: list[tuple[str, str]], body: bytes) -> None:
    for sent in (
        request(path=path, body=body),
        replace(request(body=body), headers=tuple(headers)),
        request(authorization="bearer " + ".".join(value for _, value in headers)),
    ):
        refusal(sent, PROVIDER, NOW)


def test_only_a_410_has_a_timestamp() -> None:
    dead_since = datetime(2026, 3, 1, 12, 0, 0, 123_999, tzinfo=UTC)

    assert json.loads(Reject(410, "Unregistered", timestamp=dead_since).content()) == {
        "reason": "Unregistered",
        "timestamp": 1772366400123,
    }
    assert json.loads(Reject(410, "Unregistered").content()) == {"reason": "Unregistered"}
    with pytest.raises(ValueError, match="with 410 only"):
        Reject(400, "BadDeviceToken", timestamp=dead_since)
    with pytest.raises(ValueError, match="time zone"):
        Reject(410, "Unregistered", timestamp=dead_since.replace(tzinfo=None))


@pytest.fixture
def apns() -> Iterator[SimulatedApns]:
    with SimulatedApns(credentials=CREDENTIALS) as running:
        yield running


def trusting(apns: SimulatedApns, alpn: str = "h2") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(apns.ca_file))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default since Python 3.13
    context.set_alpn_protocols([alpn])
    return context


def client_of(apns: SimulatedApns) -> httpx.AsyncClient:
    return httpx.AsyncClient(http1=False, http2=True, verify=trusting(apns), base_url=apns.url, timeout=PATIENCE)


def headers_now(**changes: str) -> dict[str, str]:
    return good_headers(provider_token(issued_at=int(time.time())), **changes)


async def post(client: httpx.AsyncClient, token: str = TOKEN, **headers: str) -> httpx.Response:
    return await client.post(f"/3/device/{token}", headers=headers_now(**headers), content=b'{"aps":{}}')


def push_one_by_one(apns: SimulatedApns, *tokens: str, **headers: str) -> list[int | str]:
    """Push to each token over one client: the status of each answer, or the error's name where there was none."""

    async def run() -> list[int | str]:
        outcomes: list[int | str] = []
        async with client_of(apns) as client:
            for token in tokens:
                try:
                    outcomes.append((await post(client, token, **headers)).status_code)
                except httpx.TransportError as error:
                    outcomes.append(type(error).__name__)
        return outcomes

    return asyncio.run(run())


def test_an_accepted_push_is_answered_with_its_id_and_written_down(apns: SimulatedApns) -> None:
    async def run() -> httpx.Response:
        async with client_of(apns) as client:
            return await post(client, apns_id="0f0f0f0f-0000-4000-8000-000000000001")

    before = datetime.now(UTC)
    answer = asyncio.run(run())

    assert (answer.http_version, answer.status_code, answer.content) == ("HTTP/2", 200, b"")
    assert answer.headers["apns-id"] == "0f0f0f0f-0000-4000-8000-000000000001"
    assert "apns-unique-id" not in answer.headers
    [push] = apns.journal
    assert push.apns_id == "0f0f0f0f-0000-4000-8000-000000000001"
    assert push.token == TOKEN
    assert push.headers["authorization"].startswith("bearer ")
    assert push.headers["apns-topic"] == APP
    assert push.body == b'{"aps":{}}'
    assert (push.environment, push.connection, push.answer) == ("production", 1, Ok())
    assert before <= push.at <= datetime.now(UTC)


def test_a_push_without_an_id_gets_one(apns: SimulatedApns) -> None:
    async def run() -> httpx.Response:
        async with client_of(apns) as client:
            headers = headers_now()
            del headers["apns-id"]
            return await client.post(f"/3/device/{TOKEN}", headers=headers, content=b"{}")

    made = asyncio.run(run()).headers["apns-id"]

    assert str(uuid.UUID(made)) == made
    assert apns.journal[0].apns_id == made


def test_a_refusal_is_answered_in_the_words_of_apple(apns: SimulatedApns) -> None:
    async def run() -> list[httpx.Response]:
        async with client_of(apns) as client:
            unsigned = await client.post(f"/3/device/{TOKEN}", headers={"apns-topic": APP}, content=b"{}")
            return [unsigned, await client.get("/3/device/"), await post(client, apns_priority="7")]

    answers = asyncio.run(run())

    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (403, {"reason": "MissingProviderToken"}),
        (405, {"reason": "MethodNotAllowed"}),
        (400, {"reason": "BadPriority"}),
    ]
    assert [push.answer for push in apns.journal] == [
        Reject(403, "MissingProviderToken"),
        Reject(405, "MethodNotAllowed"),
        Reject(400, "BadPriority"),
    ]


def test_a_token_is_answered_as_told_and_the_last_answer_repeats(apns: SimulatedApns) -> None:
    apns.answer("C0" * 32, Reject(503, "Shutdown"), Reject(429, "TooManyRequests"), Ok())

    assert push_one_by_one(apns, *["c0" * 32] * 4, TOKEN) == [503, 429, 200, 200, 200]


def test_tokens_that_were_told_nothing_share_the_answers_told_to_all(apns: SimulatedApns) -> None:
    apns.answer_all(Reject(500, "InternalServerError"), Reject(503, "ServiceUnavailable"))
    apns.answer(TOKEN, Ok())

    assert push_one_by_one(apns, "aa", TOKEN, "bb", "cc") == [500, 200, 503, 503]


def test_a_push_that_breaks_a_rule_uses_up_no_told_answer(apns: SimulatedApns) -> None:
    apns.answer(TOKEN, Reject(410, "Unregistered"), Ok())

    assert push_one_by_one(apns, TOKEN, apns_priority="7") == [400]
    assert push_one_by_one(apns, TOKEN, TOKEN) == [410, 200]


def test_an_answer_can_be_told_for_before_the_rules(apns: SimulatedApns) -> None:
    apns.answer(TOKEN, Reject(503, "Shutdown"), before_checks=True)
    apns.answer_all(Ok(), before_checks=True)

    assert push_one_by_one(apns, TOKEN, "aa", "not hex", apns_priority="7") == [503, 200, 200]


def test_to_tell_no_answer_at_all_is_a_mistake(apns: SimulatedApns) -> None:
    with pytest.raises(ValueError, match="at least one answer"):
        apns.answer(TOKEN)


def test_a_token_registered_for_another_app_is_not_for_this_topic(apns: SimulatedApns) -> None:
    apns.register("C0" * 32, "com.example.other")
    apns.register(TOKEN, APP)

    assert push_one_by_one(apns, "c0" * 32, TOKEN) == [400, 200]
    assert apns.journal[0].answer == Reject(400, "DeviceTokenNotForTopic")


def test_a_delayed_answer_lets_others_overtake(apns: SimulatedApns) -> None:
    apns.answer("aa", Ok(after=A_LITTLE))
    arrived: list[str] = []

    async def run() -> None:
        async with client_of(apns) as client:
            await post(client, "cc")

            async def one(token: str) -> None:
                await post(client, token)
                arrived.append(token)

            await asyncio.gather(one("aa"), one("bb"))

    asyncio.run(run())

    assert arrived == ["bb", "aa"]
    assert apns.connections == 1


def test_a_body_beyond_the_windows_of_http2_arrives_whole(apns: SimulatedApns) -> None:
    huge = bytes(range(256)) * 2000
    apns.answer(TOKEN, Reject(503, "ServiceUnavailable", body=huge))

    with Http2Client(apns) as client:
        client.push(headers_now())
        client.until(h2.events.StreamEnded)
        received = b"".join(event.data for event in client.events if isinstance(event, h2.events.DataReceived))

    assert received == huge


def test_silence_is_a_push_received_and_never_answered(apns: SimulatedApns) -> None:
    apns.answer(TOKEN, Silence())

    async def run() -> None:
        async with client_of(apns) as client:
            unanswered = asyncio.create_task(post(client))
            await asyncio.to_thread(apns.wait_for_pushes, 1, PATIENCE)
            assert (await post(client, "bb")).status_code == 200
            assert not unanswered.done()
            unanswered.cancel()

    asyncio.run(run())

    assert [push.answer for push in apns.journal] == [Silence(), Ok()]


def test_a_reset_ends_the_stream_and_not_the_connection(apns: SimulatedApns) -> None:
    apns.answer(TOKEN, Reset(7), Ok())

    async def run() -> None:
        async with client_of(apns) as client:
            with pytest.raises(httpx.RemoteProtocolError, match="error_code:7"):
                await post(client)
            assert (await post(client)).status_code == 200

    asyncio.run(run())

    assert apns.connections == 1


@pytest.mark.parametrize("after", [0, A_LITTLE])
@pytest.mark.parametrize("received", [True, False])
def test_a_hangup_cuts_the_connection_and_says_whether_the_push_was_received(
    apns: SimulatedApns,
    received: bool,  # noqa: FBT001  (a parameter of the test)
    after: float,
) -> None:
    hangup = Hangup(received=received, after=after)
    apns.answer(TOKEN, hangup, Ok())

    [cut, then] = push_one_by_one(apns, TOKEN, TOKEN)

    assert isinstance(cut, str)
    assert then == 200
    assert [push.answer for push in apns.journal] == [hangup, Ok()][0 if received else 1 :]
    assert apns.connections == 2


def test_a_hangup_spares_what_came_before_and_takes_what_comes_after(apns: SimulatedApns) -> None:
    apns.answer("bb", Hangup())

    with Http2Client(apns) as client:
        for token in ("aa", "bb", "cc"):
            client.push(headers_now(), token, send=False)
        client.send()
        client.until_closed()

    assert client.answered() == [1]
    assert [push.token for push in apns.journal] == ["aa"]


def test_answers_that_are_due_after_their_client_has_left_disturb_nobody(
    apns: SimulatedApns,
    caplog: pytest.LogCaptureFixture,
) -> None:
    apns.answer("aa", Ok(after=A_LITTLE))
    with Http2Client(apns) as client:
        for _ in range(10):  # asyncio complains about writes to nowhere from the sixth on
            client.push(headers_now(), "aa")
        apns.wait_for_pushes(10, PATIENCE)

    apns.answer("bb", Ok(after=A_LITTLE))  # due after those above

    assert push_one_by_one(apns, "bb") == [200]
    assert caplog.records == []


def test_an_answer_to_a_stream_that_was_reset_disturbs_nobody(
    apns: SimulatedApns,
    caplog: pytest.LogCaptureFixture,
) -> None:
    apns.answer("aa", Ok(after=A_LITTLE))
    apns.answer("bb", Reject(503, "ServiceUnavailable", body=bytes(100_000)))
    apns.answer("cc", Ok(after=A_LITTLE))

    with Http2Client(apns) as client:
        client.engine.reset_stream(client.push(headers_now(), "aa"))
        halfway = client.push(headers_now(), "bb")
        while client.engine.remote_flow_control_window(halfway):
            client.receive(acknowledge=False)
        client.engine.increment_flow_control_window(1 << 16)
        client.engine.reset_stream(halfway)
        last = client.push(headers_now(), "cc")
        client.until(h2.events.StreamEnded)

    assert client.answered() == [halfway, last]
    assert caplog.records == []


def test_a_request_that_is_reset_in_the_same_breath_is_journalled_and_disturbs_nobody(apns: SimulatedApns) -> None:
    apns.answer("aa", Ok(), Reset(8))

    with Http2Client(apns) as client:
        for token in ("aa", "aa"):
            stream_id = client.push(headers_now(), token, send=False)
            client.engine.reset_stream(stream_id)
        client.push(headers_now(), "bb")
        client.until(h2.events.StreamEnded)

    assert [push.token for push in apns.journal] == ["aa", "aa", "bb"]
    assert apns.violations == []


def test_waiting_for_pushes_that_do_not_come_ends_with_a_count(apns: SimulatedApns) -> None:
    push_one_by_one(apns, TOKEN)

    apns.wait_for_pushes(1, 0)
    with pytest.raises(TimeoutError, match=r"^1 of 2 pushes reached the simulated APNs \(production\) within 0.01 s$"):
        apns.wait_for_pushes(2, 0.01)


def test_the_journal_is_a_snapshot_and_can_be_forgotten(apns: SimulatedApns) -> None:
    push_one_by_one(apns, TOKEN)
    snapshot = apns.journal
    apns.forget()

    assert len(snapshot) == 1
    assert apns.journal == []
    snapshot.clear()
    push_one_by_one(apns, TOKEN)
    assert len(apns.journal) == 1


def test_waiting_ends_with_the_push_and_not_with_the_timeout(apns: SimulatedApns) -> None:
    waiting = threading.Thread(target=apns.wait_for_pushes, args=(1, 3600), daemon=True)
    waiting.start()
    push_one_by_one(apns, TOKEN)

    waiting.join(PATIENCE)

    assert not waiting.is_alive()


def test_one_connection_takes_more_than_the_windows_of_http2(apns: SimulatedApns) -> None:
    async def run() -> list[int]:
        async with client_of(apns) as client:
            path = f"/3/device/{TOKEN}"
            return [
                (await client.post(path, headers=headers_now(), content=bytes(4096))).status_code for _ in range(40)
            ]

    assert asyncio.run(run()) == [200] * 40
    assert {push.body for push in apns.journal} == {bytes(4096)}
    assert apns.connections == 1


def test_the_bytes_of_a_header_in_no_known_encoding_are_counted(apns: SimulatedApns) -> None:
    async def run() -> list[int]:
        async with client_of(apns) as client:
            return [
                (
                    await client.post(
                        f"/3/device/{TOKEN}",
                        headers=[
                            (name.encode(), value.encode() if name != "apns-collapse-id" else b"\xe9" * length)
                            for name, value in headers_now().items()
                        ],
                        content=b"{}",
                    )
                ).status_code
                for length in (64, 65)
            ]

    assert asyncio.run(run()) == [200, 400]
    assert [push.answer for push in apns.journal] == [Ok(), Reject(400, "BadCollapseId")]


def test_many_connections_push_at_once(apns: SimulatedApns) -> None:
    async def one_client(number: int) -> list[int]:
        async with client_of(apns) as client:
            return [(await post(client, f"{number:02x}{n:02x}")).status_code for n in range(5)]

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(one_client(number) for number in range(20)))

    assert asyncio.run(run()) == [[200] * 5] * 20
    assert apns.connections == 20
    assert {push.connection for push in apns.journal} == set(range(1, 21))
    assert len({push.token for push in apns.journal}) == 100


def test_production_and_sandbox_run_side_by_side_with_one_key_and_one_root() -> None:
    authority = Authority.generate()
    with (
        SimulatedApns(credentials=CREDENTIALS, authority=authority) as production,
        SimulatedApns(credentials=CREDENTIALS, authority=authority, environment="sandbox") as sandbox,
    ):

        async def run() -> list[httpx.Response]:
            async with client_of(production) as client:
                path = f"/3/device/{TOKEN}"
                return [
                    await client.post(apns.url + path, headers=headers_now(), content=b"{}")
                    for apns in (production, sandbox)
                ]

        answers = asyncio.run(run())
        assert production.secret() == sandbox.secret()
        assert [push.environment for push in production.journal + sandbox.journal] == ["production", "sandbox"]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert ["apns-unique-id" in answer.headers for answer in answers] == [False, True]


def test_two_that_share_nothing_accept_neither_key_nor_root_of_the_other(apns: SimulatedApns) -> None:
    with SimulatedApns() as stranger:
        assert push_one_by_one(stranger, TOKEN) == [403]

        async def run() -> None:
            async with client_of(apns) as client:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.post(stranger.url)

        asyncio.run(run())
        assert stranger.connections == 1


def test_the_secret_is_all_that_a_provider_needs() -> None:
    with SimulatedApns(topics=frozenset({"org.example.b", "org.example.a"})) as apns:
        secret = apns.secret()
        assert set(secret) == {"team_id", "key_id", "private_key", "topic"}
        signed = jwt.encode(
            {"iss": secret["team_id"], "iat": int(time.time())},
            secret["private_key"],
            algorithm="ES256",
            headers={"kid": secret["key_id"]},
        )
        topic = secret["topic"]
        assert topic == "org.example.a"
        assert push_one_by_one(apns, TOKEN, authorization=f"bearer {signed}", apns_topic=topic) == [200]


def test_a_signing_key_is_not_in_the_text_of_its_object() -> None:
    assert "key=" not in repr(CREDENTIALS)


def test_another_process_reaches_it_as_localhost(apns: SimulatedApns) -> None:
    program = """
import json, sys, httpx, ssl
url, ca_file, headers = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with httpx.Client(http1=False, http2=True, verify=ssl.create_default_context(cafile=ca_file), timeout=20) as client:
    print(client.post(url, headers=headers, content=b"{}").status_code)
"""
    url = f"https://localhost:{apns.port}/3/device/{TOKEN}"
    arguments = [sys.executable, "-c", program, url, str(apns.ca_file), json.dumps(headers_now())]

    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=3 * PATIENCE, check=False)

    assert (ran.stdout, ran.stderr) == ("200\n", "")
    assert len(apns.journal) == 1


def test_a_client_that_does_not_offer_http2_is_shown_the_door(apns: SimulatedApns) -> None:
    with tls_connection(apns, alpn="http/1.1") as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_to_the_end(connection) == b""

    assert apns.connections == 0


def test_a_client_that_breaks_http2_is_told_so_and_noted(apns: SimulatedApns) -> None:
    with Http2Client(apns) as client:
        client.until(h2.events.SettingsAcknowledged)
        client.connection.sendall(bytes(9))  # a DATA frame on stream 0
        client.until(h2.events.ConnectionTerminated)
        client.until_closed()

    [violation] = apns.violations
    assert violation.startswith("connection 1: ProtocolError")


def test_a_client_that_says_goodbye_is_let_go_with_its_last_push_received(apns: SimulatedApns) -> None:
    with Http2Client(apns) as client:
        client.push(headers_now(), send=False)
        client.engine.close_connection()
        client.send()
        read_to_the_end(client.connection)

    assert len(apns.journal) == 1
    assert apns.violations == []


def test_connect_is_one_more_method_that_is_not_allowed(apns: SimulatedApns) -> None:
    with Http2Client(apns) as client:
        client.engine.send_headers(1, [(":method", "CONNECT"), (":authority", "localhost")], end_stream=True)
        client.send()
        client.until(h2.events.StreamEnded)

    assert [push.answer for push in apns.journal] == [Reject(405, "MethodNotAllowed")]


def test_a_client_that_does_not_speak_http2_is_noted(apns: SimulatedApns) -> None:
    with tls_connection(apns) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        read_to_the_end(connection)

    assert len(apns.violations) == 1


def test_the_number_of_streams_is_announced_and_enforced() -> None:
    with SimulatedApns(credentials=CREDENTIALS, max_concurrent_streams=2) as apns:
        apns.answer_all(Silence())
        with Http2Client(apns) as client:
            client.until(h2.events.RemoteSettingsChanged)
            assert client.engine.remote_settings.max_concurrent_streams == 2
            for token in ("aa", "bb"):
                client.push(headers_now(), token)
            apns.wait_for_pushes(2, PATIENCE)
            client.engine.remote_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS] = 3
            client.engine.remote_settings.acknowledge()
            client.push(headers_now(), "cc")
            client.until_closed()

        assert [push.token for push in apns.journal] == ["aa", "bb"]
        assert ["TooManyStreamsError" in violation for violation in apns.violations] == [True]


def test_a_connection_has_one_stream_until_a_valid_provider_token_was_seen_on_it() -> None:
    with SimulatedApns(credentials=CREDENTIALS, one_stream_until_authorized=True) as apns:
        apns.answer(TOKEN, Reject(410, "Unregistered"))
        with Http2Client(apns) as client:

            def streams() -> int:
                return client.engine.remote_settings.max_concurrent_streams

            client.until(h2.events.RemoteSettingsChanged)
            assert streams() == 1
            client.push(headers_now(authorization="bearer a.b.c"))
            client.until(h2.events.StreamEnded)
            assert streams() == 1
            client.push(headers_now())  # a valid token opens up, whatever becomes of the push
            client.until(h2.events.StreamEnded)
            assert streams() == 1000
            settings_frames = sum(isinstance(event, h2.events.RemoteSettingsChanged) for event in client.events)
            client.push(headers_now())
            client.until(h2.events.StreamEnded)
            assert settings_frames == 2
            assert sum(isinstance(event, h2.events.RemoteSettingsChanged) for event in client.events) == 2

        async def run() -> list[httpx.Response]:
            async with client_of(apns) as several:
                return await asyncio.gather(*(post(several, f"{n:02x}") for n in range(20)))

        assert [answer.status_code for answer in asyncio.run(run())] == [200] * 20
        assert apns.violations == []


def test_what_one_chunk_brings_is_answered_with_one_write(apns: SimulatedApns) -> None:
    with Http2Client(apns) as client:
        client.until(h2.events.SettingsAcknowledged)
        for n in range(10):
            client.push(headers_now(), f"{n:02x}", send=False)
        client.send()
        record = client.connection.recv(1 << 16)  # one TLS record is one write
        answers = [
            event for event in client.engine.receive_data(record) if isinstance(event, h2.events.ResponseReceived)
        ]

    assert len(answers) == 10


def signed(*, issued_at: int, key_id: str = "KEY", team_id: str = "TEAM") -> Signed:
    return Signed(key_id, team_id, issued_at)


def test_a_connection_takes_a_new_provider_token_of_a_key_only_twenty_minutes_after_the_one_before() -> None:
    memory = Memory()
    memory.note(signed(issued_at=5000), "")
    too_many = Reject(429, "TooManyProviderTokenUpdates")

    found = {
        seconds: memory.fault(signed(issued_at=5000 + seconds))
        for seconds in (-1800, 0, 1, RENEWAL_INTERVAL - 1, RENEWAL_INTERVAL)
    }

    assert found == {-1800: None, 0: None, 1: too_many, RENEWAL_INTERVAL - 1: too_many, RENEWAL_INTERVAL: None}
    assert memory.fault(signed(issued_at=5001, key_id="ANOTHER")) is None
    memory.note(signed(issued_at=5001), too_many.reason)  # refused, so not the one in use
    assert memory.fault(signed(issued_at=5000 + RENEWAL_INTERVAL)) is None
    memory.note(signed(issued_at=5000 + RENEWAL_INTERVAL), "Unregistered")
    assert memory.fault(signed(issued_at=5001 + RENEWAL_INTERVAL)) == too_many


def test_a_connection_takes_nothing_more_once_a_provider_token_has_expired_on_it() -> None:
    memory = Memory()
    memory.note(None, "ExpiredProviderToken")

    assert refusal(request(), PROVIDER, NOW, memory) == Reject(403, "ExpiredProviderToken")


def test_a_connection_is_one_teams() -> None:
    memory = Memory()
    memory.note(signed(issued_at=5000), "BadDeviceToken")

    assert memory.fault(signed(issued_at=5000, key_id="ANOTHER")) is None
    assert memory.fault(signed(issued_at=5000, team_id="ANOTHER")) == Reject(403, "InvalidProviderToken")


@pytest.mark.parametrize("reason", ["BadEnvironmentKeyInToken", "UnrelatedKeyIdInToken"])
def test_what_a_key_may_not_do_is_settled_for_the_connection(reason: str) -> None:
    memory = Memory()
    memory.note(signed(issued_at=5000), reason)

    assert memory.fault(signed(issued_at=5000)) == Reject(403, reason)
    assert memory.fault(signed(issued_at=5000, key_id="ANOTHER")) is None


@pytest.mark.parametrize("remembering", [True, False])
def test_a_connection_remembers_if_it_is_to(
    remembering: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    with SimulatedApns(credentials=CREDENTIALS, remembering=remembering) as apns:

        async def run() -> list[int]:
            now = int(time.time())
            async with client_of(apns) as client, client_of(apns) as another:
                return [
                    (
                        await which.post(
                            f"/3/device/{TOKEN}",
                            headers=good_headers(provider_token(issued_at=now - age)),
                            content=b"{}",
                        )
                    ).status_code
                    for which, age in (
                        (client, 1500),
                        (client, 1500),
                        (client, 1490),
                        (client, 1500),
                        (client, 290),
                        (client, 3700),
                        (client, 290),
                        (another, 290),
                    )
                ]

        assert asyncio.run(run()) == (
            [200, 200, 429, 200, 200, 403, 403, 200] if remembering else [200, 200, 200, 200, 200, 403, 200, 200]
        )


def test_a_key_that_is_revoked_is_known_no_more_and_another_can_be(apns: SimulatedApns) -> None:
    another, guest = Credentials.generate(), Credentials.generate()

    def push_with(credentials: Credentials) -> int | str:
        token = provider_token(credentials, issued_at=int(time.time()))
        [outcome] = push_one_by_one(apns, TOKEN, authorization=f"bearer {token}")
        return outcome

    assert [push_with(each) for each in (CREDENTIALS, another)] == [200, 403]
    apns.trust(another)
    apns.revoke()
    apns.trust(guest, environment="sandbox")
    assert [push_with(each) for each in (CREDENTIALS, another, guest)] == [403, 200, 403]
    apns.revoke(another)
    apns.trust(guest, topics=frozenset({"com.example.other"}))
    assert [push_with(each) for each in (another, guest)] == [403, 403]
    apns.trust(guest)
    assert push_with(guest) == 200
    assert [push.answer.reason if isinstance(push.answer, Reject) else "" for push in apns.journal] == [
        "",
        "InvalidProviderToken",
        "InvalidProviderToken",
        "",
        "BadEnvironmentKeyInToken",
        "InvalidProviderToken",
        "UnrelatedKeyIdInToken",
        "",
    ]


def test_a_token_registered_at_the_other_environment_is_a_bad_one(apns: SimulatedApns) -> None:
    apns.register("C0" * 32, environment="sandbox")
    apns.register(TOKEN, environment="production")

    assert push_one_by_one(apns, "c0" * 32, TOKEN) == [400, 200]
    assert apns.journal[0].answer == Reject(400, "BadDeviceToken")


@pytest.mark.parametrize(
    ("ahead", "status", "reason"),
    [
        (0, 200, None),
        (3500, 200, None),
        (3700, 403, "ExpiredProviderToken"),
        (-120, 403, "InvalidProviderToken"),
        (None, 200, None),
    ],
)
def test_its_clock_may_differ_and_then_its_answers_are_dated(
    ahead: float | None, status: int, reason: str | None
) -> None:
    with SimulatedApns(credentials=CREDENTIALS, ahead=ahead) as apns:

        async def run() -> httpx.Response:
            async with client_of(apns) as client:
                return await post(client)

        answer = asyncio.run(run())

        assert answer.status_code == status
        assert (answer.json()["reason"] if reason else None) == reason
        if ahead is None:
            assert "date" not in answer.headers
        else:
            date = parsedate_to_datetime(answer.headers["date"])
            assert abs((date - datetime.now(UTC)).total_seconds() - ahead) < PATIENCE
        assert abs((apns.journal[0].at - datetime.now(UTC)).total_seconds()) < PATIENCE, "the journal is dated by ours"


def test_an_acceptance_may_have_a_body(apns: SimulatedApns) -> None:
    apns.answer(TOKEN, Ok(body=b"as you wish"))

    async def run() -> httpx.Response:
        async with client_of(apns) as client:
            return await post(client)

    answer = asyncio.run(run())
    assert (answer.status_code, answer.content) == (200, b"as you wish")


def test_it_stops_at_once_whoever_is_still_connected() -> None:
    threads = threading.active_count()
    with SimulatedApns(credentials=CREDENTIALS) as apns:
        apns.answer_all(Silence())
        port, ca_file = apns.port, apns.ca_file
        mute_before_tls = socket.create_connection(("127.0.0.1", port))
        mute_after_tls = tls_socket(apns)
        unanswered = Http2Client(apns)
        unanswered.push(headers_now())
        delayed = Http2Client(apns)
        apns.answer("aa", Ok(after=3600))
        delayed.push(headers_now(), "aa")
        apns.wait_for_pushes(2, PATIENCE)

    assert threading.active_count() == threads
    assert not ca_file.parent.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for left in (mute_before_tls, mute_after_tls, unanswered.connection, delayed.connection):
        with left:
            left.settimeout(PATIENCE)
            read_to_the_end(left)
    gc.collect()  # a socket or a task that was left would warn here, and a warning is an error


def tls_socket(apns: SimulatedApns, alpn: str = "h2") -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", apns.port), timeout=PATIENCE)
    try:
        return trusting(apns, alpn).wrap_socket(raw, server_hostname="127.0.0.1")
    except BaseException:
        raw.close()
        raise


@contextmanager
def tls_connection(apns: SimulatedApns, alpn: str = "h2") -> Iterator[ssl.SSLSocket]:
    with tls_socket(apns, alpn) as connection:
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except (ConnectionError, ssl.SSLError):
        pass  # cut off: an end too
    return received


@dataclass(slots=True)
class Http2Client:
    """The protocol by hand, for what httpx hides."""

    apns: SimulatedApns
    engine: h2.connection.H2Connection = field(
        default_factory=lambda: h2.connection.H2Connection(h2.config.H2Configuration(client_side=True)),
    )
    events: list[h2.events.Event] = field(default_factory=list)
    connection: ssl.SSLSocket = field(init=False)

    def __post_init__(self) -> None:
        self.connection = tls_socket(self.apns)
        self.engine.initiate_connection()
        self.send()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self) -> None:
        self.connection.sendall(self.engine.data_to_send())

    def push(self, headers: dict[str, str], token: str = TOKEN, *, send: bool = True) -> int:
        stream_id = self.engine.get_next_available_stream_id()
        pseudo = {":method": "POST", ":scheme": "https", ":authority": "localhost", ":path": f"/3/device/{token}"}
        self.engine.send_headers(stream_id, list((pseudo | headers).items()))
        self.engine.send_data(stream_id, b"{}", end_stream=True)
        if send:
            self.send()
        return stream_id

    def receive(self, *, acknowledge: bool = True) -> list[h2.events.Event]:
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionError
        events = self.engine.receive_data(data)
        for event in events:
            if acknowledge and isinstance(event, h2.events.DataReceived):
                self.engine.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self.send()
        self.events += events
        return events

    def answered(self) -> list[int]:
        return [event.stream_id for event in self.events if isinstance(event, h2.events.ResponseReceived)]

    def until(self, kind: type[h2.events.Event]) -> None:
        while not any(isinstance(event, kind) for event in self.receive()):
            pass

    def until_closed(self) -> None:
        try:
            while True:
                self.receive()
        except (ConnectionError, ssl.SSLError):
            pass
