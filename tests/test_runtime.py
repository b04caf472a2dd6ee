"""The artefact of `sam build` in the real Lambda runtime: what is in it, and that it does there what it does here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from devtools import build, runtime
from devtools.build import Architecture, artefact
from devtools.runtime import (
    MIGRATE,
    ExecutionEnvironment,
    Exited,
    Raised,
    Returned,
    TimedOut,
    this_architecture,
)
from devtools.simulated_apns import Reject
from tests.support.database import Database
from tests.support.handler import LEASE, ROOT, Stack, adds_up, only

pytest_plugins = ["tests.support.handler_fixtures"]

WAIT = 30  # seconds for what takes one: bounded, never measured
type Start = Callable[..., ExecutionEnvironment]


def built_for(architecture: Architecture) -> Path:
    if not build.TOOLS.exists():
        pytest.skip("there is no .venv-aws, and so no SAM CLI and no Lambda runtime: ./dev build makes it")
    return artefact(architecture)


@pytest.fixture(scope="session")
def built() -> Path:
    return built_for(this_architecture())


@pytest.fixture
def start(stack: Stack, built: Path) -> Iterator[Start]:
    """Start execution environments, before the servers that the test's `stack` has. None outlives the test."""
    started: list[ExecutionEnvironment] = []
    with ExitStack() as ends:

        def begin(*, artefact: Path = built, timeout: int = 25, **variables: str) -> ExecutionEnvironment:
            ours = re.compile("DATABASE_URL|POWERTOOLS_LOG_LEVEL|APNS_.*|AWS_.*")
            environment = {name: value for name, value in os.environ.items() if ours.fullmatch(name)}
            begun = ExecutionEnvironment(artefact, environment=environment | variables, timeout=timeout)
            started.append(ends.enter_context(begun))
            return begun

        yield begin
    stack.said += [each.log for each in started]  # no secret may be in there, either


def tally(environment: ExecutionEnvironment, event: object = None) -> dict[str, int]:
    result = environment.invoke({} if event is None else event)
    assert isinstance(result, Returned), (result, environment.log)
    assert isinstance(result.payload, dict)
    return adds_up(result.payload)


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def insert_a_mix(stack: Stack) -> None:
    for _ in range(4):
        stack.post()
    stack.post(Reject(410, "Unregistered"))
    stack.post(Reject(503, "ServiceUnavailable"))
    stack.post(Reject(400, "BadCollapseId"))
    stack.post(text="x" * 5000)
    stack.enqueue("nobody")
    two_devices = stack.post()
    stack.device(two_devices.user)


@pytest.mark.parametrize("file", ["tick.json", "half-tick.json", "by-hand.json"])
def test_an_event_makes_the_same_tally_there_as_here(file: str, stack: Stack, start: Start) -> None:
    event = json.loads((ROOT / "events" / file).read_text())
    insert_a_mix(stack)
    here = stack.drain(event)
    ends_here = list(stack.ends().values())
    stack.db.execute("TRUNCATE notification_delivery, push_token RESTART IDENTITY")
    insert_a_mix(stack)

    there = tally(start(), event)

    assert there == here == only(claimed=11, pushed=9, sent=6, retried=1, failed=2, invalid_token=1, skipped=1)
    assert list(stack.ends().values()) == ends_here


def test_what_is_warm_is_used_again_by_the_next_invocation(stack: Stack, start: Start) -> None:
    environment = start()
    for _ in range(4):
        stack.post()
    assert tally(environment) == only(claimed=4, pushed=4, sent=4)
    process, backends, connections = environment.pid, stack.backends(), stack.apns.connections

    for _ in range(4):
        stack.post()
    assert tally(environment) == only(claimed=4, pushed=4, sent=4)

    assert len(backends) == 1
    assert (environment.pid, stack.backends(), stack.apns.connections) == (process, backends, connections)
    assert len(environment.milliseconds("init")) == 1
    assert len(environment.milliseconds("invoke")) == 2


