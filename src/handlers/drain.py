"""The scheduled function: wires the core to the world, and reports. Decides nothing."""

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.metrics import MetricUnit, single_metric

from core.answer import Answer, Unanswered
from core.apns import Apns, tls
from core.database import Database
from core.delivery import Delivery, Environment, Push
from core.drain import CLOSING_SECONDS, PUSH_SECONDS, Clock, Drain, Pace, Settled, Swept, Tally
from core.outbox import Backlog, PostgresOutbox
from core.proof import Fault
from core.reasons import Blame
from core.schema import require_version
from core.secret import CachedSecret, SigningKey, Unconfigured, secrets_manager
from core.settings import Settings, check_lease
from core.transport import ApnsTransport
from core.verdict import Failed, Ladder

# Two stacks in one account share the namespace: the template gives each its own name.
SERVICE, NAMESPACE = os.environ.get("POWERTOOLS_SERVICE_NAME") or "apns-outbox", "ApnsOutbox"
logger = Logger(service=SERVICE)
metrics = Metrics(namespace=NAMESPACE, service=SERVICE)

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
    """One line for each delivery that failed or whose lease was lost, and for each group that is withheld.

    Ids only: no token, no payload.
    """

    def __init__(self) -> None:
        self.possible_duplicates = 0
        self.faults: list[Fault] = []

    def answered(self, push: Push, answer: Answer) -> None:
        if isinstance(answer, Unanswered) and answer.maybe_processed:
            self.possible_duplicates += 1
            logger.warning(
                "outcome unknown: if APNs has it, the next attempt will be a duplicate with the same apns-id",
                extra={"delivery_id": push.delivery.id, "apns_id": str(push.delivery.apns_id), "reason": answer.reason},
            )

    def withheld(self, fault: Fault) -> None:
        self.faults.append(fault)
        logger.error(
            "withheld: APNs is out" if fault.blame is Blame.APNS else "withheld: the fault is on our side",
            extra={
                "environment": fault.environment,
                "topic": fault.topic or "all",
                "reason": fault.reason,
                "error": fault.error,
            },
        )

    def bad_time_zone(self, delivery: Delivery, time_zone: str) -> None:
        logger.warning(
            "the recipient's time zone is none: pushed without regard to quiet hours",
            extra={"delivery_id": delivery.id, "time_zone": time_zone[:100]},
        )

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


@dataclass(frozen=True, slots=True)
class _Drained:
    tally: Tally
    backlog: Backlog
    witness: _LogWitness


