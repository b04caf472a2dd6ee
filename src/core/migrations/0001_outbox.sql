-- The outbox, the devices and the people: three tables, two functions.
--
-- No foreign keys. A key from a delivery to its device or to its original would need an index that every insert and
-- every settle pays for (or a scan of the whole outbox whenever a device or an old delivery is deleted), and would let
-- a producer's open transaction lock rows that the drain wants. The drain joins at the time of sending instead, and a
-- device that is gone is a decision it knows: `no_push_token`.

CREATE TABLE notification_delivery (
    id                 bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    user_id            text        NOT NULL,
    payload            jsonb       NOT NULL,
    push_type          text        NOT NULL DEFAULT 'alert',
    priority           smallint,
    collapse_id        text,
    expires_at         timestamptz,
    dedupe_key         text        CONSTRAINT dedupe_key_is_used_once UNIQUE,
    ignore_quiet_hours boolean     NOT NULL DEFAULT false,
    status             text        NOT NULL DEFAULT 'pending',
    reason             text,
    attempts           int         NOT NULL DEFAULT 0,
    next_attempt_at    timestamptz NOT NULL DEFAULT now(),
    push_token_id      bigint,
    fanned_out_from    bigint,
    first_claimed_at   timestamptz,
    claimed_at         timestamptz,
    apns_id            uuid        NOT NULL DEFAULT gen_random_uuid(),
    last_error         text,
    sent_at            timestamptz,
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT user_id_is_not_empty CHECK (user_id <> ''),
    CONSTRAINT payload_is_a_json_object CHECK (jsonb_typeof(payload) = 'object'),
    CONSTRAINT push_type_is_one_of_apples CHECK (push_type IN (
        'alert', 'background', 'complication', 'controls', 'fileprovider', 'liveactivity', 'location', 'mdm',
        'pushtotalk', 'voip', 'widgets')),
    CONSTRAINT priority_is_10_5_or_1 CHECK (priority IN (10, 5, 1)),
    -- 64 bytes is Apple's limit; printable ASCII is what an HTTP header carries unharmed.
    CONSTRAINT collapse_id_is_1_to_64_printable_ascii CHECK (collapse_id ~ '^[\x20-\x7e]{1,64}$'),
    CONSTRAINT status_is_known CHECK (status IN ('pending', 'sent', 'failed', 'invalid_token', 'skipped')),
    -- The upper bound is far above any setting, and low enough that `attempts + 1` can never overflow and take the
    -- whole claim down with it.
    CONSTRAINT attempts_are_counted_from_0 CHECK (attempts BETWEEN 0 AND 1000000),
    -- 'infinity' would be due never, '-infinity' first for ever, and neither can be added to.
    CONSTRAINT dates_are_finite CHECK (isfinite(next_attempt_at) AND isfinite(expires_at)),
    CONSTRAINT sent_means_sent_at CHECK ((status = 'sent') = (sent_at IS NOT NULL)),
    CONSTRAINT an_end_other_than_sent_has_a_reason CHECK (status IN ('pending', 'sent') OR reason IS NOT NULL),
    CONSTRAINT reason_is_one_short_word CHECK (length(reason) BETWEEN 1 AND 100),
    CONSTRAINT last_error_is_at_most_500_characters CHECK (length(last_error) <= 500)
)
-- Each delivery is updated at least twice (claim, settle), and none of these updates is HOT: the claim changes an
-- indexed column, the settle an index's predicate. The defaults would let a fifth of the table die before a vacuum,
-- and dead entries at the head of the due index are what slows a claim down. So: vacuum and analyze after 2 % (plus a
-- floor so that a small table is left alone), and let the vacuum work ten times longer before it pauses.
WITH (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_vacuum_cost_limit = 2000
);

-- Two partial indexes hold the pending rows between them, each row in exactly one: a claim moves it from the first to
-- the second, a retry back. So the claim never walks over leased rows and crashed ones, and the search for crashed ones
-- (the sweep, the suspects) never walks over a backlog, be it a million rows long.
CREATE INDEX notification_delivery_due ON notification_delivery (next_attempt_at, id)
    WHERE status = 'pending' AND claimed_at IS NULL;
CREATE INDEX notification_delivery_leased ON notification_delivery (next_attempt_at, id)
    WHERE status = 'pending' AND claimed_at IS NOT NULL;
-- What is finished, by the date of its end: for purging and for looking at what happened lately.
CREATE INDEX notification_delivery_done ON notification_delivery (updated_at)
    WHERE status <> 'pending';

COMMENT ON TABLE notification_delivery IS
    'The outbox: one row is one notification for one device, once a device is bound to it. A producer needs user_id and payload.';
