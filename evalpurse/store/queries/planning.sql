-- name: paid_runs
-- For each (variant, case, repeat) of three lists of equal length: the newest counted run that was paid for
-- under the same allowance a run.
WITH wanted AS (
  SELECT
    unnest($variant_digests::VARCHAR[]) AS variant_digest,
    unnest($case_digests::VARCHAR[]) AS case_digest,
    unnest($repeats::BIGINT[]) AS repeat
)
SELECT runs.run_id, runs.variant_digest, runs.case_digest, runs.repeat FROM runs
SEMI JOIN wanted USING (variant_digest, case_digest, repeat)
JOIN experiments USING (experiment_id)
WHERE runs.counted AND runs.reused_from = '' AND experiments.allowance_nusd = $allowance_nusd
  AND experiments.backend = $backend
QUALIFY row_number() OVER (
  PARTITION BY runs.variant_digest, runs.case_digest, runs.repeat ORDER BY runs.ended_at DESC, runs.run_id DESC
) = 1

-- name: runs_by_ids
-- Ended runs by their ids.
SELECT * FROM runs SEMI JOIN (SELECT unnest($run_ids::VARCHAR[]) AS run_id) USING (run_id)

-- name: scores_by_run_ids
-- All numbers of runs by their ids.
SELECT * FROM scores SEMI JOIN (SELECT unnest($run_ids::VARCHAR[]) AS run_id) USING (run_id)

-- name: usage_by_run_ids
-- Model usage of the last attempt of runs by their ids.
SELECT usage.* FROM usage
SEMI JOIN (SELECT unnest($run_ids::VARCHAR[]) AS run_id) USING (run_id)
QUALIFY attempt_id = max(attempt_id) OVER (PARTITION BY run_id)

-- name: past_costs
-- What counted, paid runs of some variants cost each, in nano-dollars.
SELECT variant_digest, count(*) AS runs, avg(model_cost_nusd + sandbox_cost_nusd) AS mean_nusd
FROM runs
SEMI JOIN (SELECT unnest($variant_digests::VARCHAR[]) AS variant_digest) USING (variant_digest)
WHERE counted AND reused_from = ''
GROUP BY variant_digest

-- name: outcome_counts
-- Ended runs of an experiment by outcome.
SELECT outcome, count(*) AS runs FROM runs WHERE experiment_id = $experiment_id GROUP BY outcome

-- name: outcomes_of
-- Which runs of an experiment have ended, and how.
SELECT run_id, outcome FROM runs WHERE experiment_id = $experiment_id

-- name: intended_attempts
-- Attempts of an experiment whose sandbox was about to be made.
SELECT DISTINCT attempt_id FROM events WHERE experiment_id = $experiment_id AND step = 'create'
