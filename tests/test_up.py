"""`./dev up`, and everything of `sam local invoke` but Docker itself."""

import json
import os
import platform
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import psycopg
import pytest

from devtools import build, up
from devtools.build import artefact
from devtools.runtime import ExecutionEnvironment, Returned, this_architecture
from devtools.up import CA_FILE, ENV_FILE, CannotComeUpError, Ports, Published
from tests.support.handler import ROOT, only

TALLY = only(claimed=5, pushed=4, sent=3, invalid_token=1, skipped=1)  # of the deliveries that it puts in


def env_file(directory: Path) -> Path:
    """Copy the sample with four ports that are free: the sample's own may be somebody's."""
    text = ENV_FILE.read_text()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = Ports.read(ENV_FILE)
    for listener, port in zip(listeners, (ports.database, ports.production, ports.sandbox, ports.secrets), strict=True):
        text = text.replace(f":{port}", f":{listener.getsockname()[1]}")
        listener.close()
    copy = directory / "env.json"
    copy.write_text(text)
    return copy


@dataclass(slots=True)
class Up:
    process: subprocess.Popen[str]
    env_file: Path
    said: str = ""
    exports: dict[str, str] = field(default_factory=dict)

    @property
    def ports(self) -> Ports:
        return Ports.read(self.env_file)

    def end(self, number: int) -> str:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=30)
        return out


@contextmanager
def started(directory: Path) -> Iterator[Up]:
    file = env_file(directory)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "devtools.up", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            there = Up(process, file)
            assert process.stdout is not None
            for line in process.stdout:
                there.said += line
                if line.startswith("Ctrl-C ends it"):
                    break
            exported = re.findall(r"^  export (\w+)=(.*)$", there.said, re.MULTILINE)
            there.exports = dict(exported)
            assert process.poll() is None, there.said
            yield there
        finally:
            process.kill()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Up]:
    with started(tmp_path) as there:
        yield there


def is_free(port: int) -> bool:
    with socket.socket() as question:
        return question.connect_ex(("127.0.0.1", port)) != 0


