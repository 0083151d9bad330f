-- name: runs_of
-- Every run of an experiment that has ended.
SELECT * FROM runs WHERE experiment_id = $experiment_id ORDER BY run_id

-- name: run_by_id
-- One run that has ended.
SELECT * FROM runs WHERE run_id = $run_id LIMIT 1

-- name: reusable_runs
-- For each (variant, case, repeat) of three lists of equal length: the newest run that was paid for and counted.
WITH wanted AS (
  SELECT
    unnest($variant_digests::VARCHAR[]) AS variant_digest,
    unnest($case_digests::VARCHAR[]) AS case_digest,
    unnest($repeats::BIGINT[]) AS repeat
)
SELECT runs.* FROM runs
SEMI JOIN wanted USING (variant_digest, case_digest, repeat)
WHERE counted AND reused_from = ''
QUALIFY row_number() OVER (PARTITION BY variant_digest, case_digest, repeat ORDER BY ended_at DESC, run_id DESC) = 1

-- name: attempts_of
-- The attempts of a run that have ended, first to last.
SELECT * FROM attempts WHERE run_id = $run_id ORDER BY number, rowid

-- name: attempts_of_experiment
-- All attempts of an experiment that have ended.
SELECT * FROM attempts WHERE experiment_id = $experiment_id ORDER BY run_id, number, rowid

-- name: scores_of
-- The numbers of one run: graders first, then free metrics.
SELECT * FROM scores WHERE run_id = $run_id ORDER BY weight = 0, grader, name

-- name: scores_of_experiment
-- All numbers of all runs of an experiment.
SELECT * FROM scores WHERE experiment_id = $experiment_id ORDER BY run_id, weight = 0, grader, name

-- name: usage_of
-- Model usage of one run.
SELECT * FROM usage WHERE run_id = $run_id ORDER BY "at", rowid

-- name: usage_of_experiment
-- Model usage of all runs of an experiment.
SELECT * FROM usage WHERE experiment_id = $experiment_id ORDER BY run_id, "at", rowid

-- name: events_of
-- The steps of all attempts of a run, oldest first.
SELECT * FROM events WHERE run_id = $run_id ORDER BY "at", rowid

-- name: events_of_experiment
-- The events of an experiment and of all its runs, oldest first.
SELECT * FROM events WHERE experiment_id = $experiment_id ORDER BY "at", rowid

-- name: last_event_of_each_attempt
-- Where each attempt of an experiment was when its last step was recorded.
SELECT * FROM events WHERE experiment_id = $experiment_id AND attempt_id <> ''
QUALIFY row_number() OVER (PARTITION BY attempt_id ORDER BY "at" DESC, rowid DESC) = 1
ORDER BY attempt_id
