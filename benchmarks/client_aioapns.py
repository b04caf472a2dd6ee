"""aioapns on one connection, like all the others.

Pushes beyond the connection's streams poll for one, which is most of what many pushes at once cost. `--held-back` gives
it no more at once than there are streams: the best that its user can do.
"""

import asyncio
import logging
import ssl
import sys
from pathlib import Path
from typing import Any

from aioapns import APNs, NotificationRequest, PushType
from aioapns.connection import APNsProductionClientProtocol
from h2.events import DataReceived, ResponseReceived

from benchmarks.load import Job, Push, measure


class _Protocol(APNsProductionClientProtocol):  # type: ignore[misc]  # aioapns ships no types
    """What aioapns expects of APNs and nghttpd does not do: it knows an answer by the apns-id that APNs repeats in it,
    and takes an empty DATA frame for JSON.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  whatever aioapns hands over
        super().__init__(*arguments, **named)
        receive = self.conn.receive_data

        def receive_as_from_apns(data: bytes) -> list[Any]:
            events = []
            for event in receive(data):
                if isinstance(event, ResponseReceived) and b"apns-id" not in dict(event.headers):
                    event.headers.append((b"apns-id", self.request_streams[event.stream_id].encode()))
                if not (isinstance(event, DataReceived) and not event.data):
                    events.append(event)
            return events

        self.conn.receive_data = receive_as_from_apns


async def main(job: Job, *, held_back: bool) -> None:
    context = ssl.create_default_context(cafile=job.ca_file)
    context.set_alpn_protocols(["h2"])  # aioapns' own context does not, and nghttpd hangs up on such a client
    _Protocol.APNS_SERVER, _Protocol.APNS_PORT = job.host, job.port
    apns = APNs(
        key=Path(job.key_file).read_text(),  # noqa: ASYNC240  nothing else is waiting
        key_id=job.key_id,
        team_id=job.team_id,
        topic=job.topic,
        max_connections=1,
        ssl_context=context,
    )
    apns.pool.protocol_class = _Protocol

    async def push(each: Push) -> bool:
        answer = await apns.send_notification(
            NotificationRequest(
                device_token=each.token,
                message=each.payload,
                notification_id=each.apns_id,
                priority=10,
                push_type=PushType.ALERT,
            )
        )
        return bool(answer.is_successful)

    try:
        await measure(job, job.pushes(), push, at_once=min(job.streams, job.batch) if held_back else None)
    finally:
        apns.pool.close()


logging.getLogger("aioapns").setLevel(logging.ERROR)  # it warns of each poll
asyncio.run(main(Job.read(), held_back="--held-back" in sys.argv))
