-- name: experiments
-- Every experiment with its newest status, newest first.
SELECT experiments.*, status, reason AS status_reason, "at" AS status_at
FROM experiments
LEFT JOIN (
  SELECT * FROM experiment_statuses
  QUALIFY row_number() OVER (PARTITION BY experiment_id ORDER BY "at" DESC, rowid DESC) = 1
) USING (experiment_id)
ORDER BY created_at DESC, experiment_id

-- name: experiment_by_id
-- One experiment with its newest status.
SELECT experiments.*, status, reason AS status_reason, "at" AS status_at
FROM experiments
LEFT JOIN (
  SELECT * FROM experiment_statuses WHERE experiment_id = $experiment_id ORDER BY "at" DESC, rowid DESC LIMIT 1
) USING (experiment_id)
WHERE experiment_id = $experiment_id

-- name: experiment_by_key
-- The experiment that was launched with an idempotency key, with its newest status.
SELECT experiments.*, status, reason AS status_reason, "at" AS status_at
FROM experiments
LEFT JOIN (
  SELECT * FROM experiment_statuses
  QUALIFY row_number() OVER (PARTITION BY experiment_id ORDER BY "at" DESC, rowid DESC) = 1
) USING (experiment_id)
WHERE idempotency_key = $idempotency_key AND idempotency_key <> ''
ORDER BY created_at
LIMIT 1

-- name: unfinished_experiments
-- Experiments that a restart has to take up again: their newest status is not a last one.
SELECT experiments.*, status, reason AS status_reason, "at" AS status_at
FROM experiments
LEFT JOIN (
  SELECT * FROM experiment_statuses
  QUALIFY row_number() OVER (PARTITION BY experiment_id ORDER BY "at" DESC, rowid DESC) = 1
) USING (experiment_id)
WHERE coalesce(status, '') NOT IN ('finished', 'cancelled', 'failed')
ORDER BY created_at, experiment_id

-- name: statuses_of
-- How an experiment's status went, oldest first.
SELECT * FROM experiment_statuses WHERE experiment_id = $experiment_id ORDER BY "at", rowid

-- name: planned_runs_of
-- Every run that an experiment wants, in launch order.
SELECT * FROM planned_runs WHERE experiment_id = $experiment_id ORDER BY seq

-- name: pending_runs_of
-- The planned runs of an experiment that have not ended, in launch order.
SELECT planned_runs.* FROM planned_runs
ANTI JOIN (SELECT run_id FROM runs WHERE experiment_id = $experiment_id) USING (run_id)
WHERE experiment_id = $experiment_id
ORDER BY seq
