"""What a delivery costs from its row to its row: `./dev bench drain [--json] [--quick]`.

Claim, bind, push and settle by the real Drain, on the embedded Postgres and against nghttpd, in batches of 50 and of
500; once over our transport and once over httpx's own. Both take turns, in this process, which keeps to one core;
Postgres and nghttpd share the other. Medians and ratios are printed.
"""

import argparse
import asyncio
import json
import math
import os
import random
import resource
import secrets
import ssl
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import httpx
import psycopg

from benchmarks.machine import CORES, SERVER_PREFIX
from benchmarks.report import OURS, TIMES
from core.answer import Answer
from core.apns import Apns
from core.database import Database, connect
from core.delivery import Delivery, Environment, Push
from core.drain import Drain, Pace, Settled, Swept
from core.outbox import PostgresOutbox
from core.proof import Fault
from core.schema import migrate
from core.secret import SigningKey, Unconfigured
from core.settings import DatabaseUrl
from core.transport import ApnsTransport
from core.verdict import Ladder
from devtools.local_postgres import LocalPostgres
from devtools.other_servers import MissingProgramError, Server, nghttpd
from devtools.simulated_apns.credentials import Credentials

ROUNDS = 5
USERS = 300  # with a device each
STREAMS = 1000  # APNs' own, of late
# Rows enough that one drain takes half a second or more.
BATCHES = {50: 40, 500: 10}  # how many, by their size

INSERT_DEVICES = """
    INSERT INTO push_token (user_id, token, environment)
    SELECT 'user-' || number, token, 'production' FROM unnest(%s::text[]) WITH ORDINALITY AS t (token, number)
"""
INSERT_DELIVERIES = """
    INSERT INTO notification_delivery (user_id, payload)
    SELECT 'user-' || 1 + number %% %s, jsonb_build_object('aps', jsonb_build_object('alert', 'Order ' || number))
    FROM generate_series(1, %s) AS number
"""


class StockTransport(httpx.AsyncHTTPTransport):
    """httpx's own, which has nothing to check and is told what APNs is like."""

    def __init__(self, context: ssl.SSLContext) -> None:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        super().__init__(verify=context, http1=False, http2=True, limits=limits, trust_env=False)

    async def check(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EndlessClock:
    def left(self) -> float:
        return math.inf

    def elapsed(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class SilentWitness:
    def swept(self, swept: Swept) -> None: ...
    def answered(self, push: Push, answer: Answer) -> None: ...
    def withheld(self, fault: Fault) -> None: ...
    def bad_time_zone(self, delivery: Delivery, time_zone: str) -> None: ...
    def settled(self, settled: Settled) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians."""

    batch: int
    transport: str
    rows_a_second: float
    cpu: float  # seconds for 1,000 rows, of this process


@contextmanager
def _world(tokens: Sequence[str]) -> Iterator[tuple[LocalPostgres, Server]]:
    with LocalPostgres() as postgres, nghttpd(tokens=tokens, streams=STREAMS, prefix=SERVER_PREFIX) as server:
        if CORES:
            assert postgres.pid is not None
            os.sched_setaffinity(postgres.pid, {CORES[1]})  # its backends inherit it
            os.sched_setaffinity(0, {CORES[0]})
        yield postgres, server


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench drain", description="What a delivery costs from row to row.")
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args(arguments)
    tokens = [secrets.token_hex(32) for _ in range(USERS)]
    try:
        with _world(tokens) as (postgres, server):
            rows = asyncio.run(_compare(postgres, server, tokens, 1 if options.quick else ROUNDS))
    except MissingProgramError as fault:
        sys.exit(f"bench: {fault}")
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else "\n".join(_table(rows)))
    return 0


async def _compare(postgres: LocalPostgres, server: Server, tokens: Sequence[str], rounds: int) -> list[Row]:
    url = DatabaseUrl(postgres.url())
    async with await connect(url) as connection:
        await migrate(connection)
        await connection.execute(INSERT_DEVICES, [list(tokens)])
    context = ssl.create_default_context(cafile=str(server.ca_file))
    context.set_alpn_protocols(["h2"])
    transports: dict[str, Callable[[], ApnsTransport | StockTransport]] = {
        OURS: partial(ApnsTransport, ssl_context=context),
        "stock httpx": partial(StockTransport, context),
    }
    credentials = Credentials.generate()
    key = SigningKey(
        team_id=credentials.team_id,
        key_id=credentials.key_id,
        private_key=credentials.private_key(),
        topic="com.example.app",
    )
    database = Database(url)
    turns: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    try:
        for number in range(rounds):
            print(f"bench: round {number + 1} of {rounds}", file=sys.stderr)
            for batch, batches in BATCHES.items():
                for name, transport in transports.items():
                    apns = _apns(server, key, transport)
                    try:
                        await _drain(postgres, database, apns, batch, 1)  # so that what is measured is warm
                        turns[batch, name].append(await _drain(postgres, database, apns, batch, batches))
                    finally:
                        await apns.close()
    finally:
        await database.close()
    return [
        Row(
            batch=batch,
            transport=name,
            rows_a_second=statistics.median(batch * BATCHES[batch] / wall for wall, _ in measured),
            cpu=statistics.median(cpu / (batch * BATCHES[batch]) * 1000 for _, cpu in measured),
        )
        for (batch, name), measured in turns.items()
    ]


def _apns(server: Server, key: SigningKey, transport: Callable[[], ApnsTransport | StockTransport]) -> Apns:
    async def reread() -> Unconfigured:
        return Unconfigured("Nothing is rotated here.")

    urls = dict.fromkeys(Environment, server.url)
    return Apns(urls=urls, key=key, reread=reread, now=time.time, connect=transport)


async def _drain(
    postgres: LocalPostgres, database: Database, apns: Apns, batch: int, batches: int
) -> tuple[float, float]:
    """Insert so many rows and drain them. Returns seconds and CPU-seconds."""
    with psycopg.connect(postgres.dsn(), autocommit=True) as producer:
        producer.execute(INSERT_DELIVERIES, [USERS, batch * batches])
        producer.execute("VACUUM ANALYZE notification_delivery")  # nobody else does: autovacuum is off here
    await database.ready()
    outbox = PostgresOutbox(database=database, batch_size=batch, lease_seconds=120, max_attempts=5, give_back_hours=72)
    drain = Drain(
        outbox=outbox,
        gateway=apns,
        clock=EndlessClock(),
        pace=Pace(batch_size=batch, max_batches=batches, lease_seconds=120),
        ladder=Ladder(max_attempts=5, base=60, cap=3600),
        dice=random.random,
        witness=SilentWitness(),
    )
    wall, cpu = time.perf_counter(), _cpu()
    tally = await drain.run()
    wall, cpu = time.perf_counter() - wall, _cpu() - cpu
    if tally.sent != batch * batches:
        sys.exit(f"bench: of {batch * batches} rows, not all were sent: {tally}")
    return wall, cpu


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| batch | transport | rows a second | CPU-seconds for 1,000 rows |"
    yield "|---|---|---|---|"
    for row in rows:
        ours = next(each for each in rows if (each.batch, each.transport) == (row.batch, OURS))
        yield (
            f"| {row.batch} | {row.transport} | {row.rows_a_second:,.0f}"
            f" ({row.rows_a_second / ours.rows_a_second:.2f}{TIMES})"
            f" | {row.cpu:.3f} ({row.cpu / ours.cpu:.1f}{TIMES}) |"
        )


if __name__ == "__main__":
    sys.exit(main())