def test_two_environments_at_once_share_what_is_due_and_push_nothing_twice(stack: Stack, start: Start) -> None:
    posted = [stack.post() for _ in range(40)]
    both = [start(DRAIN_BATCH_SIZE="20") for _ in range(2)]
    stack.apns.hold()

    with ThreadPoolExecutor(2) as threads:
        tallies = [threads.submit(tally, environment) for environment in both]
        stack.apns.wait_for_pushes(2, WAIT)  # each begins with one: so both have claimed, and neither has an answer
        stack.apns.release()
        for each in tallies:
            assert each.result(WAIT) == only(claimed=20, pushed=20, sent=20)

    assert [len(stack.pushes(each)) for each in posted] == [1] * 40
    assert len({environment.pid for environment in both}) == 2


def test_an_environment_refuses_a_second_invocation_while_it_is_at_one(stack: Stack, start: Start) -> None:
    stack.post()
    environment = start()
    stack.apns.hold()

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(tally, environment)
        stack.apns.wait_for_pushes(1, WAIT)
        with pytest.raises(RuntimeError, match="one invocation at a time, and this is at one: start another"):
            environment.invoke({})
        stack.apns.release()
        assert first.result(WAIT) == only(claimed=1, pushed=1, sent=1)


def test_a_drain_whose_time_is_over_is_killed_and_its_rows_come_back_when_the_lease_ends(
    stack: Stack, start: Start
) -> None:
    environment = start(timeout=15)  # with less than 13 s left nothing would be pushed
    assert tally(environment) == only()
    posted = [stack.post() for _ in range(3)]
    stack.apns.hold()

    with ThreadPoolExecutor(1) as threads:
        drain = threads.submit(environment.invoke, {})
        stack.apns.wait_for_pushes(1, WAIT)
        killed = environment.pid
        assert killed is not None
        # Running, it would end by itself in time, whatever APNs does: that is another test's. It is stuck.
        os.kill(killed, signal.SIGSTOP)
        result = drain.result(WAIT)

    assert isinstance(result, TimedOut)
    assert result.said.startswith("Task timed out after 15")
    assert not is_running(killed)
    assert set(stack.ends().values()) == {("pending", None, 1)}
    stack.apns.answer_again()
    assert tally(environment) == only(), "while the lease lasts they are nobody's"
    stack.advance(LEASE)
    while tally(environment)["claimed"]:
        pass
    assert set(stack.ends().values()) == {("sent", None, 2)}
    assert sum(len(stack.pushes(each)) for each in posted) == 4
    assert len(set(stack.pushes(posted[0]))) == 1, "the one that was pushed twice had one apns-id"


def test_a_process_that_dies_is_replaced_by_the_next_invocation(stack: Stack, start: Start) -> None:
    environment = start()
    stack.post()
    stack.apns.hold()

    with ThreadPoolExecutor(1) as threads:
        drain = threads.submit(environment.invoke, {})
        stack.apns.wait_for_pushes(1, WAIT)
        assert environment.pid is not None
        os.kill(environment.pid, signal.SIGKILL)
        result = drain.result(WAIT)

    assert isinstance(result, Exited)
    assert "Runtime.ExitError" in result.said
    stack.apns.answer_again()
    stack.advance(LEASE)
    assert tally(environment) == only(claimed=1, pushed=1, sent=1)


def test_an_exception_says_what_to_mend_and_changes_no_row(stack: Stack, start: Start) -> None:
    environment = start(APNS_SECRET_ID="absent")
    stack.post()
    before = stack.tables()

    result = environment.invoke({})

    assert isinstance(result, Raised)
    assert result.kind == "SecretFault"
    assert result.message.startswith("cannot read the secret absent: it does not exist here or has no value; create it")
    assert any("handlers/drain.py" in line for line in result.stack_trace)
    assert stack.tables() == before
    stack.secrets.put("absent", json.dumps(stack.apns.secret()))
    assert tally(environment) == only(claimed=1, pushed=1, sent=1), "mended, the same environment goes on"


