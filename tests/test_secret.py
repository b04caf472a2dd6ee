import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from moto import mock_aws

import core.secret
from core.secret import CachedSecret, SecretFault, SigningKey, Unconfigured, load_p256, parse, read, secrets_manager

P256 = ec.generate_private_key(ec.SECP256R1())


def pem(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey = P256,
    shape: PrivateFormat = PrivateFormat.PKCS8,
    encryption: KeySerializationEncryption | None = None,
) -> str:
    return key.private_bytes(Encoding.PEM, shape, encryption or NoEncryption()).decode()


KEY = SigningKey(team_id="TEAM123456", key_id="KEY1234567", private_key=pem().strip(), topic="com.example.app")
FIELDS = {"team_id": KEY.team_id, "key_id": KEY.key_id, "private_key": pem(), "topic": KEY.topic}
TEXT = json.dumps(FIELDS)


def fault(text: str) -> str:
    with pytest.raises(SecretFault) as caught:
        parse("apns/key", text)
    message = str(caught.value)
    assert message.startswith("the secret apns/key ")
    # However it is wrong, nothing of the value is said, nor carried along where a logger would print it.
    assert "MI" not in message
    assert "hunter2" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return message


def test_a_secret_is_a_json_object_of_four_fields() -> None:
    assert parse("apns/key", TEXT) == KEY


def test_fields_that_we_do_not_know_are_none_of_our_business() -> None:
    assert parse("apns/key", json.dumps(FIELDS | {"note": "rotated in May", "environment": ["both"]})) == KEY


@pytest.mark.parametrize("text", ["", " \n\t", "{}", " { } ", "\ufeff", "\ufeff{}"])
def test_a_secret_that_nobody_has_filled_in_is_a_decision_and_not_a_fault(text: str) -> None:
    found = parse("apns/key", text)

    assert isinstance(found, Unconfigured)
    assert "apns/key" in found.why


