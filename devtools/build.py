"""The functions' code as it is deployed: `./dev build [arm64|x86_64]`, then `sam deploy`.

`sam build` fetches the packages for the functions' processor, which need not be this machine's. What it leaves out is
the bytecode: in /var/task, which is read-only, each cold start would compile everything anew, for twice the time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / ".venv-aws"
TEMPLATE = ROOT / "template.yaml"
BUILDS = ROOT / ".aws-sam"
PYTHON = "python3.13"  # the Runtime of the template

type Architecture = Literal["arm64", "x86_64"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture.__value__)


class ToolsMissingError(RuntimeError):
    """Something that AWS's tools should bring is not there; the message says what to do about it."""


def tool(name: str) -> Path:
    """Find a file of the virtual environment that the SAM CLI has for itself."""
    path = TOOLS / name
    if not path.exists():
        raise ToolsMissingError(
            f"{path} is missing: ./dev build makes {TOOLS.name} of requirements-aws.txt, and needs {PYTHON} for it"
        )
    return path


def build(architecture: Architecture, into: Path) -> None:
    """Build all functions, each into a directory of its name."""
    tools = tool("bin")
    said = subprocess.run(
        [
            *(tool("bin/sam"), "build", "--template-file", TEMPLATE, "--build-dir", into),
            *("--cache-dir", BUILDS / "cache", "--parameter-overrides", f"Architecture={architecture}"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            # By its name the builder looks for the Python of the Runtime.
            "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "SAM_CLI_TELEMETRY": "0",
            "__SAM_CLI_APP_DIR": str(BUILDS / "sam"),  # else it writes to the home directory
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,  # 10 s as a rule; the packages may come over a slow line
        check=False,
    )
    if said.returncode != 0:
        raise RuntimeError(f"sam build failed for {architecture}:\n{said.stdout}")
    # By its hash and unchecked: the dates in a zip are not the files' own, and nothing changes there.
    subprocess.run(
        [
            tools / PYTHON,
            "-m",
            "compileall",
            "-q",
            "-j",
            "0",
            "--invalidation-mode",
            "unchecked-hash",
            *into.glob("*Function"),
        ],
        check=True,
        timeout=300,
    )


def artefact(architecture: Architecture) -> Path:
    """Build the drain for tests and trials, unless it was built of the same files before. What a deploy has is left."""
    BUILDS.mkdir(exist_ok=True)
    with (BUILDS / "trial.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # let go when it is closed: two runs at once would build, and clear away, the same
        name = f"trial-{architecture}-"
        kept = BUILDS / f"{name}{_digest()}"
        if not kept.exists():
            for old in BUILDS.glob(f"{name}*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(prefix="making-", dir=BUILDS) as scratch:
                build(architecture, Path(scratch) / "build")
                (Path(scratch) / "build").rename(kept)  # whole or not at all
        return kept / "DrainFunction"


def _digest() -> str:
    """Make one name of all that goes into a build."""
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    digest = hashlib.sha256()
    for path in [Path(__file__), TEMPLATE, *sorted(files)]:
        digest.update(f"{path}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main(arguments: list[str]) -> int:
    match arguments:
        case []:
            architecture: Architecture = "arm64"  # the template's own default
        case ["arm64" | "x86_64" as named]:
            architecture = named
        case _:
            print(f"usage: ./dev build [{'|'.join(ARCHITECTURES)}]", file=sys.stderr)
            return 2
    try:
        build(architecture, BUILDS / "build")
    except RuntimeError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(f"Built for {architecture}, bytecode included. Deploy with the same Architecture.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
