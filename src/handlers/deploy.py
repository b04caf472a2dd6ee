"""Brings the database to this release when CloudFormation makes or updates the stack, and says how that went.

CloudFormation waits for an answer at a URL that the event brings. It gets one whatever happens: with the reason, if the
database cannot be reached or a migration fails, and in time, before the function is killed. Asked by hand, without such
a URL, it does the same work, and returns or raises.
"""

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from typing import Any, Protocol

import httpx
from aws_lambda_powertools import Logger

from core.access import admit
from core.database import DatabaseFault, connect
from core.schema import SchemaFault, migrate
from core.secret import SecretFault
from core.settings import BadSettings, Settings

logger = Logger(service=os.environ.get("POWERTOOLS_SERVICE_NAME") or "apns-outbox")

# httpx logs the URL, which is signed and so a secret, at INFO; botocore the database's password at DEBUG.
for chatty in ("httpx", "httpcore", "boto3", "botocore", "urllib3"):
    logging.getLogger(chatty).setLevel(logging.WARNING)

_TRIES = 3
_TRY_SECONDS = 8.0
_PAUSE_SECONDS = 1.0
# Kept back of the function's time for the answer: all tries, and as much for a statement that has to be broken off.
ANSWER_SECONDS = 40.0
# CloudFormation takes 4096 bytes in all, and shows people about this much.
_REASON_LENGTH = 1000


class LambdaContext(Protocol):
    """What we ask of Lambda's context."""

    def get_remaining_time_in_millis(self) -> int: ...


class NotAnswered(Exception):  # noqa: N818  the name says what is so; an "Error" behind it would say nothing more
    """CloudFormation could not be told. It gives up by itself when its own time for us is over."""


def handler(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:
    if "ResponseURL" not in event:
        return asyncio.run(_bring_up())
    return asyncio.run(_answer(event, context))


async def _answer(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:
    answer = {
        "StackId": event["StackId"],
        "RequestId": event["RequestId"],
        "LogicalResourceId": event["LogicalResourceId"],
        # The same for as long as the stack lives: another one would mean that the old one is to be deleted.
        "PhysicalResourceId": event.get("PhysicalResourceId") or f"{event['StackId']}/{event['LogicalResourceId']}",
    }
    answer |= await _outcome(event, context)
    logger.info("answered CloudFormation", extra={name: answer.get(name) for name in ("Status", "Reason", "Data")})
    await _tell(event["ResponseURL"], answer)
    return answer


async def _outcome(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:
    if event["RequestType"] == "Delete":
        return {"Status": "SUCCESS", "Reason": "the tables stay, with all that is in them"}
    try:
        async with asyncio.timeout(context.get_remaining_time_in_millis() / 1000 - ANSWER_SECONDS):
            return {"Status": "SUCCESS", "Data": {"Version": (await _bring_up())["version"]}}
    except (BadSettings, DatabaseFault, SchemaFault, SecretFault) as fault:
        reason = str(fault)
    except TimeoutError:
        reason = "the migrations were not through in the time that the function has: apply the long one by hand"
    except Exception as error:  # whatever it is, CloudFormation must hear of it and not wait for an hour
        logger.exception("failed in a way that nobody foresaw")
        reason = f"{type(error).__name__}; the function's log says more"
    return {"Status": "FAILED", "Reason": reason[:_REASON_LENGTH]}


async def _bring_up() -> dict[str, Any]:
    settings = Settings.from_env(os.environ)
    connection = await connect(settings.database)
    try:
        migrated = await migrate(connection)
        if user := os.environ.get("DRAIN_DB_USER", "").strip():
            await admit(connection, user, iam=os.environ.get("DRAIN_DB_AUTH", "iam") == "iam")
    finally:
        await connection.close()
    outcome = {"version": migrated.version, "applied": list(migrated.applied)}
    logger.info("migrated", extra=outcome)
    return outcome


async def _tell(url: str, answer: Mapping[str, Any]) -> None:
    body = json.dumps(answer).encode()
    async with httpx.AsyncClient() as client:
        for attempt in range(1, _TRIES + 1):
            try:
                async with asyncio.timeout(_TRY_SECONDS):
                    # Without a content type, as the URL was signed.
                    response = await client.put(url, content=body, headers={"content-type": ""})
                response.raise_for_status()
            except (httpx.HTTPError, TimeoutError) as error:
                if attempt == _TRIES:
                    what = f"HTTP {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else ""
                    # From None: the error carries the URL.
                    raise NotAnswered(
                        f"CloudFormation could not be told ({what or type(error).__name__}): a function in a VPC needs"
                        " a NAT gateway, or a gateway endpoint for S3"
                    ) from None
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return