@pytest.mark.parametrize(
    "text",
    [
        "hunter2",
        "{'team_id': 'hunter2'}",
        '{"team_id": "\\hunter2"}',
        pytest.param(TEXT[:-1], id="cut off"),
        pytest.param(pem(), id="the key alone"),
        pytest.param("[" * 60_000, id="deeper than Python follows"),
    ],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    assert 'is not JSON: it must be {"team_id": "..."' in fault(text)


@pytest.mark.parametrize("text", ["null", "[]", '"hunter2"', "5", "[{}]", '""'])
def test_what_is_json_and_no_object_is_refused(text: str) -> None:
    assert "is not a JSON object: it must be" in fault(text)


def test_everything_that_is_missing_is_named_at_once() -> None:
    text = json.dumps({"team_id": " ", "key_id": 5, "private_key": None, "teamId": "hunter2"})

    assert "has no text in team_id, key_id, private_key, topic (" in fault(text)


def test_every_fault_is_named_at_once() -> None:
    text = json.dumps({"key_id": "KEY 1", "private_key": "hunter2", "topic": "com.example.app\n"})

    message = fault(text)

    assert "has no text in team_id (" in message
    assert "it has a blank, a control or a non-ASCII character in key_id" in message
    assert "it has a blank, a control or a non-ASCII character in topic" in message
    assert "it has a private_key that is not PEM" in message


@pytest.mark.parametrize("name", ["team_id", "key_id", "topic"])
@pytest.mark.parametrize(
    "value", ["hunter2 x", " hunter2", "hunter2\n", "hunt\x00er2", "hunt\u00e9r2", "hunter2\u00a0"]
)
def test_a_name_that_cannot_be_sent_is_refused(name: str, value: str) -> None:
    assert f"character in {name}: write it in one word" in fault(json.dumps(FIELDS | {name: value}))


def test_ids_need_not_look_like_apples() -> None:
    assert parse("apns/key", json.dumps(FIELDS | {"team_id": "demo", "key_id": "demo-1"})) == SigningKey(
        team_id="demo", key_id="demo-1", private_key=KEY.private_key, topic=KEY.topic
    )


@pytest.mark.parametrize(
    "pasted",
    [
        pytest.param(TEXT.replace("\\n", "\\\\n"), id="escaped twice"),
        pytest.param(TEXT.replace("\\n", "\\\\r\\\\n"), id="escaped twice, from Windows"),
        pytest.param(TEXT.replace("\\n", "\n"), id="line ends as they are"),
        pytest.param(TEXT.replace("\\n", "\\r\\n"), id="from Windows"),
        pytest.param("\ufeff" + TEXT, id="saved by Notepad"),
        pytest.param(TEXT.replace("\\n", ""), id="in one line"),
        pytest.param(TEXT.replace("-----BEGIN", "\\n  -----BEGIN"), id="indented"),
        pytest.param(json.dumps(FIELDS | {"private_key": pem(shape=PrivateFormat.TraditionalOpenSSL)}), id="SEC 1"),
    ],
)
def test_a_key_that_was_pasted_carelessly_is_still_the_key(pasted: str) -> None:
    found = parse("apns/key", pasted)

    assert isinstance(found, SigningKey)
    assert load_p256(found.private_key).private_numbers() == P256.private_numbers()


def public_pem() -> str:
    return P256.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.mark.parametrize(
    ("private_key", "words"),
    [
        pytest.param("hunter2", "is not PEM", id="a password"),
        pytest.param("".join(pem().splitlines()[1:-1]), "is not PEM", id="without its first and last line"),
        pytest.param(public_pem(), "is no private key but another kind of PEM", id="public"),
        pytest.param(pem(encryption=BestAvailableEncryption(b"hunter2")), "is encrypted", id="encrypted"),
        pytest.param(
            pem(shape=PrivateFormat.TraditionalOpenSSL, encryption=BestAvailableEncryption(b"hunter2")),
            "is encrypted",
            id="encrypted, SEC 1",
        ),
        pytest.param(pem()[:80], "is damaged", id="cut off"),
        pytest.param(pem().replace("MI", "IM", 1), "is damaged", id="altered"),
        pytest.param(pem().replace("MI", "\ud800", 1), "is damaged", id="not even Unicode"),
        pytest.param(
            pem(rsa.generate_private_key(65537, 2048)), "is not an elliptic-curve key (RSAPrivateKey)", id="RSA"
        ),
        pytest.param(pem(ed25519.Ed25519PrivateKey.generate()), "is not an elliptic-curve key", id="Ed25519"),
        pytest.param(pem(ec.generate_private_key(ec.SECP384R1())), "is on the curve secp384r1", id="P-384"),
        pytest.param(pem(ec.generate_private_key(ec.SECP256K1())), "is on the curve secp256k1", id="Bitcoin's"),
    ],
)
def test_a_key_that_cannot_sign_for_apple_is_refused(private_key: str, words: str) -> None:
    message = fault(json.dumps(FIELDS | {"private_key": private_key}))

    assert f"has a private_key that {words}" in message
    assert "put in the whole AuthKey_....p8 file" in message


def test_a_signing_key_can_be_logged() -> None:
    assert repr(KEY) == "SigningKey(team_id='TEAM123456', key_id='KEY1234567', topic='com.example.app')"


@dataclass
class Shelf:
    """A Secrets Manager with one secret, a clock, and a count of who asked."""

    text: str | SecretFault = TEXT
    now: float = 1_800_000_000.0
    asked: list[str] = field(default_factory=list)

    async def fetch(self, secret_id: str) -> str:
        self.asked.append(secret_id)
        if isinstance(self.text, SecretFault):
            raise self.text
        return self.text

    def secret(self) -> CachedSecret:
        return CachedSecret("apns/key", self.fetch, lambda: self.now)


ROTATED = json.dumps(FIELDS | {"key_id": "KEY7654321"})


def key_id(found: SigningKey | Unconfigured) -> str:
    assert isinstance(found, SigningKey)
    return found.key_id


def test_without_a_secret_nothing_is_asked() -> None:
    shelf = Shelf()

    assert asyncio.run(CachedSecret(None, shelf.fetch, lambda: shelf.now).get()) == Unconfigured(
        "APNS_SECRET_ID is not set"
    )
    assert shelf.asked == []


def test_a_rotation_is_picked_up_within_five_minutes_and_the_secret_not_read_before() -> None:
    shelf = Shelf()
    secret = shelf.secret()

    assert key_id(asyncio.run(secret.get())) == "KEY1234567"
    shelf.text = ROTATED
    shelf.now += 299.9
    assert key_id(asyncio.run(secret.get())) == "KEY1234567"
    assert shelf.asked == ["apns/key"]
    shelf.now += 0.1
    assert key_id(asyncio.run(secret.get())) == "KEY7654321"
    shelf.now += 299.9
    assert key_id(asyncio.run(secret.get())) == "KEY7654321"
    assert len(shelf.asked) == 2


def test_the_five_minutes_count_from_before_the_secret_was_asked_for() -> None:
    shelf = Shelf()

    async def slow(secret_id: str) -> str:
        text = await shelf.fetch(secret_id)
        shelf.now += 3
        return text

    secret = CachedSecret("apns/key", slow, lambda: shelf.now)
    asyncio.run(secret.get())
    shelf.now += 297
    asyncio.run(secret.get())

    assert len(shelf.asked) == 2


def test_a_clock_that_is_put_back_does_not_keep_the_key_for_longer() -> None:
    shelf = Shelf()
    secret = shelf.secret()

    asyncio.run(secret.get())
    shelf.now -= 3600
    shelf.text = ROTATED

    assert key_id(asyncio.run(secret.get())) == "KEY7654321"


def test_a_secret_that_has_just_been_filled_in_is_used_at_once() -> None:
    shelf = Shelf(text="{}")
    secret = shelf.secret()

    assert isinstance(asyncio.run(secret.get()), Unconfigured)
    shelf.text = TEXT
    assert key_id(asyncio.run(secret.get())) == "KEY1234567"
    shelf.now += 300
    shelf.text = ""
    assert isinstance(asyncio.run(secret.get()), Unconfigured)


def test_a_secret_that_could_never_be_read_is_a_fault_every_time_and_not_unconfigured() -> None:
    shelf = Shelf(text=SecretFault("no route"))
    secret = shelf.secret()

    for _ in range(2):
        with pytest.raises(SecretFault, match="no route"):
            asyncio.run(secret.get())
    shelf.text = "hunter2"
    with pytest.raises(SecretFault, match="is not JSON"):
        asyncio.run(secret.get())
    shelf.text = TEXT
    assert key_id(asyncio.run(secret.get())) == "KEY1234567"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(SecretFault("Secrets Manager is throttling the account"), "throttling", id="cannot be read"),
        pytest.param("hunter2", "is not JSON", id="is not JSON"),
        pytest.param(json.dumps(FIELDS | {"private_key": "hunter2"}), "is not PEM", id="has no key in it"),
    ],
)
def test_a_key_that_was_good_is_used_while_the_secret_is_not_and_that_is_not_kept_quiet(
    text: str | SecretFault, words: str
) -> None:
    shelf = Shelf()
    secret = shelf.secret()
    good = asyncio.run(secret.get())
    assert secret.fault is None

    shelf.text = text
    shelf.now += 300
    for asked in (2, 3):
        assert asyncio.run(secret.get()) == good
        assert words in str(secret.fault)
        assert len(shelf.asked) == asked  # each drain looks whether it has been mended
        shelf.now += 30

    shelf.text = ROTATED
    assert key_id(asyncio.run(secret.get())) == "KEY7654321"
    assert secret.fault is None


