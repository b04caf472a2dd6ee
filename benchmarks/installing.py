"""What the benchmark compares with is nothing that the project needs: it is installed here, and only on demand."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
VENV = HERE / ".venv"
NODE_MODULES = HERE / "node_modules"
MOST_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    aioapns: Path | None  # the Python that has it
    node: str | None
    node_apn: bool
    absent: tuple[str, ...]  # a sentence for each that is left out


def install() -> Installed:
    absent: list[str] = []
    aioapns = VENV / "bin/python"
    has_aioapns = _made(VENV, "requirements.txt", _make_venv, absent, "aioapns")
    node, npm = shutil.which("node"), shutil.which("npm")
    has_node_apn = False
    if node is None:
        absent.append("Node and @parse/node-apn are left out: there is no `node` here")
    elif npm is None:
        absent.append("@parse/node-apn is left out: there is no `npm` to install it with")
    else:
        npm_ci = [npm, "ci", "--ignore-scripts", "--silent"]
        has_node_apn = _made(NODE_MODULES, "package-lock.json", [npm_ci], absent, "@parse/node-apn")
    return Installed(aioapns=aioapns if has_aioapns else None, node=node, node_apn=has_node_apn, absent=tuple(absent))


# --only-binary: what is measured against is not to be built here, whatever it needs for that.
_make_venv = [
    [sys.executable, "-m", "venv", "--clear", str(VENV)],
    [
        *(str(VENV / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"),
        *("--require-hashes", "--only-binary", ":all:", "-r", str(HERE / "requirements.txt")),
    ],
]


def _made(directory: Path, lock: str, commands: Sequence[Sequence[str]], absent: list[str], what: str) -> bool:
    """Make it unless it was made from the same lock file. The stamp comes last, so that what was cut short has none."""
    stamp = hashlib.sha256((HERE / lock).read_bytes() + sys.version.encode()).hexdigest()
    kept = directory / ".stamp"
    if kept.exists() and kept.read_text() == stamp:
        return True
    print(f"bench: installing {what}, once", file=sys.stderr)
    for command in commands:
        try:
            subprocess.run(command, cwd=HERE, check=True, timeout=MOST_SECONDS, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as fault:
            absent.append(f"{what} is left out, since it could not be installed: {type(fault).__name__}")
            return False
    kept.write_text(stamp)
    return True
