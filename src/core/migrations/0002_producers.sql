-- What other services call and look at. Everything is an addition: an INSERT and a call written for 0001 work as before.
--
-- The functions run with the rights of their owner, so that a caller needs none on the tables. Hence three rules for
-- their bodies. Their search_path is pinned, with pg_temp last, so that no table of the caller's stands before ours.
-- Built-in functions are called by their full name, so that no overload that somebody put into our schema fits better.
-- And now() is not, so that a test can stop the clock: it takes no arguments, and nothing fits better than the same.
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- For notification_status, and only of a user's second device and further ones: who has one device pays nothing.
CREATE INDEX notification_delivery_sibling ON notification_delivery (fanned_out_from)
    WHERE fanned_out_from IS NOT NULL;
-- For a registration, which looks for the row that its token had before it was invalidated.
CREATE INDEX push_token_dead ON push_token (lower(token), environment, coalesce(topic, ''))
    WHERE invalidated_at IS NOT NULL;

DROP FUNCTION enqueue_notification(text, jsonb, text, int, text, timestamptz, timestamptz, text, boolean, bigint);
CREATE FUNCTION enqueue_notification(
    user_id text, payload jsonb DEFAULT NULL, push_type text DEFAULT 'alert', priority int DEFAULT NULL,
    collapse_id text DEFAULT NULL, expires_at timestamptz DEFAULT NULL, send_at timestamptz DEFAULT NULL,
    dedupe_key text DEFAULT NULL, ignore_quiet_hours boolean DEFAULT false, push_token_id bigint DEFAULT NULL,
    title text DEFAULT NULL, body text DEFAULT NULL, badge int DEFAULT NULL, sound text DEFAULT NULL,
    data jsonb DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    kind        text    := coalesce(push_type, 'alert');
    shows       boolean := title IS NOT NULL OR body IS NOT NULL OR badge IS NOT NULL OR sound IS NOT NULL;
    message     jsonb   := payload;
    largest     int;
    size        int;
    written     text;
    delivery_id bigint;
BEGIN
    -- What the table would refuse is refused under the same SQLSTATE and constraint, so that a caller need not know
    -- which of the two ways in was taken; what only this function refuses is invalid_parameter_value.
    IF user_id IS NULL OR user_id = '' THEN
        RAISE check_violation USING
            CONSTRAINT = 'user_id_is_not_empty',
            MESSAGE = 'user_id is missing',
            HINT = 'Give the user_id that the user''s devices are registered under.';
    END IF;

    IF kind NOT IN ('alert', 'background', 'complication', 'controls', 'fileprovider', 'liveactivity', 'location',
                    'mdm', 'pushtotalk', 'voip', 'widgets') THEN
        RAISE check_violation USING
            CONSTRAINT = 'push_type_is_one_of_apples',
            MESSAGE = 'push_type is none of Apple''s',
            HINT = 'Give one of alert, background, complication, controls, fileprovider, liveactivity, location, mdm,'
                   ' pushtotalk, voip, widgets, in lower case.';
    END IF;

    IF payload IS NOT NULL AND (shows OR data IS NOT NULL) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'payload excludes title, body, badge, sound and data',
            HINT = 'Put all of it into the payload, or leave the payload out.';
    ELSIF payload IS NOT NULL THEN
        IF pg_catalog.jsonb_typeof(payload) <> 'object' THEN
            RAISE check_violation USING
                CONSTRAINT = 'payload_is_a_json_object',
                MESSAGE = 'payload is no JSON object',
                HINT = 'Give an object such as {"aps": {"alert": "Hello"}}; do not encode it twice.';
        END IF;
    ELSE
        IF pg_catalog.jsonb_typeof(data) <> 'object' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'data is no JSON object',
                HINT = 'Give an object: its keys go beside "aps"; do not encode it twice.';
        ELSIF pg_catalog.jsonb_exists(data, 'aps') THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'data has a key "aps"',
                HINT = 'Use title, body, badge and sound, or write the whole as payload.';
        ELSIF badge < 0 THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'badge is negative',
                HINT = 'Give the number to show, or 0 to take the badge away.';
        ELSIF kind NOT IN ('alert', 'background', 'voip') THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'payload is missing',
                HINT = 'title, body, badge, sound and data make an alert, background or voip push; write the payload of'
                       ' the others yourself.';
        ELSIF shows AND kind <> 'alert' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'title, body, badge and sound are for an alert',
                HINT = 'Nothing of a background or voip push is shown: give data, or leave push_type out.';
        ELSIF kind = 'alert' AND NOT shows THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'there is nothing to say: payload, title, body, badge and sound are all missing',
                HINT = 'Give title or body, or the payload; for data that nobody sees, push_type => ''background''.';
        ELSIF kind = 'voip' AND data IS NULL THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'there is nothing to say: payload and data are both missing',
                HINT = 'Give as data what the app needs to show the call.';
        END IF;
        -- Beside what is shown in words stands only what was given; `data` keeps its nulls.
        message := coalesce(data, '{}') || pg_catalog.jsonb_build_object('aps', CASE kind
            WHEN 'background' THEN pg_catalog.jsonb_build_object('content-available', 1)
            ELSE pg_catalog.jsonb_strip_nulls(pg_catalog.jsonb_build_object(
                'alert', nullif(pg_catalog.jsonb_strip_nulls(
                    pg_catalog.jsonb_build_object('title', title, 'body', body)), '{}'),
                'badge', badge,
                'sound', sound))
        END);
    END IF;

    largest := CASE kind WHEN 'voip' THEN 5120 ELSE 4096 END;
    written := message::text;
    size := pg_catalog.octet_length(pg_catalog.convert_to(written, 'UTF8'));
    -- The drain sends it without the spaces that jsonb prints after colons and commas, so they do not count. Between two
    -- of them stand two octets or more: beyond half as much again it is too large without looking.
    IF size > largest AND size <= largest * 3 / 2 THEN
        size := pg_catalog.octet_length(pg_catalog.convert_to(
            pg_catalog.regexp_replace(written, '("(?:[^"\\]|\\.)*")|\s+', '\1', 'g'), 'UTF8'));
    END IF;
    IF size > largest THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'payload has ' || size::text || ' bytes, and APNs takes at most ' || largest::text || ' of '
                      || kind,
            HINT = 'Shorten it, or send an identifier that the app fetches the rest by.';
    END IF;

    IF priority NOT IN (10, 5, 1) THEN
        RAISE check_violation USING
            CONSTRAINT = 'priority_is_10_5_or_1',
            MESSAGE = 'priority is ' || priority::text,
            HINT = 'Give 10 (at once), 5 (when it suits the battery) or 1 (never wakes the device), or leave it out.';
    END IF;

    IF collapse_id IS NOT NULL AND NOT collapse_id ~ '^[\x20-\x7e]{1,64}$' THEN
        size := pg_catalog.octet_length(collapse_id);
        RAISE check_violation USING
            CONSTRAINT = 'collapse_id_is_1_to_64_printable_ascii',
            MESSAGE = CASE
                WHEN size = 0 THEN 'collapse_id is empty'
                WHEN size > 64 THEN 'collapse_id has ' || size::text || ' bytes, and APNs takes at most 64'
                ELSE 'collapse_id has other characters than printable ASCII'
            END,
            HINT = 'Give 1 to 64 printable ASCII characters (of a long one, its MD5 in hex), or leave it out.';
    END IF;

    IF dedupe_key = '' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'dedupe_key is empty',
            HINT = 'Every empty key is the same key. Give one that names what happened, or leave it out.';
    END IF;

    IF NOT pg_catalog.isfinite(expires_at) OR NOT pg_catalog.isfinite(send_at) THEN
        RAISE check_violation USING
            CONSTRAINT = 'dates_are_finite',
            MESSAGE = CASE WHEN NOT pg_catalog.isfinite(expires_at) THEN 'expires_at' ELSE 'send_at' END
                      || ' is infinite',
            HINT = 'Give an instant, or leave it out.';
    END IF;

    -- Before what may be true today and not tomorrow: a caller who asks again is told what became of it.
    IF dedupe_key IS NOT NULL THEN
        SELECT nd.id INTO delivery_id FROM notification_delivery nd
        WHERE nd.dedupe_key = enqueue_notification.dedupe_key;
        IF FOUND THEN
            RETURN delivery_id;
        END IF;
    END IF;

    IF expires_at <= greatest(now(), send_at) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = CASE WHEN expires_at <= now() THEN 'expires_at has passed'
                      ELSE 'expires_at is not after send_at' END,
            HINT = 'Give an instant with a time zone, later than that at which it is to be sent.';
    END IF;

    IF push_token_id IS NOT NULL THEN
        PERFORM FROM push_token pt
        WHERE pt.id = enqueue_notification.push_token_id AND pt.user_id = enqueue_notification.user_id;
        IF NOT FOUND THEN
            -- The same words for a device of somebody else's: who asks need not learn that it exists.
            RAISE invalid_parameter_value USING
                MESSAGE = 'push_token_id ' || push_token_id::text || ' is no device of this user',
                HINT = 'Give the id that register_push_token returned for one of the user''s devices, or leave it out'
                       ' to reach all of them.';
        END IF;
    END IF;

    LOOP
        INSERT INTO notification_delivery AS nd
            (user_id, payload, push_type, priority, collapse_id, expires_at, next_attempt_at, dedupe_key,
             ignore_quiet_hours, push_token_id)
        VALUES (enqueue_notification.user_id, message, kind, enqueue_notification.priority::smallint,
                enqueue_notification.collapse_id, enqueue_notification.expires_at,
                coalesce(enqueue_notification.send_at, now()), enqueue_notification.dedupe_key,
                coalesce(enqueue_notification.ignore_quiet_hours, false), enqueue_notification.push_token_id)
        ON CONFLICT ON CONSTRAINT dedupe_key_is_used_once DO NOTHING
        RETURNING nd.id INTO delivery_id;
        IF NOT FOUND THEN
            -- A statement of its own, so that it sees a row that another transaction committed a moment ago.
            SELECT nd.id INTO delivery_id FROM notification_delivery nd
            WHERE nd.dedupe_key = enqueue_notification.dedupe_key;
        END IF;
        -- Else that row was deleted in between: the key is free again.
        EXIT WHEN FOUND;
    END LOOP;
    RETURN delivery_id;
END $$;
COMMENT ON FUNCTION enqueue_notification IS
    'Queues a notification in the caller''s transaction and returns its id; with a dedupe_key seen before, returns the id it has and queues nothing.';

CREATE OR REPLACE FUNCTION register_push_token(
    user_id text, token text, environment text DEFAULT 'production', topic text DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    place text := coalesce(environment, 'production');
    hex   text := pg_catalog.lower(token);
    known bigint;
BEGIN
    IF user_id IS NULL OR user_id = '' THEN
        RAISE check_violation USING
            CONSTRAINT = 'push_token_user_id_is_not_empty',
            MESSAGE = 'user_id is missing',
            HINT = 'Give the id of whoever is signed in on the device; sign a device out with unregister_push_token.';
    ELSIF token IS NULL OR NOT token ~ '^([0-9a-fA-F]{2})+$' THEN
        RAISE check_violation USING
            CONSTRAINT = 'token_is_hex',
            MESSAGE = CASE WHEN token ~ '^[0-9a-fA-F]+$' THEN 'token has an odd number of hex digits'
                      ELSE 'token is not in hex' END,
            HINT = 'Give the bytes that the app got as two hex digits each, with nothing before, between or after.';
    ELSIF place NOT IN ('production', 'sandbox') THEN
        RAISE check_violation USING
            CONSTRAINT = 'environment_is_production_or_sandbox',
            MESSAGE = 'environment is neither production nor sandbox',
            HINT = 'Give production for what comes from the App Store or TestFlight, sandbox for what Xcode runs.';
    ELSIF topic IS NOT NULL AND NOT topic ~ '^[A-Za-z0-9.-]{1,255}$' THEN
        RAISE check_violation USING
            CONSTRAINT = 'topic_is_a_bundle_id',
            MESSAGE = 'topic is no bundle id',
            HINT = 'Give the app''s bundle id, such as com.example.app, or leave it out for that of the signing key.';
    END IF;

    -- The live row first, and in a statement of its own: while a drain is invalidating it this waits, and then finds it
    -- dead below. ON CONFLICT would find no live row any more, and insert a second one.
    UPDATE push_token pt
       SET user_id = register_push_token.user_id,
           -- Never back: of two sessions at once, the one that waited has the older now().
           registered_at = greatest(pt.registered_at, now())
     WHERE pg_catalog.lower(pt.token) = hex
       AND pt.environment = place
       AND coalesce(pt.topic, '') = coalesce(register_push_token.topic, '')
       AND pt.invalidated_at IS NULL
    RETURNING pt.id INTO known;
    IF FOUND THEN
        RETURN known;
    END IF;

    BEGIN
        UPDATE push_token pt
           SET user_id = register_push_token.user_id,
               registered_at = greatest(pt.registered_at, now()),
               invalidated_at = NULL,
               invalid_reason = NULL
         WHERE pt.id = (
               SELECT dead.id
                 FROM push_token dead
                WHERE pg_catalog.lower(dead.token) = hex
                  AND dead.environment = place
                  AND coalesce(dead.topic, '') = coalesce(register_push_token.topic, '')
                  AND dead.invalidated_at IS NOT NULL
                ORDER BY dead.registered_at DESC, dead.id DESC   -- a plain INSERT may have left several
                LIMIT 1
                  FOR NO KEY UPDATE)
        RETURNING pt.id INTO known;
        IF FOUND THEN
            RETURN known;
        END IF;
    EXCEPTION WHEN unique_violation THEN
        NULL;   -- somebody inserted a live row meanwhile, and it is that one which is taken below
    END;

    INSERT INTO push_token AS pt (user_id, token, environment, topic, registered_at)
    VALUES (register_push_token.user_id, hex, place, register_push_token.topic, now())
    ON CONFLICT (lower(token), environment, coalesce(topic, '')) WHERE invalidated_at IS NULL
    DO UPDATE SET user_id = excluded.user_id, registered_at = greatest(pt.registered_at, excluded.registered_at)
    RETURNING pt.id INTO known;
    RETURN known;
END $$;
COMMENT ON FUNCTION register_push_token IS
    'Registers a device, or confirms it: the same token again moves to this user, counts as registered now and is live. Returns its id, which stays.';

CREATE FUNCTION unregister_push_token(
    user_id text, token text, environment text DEFAULT 'production', topic text DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF environment NOT IN ('production', 'sandbox') THEN
        RAISE check_violation USING
            CONSTRAINT = 'environment_is_production_or_sandbox',
            MESSAGE = 'environment is neither production nor sandbox',
            HINT = 'Give the one that the device was registered with.';
    END IF;
    UPDATE push_token pt
       SET invalidated_at = now(),
           invalid_reason = 'signed_out'
     WHERE pt.user_id = unregister_push_token.user_id   -- a late sign-out must not silence who signed in since
       AND pg_catalog.lower(pt.token) = pg_catalog.lower(unregister_push_token.token)
       AND pt.environment = coalesce(unregister_push_token.environment, 'production')
       AND coalesce(pt.topic, '') = coalesce(unregister_push_token.topic, '')
       AND pt.invalidated_at IS NULL;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION unregister_push_token IS
    'Signs a device out: nothing is pushed to it until it registers again. False if this user has no such live device.';

CREATE FUNCTION set_quiet_hours(
    user_id text, quiet_from time, quiet_until time, time_zone text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    -- 24:00 is the midnight that ends a day, and most languages' times do not have it.
    begins  time := CASE quiet_from WHEN '24:00' THEN '00:00' ELSE quiet_from END;
    ends    time := CASE quiet_until WHEN '24:00' THEN '00:00' ELSE quiet_until END;
    written text;
BEGIN
    IF user_id IS NULL OR user_id = '' THEN
        RAISE check_violation USING
            CONSTRAINT = 'recipient_user_id_is_not_empty',
            MESSAGE = 'user_id is missing',
            HINT = 'Give the user_id that notifications are queued for.';
    ELSIF (quiet_from IS NULL) <> (quiet_until IS NULL) THEN
        RAISE check_violation USING
            CONSTRAINT = 'quiet_hours_have_both_ends',
            MESSAGE = CASE WHEN quiet_from IS NULL THEN 'quiet_from' ELSE 'quiet_until' END || ' is missing',
            HINT = 'Give both ends, or NULL for both: no quiet hours.';
    ELSIF begins = ends THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'quiet_from and quiet_until are the same time',
            HINT = 'Give two times; for no pushes at all use set_push_enabled(user_id, false), for no quiet hours NULL'
                   ' for both.';
    ELSIF quiet_from IS NOT NULL AND time_zone IS NULL THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'time_zone is missing',
            HINT = 'Give the IANA name of the zone that the hours are in, such as Europe/Berlin.';
    END IF;

    -- The exact name, since that is what the drain looks up: AT TIME ZONE takes EST and <+03>-3 as well. Some servers
    -- list files of their own besides, in lower case. Reading the list takes 10 to 60 ms, and people seldom move.
    IF time_zone IS NOT NULL THEN
        SELECT zone.name INTO written FROM pg_catalog.pg_timezone_names zone
        WHERE pg_catalog.lower(zone.name) = pg_catalog.lower(set_quiet_hours.time_zone)
          AND zone.name ~ '^[A-Z]'
        ORDER BY zone.name = set_quiet_hours.time_zone DESC
        LIMIT 1;
        IF written IS DISTINCT FROM time_zone THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'time_zone is not the name of a time zone',
                HINT = CASE WHEN written IS NULL
                            THEN 'Give an IANA name, such as Europe/Berlin; pg_timezone_names lists them.'
                            ELSE 'Write it ' || written || '.' END;
        END IF;
    END IF;

    IF time_zone IS NULL THEN
        UPDATE recipient r SET quiet_from = NULL, quiet_until = NULL WHERE r.user_id = set_quiet_hours.user_id;
    ELSE
        INSERT INTO recipient (user_id, time_zone, quiet_from, quiet_until)
        VALUES (set_quiet_hours.user_id, set_quiet_hours.time_zone, begins, ends)
        ON CONFLICT ON CONSTRAINT recipient_pkey DO UPDATE
           SET time_zone = excluded.time_zone, quiet_from = excluded.quiet_from, quiet_until = excluded.quiet_until;
    END IF;
END $$;
COMMENT ON FUNCTION set_quiet_hours IS
    'Sets the local time from which and until which nothing is pushed to a user, over midnight too; NULL for both: no quiet hours.';

CREATE FUNCTION set_push_enabled(
    user_id text, enabled boolean
) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF user_id IS NULL OR user_id = '' THEN
        RAISE check_violation USING
            CONSTRAINT = 'recipient_user_id_is_not_empty',
            MESSAGE = 'user_id is missing',
            HINT = 'Give the user_id that notifications are queued for.';
    ELSIF enabled IS NULL THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'enabled is missing',
            HINT = 'Give true or false.';
    END IF;
    -- Of a user with no quiet hours the zone decides nothing: any will do until set_quiet_hours says which.
    INSERT INTO recipient (user_id, time_zone, push_enabled)
    VALUES (set_push_enabled.user_id, 'UTC', enabled)
    ON CONFLICT ON CONSTRAINT recipient_pkey DO UPDATE SET push_enabled = excluded.push_enabled;
END $$;
COMMENT ON FUNCTION set_push_enabled IS
    'Opts a user out of all pushes (false) or in again (true). It is looked at when a notification is about to be sent.';

-- They now do what their caller could not. Whoever could call the old ones to any effect may call the new ones: those
-- that may insert into the table.
REVOKE EXECUTE ON FUNCTION enqueue_notification, register_push_token, unregister_push_token, set_quiet_hours,
                           set_push_enabled
    FROM PUBLIC;
DO $$
DECLARE
    allowed record;
BEGIN
    FOR allowed IN
        SELECT DISTINCT grants.callable, CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE acl.grantee::regrole::text END AS who
          FROM (VALUES ('notification_delivery', 'enqueue_notification'), ('push_token', 'register_push_token'))
               AS grants (relation, callable)
          JOIN pg_class c ON c.oid = grants.relation::regclass
         CROSS JOIN LATERAL (
               SELECT c.relacl
               UNION ALL
               SELECT a.attacl FROM pg_attribute a WHERE a.attrelid = c.oid
               ) AS held (acl)
         CROSS JOIN LATERAL aclexplode(held.acl) AS acl
         WHERE acl.privilege_type = 'INSERT'
           AND acl.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %I TO %s', allowed.callable, allowed.who);
    END LOOP;
END $$;

CREATE VIEW notification_status AS
SELECT original.id, original.user_id, original.created_at, original.dedupe_key,
       sum.devices, sum.sent, sum.failed, sum.invalid_token, sum.skipped, sum.pending,
       sum.last_reason, sum.pending = 0 AS finished, sum.next_attempt_at
  FROM notification_delivery original
 CROSS JOIN LATERAL (
       SELECT count(each.push_token_id) AS devices,
              count(*) FILTER (WHERE each.status = 'sent') AS sent,
              count(*) FILTER (WHERE each.status = 'failed') AS failed,
              count(*) FILTER (WHERE each.status = 'invalid_token') AS invalid_token,
              count(*) FILTER (WHERE each.status = 'skipped') AS skipped,
              count(*) FILTER (WHERE each.status = 'pending') AS pending,
              (array_agg(each.reason ORDER BY each.updated_at DESC, each.id DESC)
               FILTER (WHERE each.reason IS NOT NULL))[1] AS last_reason,
              min(each.next_attempt_at) FILTER (WHERE each.status = 'pending') AS next_attempt_at
         FROM (SELECT original.id, original.status, original.reason, original.push_token_id, original.next_attempt_at,
                      original.updated_at
               UNION ALL
               SELECT nd.id, nd.status, nd.reason, nd.push_token_id, nd.next_attempt_at, nd.updated_at
                 FROM notification_delivery nd
                WHERE nd.fanned_out_from = original.id
              ) AS each
       ) AS sum
 WHERE original.fanned_out_from IS NULL;
COMMENT ON VIEW notification_status IS
    'What became of each notification that was queued, all its devices together. Quick by id and by dedupe_key.';
COMMENT ON COLUMN notification_status.id IS 'The id that enqueue_notification returned.';
COMMENT ON COLUMN notification_status.user_id IS 'Whom it is for.';
COMMENT ON COLUMN notification_status.created_at IS 'When it was queued.';
COMMENT ON COLUMN notification_status.dedupe_key IS 'The producer''s own key.';
COMMENT ON COLUMN notification_status.devices IS 'How many devices it is bound to: 0 until a drain first takes it.';
COMMENT ON COLUMN notification_status.sent IS 'Devices for which APNs accepted it.';
COMMENT ON COLUMN notification_status.failed IS 'Devices for which it was given up.';
COMMENT ON COLUMN notification_status.invalid_token IS 'Devices that APNs no longer knows.';
COMMENT ON COLUMN notification_status.skipped IS 'Decided against: no device, opted out, expired, APNs not configured.';
COMMENT ON COLUMN notification_status.pending IS 'Not finished yet: waiting, or with a drain.';
COMMENT ON COLUMN notification_status.last_reason IS 'The reason that was written last, of whichever device.';
COMMENT ON COLUMN notification_status.finished IS 'True once nothing more will happen.';
COMMENT ON COLUMN notification_status.next_attempt_at IS 'When the first of what is pending is due; while a drain has it, the end of its lease. NULL when finished.';