def test_an_old_key_is_good_for_as_long_as_the_secret_cannot_be_read() -> None:
    shelf = Shelf()
    secret = shelf.secret()
    good = asyncio.run(secret.get())

    shelf.text = SecretFault("no route")
    shelf.now += 86_400

    assert asyncio.run(secret.get()) == good


def test_a_secret_that_was_emptied_is_unconfigured_and_the_key_that_it_held_is_forgotten() -> None:
    shelf = Shelf()
    secret = shelf.secret()
    asyncio.run(secret.get())
    shelf.text = SecretFault("no route")
    shelf.now += 300
    asyncio.run(secret.get())

    shelf.text = "{}"
    assert isinstance(asyncio.run(secret.get()), Unconfigured)
    assert secret.fault is None
    shelf.text = SecretFault("no route")
    with pytest.raises(SecretFault, match="no route"):
        asyncio.run(secret.get())


def test_reading_again_does_not_lean_on_what_was_read() -> None:
    shelf = Shelf()
    secret = shelf.secret()
    asyncio.run(secret.get())

    shelf.text = ROTATED
    shelf.now += 1
    assert key_id(asyncio.run(secret.reread())) == "KEY7654321"
    assert len(shelf.asked) == 2

    shelf.now += 299.9
    assert key_id(asyncio.run(secret.get())) == "KEY7654321"  # and it is what is kept from now on
    assert len(shelf.asked) == 2
    shelf.now += 0.1
    asyncio.run(secret.get())
    assert len(shelf.asked) == 3