def test_what_it_prints_is_enough_for_a_drain_on_this_machine(running: Up) -> None:
    assert running.exports.keys() >= {"DATABASE_URL", "APNS_SECRET_ID", "APNS_CA_FILE", "AWS_ENDPOINT_URL"}

    drain = subprocess.run(
        [sys.executable, "-m", "devtools.invocation", "events/tick.json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **running.exports},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )

    assert json.loads(drain.stdout.splitlines()[-1]) == TALLY
    with psycopg.connect(running.exports["DATABASE_URL"]) as session:
        found = session.execute("SELECT user_id, status FROM notification_delivery ORDER BY user_id, status").fetchall()
    assert found == [
        ("anna", "sent"),
        ("bea", "sent"),
        ("bea", "sent"),
        ("carl", "invalid_token"),
        ("dora", "skipped"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_it_ends_when_it_is_told_and_leaves_nothing(number: int, running: Up) -> None:
    with psycopg.connect(running.exports["DATABASE_URL"], autocommit=True) as session:  # and stays while it ends
        answer = session.execute("SHOW data_directory").fetchone()
        assert answer is not None

        assert running.end(number) == "\nEnded.\n"

    assert running.process.returncode == 0
    ports = running.ports
    assert all(is_free(port) for port in (ports.database, ports.production, ports.sandbox, ports.secrets))
    assert not Path(answer[0]).parent.exists()
    assert not Path(running.exports["APNS_CA_FILE"]).exists()


def test_it_writes_nothing_into_the_project(tmp_path: Path) -> None:
    def files() -> dict[Path, int]:
        ours = ("src", "devtools", "events")
        return {
            path: path.stat().st_mtime_ns
            for folder in ours
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    before = files()
    with started(tmp_path) as there:
        there.end(signal.SIGINT)

    assert files() == before


def test_the_certificate_is_good_for_the_name_by_which_a_container_knows_this_machine(running: Up) -> None:
    context = ssl.create_default_context(cafile=running.exports["APNS_CA_FILE"])
    context.set_alpn_protocols(["h2"])
    certificates = set()
    for port in (running.ports.production, running.ports.sandbox):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
            context.wrap_socket(connection, server_hostname="host.docker.internal") as secured,
        ):
            assert secured.selected_alpn_protocol() == "h2"
            certificates.add(secured.getpeercert(binary_form=True))
    assert len(certificates) == 2, "each port leads to a server of its own"


def test_secrets_manager_answers_to_that_name_too(running: Up) -> None:
    connection = HTTPConnection("127.0.0.1", running.ports.secrets, timeout=10)
    connection.request(
        "POST",
        "/",
        json.dumps({"SecretId": running.exports["APNS_SECRET_ID"]}),
        {
            "Host": f"host.docker.internal:{running.ports.secrets}",
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": "secretsmanager.GetSecretValue",
            "Authorization": "AWS4-HMAC-SHA256 Credential=defaultkey/20260101/us-east-1/secretsmanager/aws4_request",
        },
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()

    assert json.loads(answer["SecretString"]).keys() == {"team_id", "key_id", "private_key", "topic"}


def test_the_function_drains_with_the_env_file_as_it_is(running: Up, tmp_path: Path) -> None:
    """In a mount namespace that shows what the container would: the code in /var/task, read-only, with the CA that the
    printed command copies there; and the host's name. The variables are those of the file, to the letter.
    """
    task, hosts = tmp_path / "task", tmp_path / "hosts"
    mounts = (
        f"mount --bind {hosts} /etc/hosts && mount -t tmpfs tmpfs /var && mkdir /var/task"
        f" && mount --bind {task} /var/task && mount -o remount,bind,ro /var/task"
    )
    hosts.write_text("127.0.0.1 localhost host.docker.internal\n")
    prefix = ["unshare", "--mount", "/bin/sh", "-c", f'{mounts} && exec "$@"', "sh"]
    need_tools()
    shutil.copytree(artefact(this_architecture()), task)
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace can be made here: it takes root, and a kernel that allows it")
    shutil.copy(running.exports["APNS_CA_FILE"], task / CA_FILE)
    variables = json.loads(running.env_file.read_text())["DrainFunction"]

    with ExecutionEnvironment(task, environment=variables, prefix=prefix) as environment:
        result = environment.invoke(json.loads((ROOT / "events/tick.json").read_text()))

    assert result == Returned(TALLY), environment.log


def need_tools() -> None:
    if not build.TOOLS.exists():
        pytest.skip("there is no .venv-aws, and so no SAM CLI: ./dev build makes it")


def test_the_template_declares_each_variable_of_the_env_file() -> None:
    """What a function does not declare, `sam local invoke` leaves out without a word. Asked of its own code."""
    need_tools()
    resolve = """
import json, sys
from samcli.commands.local.lib.local_lambda import LocalLambdaRunner
from samcli.lib.providers.sam_function_provider import SamFunctionProvider
from samcli.lib.providers.sam_stack_provider import SamLocalStackProvider

template, env_file = sys.argv[1:]
stacks, _ = SamLocalStackProvider.get_stacks(template)
functions = SamFunctionProvider(stacks)
overrides = json.load(open(env_file))
runner = LocalLambdaRunner(None, functions, "/", template, aws_region="us-east-1", env_vars_values=overrides)
print(json.dumps(runner._make_env_vars(functions.get("DrainFunction")).resolve()))
"""
    said = subprocess.run(
        [build.tool(f"bin/{build.PYTHON}"), "-c", resolve, ROOT / "template.yaml", ENV_FILE],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )

    resolved = json.loads(said.stdout.splitlines()[-1])
    wanted = json.loads(ENV_FILE.read_text())["DrainFunction"]
    assert {name: resolved.get(name) for name in wanted} == wanted


def test_the_printed_command_is_right_up_to_docker(running: Up) -> None:
    need_tools()
    (command,) = re.findall(r"^  (\.venv-aws/bin/sam local invoke .*)$", running.said, re.MULTILINE)
    template = artefact(this_architecture()).parent / "template.yaml"

    said = subprocess.run(
        ["/bin/sh", "-c", f"{command} --template-file {template}"],
        cwd=ROOT,
        env={
            **os.environ,
            "DOCKER_HOST": "unix:///nowhere",
            "SAM_CLI_TELEMETRY": "0",
            "__SAM_CLI_APP_DIR": str(running.env_file.parent / "sam"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )

    assert said.returncode == 1
    assert re.search(r"(Docker|container runtime)", said.stdout), said.stdout
    assert "Usage:" not in said.stdout, said.stdout


def test_it_prints_what_to_build_and_to_copy_first(running: Up) -> None:
    assert f"  ./dev build {this_architecture()}\n" in running.said
    assert f"  cp {running.exports['APNS_CA_FILE']} .aws-sam/build/DrainFunction/{CA_FILE}\n" in running.said
    assert f"--env-vars {running.env_file} " in running.said
    assert json.loads(ENV_FILE.read_text())["DrainFunction"]["APNS_CA_FILE"] == f"/var/task/{CA_FILE}"


def test_a_port_that_is_taken_is_named_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = env_file(tmp_path)
    with socket.create_server(("127.0.0.1", Ports.read(file).sandbox)) as taken:
        assert up.main([str(file)]) == 1

        port = taken.getsockname()[1]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert capsys.readouterr().err == (
        f"port {port} of 127.0.0.1 cannot be taken (Address already in use): end what listens there, perhaps another"
        " ./dev up; or copy events/env.local.json, change the port, and run ./dev up with the copy\n"
    )
    assert is_free(Ports.read(file).database)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not what sam local invoke takes for --env-vars"),
        ("{}", "is not what sam local invoke takes for --env-vars"),
        ('{"DrainFunction": {}}', "DATABASE_URL, APNS_PRODUCTION_URL, APNS_SANDBOX_URL, AWS_ENDPOINT_URL: start from"),
        (
            '{"DrainFunction": {"DATABASE_URL": "postgresql://h:99999/"}}',
            "must name a port in DrainFunction's DATABASE",
        ),
    ],
)
def test_an_env_file_without_ports_is_refused_with_what_to_start_from(text: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "env.json"
    file.write_text(text)

    with pytest.raises(CannotComeUpError) as raised:
        Ports.read(file)

    assert fault in str(raised.value)
    assert str(ENV_FILE) in str(raised.value)


def test_the_sample_names_four_ports() -> None:
    ports = Ports.read(ENV_FILE)

    assert len({ports.database, ports.production, ports.sandbox, ports.secrets}) == 4


@pytest.mark.skipif(platform.system() != "Linux", reason="the addresses 127.0.0.2 and above are Linux's")
def test_what_listens_on_one_address_is_published_on_others_both_ways_and_to_the_end() -> None:
    """127.0.0.2 stands for the Docker bridge's address."""
    sent, received = os.urandom(3_000_000), os.urandom(2_000_000)

    def serve(listener: socket.socket) -> bytes:
        connection, _ = listener.accept()
        with connection:
            got = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # until the client has said its last word
            connection.sendall(received)
            return got

    with socket.create_server(("127.0.0.1", 0)) as target, ThreadPoolExecutor(1) as threads:
        target.settimeout(10)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        published = Published(["127.0.0.1", "127.0.0.2"], [port])
        try:
            published.lead({port: target.getsockname()})
            for address in ("127.0.0.1", "127.0.0.2"):
                served = threads.submit(serve, target)
                with socket.create_connection((address, port), timeout=10) as client:
                    client.sendall(sent)
                    client.shutdown(socket.SHUT_WR)
                    assert b"".join(iter(lambda: client.recv(1 << 16), b"")) == received
                assert served.result(10) == sent
            target.close()
            with socket.create_connection(("127.0.0.2", port), timeout=10) as client:
                assert client.recv(1) == b"", "nobody is there any more, and that is soon known"
        finally:
            published.close()


def test_the_address_of_an_interface_is_known_if_there_is_one() -> None:
    assert up.address_of("lo") == "127.0.0.1"
    assert up.address_of("no-such-bridge") is None
    assert up.container_addresses()[0] == "127.0.0.1"


def test_help_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert [up.main(["--help"]), up.main(["one", "two"])] == [2, 2]

    assert (
        capsys.readouterr().err.splitlines()
        == ["usage: ./dev up [ENV_FILE], which is events/env.local.json unless another is named"] * 2
    )
