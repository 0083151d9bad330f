"""What can go wrong in the results store.

When `append` raises one of these, none of the rows of that call are stored: a caller may try again without
making duplicates.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from evalpurse.errors import EvalpurseError


class StoreError(EvalpurseError):
    """The results store cannot do what was asked."""

    code: ClassVar[str] = "store_error"


class StoreLockedError(StoreError):
    """Another process owns the home folder's data."""

    code: ClassVar[str] = "store_locked"


class StoreClosedError(StoreError):
    """The store was closed, or is closing."""

    code: ClassVar[str] = "store_closed"


class StoreUnreadableError(StoreError):
    """The database file cannot be opened; it was left as it is."""

    code: ClassVar[str] = "store_unreadable"


class NewerSchemaError(StoreError):
    """The database was written by a newer evalpurse; it was left as it is."""

    code: ClassVar[str] = "store_newer"


class ForeignDatabaseError(StoreError):
    """The database file is not one of evalpurse's; it was left as it is."""

    code: ClassVar[str] = "store_foreign"


class MigrationError(StoreError):
    """A schema change failed and was rolled back."""

    code: ClassVar[str] = "migration_failed"


class RowsRefusedError(StoreError):
    """A row does not fit its table; only the call that brought it fails."""

    code: ClassVar[str] = "rows_refused"


class StatementError(StoreError):
    """A named statement does not exist, got wrong parameters, or failed."""

    code: ClassVar[str] = "statement_failed"


class StoreBrokenError(StoreError):
    """The engine gave up on the open database; it is opened again, and this call was not stored."""

    code: ClassVar[str] = "store_broken"


class DiskFullError(StoreError):
    """There is no room to write. Nothing of the call was written; it may be tried again later."""

    code: ClassVar[str] = "disk_full"

    def __init__(self, folder: Path, *, free_bytes: int, doing: str) -> None:
        super().__init__(
            f"The disk is full ({free_bytes / 1e6:,.1f} MB free at {folder}) while {doing}; "
            "nothing was written.",
            hint="Free some space and try again: nothing else is needed.",
            folder=str(folder),
            free_bytes=free_bytes,
        )


class BlobMissingError(StoreError):
    """No blob has this digest."""

    code: ClassVar[str] = "blob_missing"


class BlobDamagedError(StoreError):
    """What is stored under a digest is not the content with that digest."""

    code: ClassVar[str] = "blob_damaged"


class QueryRefusedError(StoreError):
    """The gate does not let this query through; nothing was run."""

    code: ClassVar[str] = "query_refused"


class QueryFailedError(StoreError):
    """The query was let through, or does not parse, and the engine could not answer it."""

    code: ClassVar[str] = "query_failed"


class QueryTimeoutError(StoreError):
    """The query was ended because it did not answer in time."""

    code: ClassVar[str] = "query_timeout"
