-- The ledger, version 1.
-- The journal is the truth: balances and holds are sums over it, kept beside it so that the database itself
-- refuses a commit that breaks a limit. `typeof` keeps money integer: SQLite turns a sum that overflows into
-- a float.

CREATE TABLE migrations (
    version     INTEGER PRIMARY KEY,
    name        TEXT NOT NULL,
    outcome     TEXT NOT NULL,
    at_us       INTEGER NOT NULL
);

CREATE TABLE journal (
    seq           INTEGER PRIMARY KEY,
    at_us         INTEGER NOT NULL,
    kind          TEXT NOT NULL,
    operation_id  TEXT NOT NULL UNIQUE,
    account       TEXT NOT NULL,
    hold_id       TEXT,
    resolves_seq  INTEGER,
    amount_nusd   INTEGER NOT NULL CHECK (typeof(amount_nusd) = 'integer'),
    posted_nusd   INTEGER NOT NULL CHECK (typeof(posted_nusd) = 'integer'),
    held_nusd     INTEGER NOT NULL CHECK (typeof(held_nusd) = 'integer'),
    overrun_nusd  INTEGER NOT NULL CHECK (typeof(overrun_nusd) = 'integer'),
    detail        TEXT NOT NULL,
    role          TEXT,
    parent        TEXT,
    prices_digest TEXT,
    code          TEXT
);

CREATE TRIGGER journal_is_never_edited BEFORE UPDATE ON journal
BEGIN
    SELECT RAISE(ABORT, 'the journal is append-only: write a correction');
END;

CREATE TRIGGER journal_is_never_shortened BEFORE DELETE ON journal
BEGIN
    SELECT RAISE(ABORT, 'the journal is append-only: write a correction');
END;

CREATE TABLE accounts (
    account      TEXT PRIMARY KEY,
    parent       TEXT REFERENCES accounts (account),
    limit_nusd   INTEGER NOT NULL CHECK (typeof(limit_nusd) = 'integer' AND limit_nusd >= 0),
    posted_nusd  INTEGER NOT NULL CHECK (typeof(posted_nusd) = 'integer' AND posted_nusd >= 0),
    held_nusd    INTEGER NOT NULL CHECK (typeof(held_nusd) = 'integer' AND held_nusd >= 0),
    overrun_nusd INTEGER NOT NULL CHECK (typeof(overrun_nusd) = 'integer' AND overrun_nusd >= 0),
    state        TEXT NOT NULL CHECK (state IN ('open', 'frozen', 'closed')),
    seq          INTEGER NOT NULL,
    CHECK (posted_nusd + held_nusd <= limit_nusd)
);

-- One row a hold, keyed by the journal entry that took it.
CREATE TABLE holds (
    seq          INTEGER PRIMARY KEY REFERENCES journal (seq),
    hold_id      TEXT NOT NULL,
    account      TEXT NOT NULL,
    amount_nusd  INTEGER NOT NULL CHECK (typeof(amount_nusd) = 'integer' AND amount_nusd >= 0),
    state        TEXT NOT NULL CHECK (state IN ('held', 'settled', 'released')),
    posted_nusd  INTEGER NOT NULL CHECK (typeof(posted_nusd) = 'integer' AND posted_nusd BETWEEN 0 AND amount_nusd),
    overrun_nusd INTEGER NOT NULL CHECK (typeof(overrun_nusd) = 'integer' AND overrun_nusd >= 0)
);

CREATE INDEX holds_open ON holds (seq) WHERE state = 'held';

CREATE TABLE requests (
    seq          INTEGER PRIMARY KEY REFERENCES journal (seq),
    request_id   TEXT NOT NULL UNIQUE,
    state        TEXT NOT NULL CHECK (state IN ('pending', 'granted', 'denied')),
    granted_nusd INTEGER NOT NULL,
    decided_us   INTEGER
);

INSERT INTO journal
VALUES (1, CAST(strftime('%s', 'now') AS INTEGER) * 1000000, 'open_account', 'workspace', 'workspace', NULL,
        NULL, 0, 0, 0, 0, '', 'owner', NULL, NULL, NULL);

INSERT INTO accounts VALUES ('workspace', NULL, 0, 0, 0, 0, 'open', 1);
