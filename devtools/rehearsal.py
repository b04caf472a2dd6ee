"""A real `sam deploy` of template.yaml, to a CloudFormation on this machine: `./dev rehearse`. No account, no Docker.

LocalStack (its last free release, in a virtual environment of its own) plays AWS; the functions run in the real Lambda
runtime (`devtools.localstack_executor`), against a throw-away Postgres and the simulated APNs. Exits with 1 if anything
is not as it should be. LocalStack also writes below /var/lib/localstack.

What it cannot show: IAM is not enforced, so a missing permission goes unnoticed; the database is reached without RDS's
TLS and IAM login; the custom resource is not asked (the migrate function is invoked by hand), and the dashboard, the
security group's rule and reserved concurrency are ignored; the queue's own way to the dead-letter queue takes 450 s.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psycopg

from devtools.build import artefact, tool
from devtools.local_postgres import LocalPostgres
from devtools.runtime import this_architecture
from devtools.simulated_apns import SimulatedApns

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".venv-rehearsal"
STACK = "apns-outbox-rehearsal"
REGION = "us-east-1"
START_SECONDS = 60.0
TICK_SECONDS = 200.0  # the first comes after at most a minute, its half 30 s later; the machine may be busy

ENTRY_POINT = """
[localstack.lambda.runtime_executor]
process = devtools.localstack_executor:ProcessExecutorPlugin
"""


# It does not heed SIGTERM. Whatever ends us, the pipe breaks, and it is killed; its functions have their own watchdogs.
WATCHDOG = """
"$@" & pid=$!
read -r _
kill -KILL $pid
"""


class RehearsalError(AssertionError):
    """Something was not as it should be."""


def expect(*, that: bool, what: str) -> None:
    if not that:
        raise RehearsalError(what)
    print(f"  holds   {what}", flush=True)


def eventually(what: str, holds: Callable[[], bool], within: float) -> None:
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            raise RehearsalError(f"not within {within:g} s: {what}")
        time.sleep(0.5)
    print(f"  holds   {what}", flush=True)


@contextmanager
def localstack(directory: Path, variables: dict[str, str]) -> Iterator[str]:
    """Start it on a free port, and end it for certain: it does not heed SIGTERM."""
    plugin = directory / "plugin" / "process_executor-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: process-executor\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(ENTRY_POINT)
    for name in ("home", "files"):
        (directory / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://localhost:{port}"  # by name: of 127.0.0.1, S3's client would take the 127 for a bucket
    with (directory / "localstack.log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", WATCHDOG, "sh", VENV / "bin/python", "-m", "localstack.runtime.main"],
            cwd=directory,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                **({"CI_RUN": os.environ["CI_RUN"]} if "CI_RUN" in os.environ else {}),
                "HOME": str(directory / "home"),
                "PYTHONPATH": f"{plugin.parent}{os.pathsep}{ROOT}",
                "FILESYSTEM_ROOT": str(directory / "files"),
                "GATEWAY_SERVER": "hypercorn",
                "GATEWAY_LISTEN": f"127.0.0.1:{port}",
                "LOCALSTACK_HOST": f"localhost:{port}",
                "DNS_ADDRESS": "0",
                "SKIP_SSL_CERT_DOWNLOAD": "1",
                "DISABLE_EVENTS": "1",
                "LAMBDA_RUNTIME_EXECUTOR": "process",
                "LAMBDA_RETRY_BASE_DELAY": "2",  # seconds, for the minute that Lambda waits
                "LAMBDA_EVENT_SOURCE_MAPPING_MAX_BACKOFF_ON_EMPTY_POLL_SEC": "1",
                "REHEARSAL_VARIABLES": json.dumps(variables | {"AWS_ENDPOINT_URL": url}),
                "REHEARSAL_INVOCATIONS": str(directory / "invocations"),
            },
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us to answer
        )
        try:
            _wait_for(port, directory / "localstack.log")
            yield url
        finally:
            process.communicate(timeout=30)


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise RehearsalError(f"LocalStack did not start:\n{log.read_text(errors='replace')}") from None
            time.sleep(0.2)
        else:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    url: str
    directory: Path
    postgres: LocalPostgres
    apns: SimulatedApns

    def client(self, service: str) -> Any:  # noqa: ANN401  boto3 makes its clients' classes as it runs
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106  LocalStack's account
        )

    def sam(self, *arguments: str) -> None:
        said = subprocess.run(
            [tool("bin/sam"), *arguments, "--region", REGION],
            cwd=self.directory,
            env={
                "PATH": f"{tool('bin')}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                "HOME": str(self.directory / "home"),
                "AWS_ENDPOINT_URL": self.url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "SAM_CLI_TELEMETRY": "0",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        if said.returncode != 0:
            raise RehearsalError(f"sam {' '.join(arguments)} failed:\n{said.stdout}")

    def deploy(self, template: Path, **parameters: str) -> None:
        self.sam(
            *("deploy", "--template-file", str(template), "--stack-name", STACK, "--resolve-s3"),
            *("--capabilities", "CAPABILITY_IAM", "--no-confirm-changeset", "--no-fail-on-empty-changeset"),
            *("--parameter-overrides", *(f"{name}={value}" for name, value in parameters.items())),
        )

    def outputs(self) -> dict[str, str]:
        (stack,) = self.client("cloudformation").describe_stacks(StackName=STACK)["Stacks"]
        return {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}

    def invocations(self) -> list[dict[str, Any]]:
        lines = self.directory / "invocations"
        return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as session:
            cursor = session.execute(statement.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def ends(self) -> list[str]:
        return [status for (status,) in self.sql("SELECT status FROM notification_delivery ORDER BY id")]


def main() -> int:
    began = time.monotonic()
    if not (VENV / "bin/python").exists():
        print(f"{VENV} is missing: ./dev rehearse makes it of requirements-rehearsal.txt", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="rehearsal-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        postgres = stack.enter_context(LocalPostgres())
        apns = stack.enter_context(SimulatedApns())
        variables = {
            "DATABASE_URL": postgres.url(),
            "APNS_PRODUCTION_URL": apns.url,
            "APNS_SANDBOX_URL": apns.url,
            "APNS_CA_FILE": str(apns.ca_file),
        }
        url = stack.enter_context(localstack(directory, variables))
        try:
            _rehearse(Stage(url=url, directory=directory, postgres=postgres, apns=apns))
        except RehearsalError as fault:
            print(f"  BROKEN  {fault}", flush=True)
            print((directory / "localstack.log").read_text(errors="replace")[-8000:])
            return 1
    print(f"All of it held, in {time.monotonic() - began:.0f} s.")
    return 0


def _rehearse(stage: Stage) -> None:
    template = artefact(this_architecture()).parent / "template.yaml"
    ec2 = stage.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="database", Description="database", VpcId=vpc)["GroupId"]
    parameters = {
        "VpcId": vpc,
        "SubnetIds": subnet,
        "DatabaseSecurityGroupId": group,
        "DatabaseHost": "database.example.internal",
        "DatabaseName": "postgres",
        "DatabaseUser": "apns_drain",
        "DatabaseResourceId": "db-REHEARSAL",
        "Architecture": this_architecture(),
    }
    print("sam deploy", flush=True)
    stage.deploy(template, **parameters)
    outputs = stage.outputs()
    expect(that="DrainFunctionName" in outputs, what="the stack is up")
    functions = stage.client("lambda")
    answer = functions.invoke(FunctionName=outputs["MigrateFunctionName"], Payload=b"{}")
    said = answer["Payload"].read().decode()
    expect(that="FunctionError" not in answer and stage.ends() == [], what=f"the migrate function has migrated: {said}")
    secrets = stage.client("secretsmanager")
    secrets.put_secret_value(SecretId=outputs["ApnsSecretId"], SecretString=json.dumps(stage.apns.secret()))

    print("the ticks", flush=True)
    stage.sql("SELECT register_push_token('anna', %s)", "ab" * 32)
    stage.sql("SELECT enqueue_notification('anna', '{}') FROM generate_series(1, 3)")
    eventually("a tick drains the rows", lambda: stage.ends() == ["sent"] * 3, TICK_SECONDS)
    eventually(
        "the drain comes twice for one firing, 30 s apart",
        lambda: any(25 < later - sooner < 40 for sooner, later in _halves(stage.invocations())),
        TICK_SECONDS,
    )

    print("a database that is down", flush=True)
    stage.postgres.crash()
    queue = stage.client("sqs")
    dead: list[dict[str, Any]] = []

    def given_up() -> bool:
        received = queue.receive_message(QueueUrl=outputs["DeadTicksUrl"], MaxNumberOfMessages=10)
        dead.extend(json.loads(message["Body"]) for message in received.get("Messages", []))
        return bool(dead)

    eventually("a tick that fails ends in the dead-letter queue", given_up, TICK_SECONDS)
    context = dead[0]["requestContext"]
    expect(
        that=(context["condition"], context["approximateInvokeCount"]) == ("RetriesExhausted", 3),
        what="after three tries, and not before",
    )
    stage.postgres.restart()
    stage.sql("SELECT enqueue_notification('anna', '{}')")
    eventually("it drains again once the database is back", lambda: stage.ends() == ["sent"] * 4, TICK_SECONDS)

    print("an update", flush=True)
    stage.deploy(template, **parameters, DrainBatchSize="7")
    variables = functions.get_function_configuration(FunctionName=outputs["DrainFunctionName"])["Environment"]
    expect(that=variables["Variables"]["DRAIN_BATCH_SIZE"] == "7", what="a parameter's new value has arrived")
    kept = json.loads(secrets.get_secret_value(SecretId=outputs["ApnsSecretId"])["SecretString"])
    expect(that=kept == stage.apns.secret(), what="the signing key is kept")
    stage.sql("SELECT enqueue_notification('anna', '{}')")
    eventually("the new drain works with the rows as they were", lambda: stage.ends() == ["sent"] * 5, TICK_SECONDS)

    print("sam delete", flush=True)
    stage.sam("delete", "--stack-name", STACK, "--no-prompts")
    left = functions.list_functions()["Functions"]
    rules = stage.client("events").list_rules()["Rules"]
    queues = queue.list_queues().get("QueueUrls", [])
    expect(that=(left, rules, queues) == ([], [], []), what="no function, rule or queue is left")
    expect(that=stage.ends() == ["sent"] * 5, what="the data is")


def _halves(invocations: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Find when each firing came, directly and by way of the queue. Only its time ties the two together."""
    direct = {each["event"]["time"]: each["at"] for each in invocations if each["event"].get("source") == "aws.events"}
    queued = {
        json.loads(record["body"])["time"]: each["at"]
        for each in invocations
        for record in each["event"].get("Records", [])
    }
    return [(direct[firing], queued[firing]) for firing in direct if firing in queued]


if __name__ == "__main__":
    sys.exit(main())
