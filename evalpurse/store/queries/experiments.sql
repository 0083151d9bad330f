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

-- name: planned_runs_of
-- Every run that an experiment wants, in launch order.
SELECT * FROM planned_runs WHERE experiment_id = $experiment_id ORDER BY seq