def test_reading_again_tells_of_a_fault_and_leaves_the_good_key_where_it_was() -> None:
    shelf = Shelf()
    secret = shelf.secret()
    good = asyncio.run(secret.get())

    shelf.text = "hunter2"
    with pytest.raises(SecretFault, match="is not JSON"):
        asyncio.run(secret.reread())

    assert asyncio.run(secret.get()) == good
    assert len(shelf.asked) == 2  # from the cache: it is fresh


def test_reading_again_without_a_secret_asks_nobody() -> None:
    shelf = Shelf()

    assert isinstance(asyncio.run(CachedSecret(None, shelf.fetch, lambda: shelf.now).reread()), Unconfigured)
    assert shelf.asked == []


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Work in an account of nobody's: no credentials, files or metadata service of this machine."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    return monkeypatch


def unreadable() -> str:
    with pytest.raises(SecretFault) as caught:
        asyncio.run(read("apns/key", secrets_manager()))
    assert str(caught.value).startswith("cannot read the secret apns/key: ")
    return str(caught.value)


def test_the_secret_comes_from_secrets_manager_by_name_or_arn(aws: pytest.MonkeyPatch) -> None:
    with mock_aws():
        arn = boto3.client("secretsmanager").create_secret(Name="apns/key", SecretString=TEXT)["ARN"]

        fetch = secrets_manager()
        assert asyncio.run(read("apns/key", fetch)) == KEY
        assert asyncio.run(read(arn, fetch)) == KEY


def test_a_rotated_secret_is_read_anew(aws: pytest.MonkeyPatch) -> None:
    with mock_aws():
        manager = boto3.client("secretsmanager")
        manager.create_secret(Name="apns/key", SecretString="{}")
        fetch = secrets_manager()

        assert asyncio.run(read("apns/key", fetch)) == Unconfigured("the secret apns/key is empty")
        manager.put_secret_value(SecretId="apns/key", SecretString=TEXT)
        assert asyncio.run(read("apns/key", fetch)) == KEY


def test_binary_that_is_text_is_read_as_text(aws: pytest.MonkeyPatch) -> None:
    with mock_aws():
        manager = boto3.client("secretsmanager")
        manager.create_secret(Name="apns/key", SecretBinary=TEXT.encode())
        manager.create_secret(Name="apns/der", SecretBinary=b"\x30\x81\xff")

        assert asyncio.run(read("apns/key", secrets_manager())) == KEY
        with pytest.raises(
            SecretFault, match="the secret apns/der is binary and not UTF-8 text: put its JSON in as text"
        ):
            asyncio.run(read("apns/der", secrets_manager()))


def test_a_secret_that_does_not_exist_is_a_fault(aws: pytest.MonkeyPatch) -> None:
    with mock_aws():
        assert "does not exist here or has no value; create it, or mend its id (APNS_SECRET_ID, DB" in unreadable()


def test_a_secret_that_was_made_without_a_value_is_a_fault(aws: pytest.MonkeyPatch) -> None:
    with mock_aws():
        boto3.client("secretsmanager").create_secret(Name="apns/key")

        assert "does not exist here or has no value" in unreadable()


def test_a_secret_that_is_marked_for_deletion_is_a_fault(aws: pytest.MonkeyPatch) -> None:
    with mock_aws():
        manager = boto3.client("secretsmanager")
        manager.create_secret(Name="apns/key", SecretString=TEXT)
        manager.delete_secret(SecretId="apns/key")

        assert "marked for deletion, restore it" in unreadable()


