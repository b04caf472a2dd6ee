"""HTTP/2 servers that nobody here wrote, on loopback and with a certificate made for the occasion: nghttp2's nghttpd,
nginx and Node's http2, from Debian's packages. What our sender says has to make sense to them, too.
"""

import ipaddress
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

HOST = "127.0.0.1"
PACKAGES = {"nghttpd": "nghttp2-server", "h2load": "nghttp2-client", "nginx": "nginx-light", "node": "nodejs"}

START_SECONDS = 10.0
LEAVE_SECONDS = 5.0


class MissingProgramError(RuntimeError):
    """The message says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    port: int
    ca_file: Path
    log: Path

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"


def program(name: str) -> str:
    """Find it, also where Debian keeps what only root is thought to start."""
    path = os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingProgramError(
            f"{name} is not installed; on Debian or Ubuntu: apt-get install -y --no-install-recommends {PACKAGES[name]}"
        )
    return found


@contextmanager
def nghttpd(
    *, tokens: Iterable[str], streams: int, options: Sequence[str] = (), prefix: Sequence[str] = ()
) -> Iterator[Server]:
    """Answer 200 with nothing in it to pushes to these tokens, and 404 to others: it serves files, and they are empty.

    `prefix` is a command that starts a command, such as taskset.
    """
    with _directory() as directory:
        devices = directory / "root/3/device"
        devices.mkdir(parents=True)
        for token in tokens:
            (devices / token).touch()
        key, its_certificate = certificate(directory)
        port = _free_port()
        # -W: a window of 1 MiB, so that what bounds 1,000 streams is their number and not the octets of their bodies.
        how = ["-a", HOST, "-d", str(directory / "root"), "-m", str(streams), "-W", "20", *options]
        command = [*prefix, program("nghttpd"), *how, str(port), str(key), str(its_certificate)]
        with _started(command, port, directory / "log"):
            yield Server(port=port, ca_file=its_certificate, log=directory / "log")


@contextmanager
def nginx(*, streams: int, prefix: Sequence[str] = ()) -> Iterator[Server]:
    """Answer 200 with nothing in it but the apns-id, as APNs does, to whatever comes."""
    with _directory() as directory:
        key, its_certificate = certificate(directory)
        port = _free_port()
        scratch = "".join(
            f"{what}_temp_path {directory}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (directory / "conf").write_text(
            f"""
            daemon off; master_process off; pid {directory}/pid; error_log {directory}/log;
            events {{}}
            http {{
                access_log off; {scratch}
                keepalive_requests 1000000;  # it would say GOAWAY after 1,000
                server {{
                    listen {HOST}:{port} ssl http2;
                    ssl_certificate {its_certificate}; ssl_certificate_key {key};
                    http2_max_concurrent_streams {streams};
                    location / {{ add_header apns-id $http_apns_id; return 200; }}
                }}
            }}
            """
        )
        how = ["-p", str(directory), "-e", str(directory / "log"), "-c", str(directory / "conf")]
        command = [*prefix, program("nginx"), *how]
        with _started(command, port, directory / "log"):
            yield Server(port=port, ca_file=its_certificate, log=directory / "log")


@contextmanager
def node(script: Path, *arguments: str) -> Iterator[Server]:
    """Run a script, given the files of a key and a certificate, a port, and its arguments. It prints to the log."""
    with _directory() as directory:
        key, its_certificate = certificate(directory)
        port = _free_port()
        command = [program("node"), str(script), str(key), str(its_certificate), str(port), *arguments]
        with _started(command, port, directory / "log"):
            yield Server(port=port, ca_file=its_certificate, log=directory / "log")


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="other-server-") as path:
        yield Path(path)


@contextmanager
def _started(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for(port, process, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.args!r} did not start: {log.read_text(errors='replace')}") from None
            time.sleep(0.01)
        else:
            return


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def certificate(directory: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 that is its own authority, and is trusted by whoever is shown its file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "A server on this machine")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= dict.fromkeys(("crl_sign", "encipher_only", "decipher_only"), False)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=True, **usage), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    key_file, certificate_file = directory / "key.pem", directory / "certificate.pem"
    key_file.touch(mode=0o600)
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    certificate_file.write_bytes(made.public_bytes(Encoding.PEM))
    return key_file, certificate_file
