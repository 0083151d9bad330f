"""The named statements of the store, one `.sql` file a subject."""
