"""What holds for the tree as a whole, and no single module would notice."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import core
from devtools import reasons

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "core"
MODULES = sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")
SQL_FILES = sorted((CORE / "sql").glob("*.sql")) + sorted((CORE / "migrations").glob("*.sql"))


def the_map() -> dict[str, str]:
    """core/__init__.py names each module and says what it is: pure, or what it touches."""
    lines = [re.split(r" {2,}", line.strip()) for line in (core.__doc__ or "").splitlines() if line.startswith("    ")]
    return {
        name.removesuffix(".py"): nature
        for names, _, nature in lines
        for name in names.split(", ")
        if name.endswith(".py")
    }


def the_contract() -> tuple[set[str], set[str]]:
    """Which modules may not do I/O, and which of ours they may not import."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (contract for contract in contracts if contract["name"].startswith("Decisions are pure"))
    return set(pure["source_modules"]), set(pure["forbidden_modules"])


@pytest.mark.parametrize("module", MODULES)
def test_the_map_in_core_names_every_module(module: str) -> None:
    assert f"{module}.py" in (core.__doc__ or "")


def test_the_map_in_core_names_no_module_that_is_gone() -> None:
    named = set(re.findall(r"\b(\w+)\.py\b", core.__doc__ or ""))

    assert named == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_either_held_to_be_pure_or_kept_away_from_what_is(module: str) -> None:
    pure, forbidden = the_contract()

    assert (f"core.{module}" in pure) != (f"core.{module}" in forbidden)


def test_what_the_map_calls_pure_is_held_to_it() -> None:
    pure, _ = the_contract()
    called_pure = {f"core.{module}" for module, nature in the_map().items() if nature == "pure"}

    assert len(called_pure) >= 5
    assert called_pure <= pure


def test_what_the_map_says_does_io_is_not_called_pure_by_the_contract() -> None:
    _, forbidden = the_contract()

    assert {f"core.{module}" for module, nature in the_map().items() if "I/O" in nature} <= forbidden


def test_the_page_of_reasons_is_made_from_the_table_that_the_code_uses() -> None:
    assert reasons.PAGE.read_text(encoding="utf-8") == reasons.table(), "run ./dev reasons --write"


@pytest.mark.parametrize("path", SQL_FILES, ids=lambda path: path.name)
def test_an_sql_file_begins_by_saying_what_it_does(path: Path) -> None:
    first, *_ = path.read_text(encoding="utf-8").splitlines()

    assert re.fullmatch(r"-- [A-Z].{20,}", first)


def test_there_are_sql_files_to_look_at() -> None:
    assert len(SQL_FILES) >= 7


def tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so nothing says which files are the project's")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Written in two halves, or this file would be the one it finds.
REGISTRIES = re.compile(
    "|".join(re.escape(name + rest) for name, rest in [
        ("pypi", ".org"), ("pypi", ".python.org"), ("python", "hosted.org"), ("registry.npm", "js.org"),
        ("index", "-url"), ("trusted", "-host"), ("PIP_INDEX", "_URL"), ("UV_INDEX", "_URL"), ("UV_DEFAULT", "_INDEX"),
    ]).encode()
)  # fmt: skip


def test_no_file_names_a_package_registry_so_that_each_machine_uses_its_own() -> None:
    named = {
        str(path.relative_to(ROOT)): found[0].decode()
        for path in tracked_files()
        if (found := REGISTRIES.search(path.read_bytes()))
    }

    assert named == {}


@pytest.mark.parametrize("name", ["src/requirements.txt", "requirements-dev.txt"])
def test_pins_have_hashes_and_no_address(name: str) -> None:
    text = (ROOT / name).read_text()
    pins = re.findall(r"^[a-z0-9].*?(?=^[a-z0-9]|\Z)", text, re.MULTILINE | re.DOTALL)

    assert len(pins) >= 5
    assert [pin.splitlines()[0] for pin in pins if "==" not in pin or "--hash=sha256:" not in pin] == []
    assert "://" not in text
