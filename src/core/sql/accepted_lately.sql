-- Which environments accepted a push in the last `seconds`, whoever made it. Asked only when a drain has met nothing but
-- errors: it reads the finished rows of those minutes, the latest first.
SELECT environment
  FROM (VALUES ('production'), ('sandbox')) AS known (environment)
 WHERE EXISTS (
       SELECT
         FROM notification_delivery nd
         JOIN push_token pt ON pt.id = nd.push_token_id
        WHERE nd.status = 'sent'
          AND nd.status <> 'pending'       -- said again for the index of what is finished
          AND nd.updated_at > now() - make_interval(secs => %(seconds)s)
          AND pt.environment = known.environment
       );
