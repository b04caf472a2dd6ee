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

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from devtools.simulated_apns.answers import Reject

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
class Provider:
    """What Apple knows of the one that pushes."""

    team_id: str
    key_id: str
    public_key: ec.EllipticCurvePublicKey
    topics: frozenset[str]
    # The bundle id that a device token is registered for, where that is known; tokens in lower case.
    topic_of_token: Mapping[str, str] = field(default_factory=dict)


def refusal(request: Request, provider: Provider, now: datetime) -> Reject | None:
    """Find the first rule that the push breaks, if any."""
    return next((Reject(status, reason) for status, reason, broken in _checks(request, provider, now) if broken), None)


def _checks(request: Request, provider: Provider, now: datetime) -> Iterator[tuple[int, str, bool]]:
    """(status, reason, whether the push breaks it). Lazy: each check may lean on all before it having passed."""
    yield 405, "MethodNotAllowed", request.method != "POST"

    token = request.device_token
    yield 404, "BadPath", not _DEVICE_PATH.fullmatch(request.path)
    yield 400, "MissingDeviceToken", not token
    yield 400, "BadDeviceToken", not _DEVICE_TOKEN.fullmatch(token)

    ours = [name for name, _ in request.headers if name.startswith("apns-") or name == "authorization"]
    yield 400, "DuplicateHeaders", len(set(ours)) < len(ours)

    headers = dict(request.headers)
    fault = provider_token_fault(headers.get("authorization"), provider, now)
    yield 403, str(fault), fault is not None

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


def provider_token_fault(authorization: str | None, provider: Provider, now: datetime) -> str | None:
    """Apple's reason to refuse the provider token, if any. Verified without a JWT library, so that a fault of the
    library that signs cannot excuse itself.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        return "MissingProviderToken"
    match _verified_claims(token, provider):
        case {"iss": provider.team_id, "iat": int(issued_at)} if not isinstance(issued_at, bool):
            age = int(now.timestamp()) - issued_at
        case _:
            return "InvalidProviderToken"
    if age > PROVIDER_TOKEN_LIFETIME:
        return "ExpiredProviderToken"
    return "InvalidProviderToken" if age < -CLOCK_SKEW else None


def _verified_claims(token: str, provider: Provider) -> object:
    parts = _JWT.fullmatch(token)
    if parts is None:
        return None
    try:
        header, claims, signature = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts.groups())
        match json.loads(header):
            case {"alg": "ES256", "kid": provider.key_id} if len(signature) == 64:
                der = encode_dss_signature(int.from_bytes(signature[:32]), int.from_bytes(signature[32:]))
                provider.public_key.verify(der, token.rpartition(".")[0].encode(), ec.ECDSA(hashes.SHA256()))
                return json.loads(claims)
            case _:
                return None
    except (ValueError, RecursionError, InvalidSignature):
        return None
