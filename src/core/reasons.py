"""Every reason APNs is known to give, in one table to be read beside Apple's.

Apple's page: "Handling notification responses from APNs", https://developer.apple.com/documentation/usernotifications
"""

from dataclasses import dataclass
from enum import Enum, auto

from core.answer import Rejected


class Blame(Enum):
    """Whose fault a rejection is. Everything else follows from that."""

    DEVICE = auto()  # its token is dead: this delivery ends, and so does the token
    NOTIFICATION = auto()  # this one is malformed, and asking again would not mend it
    PROVIDER = auto()  # we are wrong (key, topic, environment): nothing was judged of the delivery
    APNS = auto()  # it could not, just now: ask again


@dataclass(frozen=True, slots=True)
class Reason:
    """What one of Apple's words means."""

    status: int
    blame: Blame
    meaning: str


# fmt: off
REASONS: dict[str, Reason] = {
    "BadCollapseId":                Reason(400, Blame.NOTIFICATION, "the collapse id is longer than 64 bytes"),
    "BadDeviceToken":               Reason(400, Blame.DEVICE,       "the device token is invalid, or of the other environment"),
    "BadExpirationDate":            Reason(400, Blame.NOTIFICATION, "the expiration date is invalid"),
    "BadMessageId":                 Reason(400, Blame.NOTIFICATION, "the apns-id is invalid"),
    "BadPriority":                  Reason(400, Blame.NOTIFICATION, "the priority is invalid for this push type"),
    "BadTopic":                     Reason(400, Blame.PROVIDER,     "the topic is invalid; check the topic of the secret and of push_token"),
    "DeviceTokenNotForTopic":       Reason(400, Blame.DEVICE,       "the device token belongs to another topic"),
    "DuplicateHeaders":             Reason(400, Blame.NOTIFICATION, "a header was sent twice"),
    "IdleTimeout":                  Reason(400, Blame.APNS,         "the connection was idle for too long"),
    "InvalidPushType":              Reason(400, Blame.NOTIFICATION, "the push type is invalid"),
    "MissingDeviceToken":           Reason(400, Blame.NOTIFICATION, "the device token is missing"),
    "MissingTopic":                 Reason(400, Blame.PROVIDER,     "the topic is missing; set it in the secret"),
    "PayloadEmpty":                 Reason(400, Blame.NOTIFICATION, "the payload is empty"),
    "TopicDisallowed":              Reason(400, Blame.PROVIDER,     "pushing to this topic is not allowed; check that the key's team owns it"),
    "BadCertificate":               Reason(403, Blame.PROVIDER,     "the certificate is invalid"),
    "BadCertificateEnvironment":    Reason(403, Blame.PROVIDER,     "the certificate is for the other environment"),
    # Apple's page spells the next one with Id, the wire without.
    "BadEnvironmentKeyIdInToken":   Reason(403, Blame.PROVIDER,     "the signing key is not valid for this environment"),
    "BadEnvironmentKeyInToken":     Reason(403, Blame.PROVIDER,     "the signing key is not valid for this environment"),
    "ExpiredProviderToken":         Reason(403, Blame.PROVIDER,     "the provider token is stale; check this machine's clock"),
    "Forbidden":                    Reason(403, Blame.PROVIDER,     "the action is not allowed"),
    "InvalidProviderToken":         Reason(403, Blame.PROVIDER,     "the provider token is invalid; check team_id, key_id and private_key in the secret, and that the key is not revoked"),
    "MissingProviderToken":         Reason(403, Blame.PROVIDER,     "the provider token is missing"),
    "UnrelatedKeyIdInToken":        Reason(403, Blame.PROVIDER,     "the signing key is not related to this topic"),
    "BadPath":                      Reason(404, Blame.NOTIFICATION, "the request's path is invalid"),
    "MethodNotAllowed":             Reason(405, Blame.NOTIFICATION, "the request's method is not POST"),
    "ExpiredToken":                 Reason(410, Blame.DEVICE,       "the device token has expired"),
    "Unregistered":                 Reason(410, Blame.DEVICE,       "the device token is no longer active for the topic"),
    "PayloadTooLarge":              Reason(413, Blame.NOTIFICATION, "the payload is too large"),
    "TooManyProviderTokenUpdates":  Reason(429, Blame.PROVIDER,     "the provider token is renewed more often than every 20 minutes"),
    "TooManyRequests":              Reason(429, Blame.APNS,         "too many pushes to this device in a short time"),
    "InternalServerError":          Reason(500, Blame.APNS,         "APNs has an internal error"),
    "ServiceUnavailable":           Reason(503, Blame.APNS,         "APNs is unavailable"),
    "Shutdown":                     Reason(503, Blame.APNS,         "APNs is shutting down"),
}
# fmt: on


def blame(rejected: Rejected) -> Blame:
    """Whom a rejection blames; a reason that is not in the table is judged by its status."""
    if known := REASONS.get(rejected.reason):
        return known.blame
    if rejected.status == 403:
        return Blame.PROVIDER
    if rejected.status == 410:
        return Blame.DEVICE
    if rejected.status in (400, 404, 405, 413):
        return Blame.NOTIFICATION
    return Blame.APNS  # 429, 5xx, and what is no answer of APNs' at all: nothing that an attempt too many could harm


def blames_the_topic(rejected: Rejected) -> bool:
    """Whether a provider's fault is one of the topic alone: then the environment's other topics go on."""
    return rejected.reason in {"BadTopic", "MissingTopic", "TopicDisallowed"}


def describe(rejected: Rejected) -> str:
    """Say it in a sentence for people."""
    if known := REASONS.get(rejected.reason):
        return f"APNs answered {rejected.status} {rejected.reason}: {known.meaning}."
    return f"APNs answered {rejected.status} {rejected.reason}, which this version does not know."