class _Warm:
    """What is kept from one invocation to the next: an event loop, the connections, the key."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runner = asyncio.Runner()
        self._database = Database(settings.database)
        self._secret = CachedSecret(settings.apns_secret_id, secrets_manager(), time.time)
        self._apns: Apns | None = None
        self._schema_checked = False

    async def drain(self, context: LambdaContext) -> _Drained:
        """Drain once, with a deadline round all of it: what is not settled by then, its lease gives back."""
        clock = _InvocationClock(context)
        try:
            async with asyncio.timeout(max(clock.left() - CLOSING_SECONDS / 2, 0)):
                return await self._drain(clock)
        except TimeoutError:
            raise TimeoutError(
                "the drain did not finish in the time that the function has, so it was cut short: every row it still"
                " held is due again when its lease ends. If it stays so, raise the function's timeout"
            ) from None

    async def _drain(self, clock: Clock) -> _Drained:
        # Before anything is claimed: a key that cannot be read, or a database that cannot be used, changes no row.
        key = await self._secret.get()
        if self._secret.fault is not None:
            logger.warning(
                "the signing key's secret cannot be read; the last good key is used",
                extra={"error": str(self._secret.fault)},
            )
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
        witness = _LogWitness()
        try:
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
                witness=witness,
            ).run()
        finally:
            if gateway is not None:
                await gateway.end()
        if gateway is not None and gateway.uses_former_key:
            logger.warning(
                "APNs does not know the key that the secret holds; the last good key is used",
                extra={"secret_id": self.settings.apns_secret_id},
            )
        return _Drained(tally, backlog, witness)

    async def _gateway(self, key: SigningKey | Unconfigured) -> Apns | None:
        if isinstance(key, Unconfigured):
            logger.warning("APNs is not configured: what is due is skipped, for good", extra={"why": key.why})
            return None
        if self._apns is None:
            context = tls(self.settings.apns_ca_file)
            self._apns = Apns(
                urls={
                    Environment.PRODUCTION: self.settings.apns_production_url,
                    Environment.SANDBOX: self.settings.apns_sandbox_url,
                },
                key=key,
                reread=self._secret.reread,
                now=time.time,
                connect=lambda: ApnsTransport(ssl_context=context, on_goaway=_log_goaway),
            )
        await self._apns.begin(key)
        return self._apns

    async def close(self) -> None:
        if self._apns is not None:
            await self._apns.close()
        await self._database.close()


_warm: _Warm | None = None


def handler(event: object, context: LambdaContext) -> dict[str, int]:
    """Drain once, whatever the tick looks like: the event of the rule, the same in SQS records, or nothing at all."""
    global _warm  # noqa: PLW0603  Lambda keeps the module, and with it what is warm
    began = time.monotonic()
    settings = Settings.from_env(os.environ)
    check_lease(settings.lease_seconds, context.get_remaining_time_in_millis() / 1000)
    if context.get_remaining_time_in_millis() / 1000 < PUSH_SECONDS + CLOSING_SECONDS:
        logger.warning(
            "too little time to push anything: nothing is claimed; raise the function's timeout",
            extra={"left_ms": context.get_remaining_time_in_millis(), "needed_s": PUSH_SECONDS + CLOSING_SECONDS},
        )
    if _warm is not None and _warm.settings != settings:
        let_go()
    if _warm is None:
        _warm = _Warm(settings)
    try:
        drained = _warm.runner.run(_warm.drain(context))
    except Exception as fault:
        # Without the traceback, which Lambda prints as well: this line is for people, and for a filter on its kind.
        logger.error("drain ended early", extra={"fault": type(fault).__name__, "error": str(fault)})  # noqa: TRY400
        raise
    _report(event, context, drained, time.monotonic() - began)
    return asdict(drained.tally)


def _log_goaway(reason: str) -> None:
    # Not a warning: it is how APNs moves clients to another machine. Its reason matters when something is wrong.
    logger.info("APNs ends a connection", extra={"reason": reason})


def let_go() -> None:
    """Close what is warm. Lambda never asks for it; a test or a demo does."""
    global _warm  # noqa: PLW0603
    if _warm is not None:
        _warm.runner.run(_warm.close())
        _warm.runner.close()
        _warm = None


def _report(event: object, context: LambdaContext, drained: _Drained, seconds: float) -> None:
    tally, backlog = drained.tally, drained.backlog
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
    metrics.add_metric(name="PossibleDuplicate", unit=MetricUnit.Count, value=drained.witness.possible_duplicates)
    outages = [fault for fault in drained.witness.faults if fault.blame is Blame.APNS]
    ours = [fault for fault in drained.witness.faults if fault.blame is not Blame.APNS]
    metrics.add_metric(name="Outage", unit=MetricUnit.Count, value=len(outages))
    # With no further dimension it is what an alarm watches; by reason it is for those who look why.
    metrics.add_metric(name="ProviderFault", unit=MetricUnit.Count, value=len(ours))
    metrics.flush_metrics()
    for reason, count in Counter(fault.reason for fault in ours).items():
        with single_metric(
            namespace=NAMESPACE,
            name="ProviderFault",
            unit=MetricUnit.Count,
            value=count,
            default_dimensions={"service": SERVICE},
        ) as metric:
            metric.add_dimension(name="reason", value=reason)


def _tick(event: object) -> str:
    """Say which path the tick came by."""
    if isinstance(event, Mapping):
        records: Any = event.get("Records")
        if isinstance(records, list):
            return f"queue ({len(records)})"
        if event.get("source") == "aws.events":
            return f"rule {event.get('time')}"
    return "by hand"
