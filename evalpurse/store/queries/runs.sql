-- name: runs_of
-- Every run of an experiment that has ended.
SELECT * FROM runs WHERE experiment_id = $experiment_id ORDER BY run_id

-- name: run_by_id
-- One run that has ended.
SELECT * FROM runs WHERE run_id = $run_id LIMIT 1

-- name: attempts_of
-- The attempts of a run that have ended, first to last.
SELECT * FROM attempts WHERE run_id = $run_id ORDER BY number, rowid

-- name: attempts_of_experiment
-- All attempts of an experiment that have ended.
SELECT * FROM attempts WHERE experiment_id = $experiment_id ORDER BY run_id, number, rowid

-- name: scores_of
-- The numbers of one run: graders first, then free metrics.
SELECT * FROM scores WHERE run_id = $run_id ORDER BY weight = 0, grader, name

-- name: start_latency_by_kind
-- Seconds from launch to the start of the harness, of runs from a warm image and of those from their own.
SELECT
  starts.detail AS kind,
  count(*) AS runs,
  quantile_cont(runs.start_latency_s, 0.5) AS p50_s,
  quantile_cont(runs.start_latency_s, 0.95) AS p95_s
FROM runs
JOIN (
  SELECT e.run_id, arg_max(e.detail, e."at") AS detail
  FROM events AS e
  WHERE e.step = 'start' AND e.detail IN ('warm', 'cold')
  GROUP BY e.run_id
) AS starts ON starts.run_id = runs.run_id
WHERE runs.started_at IS NOT NULL
GROUP BY starts.detail
ORDER BY starts.detail DESC
