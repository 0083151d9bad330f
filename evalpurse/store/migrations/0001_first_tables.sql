-- Append-only tables: no keys, no indexes (min-max statistics are enough, and an index stands in the way of
-- later changes). Columns mirror the fields of the records; ids are made unique by who makes them.

CREATE TABLE suites (
  suite VARCHAR NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE cases (
  suite VARCHAR NOT NULL,
  case_id VARCHAR NOT NULL,
  version BIGINT NOT NULL,
  case_digest VARCHAR NOT NULL,
  split VARCHAR NOT NULL,
  tags VARCHAR[] NOT NULL,
  graders VARCHAR[] NOT NULL,
  timeout_s DOUBLE NOT NULL,
  content_blob VARCHAR NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE variants (
  variant VARCHAR NOT NULL,
  variant_digest VARCHAR NOT NULL,
  repo VARCHAR NOT NULL,
  commit_sha VARCHAR NOT NULL,
  run_command VARCHAR NOT NULL,
  model VARCHAR NOT NULL,
  params VARCHAR NOT NULL,
  parent VARCHAR NOT NULL,
  description VARCHAR NOT NULL,
  spec_blob VARCHAR NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE worlds (
  world VARCHAR NOT NULL,
  world_digest VARCHAR NOT NULL,
  files BIGINT NOT NULL,
  bytes BIGINT NOT NULL,
  manifest_blob VARCHAR NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE experiments (
  experiment_id VARCHAR NOT NULL,
  suite VARCHAR NOT NULL,
  split VARCHAR NOT NULL,
  strategy VARCHAR NOT NULL,
  variants VARCHAR[] NOT NULL,
  case_count BIGINT NOT NULL,
  repeats BIGINT NOT NULL,
  run_count BIGINT NOT NULL,
  cap_nusd BIGINT NOT NULL,
  allowance_nusd BIGINT NOT NULL,
  account VARCHAR NOT NULL,
  max_parallel BIGINT NOT NULL,
  backend VARCHAR NOT NULL,
  prices_digest VARCHAR NOT NULL,
  baseline VARCHAR NOT NULL,
  idempotency_key VARCHAR NOT NULL,
  arguments_digest VARCHAR NOT NULL,
  reuse BOOLEAN NOT NULL,
  rates VARCHAR NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE experiment_statuses (
  experiment_id VARCHAR NOT NULL,
  status VARCHAR NOT NULL,
  reason VARCHAR NOT NULL,
  "at" TIMESTAMPTZ NOT NULL
);

CREATE TABLE planned_runs (
  run_id VARCHAR NOT NULL,
  experiment_id VARCHAR NOT NULL,
  seq BIGINT NOT NULL,
  case_id VARCHAR NOT NULL,
  case_version BIGINT NOT NULL,
  case_digest VARCHAR NOT NULL,
  variant VARCHAR NOT NULL,
  variant_digest VARCHAR NOT NULL,
  repeat BIGINT NOT NULL,
  reuse_run_id VARCHAR NOT NULL
);

CREATE TABLE runs (
  run_id VARCHAR NOT NULL,
  experiment_id VARCHAR NOT NULL,
  suite VARCHAR NOT NULL,
  split VARCHAR NOT NULL,
  case_id VARCHAR NOT NULL,
  case_version BIGINT NOT NULL,
  case_digest VARCHAR NOT NULL,
  variant VARCHAR NOT NULL,
  variant_digest VARCHAR NOT NULL,
  repeat BIGINT NOT NULL,
  outcome VARCHAR NOT NULL,
  counted BOOLEAN NOT NULL,
  score DOUBLE,
  attempts BIGINT NOT NULL,
  reused_from VARCHAR NOT NULL,
  cost_nusd BIGINT NOT NULL,
  model_cost_nusd BIGINT NOT NULL,
  sandbox_cost_nusd BIGINT NOT NULL,
  cost_source VARCHAR NOT NULL,
  input_tokens BIGINT NOT NULL,
  output_tokens BIGINT NOT NULL,
  duration_s DOUBLE NOT NULL,
  start_latency_s DOUBLE NOT NULL,
  exit_code BIGINT,
  error VARCHAR NOT NULL,
  answer_blob VARCHAR NOT NULL,
  log_blob VARCHAR NOT NULL,
  transcript_blob VARCHAR NOT NULL,
  artifacts_blob VARCHAR NOT NULL,
  started_at TIMESTAMPTZ,
  ended_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE attempts (
  attempt_id VARCHAR NOT NULL,
  run_id VARCHAR NOT NULL,
  experiment_id VARCHAR NOT NULL,
  number BIGINT NOT NULL,
  backend VARCHAR NOT NULL,
  outcome VARCHAR NOT NULL,
  cost_nusd BIGINT NOT NULL,
  hold_nusd BIGINT NOT NULL,
  detail VARCHAR NOT NULL,
  started_at TIMESTAMPTZ,
  ended_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE scores (
  run_id VARCHAR NOT NULL,
  experiment_id VARCHAR NOT NULL,
  case_id VARCHAR NOT NULL,
  split VARCHAR NOT NULL,
  variant VARCHAR NOT NULL,
  grader VARCHAR NOT NULL,
  name VARCHAR NOT NULL,
  value DOUBLE NOT NULL,
  weight DOUBLE NOT NULL
);

CREATE TABLE usage (
  run_id VARCHAR NOT NULL,
  experiment_id VARCHAR NOT NULL,
  attempt_id VARCHAR NOT NULL,
  split VARCHAR NOT NULL,
  provider VARCHAR NOT NULL,
  model VARCHAR NOT NULL,
  source VARCHAR NOT NULL,
  requests BIGINT NOT NULL,
  input_tokens BIGINT NOT NULL,
  cached_tokens BIGINT NOT NULL,
  output_tokens BIGINT NOT NULL,
  charged_nusd BIGINT NOT NULL,
  "at" TIMESTAMPTZ NOT NULL
);

CREATE TABLE events (
  "at" TIMESTAMPTZ NOT NULL,
  experiment_id VARCHAR NOT NULL,
  run_id VARCHAR NOT NULL,
  attempt_id VARCHAR NOT NULL,
  step VARCHAR NOT NULL,
  detail VARCHAR NOT NULL
);

CREATE TABLE accounts (
  account VARCHAR NOT NULL,
  parent VARCHAR NOT NULL,
  limit_nusd BIGINT NOT NULL,
  posted_nusd BIGINT NOT NULL,
  held_nusd BIGINT NOT NULL,
  state VARCHAR NOT NULL
);

CREATE TABLE journal (
  seq BIGINT NOT NULL,
  operation_id VARCHAR NOT NULL,
  kind VARCHAR NOT NULL,
  account VARCHAR NOT NULL,
  hold_id VARCHAR NOT NULL,
  amount_nusd BIGINT NOT NULL,
  "at" TIMESTAMPTZ NOT NULL,
  detail VARCHAR NOT NULL
);
