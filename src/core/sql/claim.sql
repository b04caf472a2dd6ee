-- Lease up to `limit` due deliveries, oldest first. The lease is next_attempt_at moved forward: a drain that dies gives
-- its rows back by doing nothing.
WITH due AS MATERIALIZED (   -- runs once. As a plain subquery the planner may re-run it, and each run takes `limit` more
    SELECT id, next_attempt_at AS due_at
      FROM notification_delivery
     WHERE status = 'pending'
       AND next_attempt_at <= now()
       AND claimed_at IS NULL              -- a row whose drain died is a suspect: claim_suspect.sql takes it, alone
     ORDER BY next_attempt_at, id
     LIMIT %(limit)s
       FOR NO KEY UPDATE SKIP LOCKED       -- parallel drains get disjoint rows; a key share lock elsewhere hides none
),
claimed AS (
UPDATE notification_delivery nd
   SET attempts         = least(nd.attempts + 1, 1000000),  -- before anything is sent: a crash counts. The bound is the
                                                            -- column's own: one absurd row must not fail the claim
       next_attempt_at  = now() + make_interval(secs => %(lease_seconds)s),
       claimed_at       = now(),
       first_claimed_at = coalesce(nd.first_claimed_at, now()),
       updated_at       = now()
  FROM due
 WHERE nd.id = due.id                      -- and nothing else: a second predicate here invites the plan that re-runs `due`
RETURNING nd.*, due.due_at
)
SELECT
    claimed.id, claimed.attempts, claimed.next_attempt_at AS lease, claimed.push_type, claimed.priority,
    claimed.collapse_id, claimed.apns_id, claimed.ignore_quiet_hours,
    -- Dates as seconds, since a timestamp may lie where Python's datetime does not reach (the year 20000, or 4000 BC),
    -- and one row's date must not fail the batch. Times of day likewise: 24:00 is one to Postgres alone.
    extract(epoch FROM claimed.due_at)::float8 AS due_at,
    extract(epoch FROM claimed.claimed_at)::float8 AS claimed_at,
    extract(epoch FROM claimed.expires_at)::bigint AS expires_at,
    claimed.expires_at <= now() AS is_expired,
    -- Bytes, so that the payload goes out as the producer wrote it: no number is rounded, no text is decoded.
    convert_to(claimed.payload::text, 'UTF8') AS payload,
    claimed.first_claimed_at > now() - make_interval(hours => %(give_back_hours)s) AS may_give_back,
    -- What the recipient wants now, not when the row was inserted. NULL: there is no such row.
    recipient.push_enabled, recipient.time_zone,
    extract(epoch FROM recipient.quiet_from)::int AS quiet_from,
    extract(epoch FROM recipient.quiet_until)::int AS quiet_until
  FROM claimed
  LEFT JOIN recipient ON recipient.user_id = claimed.user_id;