COMMENT ON COLUMN notification_delivery.id IS 'Identity. Given by the database.';
COMMENT ON COLUMN notification_delivery.user_id IS 'Whom it is for: the user_id of push_token and recipient.';
COMMENT ON COLUMN notification_delivery.payload IS 'The APNs payload, a JSON object, sent as it stands. At most 4096 bytes (voip 5120).';
COMMENT ON COLUMN notification_delivery.push_type IS 'apns-push-type. Also decides the suffix of the topic.';
COMMENT ON COLUMN notification_delivery.priority IS 'apns-priority 10, 5 or 1. NULL is 10; a background push is always sent with 5.';
COMMENT ON COLUMN notification_delivery.collapse_id IS 'apns-collapse-id: a later notification with the same id replaces the earlier one on the device. NULL is the row''s apns_id.';
COMMENT ON COLUMN notification_delivery.expires_at IS 'apns-expiration: after this instant nobody wants it any more. NULL is APNs'' own limit (30 days).';
COMMENT ON COLUMN notification_delivery.dedupe_key IS 'The producer''s own key: a second row with the same key is refused.';
COMMENT ON COLUMN notification_delivery.ignore_quiet_hours IS 'True wakes people up.';
COMMENT ON COLUMN notification_delivery.status IS 'pending, or its end: sent, failed, invalid_token, skipped. An end is final.';
COMMENT ON COLUMN notification_delivery.reason IS 'One word for machines: APNs'' own, verbatim, or ours (timeout, connection_lost, lease_expired, no_push_token, unconfigured, ...). Also set while pending, from the last try.';
COMMENT ON COLUMN notification_delivery.attempts IS 'Claims that were not given back. Raised before anything is sent.';
COMMENT ON COLUMN notification_delivery.next_attempt_at IS 'Due from this instant on. While a drain holds the row it is the end of its lease, and the fence: whoever writes must still find it unchanged. A producer sets it to schedule. Do not edit it while claimed_at is set.';
COMMENT ON COLUMN notification_delivery.push_token_id IS 'The device it is bound to (push_token.id). NULL until the first claim, unless the producer wants this device alone.';
COMMENT ON COLUMN notification_delivery.fanned_out_from IS 'The delivery this row was made from at its first claim, for a further device of the same user. NULL for what a producer inserted.';
COMMENT ON COLUMN notification_delivery.first_claimed_at IS 'When a drain first took it. Attempts are given back only for so long after this.';
COMMENT ON COLUMN notification_delivery.claimed_at IS 'Set by the claim, cleared by every settle. Set and no longer leased: the drain that held it died.';
COMMENT ON COLUMN notification_delivery.apns_id IS 'apns-id, the same on every try, so that a doubled push can be recognised.';
COMMENT ON COLUMN notification_delivery.last_error IS 'A sentence for people about the last try that was not accepted.';
COMMENT ON COLUMN notification_delivery.sent_at IS 'When APNs'' acceptance was written down.';
COMMENT ON COLUMN notification_delivery.created_at IS 'When it was inserted: the start of the producer''s transaction.';
COMMENT ON COLUMN notification_delivery.updated_at IS 'When a drain last changed its state; for a finished row, when it ended.';

CREATE TABLE push_token (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    user_id        text        NOT NULL,
    token          text        NOT NULL,
    environment    text        NOT NULL,
    topic          text,
    registered_at  timestamptz NOT NULL DEFAULT now(),
    invalidated_at timestamptz,
    invalid_reason text,

    CONSTRAINT push_token_user_id_is_not_empty CHECK (user_id <> ''),
    -- Any even length: Apple says to assume nothing about the size, and up to 200 characters have been seen.
    CONSTRAINT token_is_hex CHECK (token ~ '^([0-9a-fA-F]{2})+$'),
    CONSTRAINT environment_is_production_or_sandbox CHECK (environment IN ('production', 'sandbox')),
    CONSTRAINT topic_is_a_bundle_id CHECK (topic ~ '^[A-Za-z0-9.-]{1,255}$'),
    CONSTRAINT push_token_dates_are_finite CHECK (isfinite(registered_at) AND isfinite(invalidated_at))
);

-- One live row per (token, environment, topic): a device is pushed once. Hex is hex in either case.
CREATE UNIQUE INDEX push_token_live ON push_token (lower(token), environment, coalesce(topic, ''))
    WHERE invalidated_at IS NULL;
-- A user's devices, the most recently registered first: how a delivery is bound.
CREATE INDEX push_token_of_user ON push_token (user_id, registered_at DESC, id DESC)
    WHERE invalidated_at IS NULL;

