"""httpx as its documentation has it: an AsyncClient with HTTP/2, the requests concurrent."""

import asyncio
import ssl

import httpx

from benchmarks.load import Job, Push, measure


async def main(job: Job) -> None:
    context = ssl.create_default_context(cafile=job.ca_file)
    limits = httpx.Limits(max_connections=1)  # as all the others have
    timeout = httpx.Timeout(120.0)  # the last of 5,000 waits its turn for longer than the default
    async with httpx.AsyncClient(http2=True, http1=False, verify=context, limits=limits, timeout=timeout) as client:
        origin, bearer = f"https://{job.host}:{job.port}", f"bearer {job.bearer}"

        async def push(each: tuple[Push, bytes]) -> bool:
            notification, body = each
            response = await client.post(
                f"{origin}/3/device/{notification.token}",
                headers=[
                    ("apns-topic", job.topic),
                    ("apns-push-type", "alert"),
                    ("apns-priority", "10"),
                    ("apns-id", notification.apns_id),
                    ("authorization", bearer),
                ],
                content=body,
            )
            return response.status_code == httpx.codes.OK

        await measure(job, ((each, each.body()) for each in job.pushes()), push)


asyncio.run(main(Job.read()))
