"""What the proxy does to a connection is what its verbs say, and done when they return."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from devtools.local_postgres import LocalPostgres
from tests.support.database import Database
from tests.support.tcp_proxy import TcpProxy

SILENCE = 0.3  # how long nothing has to come to count as silence; too short could only let a fault pass, never fail


@dataclass
class Echo:
    """Sends back what it gets; at an end it says bye."""

    address: tuple[str, int]
    listener: socket.socket
    peers: list[socket.socket] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def serve(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            self.peers.append(peer)
            threading.Thread(target=self.echo, args=[peer], daemon=True).start()

    def echo(self, peer: socket.socket) -> None:
        try:
            while data := peer.recv(1 << 16):
                peer.sendall(data)
            self.ended.set()
            peer.sendall(b"bye")
            peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Echo(listener.getsockname(), listener)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for peer in server.peers:
            peer.close()


@contextmanager
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=10)) as connection:
        yield connection


def receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := connection.recv(length - len(data))):
        data += more
    return data


def silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(10)
    return False


def test_it_carries_bytes_both_ways_and_counts_them(echo: Echo) -> None:
    with TcpProxy(echo.address) as proxy, client(proxy) as first, client(proxy) as second:
        first.sendall(b"hello")
        assert receive(first, 5) == b"hello"
        second.sendall(b"you")
        assert receive(second, 3) == b"you"

        assert (proxy.count, proxy.accepted) == (2, 2)
        first.shutdown(socket.SHUT_WR)
        assert receive(first, 4) == b"bye"  # its end, too, went there and came back
        assert (proxy.bytes_to_target, proxy.bytes_to_client) == (8, 11)


def test_large_amounts_arrive_whole(echo: Echo) -> None:
    data = bytes(range(256)) * 20_000
    with TcpProxy(echo.address) as proxy, client(proxy) as connection:
        sender = threading.Thread(target=connection.sendall, args=[data])
        sender.start()

        assert receive(connection, len(data)) == data
        sender.join(10)


def test_while_it_hangs_nothing_comes_and_nothing_breaks_until_it_resumes(echo: Echo) -> None:
    with TcpProxy(echo.address) as proxy, client(proxy) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"

        proxy.hang()
        connection.sendall(b"b")
        echo.peers[0].sendall(b"!")
        assert silent(connection)
        assert (proxy.bytes_to_target, proxy.bytes_to_client) == (1, 1)
        with client(proxy) as newcomer:
            newcomer.sendall(b"c")
            assert silent(newcomer)
            assert proxy.count == 2
            assert len(echo.peers) == 1

            proxy.resume()
            assert receive(connection, 2) == b"!b"
            assert receive(newcomer, 1) == b"c"


def test_an_end_is_held_back_while_it_hangs(echo: Echo) -> None:
    with TcpProxy(echo.address) as proxy, client(proxy) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"

        proxy.hang()
        connection.shutdown(socket.SHUT_WR)
        assert not echo.ended.wait(SILENCE)
        echo.peers[0].shutdown(socket.SHUT_WR)
        assert silent(connection)

        proxy.resume()
        assert connection.recv(1) == b""
        assert echo.ended.wait(10)


@pytest.mark.parametrize("hanging", [False, True])
def test_a_cut_resets_both_sides_and_leaves_the_door_open(echo: Echo, hanging: bool) -> None:  # noqa: FBT001 - pytest's
    with TcpProxy(echo.address) as proxy, client(proxy) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
        if hanging:
            proxy.hang()
            connection.sendall(b"b")

        proxy.cut()

        assert proxy.count == 0
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        proxy.resume()
        with client(proxy) as again:
            again.sendall(b"c")
            assert receive(again, 1) == b"c"


def test_who_is_refused_hears_so_at_once_and_who_is_connected_stays(echo: Echo) -> None:
    with TcpProxy(echo.address) as proxy, client(proxy) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
        port = proxy.port

        proxy.refuse()

        with pytest.raises(ConnectionRefusedError), client(proxy):
            pass
        connection.sendall(b"b")
        assert receive(connection, 1) == b"b"

        proxy.resume()
        assert proxy.port == port
        with client(proxy) as again:
            again.sendall(b"c")
            assert receive(again, 1) == b"c"


def test_a_target_that_takes_nobody_breaks_the_client(tmp_path: Path) -> None:
    with TcpProxy(tmp_path / "nobody") as proxy, client(proxy) as connection, pytest.raises(ConnectionResetError):
        connection.recv(1)


def test_its_end_breaks_what_is_still_connected(echo: Echo) -> None:
    with TcpProxy(echo.address) as proxy:
        connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
    with closing(connection), pytest.raises(ConnectionResetError):
        connection.recv(1)
    with pytest.raises(ConnectionRefusedError), client(proxy):
        pass


def test_a_client_that_resets_takes_its_other_half_along(echo: Echo) -> None:
    with TcpProxy(echo.address) as proxy:
        with client(proxy) as connection:
            connection.sendall(b"a")
            assert receive(connection, 1) == b"a"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

        assert eventually(lambda: proxy.count == 0)


def test_postgres_works_through_it_and_goes_silent_with_it(postgres: LocalPostgres, database: Database) -> None:
    assert isinstance(postgres.address, Path)
    with TcpProxy(postgres.address) as proxy:
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{database.name}"
        with psycopg.connect(url, autocommit=True) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
            proxy.hang()
            with pytest.raises(psycopg.OperationalError, match="timeout"):
                psycopg.connect(url, connect_timeout=2)
            proxy.resume()
            assert connection.execute("SELECT 2").fetchone() == (2,)
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 3")


def eventually(what: Callable[[], bool]) -> bool:
    for _ in range(500):
        if what():
            return True
        threading.Event().wait(0.01)
    return False
