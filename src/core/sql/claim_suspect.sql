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
),
claimed AS (
UPDATE notification_delivery nd
   SET attempts         = nd.attempts + 1,
       next_attempt_at  = now() + make_interval(secs => %(lease_seconds)s),
       claimed_at       = now(),
       updated_at       = now()
  FROM due
 WHERE nd.id = due.id
RETURNING nd.*, due.due_at
)
SELECT
    claimed.id, claimed.attempts, claimed.next_attempt_at AS lease, claimed.push_type, claimed.priority,
    claimed.collapse_id, claimed.apns_id, claimed.ignore_quiet_hours,
    extract(epoch FROM claimed.due_at)::float8 AS due_at,
    extract(epoch FROM claimed.claimed_at)::float8 AS claimed_at,
    extract(epoch FROM claimed.expires_at)::bigint AS expires_at,
    claimed.expires_at <= now() AS is_expired,
    convert_to(claimed.payload::text, 'UTF8') AS payload,
    claimed.first_claimed_at > now() - make_interval(hours => %(give_back_hours)s) AS may_give_back,
    recipient.push_enabled, recipient.time_zone,
    extract(epoch FROM recipient.quiet_from)::int AS quiet_from,
    extract(epoch FROM recipient.quiet_until)::int AS quiet_until
  FROM claimed
  LEFT JOIN recipient ON recipient.user_id = claimed.user_id;
