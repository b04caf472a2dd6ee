-- Bind claimed deliveries to devices. One with no device yet takes its user's most recently registered live token, and
-- in this same statement a row is inserted for each further one, leased like the first: after a crash at any instant
-- either all of them exist or none.
WITH held AS MATERIALIZED (
    SELECT nd.*
      FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(leases)s::timestamptz[]) AS claimed (id, attempts, lease)
      JOIN notification_delivery nd ON nd.id = claimed.id
     WHERE nd.status = 'pending'           -- the fence: what another drain holds by now is its to bind
       AND nd.attempts = claimed.attempts
       AND nd.next_attempt_at = claimed.lease
     ORDER BY nd.id
       FOR NO KEY UPDATE OF nd
),
device AS MATERIALIZED (
    SELECT held.id AS delivery_id, found.*
      FROM held
     CROSS JOIN LATERAL (
           SELECT pt.id, pt.token, pt.environment, pt.topic,
                  row_number() OVER (ORDER BY pt.registered_at DESC, pt.id DESC) AS place
             FROM push_token pt
            WHERE pt.user_id = held.user_id
              AND pt.invalidated_at IS NULL
            ORDER BY pt.registered_at DESC, pt.id DESC
            LIMIT 20                       -- a user has a handful; more is a bug at the registration, and must not burst
           ) found
     WHERE held.push_token_id IS NULL
    UNION ALL
    SELECT held.id, pt.id, pt.token, pt.environment, pt.topic, 1
      FROM held
      JOIN push_token pt ON pt.id = held.push_token_id
     WHERE pt.invalidated_at IS NULL
       AND pt.user_id = held.user_id       -- a device that changed hands must not show its former owner's notifications
),
bound AS (
    UPDATE notification_delivery nd
       SET push_token_id = device.id
      FROM device
     WHERE nd.id = device.delivery_id
       AND device.place = 1
       AND nd.push_token_id IS NULL
),
sibling AS (
    INSERT INTO notification_delivery AS nd
           (user_id, payload, push_type, priority, collapse_id, expires_at, ignore_quiet_hours, push_token_id,
            fanned_out_from, attempts, next_attempt_at, first_claimed_at, claimed_at)
    SELECT held.user_id, held.payload, held.push_type, held.priority, held.collapse_id, held.expires_at,
           held.ignore_quiet_hours, device.id, held.id, 1, held.next_attempt_at, held.first_claimed_at, now()
      FROM held
      JOIN device ON device.delivery_id = held.id
     WHERE device.place > 1
    RETURNING nd.id, nd.attempts, nd.next_attempt_at, nd.apns_id, nd.push_token_id, nd.fanned_out_from
)
SELECT held.id, held.id AS claimed_id, held.attempts, held.next_attempt_at AS lease, held.apns_id,
       device.id AS push_token_id, device.token, device.environment, device.topic
  FROM held
  JOIN device ON device.delivery_id = held.id AND device.place = 1
UNION ALL
SELECT sibling.id, sibling.fanned_out_from, sibling.attempts, sibling.next_attempt_at, sibling.apns_id,
       device.id, device.token, device.environment, device.topic
  FROM sibling
  JOIN device ON device.delivery_id = sibling.fanned_out_from AND device.id = sibling.push_token_id;
