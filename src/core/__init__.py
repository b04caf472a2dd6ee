"""Drain the outbox: lease what is due, push it to APNs, settle what came back.

Read drain.py first; it is the specification, in code. Then:

    delivery.py         a row that a drain holds, its lease, its device      pure
    recipient.py        what its recipient wants: opted out, quiet hours         pure
    request.py          a delivery as the request APNs wants                 pure
    answer.py           what APNs said, read from a response                 pure
    reasons.py          every reason of APNs, whom it blames, what it means  pure
    verdict.py          what becomes of the delivery                         pure
    proof.py            what an answer says in the light of the others       pure
    sending.py          in which order pushes go out                         asyncio
    settling.py         outcomes written down as they come                   asyncio
    outbox.py, sql/     sweep, claim, bind, settle, release, in Postgres     I/O
    apns.py             the conversation with APNs                           I/O
    transport.py        its connections, behind httpx's interface            I/O
    http2.py            the protocol on one connection                       pure
    hpack.py            header blocks, written and read                      pure
    provider_token.py   the signature APNs wants on every push               pure but for the key
    secret.py           the signing key, from Secrets Manager                I/O
    database.py         the connection to Postgres                           I/O
    schema.py, migrations/   numbered SQL files and their runner             I/O
    access.py           the drain's database user, and what it is granted    I/O
    settings.py         what may be configured, read once                    pure

Pure files import the standard library's values and each other. drain.py meets the rest through the Protocols it
declares, and everything is wired together in handlers/.
"""
