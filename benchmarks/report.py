"""The figures for people: a page, and a picture of the two scenarios that matter most to a drain."""

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "ours"
CEILING = "h2load (C), the server's ceiling"

DOCS = Path(__file__).parent.parent / "docs"
BEGIN = "<!-- made by ./dev bench apns: begin -->"
END = "<!-- made by ./dev bench apns: end -->"
TIMES = "×"  # noqa: RUF001  the sign, not the letter


@dataclass(frozen=True, slots=True)
class Scenario:
    server: str
    streams: int
    batch: int
    batches: int

    @property
    def pushes(self) -> int:
        return self.batch * self.batches

    def __str__(self) -> str:
        batches = f"{self.batches} {TIMES} {self.batch:,}" if self.batches > 1 else f"{self.batch:,} at once"
        return f"{batches}, {self.streams:,} streams, {self.server}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians, in seconds: of CPU and of time for 1,000 pushes, and of all until the first was answered."""

    scenario: Scenario
    client: str
    cpu: float
    wall: float
    cold_cpu: float
    cold_wall: float


type Figure = Callable[[Row], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    machine: dict[str, str]
    rounds: int
    rows: Sequence[Row]
    absent: Sequence[str]

    @property
    def scenarios(self) -> list[Scenario]:
        return list(dict.fromkeys(row.scenario for row in self.rows))

    @property
    def clients(self) -> list[str]:
        """From the cheapest to the dearest, over all scenarios."""
        names = dict.fromkeys(row.client for row in self.rows)
        return sorted(names, key=lambda name: sum(row.cpu for row in self.rows if row.client == name))

    def row(self, scenario: Scenario, client: str) -> Row:
        return next(row for row in self.rows if (row.scenario, row.client) == (scenario, client))


def write(comparison: Comparison) -> Iterator[Path]:
    page, picture = DOCS / "performance.md", DOCS / "performance.svg"
    text = page.read_text() if page.exists() else f"# Performance\n\n{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"bench: {page} has lost the lines {BEGIN!r} and {END!r}, between which the figures go")
    page.write_text(f"{before}{BEGIN}\n{markdown(comparison)}\n{END}{after}")
    yield page
    picture.write_text(svg(comparison))
    yield picture


def markdown(comparison: Comparison) -> str:
    return "\n".join(_lines(comparison))


def _lines(comparison: Comparison) -> Iterator[str]:
    yield f"Medians of {comparison.rounds} rounds in which the clients took turns. In brackets: how many times ours."
    yield ""
    yield "**CPU-seconds of the client (user and system) for 1,000 pushes**"
    yield ""
    yield from _table(comparison, lambda row: row.cpu)
    yield ""
    yield "**Seconds that 1,000 pushes took**"
    yield ""
    yield from _table(comparison, lambda row: row.wall)
    yield ""
    yield "**Cold: a process that starts, connects and has its first push answered**"
    yield ""
    yield "| client | CPU, ms | time, ms |"
    yield "|---|---|---|"
    most = comparison.scenarios[1]
    for client in comparison.clients:
        if client != CEILING:
            row = comparison.row(most, client)
            yield f"| {client} | {row.cold_cpu * 1000:.0f} | {row.cold_wall * 1000:.0f} |"
    yield ""
    yield "The machine:"
    yield ""
    yield from (f"- {what}: {value}" for what, value in comparison.machine.items())
    for absent in comparison.absent:
        yield f"- {absent}"


def _table(comparison: Comparison, value: Figure) -> Iterator[str]:
    yield "| client | " + " | ".join(map(str, comparison.scenarios)) + " |"
    yield "|---" * (1 + len(comparison.scenarios)) + "|"
    for client in comparison.clients:
        cells = []
        for scenario in comparison.scenarios:
            ours, its = (value(comparison.row(scenario, name)) for name in (OURS, client))
            cells.append(f"{its:.3f} ({_times(its / ours)})")
        name = f"**{client}**" if client == OURS else client
        yield f"| {name} | " + " | ".join(cells) + " |"


def _times(ratio: float) -> str:
    return (f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}") + TIMES


WIDTH, LEFT, LONGEST, RIGHT_OF_BAR = 880, 265, 440, 8
BAR, STEP, PANEL_HEAD = 18, 26, 44

STYLE = """
    text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif;
      font-size: 14px; fill: #1f2328; }
    .head { font-size: 15px; font-weight: 600; }
    .note { font-size: 12.5px; fill: #59636e; }
    .ours { font-weight: 600; }
    .bar { fill: #afb8c1; }
    .bar.ours { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .note { fill: #9198a1; }
      .bar { fill: #656c76; }
      .bar.ours { fill: #4493f8; }
    }
"""


def svg(comparison: Comparison) -> str:
    """Draw the CPU of a batch of 50, which is what a drain sends by default, and of as many as there are."""
    panels = comparison.scenarios[:2]
    height = 40 + sum(PANEL_HEAD + STEP * len(comparison.clients) for _ in panels) + 20
    body: list[str] = []
    top = 40
    for scenario in panels:
        body += _panel(comparison, scenario, top)
        top += PANEL_HEAD + STEP * len(comparison.clients)
    machine = html.escape(comparison.machine["processor"])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"',
            f'  height="{height}" role="img" aria-labelledby="title words">',
            '  <title id="title">CPU time for 1,000 pushes, by client</title>',
            f'  <desc id="words">{html.escape(_in_words(comparison, panels))}</desc>',
            f"  <style>{STYLE}  </style>",
            '  <text class="head" x="10" y="24">CPU of the client for 1,000 pushes; shorter is better</text>',
            *body,
            f'  <text class="note" x="10" y="{height - 8}">Medians of {comparison.rounds} rounds. {machine}.</text>',
            "</svg>",
            "",
        ]
    )


def _panel(comparison: Comparison, scenario: Scenario, top: int) -> Iterator[str]:
    rows = sorted((comparison.row(scenario, client) for client in comparison.clients), key=lambda row: row.cpu)
    dearest, ours = rows[-1].cpu, comparison.row(scenario, OURS).cpu
    yield f'  <text class="note" x="10" y="{top + 26}">{html.escape(str(scenario))}</text>'
    for number, row in enumerate(rows):
        y = top + PANEL_HEAD - 8 + STEP * number
        width = max(LONGEST * row.cpu / dearest, 1)
        mark = " ours" if row.client == OURS else ""
        figure = f"{row.cpu * 1000:.0f} ms" + ("" if mark else f" · {_times(row.cpu / ours)}")
        yield (
            f'  <text class="{mark.strip()}" x="{LEFT - 10}" y="{y + 14}" text-anchor="end">'
            f"{html.escape(row.client)}</text>"
            f'<rect class="bar{mark}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3"/>'
            f'<text class="{mark.strip()}" x="{LEFT + width + RIGHT_OF_BAR:.1f}" y="{y + 14}">{figure}</text>'
        )


def _in_words(comparison: Comparison, panels: Sequence[Scenario]) -> str:
    return " ".join(
        f"{scenario}: "
        + ", ".join(f"{client} {comparison.row(scenario, client).cpu * 1000:.0f} ms" for client in comparison.clients)
        + "."
        for scenario in panels
    )
