"""What APNs can answer and what follows, as Markdown: `./dev reasons`; with `--write` it goes to docs/reasons.md."""

import sys
from pathlib import Path

from core.reasons import BY_STATUS, REASONS, Blame

PAGE = Path(__file__).parent.parent / "docs" / "reasons.md"


def table() -> str:
    """Make the page."""
    lines = [
        "# What APNs can answer, and what follows",
        "",
        "Made by `./dev reasons --write` from `src/core/reasons.py`, the table that the code itself uses.",
        'Apple\'s own: "Handling notification responses from APNs".',
        "",
        "| whose fault | what becomes of the delivery |",
        "| --- | --- |",
        *(f"| {blame.name.lower()} | {blame.value} |" for blame in Blame),
        "",
        "| status | reason | fault of | meaning | beside that |",
        "| --- | --- | --- | --- | --- |",
        "| 200 | | | accepted: APNs has it, which is not to say that the device has | |",
        *(
            f"| {reason.status} | `{name}` | {reason.blame.name.lower()} | {reason.meaning} | {reason.note} |"
            for name, reason in REASONS.items()
        ),
        *(
            f"| {status} | any other | {blame.name.lower()} | kept word for word, and judged by its status | |"
            for status, blame in BY_STATUS.items()
        ),
        "| else | any | apns | kept word for word, and judged by its status | |",
        (
            "| none | `timeout`, `connection_lost`, … | apns | the outcome is unknown | Retried with the same apns-id"
            " and collapse id, so that a second push replaces the first on the device. |"
        ),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Print the page, or write it."""
    match arguments:
        case []:
            print(table(), end="")
        case ["--write"]:
            PAGE.write_text(table(), encoding="utf-8")
        case _:
            print("usage: ./dev reasons [--write]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
