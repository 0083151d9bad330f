-- name: list_variants
-- The newest specification under each label.
SELECT * FROM variants
QUALIFY row_number() OVER (PARTITION BY variant ORDER BY created_at DESC, rowid DESC) = 1
ORDER BY variant

-- name: variant_by_name
-- What a label means now.
SELECT * FROM variants WHERE variant = $variant ORDER BY created_at DESC, rowid DESC LIMIT 1

-- name: variant_by_digest
-- The newest label of a digest, with its specification.
SELECT * FROM variants WHERE variant_digest = $variant_digest ORDER BY created_at DESC, rowid DESC LIMIT 1
