"""What a push costs, next to the others: `./dev bench apns [--json] [--quick]`.

All clients take turns on one core, each in a process of its own, against one server on the other core that is not ours
and is faster than any of them. Medians of several rounds, and ratios, go to docs/performance.md, between the markers
there, and to its picture; `--json` prints them as well, for machines. `--quick` does little, and writes nothing.
"""

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import jwt

from benchmarks import report
from benchmarks.installing import Installed, install
from benchmarks.load import Job, Measured
from benchmarks.machine import CLIENT_PREFIX, SERVER_PREFIX, describe
from benchmarks.report import Comparison, Row, Scenario
from devtools.other_servers import HOST, MissingProgramError, Server, nghttpd, nginx, program
from devtools.simulated_apns.credentials import Credentials

ROUNDS = 5
TOKENS = 300  # files that the server has; APNs has more, but no client here remembers a token
MOST_SECONDS = 300.0  # for one client's turn: the slowest needs 15

SCENARIOS = (
    Scenario("nghttpd", streams=100, batch=50, batches=20),
    Scenario("nghttpd", streams=100, batch=5000, batches=1),
    Scenario("nghttpd", streams=1000, batch=50, batches=20),
    Scenario("nghttpd", streams=1000, batch=5000, batches=1),
    # It repeats the apns-id in its answer, as APNs does, and resets each stream afterwards, as APNs does not.
    Scenario("nginx", streams=100, batch=5000, batches=1),
)
QUICK = tuple(
    Scenario(each.server, each.streams, batch=min(each.batch, 1000), batches=min(each.batches, 10))
    for each in SCENARIOS
)


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class Account:
    credentials: Credentials
    key_file: Path
    tokens: tuple[str, ...]
    bearer: str

    @classmethod
    def generate(cls, directory: Path) -> "Account":
        credentials = Credentials.generate()
        key_file = directory / "key.p8"
        key_file.touch(mode=0o600)
        key_file.write_text(credentials.private_key())
        bearer = jwt.encode(
            {"iss": credentials.team_id, "iat": int(time.time())},
            credentials.private_key(),
            algorithm="ES256",
            headers={"kid": credentials.key_id},
        )
        return cls(credentials, key_file, tuple(secrets.token_hex(32) for _ in range(TOKENS)), bearer)

    def job(self, server: Server, scenario: Scenario) -> Job:
        return Job(
            host=HOST,
            port=server.port,
            ca_file=str(server.ca_file),
            key_file=str(self.key_file),
            key_id=self.credentials.key_id,
            team_id=self.credentials.team_id,
            bearer=self.bearer,
            topic="com.example.app",
            tokens=self.tokens,
            streams=scenario.streams,
            batch=scenario.batch,
            batches=scenario.batches,
            began=time.time(),
        )


