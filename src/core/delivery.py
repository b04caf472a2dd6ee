"""What a drain holds: a delivery under its lease, and the device it is for."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from core.recipient import Recipient


class Environment(StrEnum):
    """Which of Apple's two services a device token is valid at."""

    PRODUCTION = "production"
    SANDBOX = "sandbox"


@dataclass(frozen=True, slots=True)
class Lease:
    """The fence. A write counts only if the row still carries exactly this.

    Both parts are needed: an attempt that was given back is counted again under the same number, by another claim.
    """

    attempts: int
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A live row of push_token."""

    push_token_id: int
    token: str = field(repr=False)  # a secret: it must not reach a log by way of a repr
    environment: Environment
    topic: str | None  # None: the signing key's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A row of notification_delivery as its claim returned it."""

    id: int
    lease: Lease
    due_at: float  # epoch seconds
    payload: bytes = field(repr=False)
    push_type: str
    priority: int | None
    collapse_id: str | None
    expires_at: int | None  # epoch seconds
    apns_id: UUID
    claimed_at: float = 0.0  # epoch seconds, by the database's clock
    is_expired: bool = False
    ignore_quiet_hours: bool = False
    recipient: Recipient | None = None  # None: always awake, and opted in
    may_give_back: bool  # False once it was first claimed too long ago: then every claim counts


@dataclass(frozen=True, slots=True)
class Push:
    """A delivery bound to its device: what is sent."""

    delivery: Delivery
    device: Device
