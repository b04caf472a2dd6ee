"""A delivery as the request APNs wants. Source of the rules: Apple, "Sending notification requests to APNs"."""

import re
from dataclasses import dataclass, field

from core.answer import Unsendable
from core.delivery import Push

LARGEST_PAYLOAD = 4096  # bytes
LARGEST_VOIP_PAYLOAD = 5120

# What Apple appends to the bundle id for a push type; the others use the bundle id itself.
TOPIC_SUFFIX = {
    "complication": ".complication",
    "controls": ".push-type.controls",
    "fileprovider": ".pushkit.fileprovider",
    "liveactivity": ".push-type.liveactivity",
    "location": ".location-query",
    "pushtotalk": ".voip-ptt",
    "voip": ".voip",
    "widgets": ".push-type.widgets",
}

_STRING_OR_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*")|\s+')


@dataclass(frozen=True, slots=True)
class Request:
    """One push on the wire, but for the authorization."""

    path: str = field(repr=False)  # holds the device token
    headers: tuple[tuple[str, str], ...]
    body: bytes = field(repr=False)


def compose(push: Push, key_topic: str) -> Request | Unsendable:
    """Make the request, or say why there is none. `key_topic` is the bundle id of the signing key's secret."""
    delivery, device = push.delivery, push.device
    body = compact(delivery.payload)
    largest = LARGEST_VOIP_PAYLOAD if delivery.push_type == "voip" else LARGEST_PAYLOAD
    if len(body) > largest:
        return Unsendable(
            "PayloadTooLarge",
            f"The payload has {len(body)} bytes; APNs takes at most {largest} of a {delivery.push_type}.",
        )
    priority = 5 if delivery.push_type == "background" else delivery.priority or 10  # anything but 5 is an error there
    if delivery.push_type == "liveactivity" and priority == 1:
        return Unsendable("BadPriority", "A liveactivity has priority 10 or 5; APNs takes no 1 of it.")
    apns_id = str(delivery.apns_id)
    headers = [
        ("apns-topic", topic_of(push, key_topic)),
        ("apns-push-type", delivery.push_type),
        ("apns-priority", str(priority)),
        ("apns-id", apns_id),
        # Of a notification that is sent twice, the second replaces the first on the device.
        ("apns-collapse-id", delivery.collapse_id or apns_id),
    ]
    if delivery.expires_at is not None:
        headers.append(("apns-expiration", str(max(delivery.expires_at, 0))))
    return Request(f"/3/device/{device.token}", tuple(headers), body)


def topic_of(push: Push, key_topic: str) -> str:
    """Give the apns-topic: the device's bundle id, else the key's, with what its push type appends."""
    return (push.device.topic or key_topic) + TOPIC_SUFFIX.get(push.delivery.push_type, "")


def compact(payload: bytes) -> bytes:
    """JSON without the spaces that Postgres puts after colons and commas: they would count against the limit."""
    return _STRING_OR_SPACE.sub(rb"\1", payload)