@contextmanager
def endpoint(aws: pytest.MonkeyPatch, respond: Callable[[BaseHTTPRequestHandler], object]) -> Iterator[list[str]]:
    """Serve what AWS_ENDPOINT_URL points at; the list is what was asked of it."""
    asked = []

    class Asked(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            respond(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        aws.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


def refusal(status: int, code: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(request: BaseHTTPRequestHandler) -> None:
        body = json.dumps({"__type": code, "Message": "said AWS"}).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return respond


@pytest.mark.parametrize(
    ("code", "mend"),
    [
        ("AccessDeniedException", "grant the function's role secretsmanager:GetSecretValue on it, and kms:Decrypt"),
        ("DecryptionFailure", "kms:Decrypt on the secret's KMS key"),
        ("ValidationException", "its id (APNS_SECRET_ID, DB_SECRET_ID) must be the name or the ARN"),
        ("InvalidParameterException", "its id (APNS_SECRET_ID, DB_SECRET_ID) must be the name or the ARN"),
        ("UnrecognizedClientException", "AWS does not accept our credentials"),
        ("InvalidSignatureException", "AWS does not accept our credentials"),
        ("ExpiredTokenException", "AWS does not accept our credentials"),
        ("SomethingNewException", "the next drain tries again"),
    ],
)
def test_what_aws_refuses_is_a_fault_with_its_mend(aws: pytest.MonkeyPatch, code: str, mend: str) -> None:
    with endpoint(aws, refusal(400, code)) as asked:
        message = unreadable()

    assert mend in message
    assert message.endswith(f"({code}: said AWS)")
    assert [json.loads(body) for body in asked] == [{"SecretId": "apns/key"}]


@pytest.mark.parametrize(("status", "code"), [(400, "ThrottlingException"), (500, "InternalServiceError")])
def test_aws_is_asked_once_more_and_then_left_to_the_next_drain(
    aws: pytest.MonkeyPatch, status: int, code: str
) -> None:
    with endpoint(aws, refusal(status, code)) as asked:
        message = unreadable()

    assert "the next drain tries again" in message
    assert len(asked) == 2


def test_an_endpoint_that_never_answers_is_given_up(aws: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    # Six seconds stand for the minute that botocore waits of its own accord.
    with endpoint(aws, lambda _: given_up.wait(6)) as asked:
        message = unreadable()
        given_up.set()

    assert "needs a NAT gateway or an interface endpoint" in message
    assert "Read timeout" in message
    assert len(asked) == 2


def test_a_network_that_swallows_every_packet_is_given_up(aws: pytest.MonkeyPatch) -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for queued in (first, second):  # from then on nobody is let in: the kernel drops who knocks
            queued.settimeout(0)
            queued.connect_ex(full.getsockname())
        aws.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{full.getsockname()[1]}")

        # After six seconds, which stand for botocore's minute, it is a refusal that is met and no more a silence.
        opened = threading.Timer(6, full.close)
        opened.start()

        message = unreadable()

        opened.cancel()
        opened.join()

    assert "needs a NAT gateway or an interface endpoint" in message
    assert "Connect timeout" in message


def test_an_endpoint_that_is_not_there_is_a_fault(aws: pytest.MonkeyPatch) -> None:
    with endpoint(aws, refusal(500, "unused")):
        pass  # its port is closed now

    assert "needs a NAT gateway or an interface endpoint for secretsmanager" in unreadable()


def test_an_endpoint_that_is_no_url_is_a_fault(aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_ENDPOINT_URL", "localhost:4566")

    assert "mend AWS_ENDPOINT_URL (Invalid endpoint: localhost:4566)" in unreadable()


def test_no_credentials_and_no_region_are_faults(aws: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        aws.delenv(name)
    assert "give the function a role" in unreadable()

    aws.delenv("AWS_DEFAULT_REGION")
    assert "set AWS_REGION" in unreadable()


def test_the_client_is_made_once(aws: pytest.MonkeyPatch) -> None:
    with mock_aws():
        manager = boto3.client("secretsmanager")
        manager.create_secret(Name="apns/key", SecretString=TEXT)
        fetch = secrets_manager()
        asyncio.run(read("apns/key", fetch))
        # A second client would be made in a region where the secret is not.
        aws.setenv("AWS_DEFAULT_REGION", "us-east-1")

        assert asyncio.run(read("apns/key", fetch)) == KEY


def test_a_drain_that_reads_no_secret_does_not_pay_for_the_sdk() -> None:
    program = "import sys, core.secret; core.secret.secrets_manager(); print('botocore' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(core.secret.__file__).parents[1],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert ran.stdout == "False\n", ran.stderr
