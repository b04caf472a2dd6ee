-- Give back deliveries whose push never began: due at once, and the attempt is not counted. One that was first claimed
-- too long ago for that spends its attempt, so that nothing circles for ever. An id that does not come back lost its lease.
UPDATE notification_delivery nd
   SET attempts        = CASE WHEN release.give_back THEN greatest(nd.attempts - 1, 0) ELSE nd.attempts END,
       status          = CASE WHEN release.give_back OR nd.attempts < %(max_attempts)s THEN 'pending' ELSE 'failed' END,
       reason          = CASE WHEN release.give_back OR nd.attempts < %(max_attempts)s THEN nd.reason ELSE 'out_of_time' END,
       last_error      = CASE WHEN release.give_back OR nd.attempts < %(max_attempts)s THEN nd.last_error
                              ELSE 'Every drain that claimed it ran out of time before its push began.' END,
       next_attempt_at = now(),
       claimed_at      = NULL,
       updated_at      = now()
  FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(leases)s::timestamptz[], %(give_backs)s::boolean[])
       AS release (id, attempts, lease, give_back)
 WHERE nd.id = release.id
   AND nd.status = 'pending'               -- the fence, as in settle.sql
   AND nd.attempts = release.attempts
   AND nd.next_attempt_at = release.lease
RETURNING nd.id, nd.status;
