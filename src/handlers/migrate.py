"""Applies the migrations. Invoked by hand or by the deploy, with any event; safe to invoke twice at once.

It needs a database user that owns the tables, and a direct connection (no RDS Proxy). Of the settings it reads only
those of the database.
"""

import asyncio
import logging
import os
from typing import Any

from aws_lambda_powertools import Logger

from core.database import connect
from core.schema import Migrated, migrate
from core.settings import Settings

logger = Logger(service="apns-outbox")

# At DEBUG, which a log level of the function's would give them too, botocore prints the secret it was sent.
for chatty in ("boto3", "botocore", "urllib3"):
    logging.getLogger(chatty).setLevel(logging.WARNING)


def handler(event: dict[str, Any], context: object) -> dict[str, Any]:  # noqa: ARG001  Lambda passes both
    migrated = asyncio.run(_migrate(Settings.from_env(os.environ)))
    outcome = {"version": migrated.version, "applied": list(migrated.applied)}
    logger.info("migrated", extra=outcome)
    return outcome


async def _migrate(settings: Settings) -> Migrated:
    connection = await connect(settings.database)
    try:
        return await migrate(connection)
    finally:
        await connection.close()
