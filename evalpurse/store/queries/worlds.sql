-- name: list_worlds
-- Every world, oldest first.
SELECT * FROM worlds ORDER BY created_at, world

-- name: world_by_name
-- What a name stands for, for ever.
SELECT * FROM worlds WHERE world = $world ORDER BY created_at, rowid LIMIT 1

-- name: worlds_by_digest
-- Names of the worlds whose digest starts like this.
SELECT * FROM worlds WHERE starts_with(world_digest, $prefix) ORDER BY created_at, rowid
