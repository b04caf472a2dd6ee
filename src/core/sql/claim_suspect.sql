-- Lease the oldest suspect: a delivery whose last lease expired without a verdict, so that its drain died, perhaps of it.
-- One at a time: if it kills this drain too, it burns nobody else's attempt.
WITH due AS MATERIALIZED (
    SELECT id, next_attempt_at AS due_at
      FROM notification_delivery
     WHERE status = 'pending'
       AND next_attempt_at <= now()
       AND claimed_at IS NOT NULL          -- nobody settled it
       AND attempts < %(max_attempts)s     -- else it is the sweep's
     ORDER BY next_attempt_at, id
     LIMIT 1
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE notification_delivery nd
   SET attempts         = nd.attempts + 1,
       next_attempt_at  = now() + make_interval(secs => %(lease_seconds)s),
       claimed_at       = now(),
       updated_at       = now()
  FROM due
 WHERE nd.id = due.id
RETURNING
    nd.id, nd.attempts, nd.next_attempt_at AS lease, nd.push_type, nd.priority, nd.collapse_id, nd.apns_id,
    extract(epoch FROM due.due_at)::float8 AS due_at,
    extract(epoch FROM nd.expires_at)::bigint AS expires_at,
    convert_to(nd.payload::text, 'UTF8') AS payload,
    nd.first_claimed_at > now() - make_interval(hours => %(give_back_hours)s) AS may_give_back;