def test_a_lease_shorter_than_the_functions_timeout_is_refused_there_too(stack: Stack, start: Start) -> None:
    result = start(LEASE_SECONDS="30").invoke({})

    assert isinstance(result, Raised)
    assert (result.kind, "set LEASE_SECONDS to at least 36" in result.message) == ("BadSettings", True)


def test_the_migrations_are_applied_there(empty_database: Database, built: Path) -> None:
    with ExecutionEnvironment(
        built, environment={"DATABASE_URL": empty_database.url}, handler=MIGRATE, timeout=60
    ) as environment:
        migrated = [environment.invoke({}) for _ in range(2)]

    names = sorted(path.name for path in (ROOT / "src/core/migrations").glob("*.sql"))
    assert migrated == [
        Returned({"version": len(names), "applied": names}),
        Returned({"version": len(names), "applied": []}),
    ]


def test_a_cold_start_is_split_into_its_phases(
    stack: Stack, start: Start, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine's times are its own, so they are printed; that they were taken is what is asserted."""
    without = tmp_path / "without-bytecode"
    shutil.copytree(built, without, ignore=shutil.ignore_patterns("__pycache__"))
    best: dict[str, list[float]] = {}
    for name, code in (("with", built), ("without", without)):
        environments = []
        for _ in range(3):
            stack.post()
            environments.append(start(artefact=code))
            assert tally(environments[-1]) == only(claimed=1, pushed=1, sent=1)
        init = min(environment.milliseconds("init")[0] for environment in environments)
        first = min(environment.milliseconds("invoke")[0] for environment in environments)
        stack.post()
        assert tally(environments[-1])["sent"] == 1
        best[name] = [init, first, environments[-1].milliseconds("invoke")[1]]

    with capsys.disabled():
        for name, (init, first, warm) in best.items():
            print(  # noqa: T201  for whoever runs the tests
                f"\ncold start {name} bytecode, best of 3: {init + first:.0f} ms = init {init:.0f} ms"
                f" + first drain {first:.0f} ms; warm drain {warm:.0f} ms",
                end="",
            )
        ratio = sum(best["without"][:2]) / sum(best["with"][:2])
        print(f"\nwithout bytecode it takes {ratio:.1f} times as long")  # noqa: T201  likewise
    assert all(took > 0 for phases in best.values() for took in phases)


@pytest.mark.parametrize("moment", ["idle", "stuck"])
def test_nothing_outlives_the_environment(moment: str, stack: Stack, built: Path) -> None:
    with ExecutionEnvironment(built, environment={"DATABASE_URL": stack.database.url}) as environment:
        tally(environment)
        emulator, handler = environment._process.pid, environment.pid
        assert handler is not None
        if moment == "stuck":
            os.kill(handler, signal.SIGSTOP)

    assert eventually(lambda: not is_running(handler))
    assert eventually(lambda: not is_running(emulator))
    assert not environment._directory.exists()


def test_an_owner_that_is_killed_takes_the_environment_with_it(stack: Stack, built: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from devtools.runtime import ExecutionEnvironment
        environment = {{"DATABASE_URL": {stack.database.url!r}}}
        with ExecutionEnvironment(Path({str(built)!r}), environment=environment) as there:
            there.invoke({{}})
            os.kill(there.pid, signal.SIGSTOP)
            print(there._process.pid, there.pid, there._directory, flush=True)
            signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        emulator, handler, directory = owner.stdout.readline().split()
        assert is_running(int(emulator))
        assert is_running(int(handler))

        owner.kill()

        assert eventually(lambda: not is_running(int(emulator)))
        assert eventually(lambda: not is_running(int(handler)))
        assert eventually(lambda: not Path(directory).exists())


def test_the_artefact_is_small_enough_to_start_fast(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [path for path in built.rglob("*") if path.is_file()]
    with zipfile.ZipFile(tmp_path / "artefact.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            archive.write(path, path.relative_to(built))
    unzipped = sum(path.stat().st_size for path in files) / 1e6
    zipped = (tmp_path / "artefact.zip").stat().st_size / 1e6

    with capsys.disabled():
        print(f"\nthe artefact: {len(files)} files, {unzipped:.1f} MB unzipped, {zipped:.1f} MB zipped")  # noqa: T201  for whoever runs the tests
    assert unzipped <= 60
    assert zipped <= 20


def test_the_artefact_leaves_out_what_the_runtime_has(built: Path) -> None:
    names = {path.name for path in built.iterdir()}

    assert {"boto3", "botocore", "s3transfer"} & names == set()
    assert {"handlers", "core", "psycopg", "psycopg_binary", "cryptography", "aws_lambda_powertools"} <= names


def test_the_artefact_holds_all_of_the_source_and_what_it_reads(built: Path) -> None:
    source = ROOT / "src"
    wanted = [
        path.relative_to(source)
        for folder in ("core", "handlers")
        for path in (source / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]

    assert {path.suffix for path in wanted} >= {".py", ".sql", ".pem"}
    assert [str(path) for path in wanted if not (built / path).exists()] == []
    assert [str(path) for path in wanted if (built / path).read_bytes() != (source / path).read_bytes()] == []


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_each_artefact_is_compiled_for_its_own_processor(architecture: Architecture) -> None:
    built = built_for(architecture)
    machine = {"x86_64": 62, "arm64": 183}[architecture]  # of the ELF header: EM_X86_64, EM_AARCH64

    libraries = [path for path in built.rglob("*") if re.search(r"\.so(\.[0-9.]+)?$", path.name)]
    assert len(libraries) > 10
    assert {int.from_bytes(path.read_bytes()[18:20], "little") for path in libraries} == {machine}
    uncompiled = [
        str(path.relative_to(built))
        for path in built.rglob("*.py")
        if not (path.parent / "__pycache__" / f"{path.stem}.cpython-313.pyc").exists()
    ]
    assert uncompiled == []


def test_bytecode_is_taken_whatever_the_dates_of_the_files_are(built: Path) -> None:
    compiled = (built / "handlers/__pycache__/drain.cpython-313.pyc").read_bytes()

    assert int.from_bytes(compiled[4:8], "little") == 0b01, "by its hash, and that unchecked: PEP 552"


def test_a_build_is_kept_until_a_file_that_goes_into_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, template = tmp_path / "src/core/drain.py", tmp_path / "template.yaml"
    source.parent.mkdir(parents=True)
    builds: list[Path] = []

    def pretend(architecture: Architecture, into: Path) -> None:
        (into / "DrainFunction").mkdir(parents=True)
        builds.append(into)

    for name, path in (("ROOT", tmp_path), ("TEMPLATE", template), ("BUILDS", tmp_path / ".aws-sam")):
        monkeypatch.setattr(build, name, path)
    monkeypatch.setattr(build, "build", pretend)

    for change in ("one", "another"):
        for path in (template, source):
            path.write_text(change)
            kept = artefact("arm64")
            (source.parent / "__pycache__").mkdir(exist_ok=True)
            (source.parent / "__pycache__/drain.pyc").write_text(change)
            assert artefact("arm64") == kept
            assert kept.is_dir()

    assert len(builds) == 3 + 1, "the first template alone, then each change"
    assert artefact("x86_64") != kept
    assert len([path for path in (tmp_path / ".aws-sam").iterdir() if "arm64" in path.name]) == 1


def test_two_that_want_the_same_build_at_once_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "template.yaml").touch()
    begun, go = threading.Event(), threading.Event()
    builds: list[Path] = []

    def pretend(architecture: Architecture, into: Path) -> None:
        builds.append(into)
        begun.set()
        assert go.wait(WAIT)
        (into / "DrainFunction").mkdir(parents=True)

    for name, path in (("ROOT", "."), ("TEMPLATE", "template.yaml"), ("BUILDS", ".aws-sam")):
        monkeypatch.setattr(build, name, tmp_path / path)
    monkeypatch.setattr(build, "build", pretend)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(artefact, "arm64")
        assert begun.wait(WAIT)
        second = threads.submit(artefact, "arm64")
        with pytest.raises(TimeoutError):
            second.result(0.2)  # a moment in which it could have begun
        go.set()
        assert first.result(WAIT) == second.result(WAIT)

    assert len(builds) == 1


def test_the_function_sees_its_own_code_what_aws_has_and_nothing_of_this_machine(tmp_path: Path, built: Path) -> None:
    (tmp_path / "probe.py").write_text(
        """
import importlib.util, os, tempfile
def handler(event, context):
    names = ["boto3", "botocore", "samcli", "pip", "click"]
    return {
        "found": [name for name in names if importlib.util.find_spec(name)],
        "variables": sorted(os.environ),
        "event": event,
        "left": context.get_remaining_time_in_millis(),
    }
"""
    )
    with ExecutionEnvironment(
        tmp_path, environment={"OUR_OWN": "1"}, handler="probe.handler", timeout=7
    ) as environment:
        result = environment.invoke({"text": "é"})

    assert isinstance(result, Returned)
    assert isinstance(result.payload, dict)
    assert result.payload["found"] == ["boto3", "botocore"]
    assert result.payload["event"] == {"text": "é"}
    assert 0 < result.payload["left"] <= 7000
    own = {"OUR_OWN", "LAMBDA_TASK_ROOT", "AWS_LAMBDA_FUNCTION_NAME", "AWS_REGION", "TZ"}
    assert own <= set(result.payload["variables"])
    assert not {"PYTEST_CURRENT_TEST", "APNS_CA_FILE", "USER"} & set(result.payload["variables"])
    assert [path.name for path in tmp_path.iterdir()] == ["probe.py"], "as in /var/task, nothing is written"


def test_missing_tools_are_named_with_what_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TOOLS", tmp_path / ".venv-aws")

    with pytest.raises(build.ToolsMissingError, match=r"\.venv-aws/bin is missing: \./dev build makes \.venv-aws of"):
        build.build("x86_64", tmp_path / "build")
    with (
        pytest.raises(build.ToolsMissingError, match=r"python3\.13 is missing: \./dev build makes \.venv-aws of"),
        ExecutionEnvironment(tmp_path, environment={}),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_says_what_sam_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    monkeypatch.setattr(build, "TEMPLATE", tmp_path / "template.yaml")

    with pytest.raises(RuntimeError, match=r"(?s)sam build failed for x86_64:.*template\.yaml"):
        build.build("x86_64", tmp_path / "build")


def test_an_emulator_that_does_not_start_is_an_error_with_its_words(built: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)the emulator did not start:.*nothing starts me"),
        ExecutionEnvironment(built, environment={}, prefix=["/bin/sh", "-c", "echo nothing starts me"]),
    ):
        pass


def test_a_machine_that_lambda_does_not_know_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(build.ToolsMissingError, match="Lambda runs on x86_64 and arm64, and this machine is riscv64"):
        this_architecture()


def test_dev_invoke_shows_the_log_and_then_the_tally(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runtime.main([str(ROOT / "events/tick.json")]) == 0

    *log, said = capsys.readouterr().out.splitlines()
    assert json.loads(said) == only(claimed=5, pushed=4, sent=3, invalid_token=1, skipped=1)
    assert any('"message":"drained"' in line for line in log)


def test_dev_invoke_tells_of_an_event_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")

    assert [runtime.main(arguments) for arguments in ([], [str(broken)], [str(tmp_path / "absent")])] == [2, 2, 2]

    said = capsys.readouterr().err.splitlines()
    assert said[0] == "usage: ./dev invoke FILE, such as ./dev invoke events/tick.json"
    assert [line.endswith("give a JSON file, such as events/tick.json") for line in said[1:]] == [True, True]