COMMENT ON TABLE push_token IS 'The devices: one live row per token, environment and topic. A registration needs user_id, token and environment.';
COMMENT ON COLUMN push_token.id IS 'Identity. Kept when the same token is registered again.';
COMMENT ON COLUMN push_token.user_id IS 'Whose device it is now.';
COMMENT ON COLUMN push_token.token IS 'The device token as the app got it, in hex. A secret: it never reaches a log.';
COMMENT ON COLUMN push_token.environment IS 'production or sandbox: which APNs the token is valid at.';
COMMENT ON COLUMN push_token.topic IS 'The app''s bundle id, without a push type''s suffix. NULL is the one of the signing key''s secret.';
COMMENT ON COLUMN push_token.registered_at IS 'The last time the app handed us this token. APNs'' word that it is dead counts only if it is not older.';
COMMENT ON COLUMN push_token.invalidated_at IS 'Since when nothing is pushed to it any more. NULL is live.';
COMMENT ON COLUMN push_token.invalid_reason IS 'Why: APNs'' own word.';

CREATE TABLE recipient (
    user_id      text    PRIMARY KEY,
    time_zone    text    NOT NULL,
    quiet_from   time,
    quiet_until  time,
    push_enabled boolean NOT NULL DEFAULT true,

    CONSTRAINT recipient_user_id_is_not_empty CHECK (user_id <> ''),
    CONSTRAINT quiet_hours_have_both_ends CHECK ((quiet_from IS NULL) = (quiet_until IS NULL))
);

COMMENT ON TABLE recipient IS 'What people want. A user with no row is always awake and opted in.';
COMMENT ON COLUMN recipient.user_id IS 'The user_id of notification_delivery and push_token.';
COMMENT ON COLUMN recipient.time_zone IS 'IANA name, such as Europe/Berlin: where the quiet hours are.';
COMMENT ON COLUMN recipient.quiet_from IS 'Local time from which nothing is pushed. May be later than quiet_until: over midnight.';
COMMENT ON COLUMN recipient.quiet_until IS 'Local time until which nothing is pushed.';
COMMENT ON COLUMN recipient.push_enabled IS 'False: nothing is pushed to this user at all.';

CREATE FUNCTION enqueue_notification(
    user_id text, payload jsonb, push_type text DEFAULT 'alert', priority int DEFAULT NULL,
    collapse_id text DEFAULT NULL, expires_at timestamptz DEFAULT NULL, send_at timestamptz DEFAULT NULL,
    dedupe_key text DEFAULT NULL, ignore_quiet_hours boolean DEFAULT false, push_token_id bigint DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    delivery_id bigint;
BEGIN
    INSERT INTO notification_delivery AS nd
        (user_id, payload, push_type, priority, collapse_id, expires_at, next_attempt_at, dedupe_key,
         ignore_quiet_hours, push_token_id)
    VALUES (enqueue_notification.user_id, enqueue_notification.payload,
            coalesce(enqueue_notification.push_type, 'alert'), enqueue_notification.priority::smallint,
            enqueue_notification.collapse_id, enqueue_notification.expires_at,
            coalesce(enqueue_notification.send_at, now()), enqueue_notification.dedupe_key,
            coalesce(enqueue_notification.ignore_quiet_hours, false), enqueue_notification.push_token_id)
    ON CONFLICT ON CONSTRAINT dedupe_key_is_used_once DO NOTHING
    RETURNING nd.id INTO delivery_id;
    IF delivery_id IS NULL THEN
        -- A statement of its own, so that it sees a row that another transaction committed a moment ago.
        SELECT nd.id INTO STRICT delivery_id FROM notification_delivery nd
        WHERE nd.dedupe_key = enqueue_notification.dedupe_key;
    END IF;
    RETURN delivery_id;
END $$;
COMMENT ON FUNCTION enqueue_notification IS
    'Queues a notification in the caller''s transaction and returns its id; with a dedupe_key seen before, returns the id it has and queues nothing.';

CREATE FUNCTION register_push_token(
    user_id text, token text, environment text DEFAULT 'production', topic text DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    INSERT INTO push_token AS pt (user_id, token, environment, topic)
    VALUES (register_push_token.user_id, lower(register_push_token.token),
            coalesce(register_push_token.environment, 'production'), register_push_token.topic)
    ON CONFLICT (lower(token), environment, coalesce(topic, '')) WHERE invalidated_at IS NULL
    -- registered_at never goes back: of two sessions at once, the one that waited has the older now().
    DO UPDATE SET user_id = excluded.user_id, registered_at = greatest(pt.registered_at, excluded.registered_at)
    RETURNING pt.id
$$;
COMMENT ON FUNCTION register_push_token IS
    'Registers a device, or confirms it: the same token again moves to this user and counts as registered now. Returns its id.';
