-- name: journal_max_seq
-- How far the mirror of the ledger's journal is: the highest sequence number, 0 when it is empty.
SELECT coalesce(max(seq), 0) AS seq FROM journal

-- name: list_accounts
-- The mirror of the ledger's accounts.
SELECT * FROM accounts ORDER BY account

-- name: clear_journal
-- Empties the mirror of the journal, to be filled again from the ledger.
DELETE FROM journal
