"""`python -m tests.support.invoke [TOKEN]`: one invocation in a process of its own. The tally is its last line.

With a token, the process dies of the push to that device, at the moment when it makes the request: as of a payload that
crashes a C extension, or eats all the memory.
"""

import json
import logging
import os
import sys

from core import apns
from core.answer import Unsendable
from core.delivery import Push
from core.request import Request, compose
from handlers import drain
from tests.support.handler import Invocation

DIED = 70


def main() -> None:
    logging.basicConfig(level=logging.DEBUG)  # to standard error: whatever any logger would say
    if sys.argv[1:]:
        (fatal,) = sys.argv[1:]

        def compose_or_die(push: Push, key_topic: str) -> Request | Unsendable:
            if push.device.token == fatal:
                os._exit(DIED)
            return compose(push, key_topic)

        vars(apns)["compose"] = compose_or_die
    tally = drain.handler({}, Invocation())
    drain.let_go()
    print(json.dumps(tally))  # noqa: T201  to the test


if __name__ == "__main__":
    main()
