"""Drain the outbox: lease what is due, push it to APNs, settle what came back.

Read drain.py first; it is the specification, in code. Then:

    delivery.py         a row that a drain holds, its lease, its device      pure
    request.py          a delivery as the request APNs wants                 pure
    answer.py           what APNs said, read from a response                 pure
    reasons.py          every reason of APNs, whom it blames, what it means  pure
    verdict.py          what becomes of the delivery                         pure
    settling.py         outcomes written down as they come                   asyncio
    outbox.py, sql/     sweep, claim, bind, settle, release, in Postgres     I/O
    apns.py             the conversation with APNs                           I/O
    provider_token.py   the signature APNs wants on every push               pure but for the key
    secret.py           the signing key, from Secrets Manager                I/O
    database.py         the connection to Postgres                           I/O
    schema.py, migrations/   numbered SQL files and their runner             I/O
    settings.py         what may be configured, read once                    pure

Pure files import the standard library's values and each other. drain.py meets the rest through the Protocols it
declares, and everything is wired together in handlers/.
"""
