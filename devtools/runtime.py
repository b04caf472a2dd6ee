"""The real Lambda runtime on this machine, without Docker: around an artefact of `sam build`, AWS's own runtime client
(awslambdaric) under the runtime interface emulator (RIE) that the wheel of the SAM CLI carries.

    with ExecutionEnvironment(artefact(this_architecture()), environment={"DATABASE_URL": ..., ...}) as environment:
        result = environment.invoke(event)  # Returned, Raised, TimedOut or Exited

As on AWS, one environment answers one invocation at a time and is kept warm in between; for two at once start two. What
is unlike AWS: init comes with the first invocation and counts against its timeout (there it has 10 s of its own), and
no memory limit is set.

`python -m devtools.runtime FILE` invokes the drain with this event, against the servers of `devtools.up`.
"""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, Self, assert_never

from devtools.build import PYTHON, TOOLS, Architecture, ToolsMissingError, artefact, tool

DRAIN, MIGRATE = "handlers.drain.handler", "handlers.migrate.handler"
TIMEOUT_SECONDS = 25

START_SECONDS = 10.0
PATIENCE_SECONDS = 15.0  # over the function's timeout, which the emulator enforces itself

# What AWS's image has beside the function's own code, and the function counts on.
RUNTIME_PACKAGES = (
    *("awslambdaric", "snapshot-restore-py", "simplejson"),
    *("boto3", "botocore", "s3transfer", "jmespath", "python-dateutil", "six", "urllib3"),
)

# Whatever ends the owner, `kill -9` included, the pipe breaks, and all that carry the mark in their environment are
# killed: the emulator, and the handler, which is in a process group of its own and outlives an emulator that panics.
WATCHDOG = """
read -r keep || keep=
while found=$(grep -slzxF "$1" /proc/[0-9]*/environ); [ -n "$found" ]; do  # its exit code tells of processes that left
    for environ in $found; do pid=${environ#/proc/}; kill -KILL "${pid%/environ}"; done
done
[ -n "$keep" ] || rm -rf "$2"
"""


@dataclass(frozen=True, slots=True)
class Returned:
    payload: object


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler, or the import of its module, ended with an exception."""

    kind: str
    message: str
    stack_trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The function's time was over, and its process was killed."""

    said: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended by itself."""

    said: str


type Result = Returned | Raised | TimedOut | Exited


def this_architecture() -> Architecture:
    match platform.machine():
        case "x86_64" | "AMD64":
            return "x86_64"
        case "aarch64" | "arm64":
            return "arm64"
        case other:
            raise ToolsMissingError(f"Lambda runs on x86_64 and arm64, and this machine is {other}")


class ExecutionEnvironment:
    """`environment` is the function's own; of this process's nothing is passed on. `prefix` is a command that starts a
    command, such as taskset or unshare.
    """

    def __init__(
        self,
        artefact: Path,
        *,
        environment: Mapping[str, str],
        handler: str = DRAIN,
        timeout: int = TIMEOUT_SECONDS,
        prefix: Sequence[str] = (),
    ) -> None:
        self._artefact = artefact.resolve()
        self._environment = environment
        self._handler = handler
        self._timeout = timeout
        self._prefix = prefix
        self._mark = f"EXECUTION_ENVIRONMENT={uuid.uuid4()}"
        self._turn = threading.Lock()
        self._log_at_the_end: str | None = None
        self._port = 0

    def __enter__(self) -> Self:
        python, emulator = tool(f"bin/{PYTHON}"), _emulator()
        self._directory = Path(tempfile.mkdtemp(prefix="lambda-runtime-"))
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", WATCHDOG, "sh", self._mark, self._directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us to answer
            cwd="/",
        )
        try:
            (self._directory / "runtime").mkdir()
            for package in _runtime_packages():
                (self._directory / "runtime" / package.name).symlink_to(package)
            self._process = self._start(emulator, python)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._process.wait(timeout=10)

    def _end(self) -> None:
        self._watchdog.communicate(b"keep\n", timeout=30)
        self._log_at_the_end = self.log
        shutil.rmtree(self._directory)

    @property
    def log(self) -> str:
        """What the function and the emulator have said so far."""
        if self._log_at_the_end is not None:
            return self._log_at_the_end
        path = self._directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self) -> int | None:
        """The handler's process, or None while there is none: before the first invocation, and after it was killed."""
        children = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        found = [int(pid) for path in children for pid in path.read_text().split()]
        return found[0] if found else None

    def milliseconds(self, phase: Literal["init", "invoke"]) -> list[float]:
        """How long each init or each invocation took, as the emulator says."""
        match phase:
            case "init":
                said = r"INIT REPORT\(durationMs: ([0-9.]+)\)"
            case "invoke":
                said = r"INVOKE RTDONE\(.*duration: ([0-9.]+)ms\)"
            case _:
                assert_never(phase)
        return [float(took) for took in re.findall(said, self.log)]

    def invoke(self, event: object) -> Result:
        """Invoke as the service does, and wait for the end of it."""
        if not self._turn.acquire(blocking=False):
            # The emulator would panic, and take the invocation that it is at with it.
            raise RuntimeError(
                "an execution environment answers one invocation at a time, and this is at one: start another"
            )
        try:
            with closing(HTTPConnection("127.0.0.1", self._port, timeout=self._timeout + PATIENCE_SECONDS)) as service:
                service.request("POST", "/2015-03-31/functions/function/invocations", json.dumps(event))
                response = service.getresponse()
                return _result(response.status, response.read())
        except (OSError, HTTPException) as error:
            raise RuntimeError(f"the emulator gave no answer ({error}):\n{self.log}") from error
        finally:
            self._turn.release()

    def _start(self, emulator: Path, python: Path) -> subprocess.Popen[bytes]:
        # The two ports are free when they are chosen; somebody else may still be faster.
        for _ in range(3):
            self._port, api = _free_ports()
            command = [
                *(*self._prefix, str(emulator), "--log-level", "info"),
                *("--runtime-interface-emulator-address", f"127.0.0.1:{self._port}"),
                *("--runtime-api-address", f"127.0.0.1:{api}"),
                # -S: of this machine's packages none, only what is in PYTHONPATH.
                *(str(python), "-S", "-m", "awslambdaric", self._handler),
            ]
            with (self._directory / "log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._variables(),
                    cwd=self._artefact,
                    start_new_session=True,
                )
            deadline = time.monotonic() + START_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                except OSError:
                    time.sleep(0.01)
                else:
                    return process
            process.kill()
            process.wait()
        raise RuntimeError(f"the emulator did not start:\n{self.log}")

    def _variables(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        return {
            name: value,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._directory),  # no ~/.aws of anybody's
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
            "LAMBDA_TASK_ROOT": str(self._artefact),
            "PYTHONPATH": f"{self._artefact}{os.pathsep}{self._directory / 'runtime'}",
            "PYTHONDONTWRITEBYTECODE": "1",  # /var/task is read-only
            "PYTHONUNBUFFERED": "1",
            "AWS_LAMBDA_FUNCTION_NAME": "apns-outbox",
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_HANDLER": self._handler,
            "AWS_LAMBDA_FUNCTION_TIMEOUT": str(self._timeout),
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "1024",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",  # of no account
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_SESSION_TOKEN": "testing",
            **self._environment,
        }


