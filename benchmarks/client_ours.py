"""The transport under our sender, used as the sender does: httpx.Request in, httpx.Response out, nothing between.

The URL is the origin's alone, parsed once, and the path goes as the extension `target`: to parse a URL for each push
would cost a fifth of it all.
"""

import asyncio
import ssl

import httpx

from benchmarks.load import Job, Push, measure
from core.transport import ApnsTransport


async def main(job: Job) -> None:
    transport = ApnsTransport(ssl_context=ssl.create_default_context(cafile=job.ca_file))
    origin, host = httpx.URL(f"https://{job.host}:{job.port}"), f"{job.host}:{job.port}"
    bearer = f"bearer {job.bearer}"

    async def push(each: tuple[Push, bytes]) -> bool:
        notification, body = each
        request = httpx.Request(
            "POST",
            origin,
            headers=[
                ("host", host),
                ("apns-topic", job.topic),
                ("apns-push-type", "alert"),
                ("apns-priority", "10"),
                ("apns-id", notification.apns_id),
                ("authorization", bearer),
            ],
            stream=httpx.ByteStream(body),
            extensions={"target": f"/3/device/{notification.token}".encode()},
        )
        response = await transport.handle_async_request(request)
        return response.status_code == httpx.codes.OK

    try:
        await measure(job, ((each, each.body()) for each in job.pushes()), push)
    finally:
        await transport.aclose()


asyncio.run(main(Job.read()))
