"""Every reason APNs is known to give, in one table to be read beside Apple's.

Apple's page: "Handling notification responses from APNs", https://developer.apple.com/documentation/usernotifications
"""

from dataclasses import dataclass
from enum import Enum

from core.answer import Rejected


class Blame(Enum):
    """Whose fault a rejection is. Everything else follows from that; the value says what."""

    DEVICE = "ends as `invalid_token`, and the token is invalidated"
    NOTIFICATION = "ends as `failed`: asking again would not mend it"
    PROVIDER = "withheld: nothing was judged of it, the attempt is given back, its group pauses"
    APNS = "retried while it has attempts; of an APNs that answers nobody: withheld"


@dataclass(frozen=True, slots=True)
class Reason:
    """What one of Apple's words means, and what is special about it where that is not plain."""

    status: int
    blame: Blame
    meaning: str
    note: str = ""


_REFUSED_ROWS = "Five rows of a drain refused for this reason and none accepted: it is our bug, all are withheld."
_REFUSED_TOKENS = (
    "Only if it is alone: it is also what every token earns in the wrong environment or topic. Five tokens of one topic"
    " refused and none accepted: withheld, nothing is invalidated."
)
_SINCE = "Unless the device registered after the instant that comes with it: then it is alive, and the row is retried."

# fmt: off
REASONS: dict[str, Reason] = {
    "BadCollapseId":                Reason(400, Blame.NOTIFICATION, "the collapse id is longer than 64 bytes", _REFUSED_ROWS),
    "BadDeviceToken":               Reason(400, Blame.DEVICE,       "the device token is invalid, or of the other environment", _REFUSED_TOKENS),
    "BadExpirationDate":            Reason(400, Blame.NOTIFICATION, "the expiration date is invalid", _REFUSED_ROWS),
    "BadMessageId":                 Reason(400, Blame.NOTIFICATION, "the apns-id is invalid", _REFUSED_ROWS),
    "BadPriority":                  Reason(400, Blame.NOTIFICATION, "the priority is invalid for this push type", _REFUSED_ROWS),
    "BadTopic":                     Reason(400, Blame.PROVIDER,     "the topic is invalid; check the topic of the secret and of push_token", "Its topic alone pauses."),
    "DeviceTokenNotForTopic":       Reason(400, Blame.DEVICE,       "the device token belongs to another topic", _REFUSED_TOKENS),
    "DuplicateHeaders":             Reason(400, Blame.NOTIFICATION, "a header was sent twice", _REFUSED_ROWS),
    "IdleTimeout":                  Reason(400, Blame.APNS,         "the connection was idle for too long", "The connection is replaced."),
    "InvalidPushType":              Reason(400, Blame.NOTIFICATION, "the push type is invalid", _REFUSED_ROWS),
    "MissingDeviceToken":           Reason(400, Blame.NOTIFICATION, "the device token is missing", _REFUSED_ROWS),
    "MissingTopic":                 Reason(400, Blame.PROVIDER,     "the topic is missing; set it in the secret", "Its topic alone pauses."),
    "PayloadEmpty":                 Reason(400, Blame.NOTIFICATION, "the payload is empty", _REFUSED_ROWS),
    "TopicDisallowed":              Reason(400, Blame.PROVIDER,     "pushing to this topic is not allowed; check that the key's team owns it", "Its topic alone pauses."),
    "BadCertificate":               Reason(403, Blame.PROVIDER,     "the certificate is invalid"),
    "BadCertificateEnvironment":    Reason(403, Blame.PROVIDER,     "the certificate is for the other environment"),
    "BadEnvironmentKeyIdInToken":   Reason(403, Blame.PROVIDER,     "the signing key is not valid for this environment", "As Apple's page spells it."),
    "BadEnvironmentKeyInToken":     Reason(403, Blame.PROVIDER,     "the signing key is not valid for this environment", "As it was seen on the wire."),
    "ExpiredProviderToken":         Reason(403, Blame.PROVIDER,     "the provider token is stale; check this machine's clock", "If ours is 20 minutes old: once more with a fresh one, on a new connection. If not, our clock is wrong."),
    "Forbidden":                    Reason(403, Blame.PROVIDER,     "the action is not allowed"),
    "InvalidProviderToken":         Reason(403, Blame.PROVIDER,     "the provider token is invalid; check team_id, key_id and private_key in the secret, and that the key is not revoked", "The secret is read again first, since it may have been rotated; else the last key that was good is tried."),
    "MissingProviderToken":         Reason(403, Blame.PROVIDER,     "the provider token is missing"),
    "UnrelatedKeyIdInToken":        Reason(403, Blame.PROVIDER,     "the signing key is not related to this topic", "The next drain has a new connection, since a topic added to a key counts only there."),
    "BadPath":                      Reason(404, Blame.NOTIFICATION, "the request's path is invalid", _REFUSED_ROWS),
    "MethodNotAllowed":             Reason(405, Blame.NOTIFICATION, "the request's method is not POST", _REFUSED_ROWS),
    "ExpiredToken":                 Reason(410, Blame.DEVICE,       "the device token has expired", _SINCE),
    "Unregistered":                 Reason(410, Blame.DEVICE,       "the device token is no longer active for the topic", _SINCE),
    "PayloadTooLarge":              Reason(413, Blame.NOTIFICATION, "the payload is too large", "Checked before it is sent: 4096 bytes, 5120 for voip."),
    "TooManyProviderTokenUpdates":  Reason(429, Blame.PROVIDER,     "the provider token is renewed more often than every 20 minutes", "The token is kept, and the pause lasts until it is 20 minutes old."),
    "TooManyRequests":              Reason(429, Blame.APNS,         "too many pushes to this device in a short time", "About one device: the drain's other rows for it are held back, too."),
    "InternalServerError":          Reason(500, Blame.APNS,         "APNs has an internal error", "The connection is replaced."),
    "ServiceUnavailable":           Reason(503, Blame.APNS,         "APNs is unavailable", "The connection is replaced."),
    "Shutdown":                     Reason(503, Blame.APNS,         "APNs is shutting down", "The connection is replaced."),
}
# fmt: on

# What is in no table is judged by its status; what is not here either is retried, which an attempt too many cannot harm.
BY_STATUS: dict[int, Blame] = {
    400: Blame.NOTIFICATION,
    403: Blame.PROVIDER,
    404: Blame.NOTIFICATION,
    405: Blame.NOTIFICATION,
    410: Blame.DEVICE,
    413: Blame.NOTIFICATION,
}


def blame(rejected: Rejected) -> Blame:
    """Whom a rejection blames; a reason that is not in the table is judged by its status."""
    if known := REASONS.get(rejected.reason):
        return known.blame
    return BY_STATUS.get(rejected.status, Blame.APNS)


def blames_the_topic(rejected: Rejected) -> bool:
    """Whether a provider's fault is one of the topic alone: then the environment's other topics go on."""
    return rejected.reason in {"BadTopic", "MissingTopic", "TopicDisallowed"}


def describe(rejected: Rejected) -> str:
    """Say it in a sentence for people."""
    known = REASONS.get(rejected.reason)
    meaning = f": {known.meaning}." if known else ", which this version does not know."
    return f"APNs answered {rejected.status} {rejected.reason}{meaning}{' ' * bool(rejected.note)}{rejected.note}"
