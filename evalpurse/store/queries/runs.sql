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
