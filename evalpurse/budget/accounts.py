"""The nouns of the ledger: accounts, holds, requests and journal entries, as a caller sees them.

All of them are frozen: what changes over time is a new journal entry, and a new snapshot to look at.
Money is nano-dollars.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from evalpurse.budget.errors import InvalidNameError
from evalpurse.errors import EvalpurseError

ROOT = "workspace"
"""The account above all others; it exists from the creation of a ledger, with a limit of 0."""

TEXT_CHARACTERS_MAX = 2_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:/@+=,~-]{0,199}")


class Role(StrEnum):
    """Who asks. Only what the ledger must tell apart."""

    OWNER = "owner"
    """A person: sets limits, unfreezes, corrects, decides requests."""
    AGENT = "agent"
    """Spends inside what a person gave; opens child accounts; may freeze, close and ask for more."""
    VIEWER = "viewer"
    """Looks."""


class AccountState(StrEnum):
    OPEN = "open"
    """Takes new holds."""
    FROZEN = "frozen"
    """Takes no new holds until an owner unfreezes it; what is held still settles."""
    CLOSED = "closed"
    """Takes nothing any more, for ever; an owner may still correct it."""


class HoldPhase(StrEnum):
    HELD = "held"
    """Something that can spend may exist."""
    SETTLED = "settled"
    """Charged with what was really used."""
    RELEASED = "released"
    """Given back in full, with a proof that nothing was spent."""


class RequestState(StrEnum):
    PENDING = "pending"
    """Waits for the owner."""
    GRANTED = "granted"
    """The owner raised the limit, perhaps by another amount."""
    DENIED = "denied"
    """The owner said no."""


class Kind(StrEnum):
    """What a journal entry did."""

    OPEN_ACCOUNT = "open_account"
    """Opened `account` under `parent`; the amount is its limit."""
    SET_LIMIT = "set_limit"
    """The amount is the new limit."""
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    CLOSE = "close"
    HOLD = "hold"
    """Reserved the amount on the account and everything above it."""
    HOLD_REFUSED = "hold_refused"
    """Used up the hold's id and moved nothing; `code` says why."""
    SETTLE = "settle"
    """Charged the amount and gave the rest of the hold back."""
    OVERRUN = "overrun"
    """Charged more than was held: the amount in full; froze the account and everything above it."""
    RELEASE = "release"
    """Gave the whole hold back; the detail is the proof."""
    CORRECT = "correct"
    """An owner's correction, up or down; froze the chain where it did not fit under a limit."""
    REQUEST = "request"
    """Asked the owner to raise the limit by the amount."""
    GRANT = "grant"
    """Raised the limit by the amount."""
    DENY = "deny"


class Entry(NamedTuple):
    """One row of the journal, its fields the columns in order.

    `posted_nusd`, `held_nusd` and `overrun_nusd` are what the entry added to these balances, at its account
    and at every account above it: a balance is the sum over the journal. `resolves_seq` is the entry whose
    second phase this is: the hold that it settles or releases, the request that it decides.
    """

    seq: int
    at_us: int
    kind: str
    operation_id: str
    account: str
    hold_id: str | None
    resolves_seq: int | None
    amount_nusd: int
    posted_nusd: int
    held_nusd: int
    overrun_nusd: int
    detail: str
    role: str | None
    parent: str | None
    prices_digest: str | None
    code: str | None


@dataclass(frozen=True)
class JournalEntry:
    """One row of the journal for readers; `at` is UTC. Amounts as in `Entry`."""

    seq: int
    at: datetime
    kind: Kind
    operation_id: str
    account: str
    hold_id: str
    resolves_seq: int | None
    amount_nusd: int
    posted_nusd: int
    held_nusd: int
    overrun_nusd: int
    detail: str
    role: str
    parent: str
    prices_digest: str
    code: str


@dataclass(frozen=True)
class Account:
    """An account at one instant.

    `overrun_nusd` is real money that was charged above what had been held; it is kept apart so that
    `posted_nusd + held_nusd <= limit_nusd` can be enforced by the database.
    """

    account: str
    parent: str | None
    limit_nusd: int
    posted_nusd: int
    held_nusd: int
    overrun_nusd: int
    state: AccountState

    @property
    def spent_nusd(self) -> int:
        """Everything that was really charged."""
        return self.posted_nusd + self.overrun_nusd

    @property
    def free_nusd(self) -> int:
        """What this account alone would still let in; negative after an overrun beyond its limit."""
        return self.limit_nusd - self.posted_nusd - self.held_nusd - self.overrun_nusd


@dataclass(frozen=True)
class Hold:
    """A wish to reserve the worst case of something that can spend. All fields belong to the id."""

    hold_id: str
    account: str
    amount_nusd: int
    prices_digest: str = ""
    purpose: str = ""


@dataclass(frozen=True)
class HoldState:
    """A hold and what became of it; `seq` is the journal entry that took it."""

    seq: int
    hold_id: str
    account: str
    amount_nusd: int
    prices_digest: str
    purpose: str
    state: HoldPhase
    posted_nusd: int = 0
    overrun_nusd: int = 0

    @property
    def open(self) -> bool:
        """Whether something that can spend may exist under it."""
        return self.state is HoldPhase.HELD

    @property
    def charged_nusd(self) -> int:
        """What was really charged: the part inside the hold and the part above it."""
        return self.posted_nusd + self.overrun_nusd


class HoldManyResult(NamedTuple):
    """`admitted` are held and durable; `refused` carries the reason for each of the others, in order."""

    admitted: list[str]
    refused: list[tuple[str, EvalpurseError]]


@dataclass(frozen=True)
class BudgetRequest:
    """A wish that a limit be raised by `amount_nusd`; `granted_nusd` is what the owner gave."""

    seq: int
    request_id: str
    account: str
    amount_nusd: int
    reason: str
    state: RequestState
    granted_nusd: int
    asked_by: Role
    asked_at: datetime
    decided_at: datetime | None


@dataclass(frozen=True)
class Verification:
    """What `Ledger.verify` found; no `problems` means that journal, stored balances and memory agree."""

    entries: int
    accounts: int
    holds: int
    problems: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.problems


RESOLVE_SUFFIX = "#settle"
DECIDE_SUFFIX = "#decide"
"""Journal ids of second phases; `#` cannot be in an id that a caller chooses."""


def check_name(name: str, *, what: str) -> str:
    """Returns a usable id or account name, else raises InvalidNameError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"{what} {str(name)[:80]!r} cannot be used.",
            hint="Use 1 to 200 letters, digits, spaces and ._:/@+=,~- and start with a letter or a digit.",
            name=str(name)[:80],
        )
    return name


def clean_text(text: str) -> str:
    """Free text as it can be stored: cut to its maximum, without what UTF-8 cannot carry.

    Never refuses: a charge must not fail because of its remark.
    """
    if text.isascii() and len(text) <= TEXT_CHARACTERS_MAX:
        return text
    return text[:TEXT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
