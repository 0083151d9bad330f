-- name: secret_syncs
-- The newest copies of secrets from the vault, with names and never values.
SELECT "at", step, detail FROM events
WHERE step IN ('secrets_synced', 'secrets_sync_failed') ORDER BY "at" DESC LIMIT $count