def clients(installed: Installed) -> Iterator[Client]:
    yield Client(report.OURS, [sys.executable, "-m", "benchmarks.client_ours"])
    yield Client("stock httpx", [sys.executable, "-m", "benchmarks.client_httpx"])
    if installed.aioapns is not None:
        yield Client("aioapns", [str(installed.aioapns), "-m", "benchmarks.client_aioapns"])
        yield Client(
            "aioapns, held back to the streams",
            [str(installed.aioapns), "-m", "benchmarks.client_aioapns", "--held-back"],
        )
    if installed.node is not None:
        if installed.node_apn:
            yield Client("@parse/node-apn", [installed.node, "benchmarks/client_node_apn.mjs"])
        yield Client("Node's http2", [installed.node, "benchmarks/client_node_http2.mjs"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench apns", description="What a push costs, next to the others.")
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    parser.add_argument("--quick", action="store_true", help="one short round, and nothing is written to docs/")
    options = parser.parse_args(arguments)
    try:
        for name in ("nghttpd", "h2load", "nginx"):
            program(name)
    except MissingProgramError:
        sys.exit(
            "bench: first run: apt-get install -y --no-install-recommends nghttp2-server nghttp2-client nginx-light"
        )
    installed = install()
    for absent in installed.absent:
        _say(absent)
    scenarios, rounds = (QUICK, 1) if options.quick else (SCENARIOS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        comparison = _compare(list(clients(installed)), scenarios, rounds, Path(directory), installed)
    if options.json:
        print(json.dumps(asdict(comparison), indent=2))
    else:
        print(report.markdown(comparison))
    if not options.quick:
        for path in report.write(comparison):
            _say(f"wrote {path}")
    return 0


def _compare(
    candidates: Sequence[Client], scenarios: Sequence[Scenario], rounds: int, directory: Path, installed: Installed
) -> Comparison:
    machine = describe(installed)
    account = Account.generate(directory)
    turns: dict[tuple[Scenario, str], list[Measured]] = defaultdict(list)
    for number in range(rounds):
        for scenario in scenarios:
            _say(f"round {number + 1} of {rounds}: {scenario}")
            with _serve(scenario, account) as server:
                for client in candidates:
                    turns[scenario, client.name].append(_turn(client, account.job(server, scenario)))
                turns[scenario, report.CEILING].append(_h2load(server, account, scenario, directory))
    rows = [
        Row(
            scenario=scenario,
            client=client,
            cpu=statistics.median(each.cpu for each in measured) / scenario.pushes * 1000,
            wall=statistics.median(each.wall for each in measured) / scenario.pushes * 1000,
            cold_cpu=statistics.median(each.cold_cpu for each in measured),
            cold_wall=statistics.median(each.cold_wall for each in measured),
        )
        for (scenario, client), measured in turns.items()
    ]
    return Comparison(machine=machine, rounds=rounds, rows=rows, absent=installed.absent)


def _serve(scenario: Scenario, account: Account) -> AbstractContextManager[Server]:
    if scenario.server == "nginx":
        return nginx(streams=scenario.streams, prefix=SERVER_PREFIX)
    return nghttpd(tokens=account.tokens, streams=scenario.streams, prefix=SERVER_PREFIX)


def _turn(client: Client, job: Job) -> Measured:
    done = subprocess.run(
        [*CLIENT_PREFIX, *client.command],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        env=os.environ | {"PYTHONPATH": "src:.", "NODE_ENV": "production"},
        check=False,
    )
    try:
        measured = Measured(**json.loads(done.stdout))
    except ValueError:
        sys.exit(f"bench: {client.name} did not finish: {done.stderr[-2000:]}")
    if measured.accepted != job.batch * job.batches:
        sys.exit(f"bench: of {job.batch * job.batches} pushes, {client.name} had only {measured.accepted} accepted")
    return measured


def _h2load(server: Server, account: Account, scenario: Scenario, directory: Path) -> Measured:
    """Measure the server's ceiling: what a client in C costs that makes nothing of the answers."""
    job = account.job(server, scenario)
    notification = next(job.pushes())
    body, urls, output = directory / "body", directory / "urls", directory / "h2load"
    body.write_bytes(notification.body())
    urls.write_text("".join(f"{server.url}/3/device/{token}\n" for token in account.tokens))
    headers = {
        "apns-topic": job.topic,
        "apns-push-type": "alert",
        "apns-priority": "10",
        "apns-id": notification.apns_id,
        "authorization": f"bearer {job.bearer}",
    }
    at_once, pushes = min(scenario.batch, scenario.streams), 5000  # so many that its start does not count
    command = [program("h2load"), "-n", str(pushes), "-c", "1", "-m", str(at_once), "-d", str(body), "-i", str(urls)]
    for name, value in headers.items():
        command += ["-H", f"{name}: {value}"]
    with output.open("wb") as sink:
        process = subprocess.Popen([*CLIENT_PREFIX, *command], stdin=subprocess.DEVNULL, stdout=sink)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    said = output.read_text()
    finished = re.search(r"finished in ([\d.]+)(us|ms|s),", said)
    if process.returncode or finished is None or f" {pushes} succeeded" not in said:
        sys.exit(f"bench: h2load did not finish: {said}")
    share = scenario.pushes / pushes
    seconds = float(finished[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[finished[2]]
    cpu = usage.ru_utime + usage.ru_stime
    return Measured(cold_cpu=0.0, cold_wall=0.0, cpu=cpu * share, wall=seconds * share, accepted=scenario.pushes)


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
