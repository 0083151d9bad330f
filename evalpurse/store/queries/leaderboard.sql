-- name: leaderboard
-- Per variant of an experiment ('': of all) and suite ('': all) and split ('': all): score with its clustered error.
-- The case is the unit: score is the mean of the case means over counted runs, score_se their s / sqrt(n).
-- Runs that were reused stand for themselves in their experiment and are left out across experiments.
-- infra_share is the part of the ended runs that infrastructure failed; costs are nano-dollars, times seconds.
WITH chosen AS MATERIALIZED (
  SELECT variant, variant_digest, case_digest, outcome, counted, score, cost_nusd, duration_s, reused_from <> '' AS reused
  FROM runs
  WHERE (experiment_id = $experiment_id OR $experiment_id = '')
    AND (suite = $suite OR $suite = '')
    AND (split = $split OR $split = '')
    AND ($experiment_id <> '' OR reused_from = '')
),
parts AS (
  SELECT
    variant_digest,
    case_digest,
    outcome,
    counted,
    any_value(variant) AS variant,
    count(*) AS runs,
    sum(score) AS score_sum,
    count(score) AS scores,
    sum(cost_nusd) AS cost_nusd
  FROM chosen
  GROUP BY variant_digest, case_digest, outcome, counted
),
by_case AS (
  SELECT variant_digest, sum(score_sum) / sum(scores) AS score
  FROM parts
  WHERE counted AND scores > 0
  GROUP BY variant_digest, case_digest
),
scored AS (
  SELECT
    variant_digest,
    count(*) AS cases,
    avg(score) AS score,
    stddev_samp(score) / sqrt(count(*)) AS score_se
  FROM by_case
  GROUP BY variant_digest
),
by_outcome AS (
  SELECT variant_digest, outcome, sum(runs)::BIGINT AS runs FROM parts GROUP BY variant_digest, outcome
),
outcomes AS (
  SELECT
    variant_digest,
    map_from_entries(list((outcome, runs) ORDER BY outcome)) AS outcomes,
    coalesce(sum(runs) FILTER (outcome = 'infra_error'), 0) / sum(runs) AS infra_share
  FROM by_outcome
  GROUP BY variant_digest
),
totals AS (
  SELECT
    variant_digest,
    any_value(variant) AS variant,
    sum(runs)::BIGINT AS runs,
    coalesce(sum(runs) FILTER (counted), 0)::BIGINT AS counted_runs,
    sum(cost_nusd)::BIGINT AS cost_nusd,
    sum(cost_nusd) FILTER (counted) / sum(runs) FILTER (counted) AS cost_per_run_nusd
  FROM parts
  GROUP BY variant_digest
),
times AS (
  SELECT variant_digest, quantile_cont(duration_s, [0.5, 0.95]) AS duration_s
  FROM chosen
  WHERE counted
  GROUP BY variant_digest
)
SELECT
  totals.variant,
  variant_digest,
  coalesce(scored.cases, 0) AS cases,
  totals.runs,
  totals.counted_runs,
  scored.score,
  scored.score_se,
  totals.cost_nusd,
  totals.cost_per_run_nusd,
  times.duration_s[1] AS duration_p50_s,
  times.duration_s[2] AS duration_p95_s,
  outcomes.outcomes,
  outcomes.infra_share
FROM totals
LEFT JOIN scored USING (variant_digest)
LEFT JOIN outcomes USING (variant_digest)
LEFT JOIN times USING (variant_digest)
ORDER BY scored.score DESC NULLS LAST, totals.variant
