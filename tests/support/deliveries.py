"""Deliveries and devices for tests that care about one field of them and not about the others."""

from datetime import UTC, datetime
from uuid import UUID

from core.delivery import Delivery, Device, Environment, Lease, Push

LEASED_UNTIL = datetime(2026, 3, 1, 12, 2, tzinfo=UTC)


def a_delivery(
    number: int = 1,
    *,
    attempts: int = 1,
    payload: bytes = b'{"aps": {"alert": "Hello"}}',
    push_type: str = "alert",
    priority: int | None = None,
    collapse_id: str | None = None,
    expires_at: int | None = None,
    apns_id: UUID | None = None,
    may_give_back: bool = True,
) -> Delivery:
    return Delivery(
        id=number,
        lease=Lease(attempts, LEASED_UNTIL),
        due_at=0.0,
        payload=payload,
        push_type=push_type,
        priority=priority,
        collapse_id=collapse_id,
        expires_at=expires_at,
        apns_id=apns_id or UUID(int=number),
        may_give_back=may_give_back,
    )


def a_device(
    number: int = 1,
    *,
    token: str | None = None,
    environment: Environment = Environment.PRODUCTION,
    topic: str | None = None,
) -> Device:
    return Device(push_token_id=number, token=token or f"{number:064x}", environment=environment, topic=topic)


def a_push(
    number: int = 1,
    delivery: Delivery | None = None,
    *,
    token: str | None = None,
    environment: Environment = Environment.PRODUCTION,
    topic: str | None = None,
) -> Push:
    """Delivery and device have the same number, and the device token ends in it."""
    return Push(delivery or a_delivery(number), a_device(number, token=token, environment=environment, topic=topic))
