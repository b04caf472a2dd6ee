"""The scheduled function: wires the core to the world, and reports. Decides nothing."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.metrics import MetricUnit

from core.apns import Apns, tls, transport
from core.database import Database
from core.delivery import Environment
from core.drain import CLOSING_SECONDS, Clock, Drain, Pace, Settled, Swept, Tally
from core.outbox import Backlog, PostgresOutbox
from core.provider_token import ProviderToken
from core.schema import require_version
from core.secret import CachedSecret, SigningKey, Unconfigured, secrets_manager
from core.settings import Settings, check_lease
from core.verdict import Failed, Ladder

logger = Logger(service="apns-outbox")
metrics = Metrics(namespace="ApnsOutbox", service="apns-outbox")

# They log device tokens (in URLs and headers) and credentials at DEBUG. No log level of ours may open that door.
for _talkative in ("httpx", "httpcore", "hpack", "h2", "hyperframe", "botocore", "boto3", "urllib3", "psycopg"):
    logging.getLogger(_talkative).setLevel(logging.WARNING)


class LambdaContext(Protocol):
    """What we ask of Lambda's context."""

    def get_remaining_time_in_millis(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _InvocationClock:
    context: LambdaContext

    def left(self) -> float:
        return self.context.get_remaining_time_in_millis() / 1000

    def elapsed(self) -> float:
        return time.monotonic()


class _LogWitness:
    """One line for each delivery that failed or whose lease was lost. Ids only: no token, no payload."""

    def swept(self, swept: Swept) -> None:
        logger.error(
            "delivery failed",
            extra={"delivery_id": swept.id, "attempts": swept.attempts, "reason": "lease_expired"},
        )

    def settled(self, settled: Settled) -> None:
        delivery, outcome = settled.delivery, settled.outcome
        about = {
            "delivery_id": delivery.id,
            "apns_id": str(delivery.apns_id),
            "attempts": delivery.lease.attempts,
            "outcome": type(outcome).__name__.lower(),
        }
        if settled.status is None:
            logger.warning("lease lost: another drain holds or has finished this delivery", extra=about)
        elif settled.status == "failed":
            said = {"reason": outcome.reason, "error": outcome.error} if isinstance(outcome, Failed) else {}
            logger.error("delivery failed", extra=about | said)


class _Warm:
    """What is kept from one invocation to the next: an event loop, the connections, the key."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runner = asyncio.Runner()
        self._database = Database(settings.database)
        self._secret = CachedSecret(settings.apns_secret_id, secrets_manager(), time.time)
        self._apns: tuple[SigningKey, Apns] | None = None
        self._schema_checked = False

    async def drain(self, context: LambdaContext) -> tuple[Tally, Backlog]:
        """One drain, with a deadline round all of it: what it has not settled by then, its lease gives back."""
        clock = _InvocationClock(context)
        try:
            async with asyncio.timeout(max(clock.left() - CLOSING_SECONDS / 2, 0)):
                return await self._drain(clock)
        except TimeoutError:
            raise TimeoutError(
                "the drain did not finish in the time that the function has, so it was cut short: every row it still"
                " held is due again when its lease ends. If it stays so, raise the function's timeout"
            ) from None

    async def _drain(self, clock: Clock) -> tuple[Tally, Backlog]:
        # Before anything is claimed: a key that cannot be read, or a database that cannot be used, changes no row.
        key = await self._secret.get()
        await self._database.ready()
        if not self._schema_checked:
            await require_version(self._database)
            self._schema_checked = True
        gateway = await self._gateway(key)
        outbox = PostgresOutbox(
            database=self._database,
            batch_size=self.settings.batch_size,
            lease_seconds=self.settings.lease_seconds,
            max_attempts=self.settings.max_attempts,
            give_back_hours=self.settings.give_back_hours,
        )
        backlog = await outbox.backlog()
        tally = await Drain(
            outbox=outbox,
            gateway=gateway,
            clock=clock,
            pace=Pace(
                batch_size=self.settings.batch_size,
                max_batches=self.settings.max_batches,
                lease_seconds=self.settings.lease_seconds,
            ),
            ladder=Ladder(
                max_attempts=self.settings.max_attempts,
                base=self.settings.backoff_base_seconds,
                cap=self.settings.backoff_cap_seconds,
            ),
            dice=random.random,
            witness=_LogWitness(),
        ).run()
        return tally, backlog

    async def _gateway(self, key: SigningKey | Unconfigured) -> Apns | None:
        if self._apns is not None and self._apns[0] != key:
            _, apns = self._apns
            self._apns = None
            await apns.close()
        if isinstance(key, Unconfigured):
            logger.warning("APNs is not configured: what is due is skipped, for good", extra={"why": key.why})
            return None
        if self._apns is None:
            context = tls(self.settings.apns_ca_file)
            urls = {
                Environment.PRODUCTION: self.settings.apns_production_url,
                Environment.SANDBOX: self.settings.apns_sandbox_url,
            }
            self._apns = (
                key,
                Apns(
                    urls=urls,
                    topic=key.topic,
                    token=ProviderToken(key),
                    now=time.time,
                    connect=lambda: transport(context),
                ),
            )
        return self._apns[1]

    async def close(self) -> None:
        if self._apns is not None:
            await self._apns[1].close()
        await self._database.close()


_warm: _Warm | None = None


def handler(event: object, context: LambdaContext) -> dict[str, int]:
    """Drain once, whatever the tick looks like: the event of the rule, the same in SQS records, or nothing at all."""
    global _warm  # noqa: PLW0603  Lambda keeps the module, and with it what is warm
    began = time.monotonic()
    settings = Settings.from_env(os.environ)
    check_lease(settings.lease_seconds, context.get_remaining_time_in_millis() / 1000)
    if _warm is not None and _warm.settings != settings:
        let_go()
    if _warm is None:
        _warm = _Warm(settings)
    try:
        tally, backlog = _warm.runner.run(_warm.drain(context))
    except Exception as fault:
        # Without the traceback, which Lambda prints as well: this line is for people, and for a filter on its kind.
        logger.error("drain ended early", extra={"fault": type(fault).__name__, "error": str(fault)})  # noqa: TRY400
        raise
    _report(event, context, tally, backlog, time.monotonic() - began)
    return asdict(tally)


def let_go() -> None:
    """Close what is warm. Lambda never asks for it; a test or a demo does."""
    global _warm  # noqa: PLW0603
    if _warm is not None:
        _warm.runner.run(_warm.close())
        _warm.runner.close()
        _warm = None


def _report(event: object, context: LambdaContext, tally: Tally, backlog: Backlog, seconds: float) -> None:
    logger.info(
        "drained",
        extra={
            "tally": asdict(tally),
            "duration_ms": round(seconds * 1000),
            "oldest_due_age_seconds": round(backlog.oldest_age_seconds, 3),
            "due_backlog": backlog.due,
            "tick": _tick(event),
            "request_id": getattr(context, "aws_request_id", None),
        },
    )
    for name, value in asdict(tally).items():
        metrics.add_metric(name="".join(map(str.title, name.split("_"))), unit=MetricUnit.Count, value=value)
    metrics.add_metric(name="DueBacklog", unit=MetricUnit.Count, value=backlog.due)
    metrics.add_metric(name="OldestDueAgeSeconds", unit=MetricUnit.Seconds, value=backlog.oldest_age_seconds)
    metrics.flush_metrics()


def _tick(event: object) -> str:
    """Say which path the tick came by."""
    if isinstance(event, Mapping):
        records: Any = event.get("Records")
        if isinstance(records, list):
            return f"queue ({len(records)})"
        if event.get("source") == "aws.events":
            return f"rule {event.get('time')}"
    return "by hand"