def _emulator() -> Path:
    pattern = f"lib/{PYTHON}/site-packages/samcli/local/rapid/aws-lambda-rie-{this_architecture()}"
    emulator = tool(pattern)
    if sys.platform != "linux":
        raise ToolsMissingError("the runtime interface emulator is a Linux program: use sam local invoke instead")
    return emulator


def _runtime_packages() -> list[Path]:
    """Find the files and directories to lay beside the function's code, out of all that the SAM CLI needs."""
    site_packages = tool(f"lib/{PYTHON}/site-packages")
    found = {each.name.replace("_", "-"): each for each in distributions(path=[str(site_packages)])}
    if missing := [name for name in RUNTIME_PACKAGES if name not in found]:
        raise ToolsMissingError(
            f"{TOOLS.name} lacks {', '.join(missing)}: add what is missing to requirements-aws.in, and run ./dev lock"
        )
    tops = {file.parts[0] for name in RUNTIME_PACKAGES for file in found[name].files or []}
    return [site_packages / top for top in sorted(tops) if not top.endswith((".dist-info", "..", "__pycache__"))]


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def _result(status: int, body: bytes) -> Result:
    # The status says little: it is 200 for an exception and for a timeout, too.
    text = body.decode(errors="replace")
    if text.startswith("Task timed out after "):
        return TimedOut(text)
    if status != 200:
        return Exited(text)
    match json.loads(text):
        case {"errorMessage": str(message), "errorType": str(kind), "requestId": str(), **rest}:
            trace = rest.get("stackTrace")
            return Raised(kind, message, tuple(map(str, trace)) if isinstance(trace, list) else ())
        case payload:
            return Returned(payload)


def main(arguments: list[str]) -> int:
    from devtools.up import local_servers  # here: it imports psycopg and moto, which tests of this module do without

    if len(arguments) != 1:
        print("usage: ./dev invoke FILE, such as ./dev invoke events/tick.json", file=sys.stderr)
        return 2
    try:
        event = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{arguments[0]} is no event: {error}; give a JSON file, such as events/tick.json", file=sys.stderr)
        return 2
    try:
        built = artefact(this_architecture())
    except RuntimeError as fault:  # tools that are missing, a build that failed
        print(fault, file=sys.stderr)
        return 1
    with local_servers() as servers, ExecutionEnvironment(built, environment=servers.environment) as environment:
        result = environment.invoke(event)
    print(environment.log)
    match result:
        case Returned(payload):
            print(json.dumps(payload))
            return 0
        case Raised(kind, message):
            print(f"{kind}: {message}", file=sys.stderr)
        case TimedOut(said) | Exited(said):
            print(said, file=sys.stderr)
        case _:
            assert_never(result)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
