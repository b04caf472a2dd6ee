"""The simulated APNs as a test sees it: the rules, the answers it was told, and the journal of what it received."""

import tempfile
import threading
import uuid
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Self, assert_never

from h2.exceptions import ProtocolError

from devtools.simulated_apns.answers import Answer, Hangup, Ok, Reject, Reset, Silence, Told
from devtools.simulated_apns.certificates import Authority
from devtools.simulated_apns.connection import Connection
from devtools.simulated_apns.credentials import Credentials
from devtools.simulated_apns.listener import Listener
from devtools.simulated_apns.rules import (
    Environment,
    Key,
    Memory,
    Provider,
    Request,
    Signed,
    is_canonical_uuid,
    refusal,
    verified,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A request that was received as a whole, and what it gets for an answer."""

    apns_id: str
    token: str
    headers: dict[str, str]
    body: bytes
    environment: Environment
    connection: int
    at: datetime
    answer: Answer


class SimulatedApns:
    """`credentials` and `authority` are shared by two that run side by side, as Apple's production and sandbox are
    reached with one key and below one root.

    `one_stream_until_authorized`: a connection may have one stream until a request with a valid provider token was
    received on it, as with Apple; then `max_concurrent_streams`.

    `remembering`: a connection remembers, as with Apple, whose it is and how its provider token has fared: it takes no
    second team, no token within 20 minutes of the one before, nothing after an expired one, and a key that was unfit
    stays so.

    `ahead`: by how many seconds its clock is ahead of ours; each answer then has a date. None, since Apple documents
    no date: the clock is right, and the answers have none.

    `connected`, `violated` and `received` are for its connections, in the thread of their loop.
    """

    def __init__(
        self,
        *,
        topics: frozenset[str] = frozenset({"com.example.app"}),
        environment: Environment = "production",
        credentials: Credentials | None = None,
        authority: Authority | None = None,
        max_concurrent_streams: int = 1000,
        one_stream_until_authorized: bool = False,
        remembering: bool = False,
        ahead: float | None = None,
    ) -> None:
        self.topics = topics
        self.environment: Environment = environment
        self.credentials = credentials or Credentials.generate()
        self.authority = authority or Authority.generate()
        self.ahead = ahead
        self._max_concurrent_streams = max_concurrent_streams
        self._streams_at_first = 1 if one_stream_until_authorized else max_concurrent_streams
        # The condition guards all that follows: tests read and tell in their thread, connections live in another.
        self._changed = threading.Condition()
        self._journal: list[Push] = []
        self._told: dict[str, Told] = {}
        self._told_to_all: Told | None = None
        self._topic_of_token: dict[str, str] = {}
        self._connections = 0
        self._violations: list[str] = []
        self._environment_of_token: dict[str, Environment] = {}
        self._keys: dict[str, Key] = {}
        self._remembering = remembering
        self._memories: defaultdict[int, Memory] = defaultdict(Memory)  # by connection
        self._provider = Provider(
            keys=self._keys,
            topics=topics,
            environment=environment,
            topic_of_token=self._topic_of_token,
            environment_of_token=self._environment_of_token,
        )
        self.trust(self.credentials)

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="simulated-apns-")
        try:
            directory = Path(self._directory.name)
            self.ca_file = directory / "ca.pem"
            self.ca_file.write_bytes(self.authority.pem())
            self._listener = Listener(self.authority.server_context(directory), self._new_connection)
        except BaseException:
            self._directory.cleanup()
            raise
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._listener.stop()
        finally:
            self._directory.cleanup()

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def secret(self) -> dict[str, str]:
        """Make the secret that the drain reads. Its topic is the first, by name, of those that are known."""
        return {
            "team_id": self.credentials.team_id,
            "key_id": self.credentials.key_id,
            "private_key": self.credentials.private_key(),
            "topic": min(self.topics),
        }

    def answer(self, token: str, *answers: Answer, before_checks: bool = False) -> None:
        """Answer the pushes to this token one after the other like this; the last answer repeats. Pushes that break
        Apple's rules are still refused, and use up no answer, unless `before_checks`.
        """
        with self._changed:
            self._told[token.lower()] = Told(answers, before_checks=before_checks)

    def answer_all(self, *answers: Answer, before_checks: bool = False) -> None:
        """Answer all tokens without an answer of their own like this; they share the one sequence."""
        with self._changed:
            self._told_to_all = Told(answers, before_checks=before_checks)

    def register(self, token: str, topic: str | None = None, environment: Environment | None = None) -> None:
        """Let the token be this app's, and be of this environment: a push to it for another bundle id gets
        DeviceTokenNotForTopic, and one by way of the other environment's host BadDeviceToken.
        """
        with self._changed:
            if topic is not None:
                self._topic_of_token[token.lower()] = topic
            if environment is not None:
                self._environment_of_token[token.lower()] = environment

    def trust(
        self,
        credentials: Credentials,
        *,
        topics: frozenset[str] | None = None,
        environment: Environment | None = None,
    ) -> None:
        """Know this key, too, be it of the same team or of another, as good for these topics and this environment. For
        others it gets UnrelatedKeyIdInToken and BadEnvironmentKeyInToken.
        """
        with self._changed:
            self._keys[credentials.key_id] = Key(
                team_id=credentials.team_id,
                public_key=credentials.key.public_key(),
                topics=topics,
                environment=environment,
            )

    def revoke(self, credentials: Credentials | None = None) -> None:
        """Know this key no more, or with none named its own: InvalidProviderToken."""
        with self._changed:
            del self._keys[(credentials or self.credentials).key_id]

    @property
    def journal(self) -> list[Push]:
        with self._changed:
            return list(self._journal)

    def forget(self) -> None:
        """Clear the journal."""
        with self._changed:
            self._journal.clear()

    @property
    def connections(self) -> int:
        """How many were ever accepted."""
        with self._changed:
            return self._connections

    @property
    def violations(self) -> list[str]:
        """What clients did against HTTP/2; each cost its connection."""
        with self._changed:
            return list(self._violations)

    def wait_for_pushes(self, count: int, timeout: float) -> None:
        """Block until the journal holds that many. They are received by then, and perhaps not answered yet. A coroutine
        calls it through `asyncio.to_thread`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._journal) >= count, timeout):
                raise TimeoutError(
                    f"{len(self._journal)} of {count} pushes reached the simulated APNs ({self.environment}) "
                    f"within {timeout:g} s",
                )

    def _new_connection(self) -> Connection:
        return Connection(self, max_concurrent_streams=self._streams_at_first)

    def connected(self) -> int:
        with self._changed:
            self._connections += 1
            return self._connections

    def violated(self, connection: Connection, error: ProtocolError) -> None:
        with self._changed:
            self._violations.append(f"connection {connection.number}: {type(error).__name__}: {error}")

    def received(self, connection: Connection, stream_id: int, request: Request) -> None:
        now = datetime.now(UTC)
        its_now = now + timedelta(seconds=self.ahead or 0)
        apns_id = request.header("apns-id") or ""
        if not is_canonical_uuid(apns_id):
            apns_id = str(uuid.uuid4())
        with self._changed:
            one_stream = connection.max_concurrent_streams < self._max_concurrent_streams
            signed = None
            if self._remembering or one_stream:  # else nobody asks, and to verify it a second time costs the most
                signed = verified(request.header("authorization"), self._provider, its_now)
            memory = self._memories[connection.number]
            refused = refusal(request, self._provider, its_now, memory)
            push = Push(
                apns_id=apns_id,
                token=request.device_token,
                headers=dict(request.headers),
                body=request.body,
                environment=self.environment,
                connection=connection.number,
                at=now,
                answer=self._decide(request.device_token, refused),
            )
            if self._remembering:  # what its own rules said; what it was told to say leaves no trace
                memory.note(signed if isinstance(signed, Signed) else None, refused.reason if refused else "")
            if not isinstance(push.answer, Hangup) or push.answer.received:
                self._journal.append(push)
                self._changed.notify_all()
        if one_stream and isinstance(signed, Signed):
            connection.allow_streams(self._max_concurrent_streams)
        self._give(push, connection, stream_id)

    def _decide(self, token: str, refused: Reject | None) -> Answer:
        told = self._told.get(token.lower(), self._told_to_all)
        if told and (told.before_checks or not refused):
            return told.next()
        return refused or Ok()

    def _give(self, push: Push, connection: Connection, stream_id: int) -> None:
        headers = [("apns-id", push.apns_id)]
        if self.ahead is not None:
            headers.append(("date", format_datetime(datetime.now(UTC) + timedelta(seconds=self.ahead), usegmt=True)))
        match push.answer:
            case Silence():
                pass
            case Ok(body=body, after=after):
                if self.environment == "sandbox":
                    headers.append(("apns-unique-id", str(uuid.uuid4())))
                connection.after(after, lambda: connection.respond(stream_id, 200, headers, body))
            case Reject(status=status, after=after) as reject:
                content = reject.content()
                headers += reject.headers
                connection.after(after, lambda: connection.respond(stream_id, status, headers, content))
            case Reset(code=code, after=after):
                connection.after(after, lambda: connection.reset(stream_id, code))
            case Hangup(after=after):
                connection.after(after, connection.hang_up)
            case other:
                assert_never(other)
