"""What is deployed may be deployed: each package says under which licence, and it is one of those we know."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

PINNED = re.findall(
    r"^([a-z0-9-]+)==(\S+)", (Path(__file__).parent.parent / "src" / "requirements.txt").read_text(), re.MULTILINE
)
# Weak copyleft at most: psycopg (LGPL) and certifi (MPL) are used as they are, and their sources are a pip away.
KNOWN = re.compile(r"MIT|BSD|Apache|Python Software Foundation|PSF|MPL|Mozilla|LGPL|Lesser General", re.IGNORECASE)
OTHERS = re.compile(r"(?<!L)GPL|AGPL|SSPL|(?<!Lesser )General Public|Commercial|Proprietary", re.IGNORECASE)


@pytest.mark.parametrize(("name", "version"), PINNED)
def test_what_is_deployed_is_licensed_for_it(name: str, version: str) -> None:
    try:
        about = metadata(name)
    except ModuleNotFoundError:
        pytest.skip(f"{name} {version} is for another platform than this")
    licence = " ".join(
        [
            about.get("License-Expression") or (about.get("License") or "")[:60],
            *(line for line in about.get_all("Classifier") or () if line.startswith("License ::")),
        ]
    )

    assert KNOWN.search(licence), licence
    assert not OTHERS.search(licence), licence
