"""A simulated APNs: HTTP/2 over TLS on 127.0.0.1, in a thread of the process that owns it, for clients in any process.

    with SimulatedApns() as apns:
        apns.answer(token, Reject(503, "ServiceUnavailable"), Ok())
        ...  # push to apns.url, trusting apns.ca_file, with the provider of apns.secret()
        assert [push.answer for push in apns.journal] == ...

What to read, in this order: `rules` (what Apple checks of a push), `answers` (what it can be told to answer),
`simulation` (rules, told answers and the journal together), `connection` (HTTP/2, one connection), `listener` (TLS).
"""

from devtools.simulated_apns.answers import Answer, Hangup, Ok, Reject, Reset, Silence
from devtools.simulated_apns.certificates import Authority
from devtools.simulated_apns.credentials import Credentials
from devtools.simulated_apns.simulation import Push, SimulatedApns

__all__ = [
    "Answer",
    "Authority",
    "Credentials",
    "Hangup",
    "Ok",
    "Push",
    "Reject",
    "Reset",
    "Silence",
    "SimulatedApns",
]
