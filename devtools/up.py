"""All that the functions talk to, on this machine, until Ctrl-C: `./dev up [ENV_FILE]`.

A migrated Postgres with a few deliveries in it, the simulated APNs (production and sandbox) and a Secrets Manager that
holds the signing key. Each listens on this machine alone; they are published at the ports that ENV_FILE, which is
events/env.local.json unless another is named, tells `sam local invoke` of.
"""

import asyncio
import json
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psycopg

from core.database import connect
from core.schema import Migrated, migrate
from core.settings import DatabaseUrl
from devtools.local_postgres import LocalPostgres, PostgresUnavailableError, postgres_version
from devtools.runtime import this_architecture
from devtools.secrets_manager import REGION, LocalSecretsManager
from devtools.simulated_apns import Reject, SimulatedApns

ROOT = Path(__file__).parent.parent
ENV_FILE = ROOT / "events" / "env.local.json"
SECRET_ID = "apns-outbox/signing-key"  # noqa: S105  its name
CA_FILE = "simulated-apns-ca.pem"  # in the artefact, the only directory of ours that a container sees

_CHUNK = 64 << 10


class CannotComeUpError(RuntimeError):
    """The message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServers:
    postgres: LocalPostgres
    production: SimulatedApns
    sandbox: SimulatedApns
    secrets: LocalSecretsManager

    @property
    def environment(self) -> dict[str, str]:
        """The functions' variables, for a process on this machine."""
        return {
            **self.secrets.environment,
            "DATABASE_URL": self.postgres.url(),
            "APNS_SECRET_ID": SECRET_ID,
            "APNS_PRODUCTION_URL": self.production.url,
            "APNS_SANDBOX_URL": self.sandbox.url,
            "APNS_CA_FILE": str(self.production.ca_file),
        }


@contextmanager
def local_servers() -> Iterator[LocalServers]:
    """Start them, migrate, and put a few deliveries in."""
    with ExitStack() as stack:
        production = stack.enter_context(SimulatedApns())
        servers = LocalServers(
            postgres=stack.enter_context(LocalPostgres()),
            production=production,
            sandbox=stack.enter_context(
                SimulatedApns(environment="sandbox", credentials=production.credentials, authority=production.authority)
            ),
            secrets=stack.enter_context(LocalSecretsManager()),
        )
        servers.secrets.put(SECRET_ID, json.dumps(production.secret()))
        asyncio.run(_migrate(servers.postgres.url()))
        _put_deliveries(servers)
        yield servers


async def _migrate(url: str) -> Migrated:
    async with await connect(DatabaseUrl(url)) as connection:
        return await migrate(connection)


def _put_deliveries(servers: LocalServers) -> None:
    removed = secrets.token_hex(32)
    servers.production.answer(removed, Reject(410, "Unregistered", timestamp=datetime.now(UTC) + timedelta(days=1)))
    devices = [
        *(("anna", secrets.token_hex(32), "production"), ("bea", secrets.token_hex(32), "production")),
        *(("bea", secrets.token_hex(32), "sandbox"), ("carl", removed, "production")),
    ]
    with psycopg.connect(servers.postgres.dsn(), autocommit=True) as connection:
        for device in devices:
            connection.execute("SELECT register_push_token(%s, %s, %s)", device)
        for user in ("anna", "bea", "carl", "dora"):
            payload = json.dumps({"aps": {"alert": f"Hello {user}"}})
            connection.execute("SELECT enqueue_notification(%s, %s::jsonb)", [user, payload])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where a container is told to look."""

    database: int
    production: int
    sandbox: int
    secrets: int

    @classmethod
    def read(cls, file: Path) -> Self:
        try:
            variables = json.loads(file.read_text(encoding="utf-8"))["DrainFunction"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CannotComeUpError(
                f"{file} is not what sam local invoke takes for --env-vars ({error!r}): start from a copy of {ENV_FILE}"
            ) from None
        ports = {name: _port(variables, name) for name in PUBLISHED.values()}
        if missing := [name for name, port in ports.items() if port is None]:
            raise CannotComeUpError(
                f"{file} must name a port in DrainFunction's {', '.join(missing)}: start from a copy of {ENV_FILE}"
            )
        return cls(**{field: ports[name] or 0 for field, name in PUBLISHED.items()})


PUBLISHED = {
    "database": "DATABASE_URL",
    "production": "APNS_PRODUCTION_URL",
    "sandbox": "APNS_SANDBOX_URL",
    "secrets": "AWS_ENDPOINT_URL",
}


def _port(variables: Mapping[str, object], name: str) -> int | None:
    try:
        return urlsplit(str(variables.get(name))).port
    except ValueError:
        return None


type Target = Path | tuple[str, int]


class Published:
    """Servers that listen on this machine alone, at ports of our choice and at addresses that a container can reach.

    Postgres could not listen there itself: it trusts whoever comes over its own socket or loopback, and nobody else.
    """

    def __init__(self, addresses: Sequence[str], ports: Sequence[int]) -> None:
        """Take the ports, before anything is started that would be in vain without them."""
        self._listeners: dict[int, list[socket.socket]] = {port: [] for port in ports}
        self._targets: dict[int, Target] = {}
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="published", daemon=True)
        try:
            for port, listeners in self._listeners.items():
                for address in addresses:
                    listeners.append(_listen(address, port))
        except BaseException:
            self.close()
            raise

    def lead(self, targets: Mapping[int, Target]) -> None:
        """Begin to pass connections on; until then they wait."""
        self._targets = dict(targets)
        self._thread.start()
        self._up.wait()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(timeout=10)
        for listener in [each for listeners in self._listeners.values() for each in listeners]:
            listener.close()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._up.set()
        async with asyncio.TaskGroup() as accepting:
            for port, target in self._targets.items():
                for listener in self._listeners[port]:
                    accepting.create_task(_accept(listener, target))


async def _accept(listener: socket.socket, target: Target) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as clients:
        while True:
            client, _ = await loop.sock_accept(listener)
            clients.create_task(_relay(client, target))


async def _relay(client: socket.socket, target: Target) -> None:
    """Pass on what comes, both ways, until either side ends it."""
    ends: list[asyncio.StreamWriter] = []
    try:
        from_client, to_client = await asyncio.open_connection(sock=client)
        ends.append(to_client)
        match target:
            case Path():
                from_target, to_target = await asyncio.open_unix_connection(target)
            case (host, port):
                from_target, to_target = await asyncio.open_connection(host, port)
        ends.append(to_target)
        async with asyncio.TaskGroup() as both_ways:
            both_ways.create_task(_pump(from_client, to_target))
            both_ways.create_task(_pump(from_target, to_client))
    except* OSError:  # one side broke off, or the target takes nobody: the other side hears of it by being closed
        pass
    finally:
        for end in ends:
            end.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
    sink.write_eof()


def _listen(address: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((address, port))
    except OSError as error:
        raise CannotComeUpError(
            f"port {port} of {address} cannot be taken ({os.strerror(error.errno or 0)}): end what listens there,"
            f" perhaps another ./dev up; or copy {ENV_FILE.relative_to(ROOT)}, change the port, and run ./dev up with"
            " the copy"
        ) from None
    listener.settimeout(0)
    return listener


def container_addresses() -> list[str]:
    """Find what host.docker.internal can lead to: loopback with Docker Desktop; on Linux, the bridge's own address."""
    bridge = address_of("docker0") if sys.platform == "linux" else None
    return ["127.0.0.1", *([bridge] if bridge else [])]


