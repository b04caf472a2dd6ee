"""Which machine it was, and which core is whose."""

import json
import os
import platform
import re
import shutil
import ssl
import subprocess
from importlib.metadata import version
from pathlib import Path

from benchmarks.installing import NODE_MODULES, Installed
from devtools.other_servers import program


def _two_cores() -> tuple[int, ...]:
    """Give one for the client and one for the servers; none where there are no two, or no way to say so."""
    if not hasattr(os, "sched_getaffinity") or shutil.which("taskset") is None:
        return ()
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[:2]) if len(cores) > 1 else ()


CORES = _two_cores()
CLIENT_PREFIX, SERVER_PREFIX = [("taskset", "-c", str(core)) for core in CORES] or ((), ())


def describe(installed: Installed) -> dict[str, str]:
    machine = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "pinned": "the clients to one core, the servers to another" if CLIENT_PREFIX else "nothing: one core only",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": f"{_distribution()}, {platform.system()} {platform.release()}",
        "Python": f"{platform.python_version()}, {ssl.OPENSSL_VERSION}",
        "packages": ", ".join(f"{name} {version(name)}" for name in ("httpx", "httpcore", "h2", "hpack", "anyio")),
        "nghttpd, h2load": _said([program("nghttpd"), "--version"]),
        "nginx": _said([program("nginx"), "-v"]),
    }
    if installed.aioapns is not None:
        names = ("aioapns", "h2", "hpack")
        script = f"from importlib.metadata import version; print(*map(version, {names!r}))"
        versions = _said([str(installed.aioapns), "-c", script]).split()
        machine["aioapns"] = ", ".join(f"{name} {its}" for name, its in zip(names, versions, strict=True))
    if installed.node is not None:
        machine["Node"] = _said([installed.node, "--version"])
    if installed.node_apn:
        package = json.loads((NODE_MODULES / "@parse/node-apn/package.json").read_text())
        machine["@parse/node-apn"] = package["version"]
    return machine


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.platform(terse=True)


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return (done.stdout + done.stderr).strip().removeprefix("nginx version: ")
