-- name: suites
-- Every suite with the number of its cases by split, newest versions only.
SELECT
  suites.suite,
  any_value(suites.created_at) AS created_at,
  count(cases.case_id) AS cases,
  count(cases.case_id) FILTER (cases.split = 'dev') AS dev_cases,
  count(cases.case_id) FILTER (cases.split = 'holdout') AS holdout_cases
FROM suites
LEFT JOIN (
  SELECT suite, case_id, split FROM cases
  QUALIFY row_number() OVER (PARTITION BY suite, case_id ORDER BY version DESC, rowid DESC) = 1
) AS cases USING (suite)
GROUP BY suites.suite
ORDER BY suites.suite

-- name: cases_of_suite
-- The newest version of each case of a suite; of one split, or of all when it is ''.
SELECT * FROM (
  SELECT * FROM cases WHERE suite = $suite
  QUALIFY row_number() OVER (PARTITION BY case_id ORDER BY version DESC, rowid DESC) = 1
)
WHERE (split = $split OR $split = '')
ORDER BY case_id

-- name: case_versions_of_suite
-- Every version of every case of a suite.
SELECT * FROM cases WHERE suite = $suite ORDER BY case_id, version
