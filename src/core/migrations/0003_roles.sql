-- Three roles to be a member of. They belong to the cluster and not to this database: another database's outbox may have
-- made them, or be making them at this moment, and what they may do here is granted in any case.
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['apns_outbox_producer', 'apns_outbox_drain', 'apns_outbox_reader'] LOOP
        IF to_regrole(wanted) IS NULL THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION
                WHEN duplicate_object OR unique_violation THEN
                    NULL;
                WHEN insufficient_privilege THEN
                    -- Not left out in silence: without the grants below, producers and drain would fail later.
                    RAISE insufficient_privilege USING MESSAGE = format(
                        'the role %s does not exist and %s may not create roles, so let an administrator run'
                        ' CREATE ROLE apns_outbox_producer NOLOGIN; CREATE ROLE apns_outbox_drain NOLOGIN;'
                        ' CREATE ROLE apns_outbox_reader NOLOGIN', wanted, current_user);
            END;
        END IF;
        IF NOT has_schema_privilege(wanted, current_schema(), 'USAGE') THEN
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), wanted);
        END IF;
    END LOOP;
END $$;

-- A producer decides what is sent, to whom and when, and not what becomes of it. The id is there for INSERT ... RETURNING.
GRANT INSERT (user_id, payload, push_type, priority, collapse_id, expires_at, dedupe_key, ignore_quiet_hours,
              next_attempt_at, push_token_id),
      SELECT (id)
    ON notification_delivery TO apns_outbox_producer;
GRANT EXECUTE ON FUNCTION enqueue_notification, register_push_token, unregister_push_token, set_quiet_hours,
                          set_push_enabled
    TO apns_outbox_producer;

-- The drain rewrites deliveries and never deletes one; of a device it may say that it is dead, of a person nothing.
GRANT SELECT, INSERT, UPDATE ON notification_delivery TO apns_outbox_drain;
GRANT SELECT, UPDATE (invalidated_at, invalid_reason) ON push_token TO apns_outbox_drain;
GRANT SELECT ON recipient, apns_outbox_migration TO apns_outbox_drain;

-- Support sees what became of everything, and neither what was said nor a token to say it to.
GRANT SELECT ON notification_status, recipient, apns_outbox_migration TO apns_outbox_reader;
GRANT SELECT (id, user_id, push_type, priority, collapse_id, expires_at, dedupe_key, ignore_quiet_hours, status, reason,
              attempts, next_attempt_at, push_token_id, fanned_out_from, first_claimed_at, claimed_at, apns_id,
              last_error, sent_at, created_at, updated_at)
    ON notification_delivery TO apns_outbox_reader;
GRANT SELECT (id, user_id, environment, topic, registered_at, invalidated_at, invalid_reason)
    ON push_token TO apns_outbox_reader;