def address_of(interface: str) -> str | None:
    """Ask Linux for an interface's address, as `ip addr` does; None if there is no such interface."""
    import fcntl  # here: there is none on Windows
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question, suppress(OSError):
        get_address = 0x8915  # SIOCGIFADDR
        answer = fcntl.ioctl(question, get_address, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None


def up(env_file: Path) -> None:
    ports = Ports.read(env_file)
    addresses = container_addresses()
    with ExitStack() as stack:
        published = Published(addresses, [ports.database, ports.production, ports.sandbox, ports.secrets])
        stack.callback(published.close)
        servers = stack.enter_context(local_servers())
        socket_file = servers.postgres.address
        assert isinstance(socket_file, Path)
        endpoint = urlsplit(servers.secrets.url)
        published.lead(
            {
                ports.database: socket_file,
                ports.production: ("127.0.0.1", servers.production.port),
                ports.sandbox: ("127.0.0.1", servers.sandbox.port),
                ports.secrets: (endpoint.hostname or "", endpoint.port or 0),
            }
        )
        print(_how_to_use_it(servers, ports, addresses, env_file), flush=True)
        signal.pause()


def _how_to_use_it(servers: LocalServers, ports: Ports, addresses: Sequence[str], env_file: Path) -> str:
    here = servers.environment | {
        "DATABASE_URL": f"postgresql://postgres@127.0.0.1:{ports.database}/postgres",
        "APNS_PRODUCTION_URL": f"https://127.0.0.1:{ports.production}",
        "APNS_SANDBOX_URL": f"https://127.0.0.1:{ports.sandbox}",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports.secrets}",
    }
    exports = "\n".join(f"  export {name}={shlex.quote(value)}" for name, value in here.items())
    if env_file.is_relative_to(ROOT):
        env_file = env_file.relative_to(ROOT)
    return f"""\
{postgres_version()}, migrated, with four deliveries for five devices; the simulated APNs, production and sandbox; a
Secrets Manager with the signing key. Published at {" and ".join(addresses)}.

For a process on this machine:

{exports}

For the function in its container, with Docker (the first two lines once, after each start and each build):

  ./dev build {this_architecture()}
  cp {shlex.quote(str(servers.production.ca_file))} .aws-sam/build/DrainFunction/{CA_FILE}
  .venv-aws/bin/sam local invoke DrainFunction --event events/tick.json --env-vars {shlex.quote(str(env_file))} \
--region {REGION} --add-host host.docker.internal:host-gateway

What became of the deliveries:

  psql {shlex.quote(here["DATABASE_URL"])} -c "SELECT id, user_id, status, reason FROM notification_delivery"

Ctrl-C ends it, and leaves nothing."""


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print("usage: ./dev up [ENV_FILE], which is events/env.local.json unless another is named", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        up(Path(arguments[0]).resolve() if arguments else ENV_FILE)
    except KeyboardInterrupt:
        print("\nEnded.")
        return 0
    except (CannotComeUpError, PostgresUnavailableError) as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
