"""What Apple checks of a push before it looks for the device: a pure function over a parsed request.

Apple documents the rules and not their order; ours goes from the outside in (request line, provider, topic, headers,
payload). Where Apple's behaviour is not documented either, a comment says what we assume.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from devtools.simulated_apns.answers import Reject

type Environment = Literal["production", "sandbox"]

TOPIC_SUFFIX = {
    "alert": "",
    "background": "",
    "complication": ".complication",
    "controls": ".push-type.controls",
    "fileprovider": ".pushkit.fileprovider",
    "liveactivity": ".push-type.liveactivity",
    "location": ".location-query",
    "mdm": "",  # the topic is the UID of an MDM certificate: here one more known topic
    "pushtotalk": ".voip-ptt",
    "voip": ".voip",
    "widgets": ".push-type.widgets",
}
PROVIDER_TOKEN_LIFETIME = 3600  # seconds, Apple's
RENEWAL_INTERVAL = 20 * 60  # seconds, Apple's
CLOCK_SKEW = 60  # seconds; Apple names no number for a provider's clock that runs ahead

_DEVICE_PATH = re.compile(r"/3/device(?:/([^/]*))?")
_DEVICE_TOKEN = re.compile(r"(?:[0-9a-fA-F]{2})+")  # of any length: Apple forbids to assume one
_JWT = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_CANONICAL_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_EPOCH_SECONDS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()  # without the pseudo headers, in the order of the wire
    body: bytes = field(default=b"", repr=False)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def device_token(self) -> str:
        """What stands where the token belongs; empty where nothing does."""
        match = _DEVICE_PATH.fullmatch(self.path)
        return (match[1] or "") if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A signing key that Apple has issued, and what it is good for: None is everything."""

    team_id: str
    public_key: ec.EllipticCurvePublicKey
    topics: frozenset[str] | None = None
    environment: Environment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What Apple knows of those that push."""

    keys: Mapping[str, Key]  # by their ids
    topics: frozenset[str]
    environment: Environment = "production"
    # The bundle id and the environment that a device token is registered for, where known; tokens in lower case.
    topic_of_token: Mapping[str, str] = field(default_factory=dict)
    environment_of_token: Mapping[str, Environment] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signed:
    """A provider token whose signature and date are good."""

    key_id: str
    team_id: str
    issued_at: int


@dataclass(slots=True)
class Memory:
    """What Apple remembers of one connection."""

    team_id: str | None = None  # it belongs to the team that first pushed on it
    issued_at: dict[str, int] = field(default_factory=dict)  # by key id, of the provider token in use
    expired: bool = False
    # What a key may not do, by its id. If it may by now, it still may not here: that was settled at the first push.
    unfit: dict[str, str] = field(default_factory=dict)

    def fault(self, signed: Signed) -> Reject | None:
        """Find what speaks against a provider token that would be good on a new connection."""
        if self.expired:  # whatever comes after an expired one: seen in the wild, documented nowhere
            return Reject(403, "ExpiredProviderToken")
        if self.team_id not in (None, signed.team_id):
            return Reject(403, "InvalidProviderToken")
        if 0 < signed.issued_at - self.issued_at.get(signed.key_id, signed.issued_at) < RENEWAL_INTERVAL:
            return Reject(429, "TooManyProviderTokenUpdates")
        if unfit := self.unfit.get(signed.key_id):
            return Reject(403, unfit)
        return None

    def note(self, signed: Signed | None, reason: str) -> None:
        """Remember a push by its provider token, if that was good, and by the reason of its refusal, if it was."""
        self.expired = self.expired or reason == "ExpiredProviderToken"
        if signed is None or self.fault(signed):
            return
        self.team_id = signed.team_id
        self.issued_at[signed.key_id] = signed.issued_at
        if reason in ("BadEnvironmentKeyInToken", "UnrelatedKeyIdInToken"):
            self.unfit[signed.key_id] = reason


def refusal(request: Request, provider: Provider, now: datetime, memory: Memory | None = None) -> Reject | None:
    """Find the first rule that the push breaks, if any."""
    checks = _checks(request, provider, now, memory or Memory())
    return next((Reject(status, reason) for status, reason, broken in checks if broken), None)


def _checks(request: Request, provider: Provider, now: datetime, memory: Memory) -> Iterator[tuple[int, str, bool]]:
    """(status, reason, whether the push breaks it). Lazy: each check may lean on all before it having passed."""
    yield 405, "MethodNotAllowed", request.method != "POST"

    token = request.device_token
    yield 404, "BadPath", not _DEVICE_PATH.fullmatch(request.path)
    yield 400, "MissingDeviceToken", not token
    yield 400, "BadDeviceToken", not _DEVICE_TOKEN.fullmatch(token)

    ours = [name for name, _ in request.headers if name.startswith("apns-") or name == "authorization"]
    yield 400, "DuplicateHeaders", len(set(ours)) < len(ours)

    headers = dict(request.headers)
    signed = verified(headers.get("authorization"), provider, now)
    if isinstance(signed, str):
        yield 403, signed, True
        return
    if fault := memory.fault(signed):
        yield fault.status, fault.reason, True
    key = provider.keys[signed.key_id]
    # As the wire spells it, not as Apple's page does.
    yield 403, "BadEnvironmentKeyInToken", key.environment not in (None, provider.environment)

    # Apple requires the type for watchOS only, and does not say what a push without one is: an alert, we assume.
    push_type = headers.get("apns-push-type", "alert")
    topic = headers.get("apns-topic", "")
    yield 400, "MissingTopic", not topic
    yield 400, "InvalidPushType", push_type not in TOPIC_SUFFIX
    fits = {known + TOPIC_SUFFIX[push_type] for known in provider.topics}
    fits_another_type = {known + suffix for known in provider.topics for suffix in TOPIC_SUFFIX.values()} - fits
    yield 400, "BadTopic", topic in fits_another_type
    yield 400, "TopicDisallowed", topic not in fits
    bundle_id = topic.removesuffix(TOPIC_SUFFIX[push_type])
    yield 403, "UnrelatedKeyIdInToken", key.topics is not None and bundle_id not in key.topics
    registered_at = provider.environment_of_token.get(token.lower(), provider.environment)
    yield 400, "BadDeviceToken", registered_at != provider.environment
    yield 400, "DeviceTokenNotForTopic", provider.topic_of_token.get(token.lower(), bundle_id) != bundle_id

    priority = headers.get("apns-priority", "10")  # Apple's default, and so an error for a background push
    yield 400, "BadPriority", priority not in ({"5"} if push_type == "background" else {"1", "5", "10"})

    collapse_id = headers.get("apns-collapse-id", "")
    yield 400, "BadCollapseId", len(collapse_id.encode("utf-8", "surrogateescape")) > 64

    apns_id = headers.get("apns-id")
    yield 400, "BadMessageId", apns_id is not None and not is_canonical_uuid(apns_id)

    expiration = headers.get("apns-expiration")
    yield 400, "BadExpirationDate", expiration is not None and not _EPOCH_SECONDS.fullmatch(expiration)

    # What Apple answers to a body that is no JSON object is not documented (no reason of its list says so): accepted
    # here, and the journal shows the bytes.
    yield 400, "PayloadEmpty", not request.body
    yield 413, "PayloadTooLarge", len(request.body) > (5120 if push_type == "voip" else 4096)


def is_canonical_uuid(text: str) -> bool:
    return _CANONICAL_UUID.fullmatch(text) is not None


def verified(authorization: str | None, provider: Provider, now: datetime) -> Signed | str:
    """Read the provider token, or give Apple's reason to refuse it. Verified without a JWT library, so that a fault of
    the library that signs cannot excuse itself.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        return "MissingProviderToken"
    key_id, claims = _verified_claims(token, provider.keys)
    match claims:
        case {"iss": str(team_id), "iat": int(issued_at)} if not isinstance(issued_at, bool):
            age = int(now.timestamp()) - issued_at
        case _:
            return "InvalidProviderToken"
    if team_id != provider.keys[key_id].team_id:
        return "InvalidProviderToken"
    if age > PROVIDER_TOKEN_LIFETIME:
        return "ExpiredProviderToken"
    return "InvalidProviderToken" if age < -CLOCK_SKEW else Signed(key_id, team_id, issued_at)


def _verified_claims(token: str, keys: Mapping[str, Key]) -> tuple[str, object]:
    parts = _JWT.fullmatch(token)
    if parts is None:
        return "", None
    try:
        header, claims, signature = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts.groups())
        match json.loads(header):
            case {"alg": "ES256", "kid": str(key_id)} if len(signature) == 64 and key_id in keys:
                der = encode_dss_signature(int.from_bytes(signature[:32]), int.from_bytes(signature[32:]))
                signed = token.rpartition(".")[0].encode()
                keys[key_id].public_key.verify(der, signed, ec.ECDSA(hashes.SHA256()))
                return key_id, json.loads(claims)
            case _:
                return "", None
    except (ValueError, RecursionError, InvalidSignature):
        return "", None
