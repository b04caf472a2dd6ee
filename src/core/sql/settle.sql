-- Write down what became of claimed deliveries, any mix of outcomes, each one only if it is still ours to say.
-- An id that does not come back lost its lease.
WITH verdict AS MATERIALIZED (
    SELECT *
      FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(leases)s::timestamptz[], %(statuses)s::text[],
                  %(reasons)s::text[], %(errors)s::text[], %(delays)s::float8[], %(give_backs)s::boolean[],
                  %(push_token_ids)s::bigint[], %(tokens)s::text[], %(dead_since)s::timestamptz[],
                  %(statuses_if_alive)s::text[])
           AS v (id, attempts, lease, status, reason, error, delay, give_back,
                 push_token_id, token, dead_since, status_if_alive)
),
held AS MATERIALIZED (
    SELECT v.*, nd.status AS found
      FROM verdict v
      JOIN notification_delivery nd ON nd.id = v.id
     WHERE (nd.next_attempt_at = v.lease   -- the fence: the lease that our claim wrote is still there
            AND nd.attempts = v.attempts   -- and so is its count: after a give-back two claims have the same number
            AND ((nd.status = 'pending' AND nd.claimed_at IS NOT NULL)  -- and nobody has ended it or given it back
                 OR (nd.status IN (v.status, v.status_if_alive) AND nd.status <> 'pending'
                     AND nd.reason = v.reason)))  -- or this is our own write, sent again since its answer was lost
        OR (v.status = 'sent'              -- that APNs accepted it stays true after the lease: better late than twice
            AND nd.status IN ('pending', 'failed', 'sent'))
     ORDER BY v.id                         -- everyone locks in the same order, so that no two settles deadlock
       FOR NO KEY UPDATE OF nd
),
token AS MATERIALIZED (                    -- as it is now, and stays until we are done: a device may be registering again
    SELECT pt.id, pt.token, pt.registered_at, pt.invalidated_at
      FROM push_token pt
     WHERE pt.id IN (SELECT push_token_id FROM held WHERE status = 'invalid_token'
                                              AND found = 'pending')  -- not where it is only said again
     ORDER BY pt.id
       FOR NO KEY UPDATE OF pt
),
dead AS (
    UPDATE push_token pt
       SET invalidated_at = now(),
           invalid_reason = held.reason
      FROM held
      JOIN token ON token.id = held.push_token_id
     WHERE pt.id = token.id
       AND held.status = 'invalid_token'
       AND held.found = 'pending'
       AND token.token = held.token        -- exactly the token that was sent
       AND token.invalidated_at IS NULL
       AND (held.dead_since IS NULL        -- APNs' date has milliseconds, so compare in milliseconds
            OR date_trunc('milliseconds', token.registered_at) <= held.dead_since)
    RETURNING pt.id
),
judged AS (
    SELECT held.id, held.reason, held.error, held.delay, held.give_back,
           -- The device registered again after the instant APNs speaks of: it is alive, and the delivery may try again.
           CASE WHEN held.status = 'invalid_token' AND held.found <> 'pending'
                THEN held.found            -- and an end stays the end it was
                WHEN held.status = 'invalid_token' AND dead.id IS NULL AND token.id IS NOT NULL
                     AND token.invalidated_at IS NULL
                THEN held.status_if_alive
                ELSE held.status
           END AS status
      FROM held
      LEFT JOIN dead ON dead.id = held.push_token_id
      LEFT JOIN token ON token.id = held.push_token_id
)
UPDATE notification_delivery nd
   SET status          = judged.status,
       reason          = judged.reason,
       last_error      = judged.error,
       attempts        = CASE WHEN judged.give_back THEN greatest(nd.attempts - 1, 0) ELSE nd.attempts END,
       next_attempt_at = CASE WHEN judged.status = 'pending' THEN now() + make_interval(secs => judged.delay)
                              ELSE nd.next_attempt_at END,
       claimed_at      = NULL,
       sent_at         = CASE WHEN judged.status = 'sent' THEN coalesce(nd.sent_at, now()) END,
       updated_at      = CASE WHEN nd.status = judged.status AND nd.status <> 'pending' THEN nd.updated_at
                              ELSE now() END       -- written twice, it still ended once
  FROM judged
 WHERE nd.id = judged.id
RETURNING nd.id, nd.status;
