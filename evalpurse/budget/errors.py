"""What money can say no to. A refusal changes nothing but, where it says so, the fate of its own id.

`retryable` says whether the same request can succeed later without anybody changing it.
"""

from __future__ import annotations

from typing import ClassVar

from evalpurse.errors import EvalpurseError


class BudgetError(EvalpurseError):
    """Base of every refusal of the budget."""

    code: ClassVar[str] = "budget_error"
    retryable: ClassVar[bool] = False


# Requests that can never be right.


class InvalidAmountError(BudgetError):
    """An amount that is not a non-negative integer of nano-dollars, or not a plain number of dollars."""

    code: ClassVar[str] = "invalid_amount"


class AmountOverflowError(BudgetError):
    """An amount, or the sum it would make, is larger than the ledger keeps."""

    code: ClassVar[str] = "overflow"


class InvalidNameError(BudgetError):
    """An id or an account name that is empty, too long or has characters that are not allowed."""

    code: ClassVar[str] = "invalid_name"


class NotAllowedError(BudgetError):
    """The role may not do this."""

    code: ClassVar[str] = "not_allowed"


class BatchTooLargeError(BudgetError):
    """More holds in one call than one transaction may carry."""

    code: ClassVar[str] = "batch_too_large"


# Accounts.


class AccountNotFoundError(BudgetError):
    code: ClassVar[str] = "account_not_found"


class AccountExistsError(BudgetError):
    """Another operation has already opened an account of this name."""

    code: ClassVar[str] = "exists"


class AccountFrozenError(BudgetError):
    """The account, or one above it, takes no new holds until an owner unfreezes it."""

    code: ClassVar[str] = "account_frozen"


class AccountClosedError(BudgetError):
    """The account, or one above it, is closed for ever."""

    code: ClassVar[str] = "account_closed"


class AccountInUseError(BudgetError):
    """The account cannot be closed: something below it is still held or open."""

    code: ClassVar[str] = "account_in_use"


class ExceedsLimitError(BudgetError):
    """The amount does not fit under the limit of an account on the way up."""

    code: ClassVar[str] = "exceeds_limit"


class LimitBelowCommittedError(BudgetError):
    """A limit cannot go below what is already spent or held."""

    code: ClassVar[str] = "limit_below_committed"


# Holds.


class HoldNotFoundError(BudgetError):
    code: ClassVar[str] = "hold_not_found"


class HoldAlreadyPostedError(BudgetError):
    """The hold was settled: nothing more may be started, charged or given back under its id."""

    code: ClassVar[str] = "hold_already_posted"


class HoldAlreadyReleasedError(BudgetError):
    """The hold was given back: nothing may be started or charged under its id."""

    code: ClassVar[str] = "hold_already_released"


class ProofMissingError(BudgetError):
    """A hold is given back only with a proof."""

    code: ClassVar[str] = "proof_missing"


class IdAlreadyFailedError(BudgetError):
    """This hold id was refused before and stays refused, so that a late retry is not a surprise success."""

    code: ClassVar[str] = "id_already_failed"


class BatchStoppedError(BudgetError):
    """Not tried: an earlier hold of the same call was refused. The id is not used up."""

    code: ClassVar[str] = "batch_stopped"
    retryable: ClassVar[bool] = True


# Same id, other fields.


class ExistsWithDifferentError(BudgetError):
    """The id is known with another value in one of its fields."""

    code: ClassVar[str] = "exists_with_different_fields"


class ExistsWithDifferentKindError(ExistsWithDifferentError):
    code: ClassVar[str] = "exists_with_different_kind"


class ExistsWithDifferentAccountError(ExistsWithDifferentError):
    code: ClassVar[str] = "exists_with_different_account"


class ExistsWithDifferentParentError(ExistsWithDifferentError):
    code: ClassVar[str] = "exists_with_different_parent"


class ExistsWithDifferentAmountError(ExistsWithDifferentError):
    code: ClassVar[str] = "exists_with_different_amount"


class ExistsWithDifferentPurposeError(ExistsWithDifferentError):
    code: ClassVar[str] = "exists_with_different_purpose"


class ExistsWithDifferentPricesError(ExistsWithDifferentError):
    code: ClassVar[str] = "exists_with_different_prices"


# Budget requests.


class RequestNotFoundError(BudgetError):
    code: ClassVar[str] = "request_not_found"


class TooManyRequestsError(BudgetError):
    """Too many budget requests wait for the owner."""

    code: ClassVar[str] = "too_many_requests"
    retryable: ClassVar[bool] = True


# The ledger itself.


class LedgerUnavailableError(BudgetError):
    """The ledger could not make the operation durable, so it does not count. Ask again with the same id."""

    code: ClassVar[str] = "ledger_unavailable"
    retryable: ClassVar[bool] = True


class LedgerLockedError(BudgetError):
    """Another process owns the ledger."""

    code: ClassVar[str] = "ledger_locked"


class LedgerNewerError(BudgetError):
    """The ledger was written by a newer evalpurse; it was left as it is."""

    code: ClassVar[str] = "ledger_newer"


class LedgerDamagedError(BudgetError):
    """The file is not a ledger of evalpurse, or cannot be read as one; it was left as it is."""

    code: ClassVar[str] = "ledger_damaged"


class LedgerMigrationError(BudgetError):
    """A schema change failed and was rolled back; the copy made before it is kept."""

    code: ClassVar[str] = "ledger_migration_failed"


class InvariantBrokenError(BudgetError):
    """A defect of the ledger itself was caught before it could change a balance."""

    code: ClassVar[str] = "invariant_broken"


# Prices.


class UnknownModelError(BudgetError):
    """No price list has the model."""

    code: ClassVar[str] = "unknown_model"


class UnpricedUnitError(BudgetError):
    """The model is known, but a unit that was used has no price; it is not taken as free."""

    code: ClassVar[str] = "unpriced_unit"


class InvalidUsageError(BudgetError):
    """Reported usage that cannot be true."""

    code: ClassVar[str] = "invalid_usage"


class InvalidPriceFileError(BudgetError):
    """The user's price file cannot be read."""

    code: ClassVar[str] = "invalid_price_file"
