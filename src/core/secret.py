"""What Secrets Manager holds: the key that signs our provider tokens, and whose it is."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

# How long a key is used before the secret is looked at again: a rotation is picked up within five minutes, at the
# price of one call to Secrets Manager in ten drains.
KEEP_SECONDS = 300

# They end up in a JWT and in a header. Apple's ids are ten of A-Z0-9, but that is Apple's to judge.
_ONE_WORD = re.compile(r"[!-~]+")


class SecretFault(Exception):  # noqa: N818  the name says what is so; an "Error" behind it would say nothing more
    """The secret cannot be read, or is not what it should be. Says what to mend, never what the secret holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    team_id: str
    key_id: str
    private_key: str = field(repr=False)
    topic: str


@dataclass(frozen=True, slots=True)
class Unconfigured:
    """Nobody has set APNs up. A decision, and not a fault: what is due is skipped."""

    why: str


type Fetch = Callable[[str], Awaitable[str]]


class CachedSecret:
    """The secret as it was read at most five minutes ago; or, while it cannot be read, the last key that it held.

    The clock is the wall's: the monotonic one may stand still while Lambda has us frozen.
    """

    def __init__(self, secret_id: str | None, fetch: Fetch, clock: Callable[[], float]) -> None:
        self._secret_id, self._fetch, self._clock = secret_id, fetch, clock
        self._last: tuple[float, SigningKey] | None = None
        self.fault: SecretFault | None = None  # why the key that `get` gave is not fresh

    async def get(self) -> SigningKey | Unconfigured:
        now = self._clock()
        if self._last is not None:
            read_at, key = self._last
            # Not below zero either: a wall clock that was put back must not keep the key for longer.
            if 0 <= now - read_at < KEEP_SECONDS:
                return key
        try:
            return await self.reread()
        except SecretFault as fault:
            # A key that was good until now is not made bad by a throttled call, or by a slip in the new one.
            if self._last is None:
                raise
            self.fault = fault
            return self._last[1]

    async def reread(self) -> SigningKey | Unconfigured:
        """Read it again, however fresh the last reading is: APNs may know better."""
        if self._secret_id is None:
            return Unconfigured("APNS_SECRET_ID is not set")
        now = self._clock()  # before the call, since the value may be as old as that
        found = await read(self._secret_id, self._fetch)
        # "Unconfigured" is not kept: it makes rows skipped for good, and whoever has just filled the secret in
        # expects the next notification to arrive.
        self._last, self.fault = (now, found) if isinstance(found, SigningKey) else None, None
        return found


async def read(secret_id: str, fetch: Fetch) -> SigningKey | Unconfigured:
    return parse(secret_id, await fetch(secret_id))


def parse(secret_id: str, text: str) -> SigningKey | Unconfigured:
    text = text.removeprefix("\ufeff")  # the mark that Windows editors put first
    if not text.strip():
        return Unconfigured(f"the secret {secret_id} is blank")
    try:
        # Not strict: who pastes a .p8 file between two quotes leaves its line ends as they are, and it is plain
        # what was meant.
        holds = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        # From None: the JSON error carries the whole text.
        raise SecretFault(f"the secret {secret_id} is not JSON: {_EXPECTED}") from None
    if not isinstance(holds, dict):
        raise SecretFault(f"the secret {secret_id} is not a JSON object: {_EXPECTED}")
    if not holds:
        return Unconfigured(f"the secret {secret_id} is empty")
    return _signing_key(secret_id, holds)


_EXPECTED = 'it must be {"team_id": "...", "key_id": "...", "private_key": "...", "topic": "..."}'


def _signing_key(secret_id: str, holds: dict[str, Any]) -> SigningKey:
    wanted = ("team_id", "key_id", "private_key", "topic")
    fields = {name: value for name in wanted if isinstance(value := holds.get(name), str) and value.strip()}
    faults = []
    if missing := [name for name in wanted if name not in fields]:
        faults.append(f"has no text in {', '.join(missing)} ({_EXPECTED})")
    faults += [
        f"has a blank, a control or a non-ASCII character in {name}: write it in one word"
        for name, value in fields.items()
        if name != "private_key" and not _ONE_WORD.fullmatch(value)
    ]
    if "private_key" in fields:
        # A \n that was escaped once too often. No PEM holds a backslash of its own.
        fields["private_key"] = fields["private_key"].replace("\\r", "").replace("\\n", "\n").strip()
        try:
            load_p256(fields["private_key"])
        except ValueError as error:
            faults.append(f"has a private_key that {error}")
    if faults:
        raise SecretFault(f"the secret {secret_id} {'; it '.join(faults)}")
    return SigningKey(**fields)


