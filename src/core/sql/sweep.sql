-- Fail what its last attempt left behind: a lease that ran out with no attempt to spare.
-- Without this a row that kills its drain every time would be pending for ever.
WITH dead AS MATERIALIZED (
    SELECT id
      FROM notification_delivery
     WHERE status = 'pending'
       AND claimed_at IS NOT NULL          -- still set: the drain died before it settled
       AND next_attempt_at <= now()        -- and its lease is over
       AND attempts >= %(max_attempts)s
     ORDER BY next_attempt_at, id
     LIMIT %(limit)s                       -- bounds one statement; the rest is the next drain's
       FOR NO KEY UPDATE SKIP LOCKED       -- two sweeps at once share the work and never wait
)
UPDATE notification_delivery nd
   SET status     = 'failed',
       reason     = 'lease_expired',
       last_error = left('The drain died during attempt ' || nd.attempts || ' and its lease expired.'
                         || coalesce(' Before that: ' || nd.last_error, ''), 500),
       claimed_at = NULL,
       updated_at = now()
  FROM dead
 WHERE nd.id = dead.id
RETURNING nd.id, nd.attempts;
