"""One invocation of the real handler in a process of its own: `python -m devtools.invocation FILE [SECONDS]`.

FILE is a sample event, SECONDS the time that the function has. The log goes to standard output as on Lambda; the last
line is what the handler returned.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from handlers.drain import handler, let_go

TIMEOUT_SECONDS = 25.0


@dataclass(frozen=True, slots=True)
class Context:
    """What Lambda hands to the handler, as far as it is used."""

    ends_at: float
    aws_request_id: str = "local"

    def get_remaining_time_in_millis(self) -> int:
        return max(int((self.ends_at - time.monotonic()) * 1000), 0)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print("usage: python -m devtools.invocation FILE [SECONDS]", file=sys.stderr)
        return 2
    event = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    seconds = float(arguments[1]) if len(arguments) == 2 else TIMEOUT_SECONDS
    try:
        print(json.dumps(handler(event, Context(time.monotonic() + seconds))), flush=True)
    finally:
        let_go()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
