"""The benchmark's page and picture. What it measures is no test's business."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import report
from benchmarks.report import BEGIN, CEILING, END, OURS, Comparison, Row, Scenario, markdown, svg, write

FIFTY = Scenario("nghttpd", streams=100, batch=50, batches=20)
MANY = Scenario("nghttpd", streams=1000, batch=5000, batches=1)


def a_comparison(*, machine: str = "A processor, 2 cores") -> Comparison:
    cpu = {OURS: 0.05, CEILING: 0.005, "a <rival>": 1.0}
    rows = [
        Row(scenario=scenario, client=client, cpu=seconds, wall=2 * seconds, cold_cpu=0.1, cold_wall=0.2)
        for scenario in (FIFTY, MANY)
        for client, seconds in cpu.items()
    ]
    return Comparison(machine={"processor": machine}, rounds=5, rows=rows, absent=["Node is left out: there is none"])


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "DOCS", tmp_path)
    return tmp_path


def test_what_stands_round_the_figures_stays_and_the_figures_are_replaced(docs: Path) -> None:
    page = docs / "performance.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold figures\n{END}\n\nAfter.\n")

    assert [path.name for path in write(a_comparison())] == ["performance.md", "performance.svg"]
    once = page.read_text()
    list(write(a_comparison()))

    assert page.read_text() == once
    assert once.startswith("# Before\n")
    assert once.endswith("\nAfter.\n")
    assert "old figures" not in once
    assert "| a <rival> | 1.000 (20.0×) |" in once  # noqa: RUF001  the sign, not the letter


def test_a_page_that_has_lost_its_markers_is_left_alone(docs: Path) -> None:
    page = docs / "performance.md"
    page.write_text(f"{BEGIN}\nno end")

    with pytest.raises(SystemExit, match="has lost the lines"):
        list(write(a_comparison()))

    assert page.read_text() == f"{BEGIN}\nno end"


def test_ratios_are_to_ours_and_what_is_left_out_is_said() -> None:
    text = markdown(a_comparison())

    assert "| **ours** | 0.050 (1.0×) | 0.050 (1.0×) |" in text  # noqa: RUF001  ditto
    assert f"| {CEILING} | 0.005 (0.10×) | 0.005 (0.10×) |" in text  # noqa: RUF001  ditto
    assert "- Node is left out: there is none" in text


def test_the_picture_is_xml_with_a_bar_for_each_client_as_long_as_its_cost() -> None:
    picture = ET.fromstring(svg(a_comparison(machine="R&D <board>")))  # noqa: S314  our own
    bars = [float(bar.attrib["width"]) for bar in picture.iter("{http://www.w3.org/2000/svg}rect")]

    assert len(bars) == 2 * 3
    assert max(bars) == pytest.approx(20 * sorted(bars)[2], rel=0.01)