def load_p256(pem: str) -> EllipticCurvePrivateKey:
    """Load the one kind of key that Apple issues and ES256 takes. All else: a ValueError that ends a sentence."""
    mend = "put in the whole AuthKey_....p8 file that Apple issued"
    if "-----BEGIN " not in pem:
        raise ValueError(f"is not PEM: {mend}, with its BEGIN and END lines")
    if "PRIVATE KEY-----" not in pem:
        raise ValueError(f"is no private key but another kind of PEM: {mend}")
    try:
        key = load_pem_private_key(pem.encode(), password=None)
    except TypeError:
        raise ValueError(f"is encrypted: {mend}, which needs no password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError(f"is damaged, or of a kind unknown to us: {mend}") from None
    match key:
        case EllipticCurvePrivateKey(curve=SECP256R1()):
            return key
        case EllipticCurvePrivateKey(curve=other):
            raise ValueError(f"is on the curve {other.name}, and ES256 needs P-256: {mend}")
        case _:
            raise ValueError(f"is not an elliptic-curve key ({type(key).__name__}): {mend}")


def secrets_manager() -> Fetch:
    """Fetch from AWS, with a client that is made on the first call and then kept."""

    @cache
    def client() -> Any:  # noqa: ANN401  botocore makes its clients' classes as it runs
        # Here and not above: 100 ms of a cold start that has no secret to read. botocore and not boto3: 100 ms more.
        from botocore.config import Config
        from botocore.session import get_session

        return get_session().create_client(
            "secretsmanager",
            # botocore's own minute of patience, tried five times, outlasts the function. This is over after 5 s.
            config=Config(connect_timeout=1, read_timeout=2, retries={"total_max_attempts": 2}),
        )

    def get(secret_id: str) -> str:
        from botocore.exceptions import BotoCoreError, ClientError  # as above

        try:
            answer = client().get_secret_value(SecretId=secret_id)
        except ClientError as error:
            code, words = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
            raise SecretFault(
                f"cannot read the secret {secret_id}: {_REFUSED.get(code, _TRY_AGAIN)} ({code}: {words})"
            ) from error
        except BotoCoreError as error:
            raise SecretFault(f"cannot read the secret {secret_id}: {_no_answer(error)} ({error})") from error
        except ValueError as error:  # botocore's for an endpoint that is no URL
            raise SecretFault(f"cannot read the secret {secret_id}: mend AWS_ENDPOINT_URL ({error})") from error
        return _text(secret_id, answer)

    async def fetch(secret_id: str) -> str:
        return await asyncio.to_thread(get, secret_id)  # botocore blocks

    return fetch


def _text(secret_id: str, answer: dict[str, Any]) -> str:
    """Read a SecretString, which is what the console writes, or a SecretBinary of the same text: as good."""
    if "SecretString" in answer:
        return str(answer["SecretString"])
    try:
        return bytes(answer["SecretBinary"]).decode()
    except UnicodeDecodeError:
        raise SecretFault(f"the secret {secret_id} is binary and not UTF-8 text: put its JSON in as text") from None


_CREDENTIALS = "AWS does not accept our credentials; mend them, or the machine's clock"
_NO_ID = "its id (APNS_SECRET_ID, DB_SECRET_ID) must be the name or the ARN of a secret"
_TRY_AGAIN = "the next drain tries again; if it stays so, mend what AWS says"

# What to mend when AWS says no, by its code.
_REFUSED = {
    "ResourceNotFoundException": (
        "it does not exist here or has no value; create it, or mend its id (APNS_SECRET_ID, DB_SECRET_ID) or the region"
    ),
    "AccessDeniedException": (
        "grant the function's role secretsmanager:GetSecretValue on it, and kms:Decrypt on its KMS key if it has one"
    ),
    "DecryptionFailure": (
        "grant the function's role kms:Decrypt on the secret's KMS key, and see that the key is enabled"
    ),
    "InvalidRequestException": "it is in no state to be read; if it is marked for deletion, restore it",
    "InvalidParameterException": _NO_ID,
    "ValidationException": _NO_ID,
    "UnrecognizedClientException": _CREDENTIALS,
    "InvalidSignatureException": _CREDENTIALS,
    "ExpiredTokenException": _CREDENTIALS,
    "ThrottlingException": "Secrets Manager is throttling the account; the next drain tries again",
}


def _no_answer(error: Exception) -> str:
    """Say what to mend when we could not ask."""
    from botocore import exceptions as aws  # as above

    match error:
        case aws.NoCredentialsError() | aws.PartialCredentialsError() | aws.CredentialRetrievalError():
            return "there are no AWS credentials; give the function a role (or set AWS_ACCESS_KEY_ID and its kin)"
        case aws.NoRegionError():
            return "no AWS region is known; set AWS_REGION or AWS_DEFAULT_REGION"
        case aws.HTTPClientError() | aws.ConnectionError():
            return (
                "Secrets Manager was not reached; a function in a VPC needs a NAT gateway or an interface endpoint"
                " for secretsmanager, and AWS_ENDPOINT_URL must be right where it is set"
            )
        case _:
            return "mend what botocore says"
