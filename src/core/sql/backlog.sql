-- How much is due, and for how long the oldest has been. Reads the two indexes of pending rows and never the table.
SELECT count(*) AS due,
       coalesce(extract(epoch FROM now() - min(next_attempt_at)), 0)::float8 AS oldest_age_seconds
  FROM ((SELECT next_attempt_at
           FROM notification_delivery
          WHERE status = 'pending' AND claimed_at IS NULL AND next_attempt_at <= now()
          ORDER BY next_attempt_at, id
          LIMIT %(limit)s)                 -- counting on would cost more than the number is worth
        UNION ALL
        (SELECT next_attempt_at
           FROM notification_delivery
          WHERE status = 'pending' AND claimed_at IS NOT NULL AND next_attempt_at <= now()   -- leases that ran out
          ORDER BY next_attempt_at, id
          LIMIT %(limit)s)) AS waiting;
