"""The ledger: who may spend what, decided in memory and durable before anybody is told.

An operation checks and changes the tree of accounts in one step of the event loop, with no await in between,
then waits until its journal entry is on the disk. A caller that is cancelled while it waits loses nothing:
the operation becomes durable all the same and is found by its id. The same id with the same fields gives
the same answer, for ever; with other fields it is an error. At every account, at every commit:
posted + held <= limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio.to_thread

from evalpurse.budget import audit, errors, replays
from evalpurse.budget.accounts import (
    DECIDE_SUFFIX,
    RESOLVE_SUFFIX,
    ROOT,
    Account,
    AccountState,
    BudgetRequest,
    Entry,
    Hold,
    HoldManyResult,
    HoldPhase,
    HoldState,
    JournalEntry,
    Kind,
    RequestState,
    Role,
    Verification,
    check_name,
    clean_text,
)
from evalpurse.budget.engine import Engine
from evalpurse.budget.journal import Journal
from evalpurse.budget.money import check_amount
from evalpurse.budget.orders import Order, carry_out, check_role
from evalpurse.budget.writer import Operation
from evalpurse.errors import EvalpurseError

HOLDS_MAX = 100_000
"""Holds of one `hold_many`: they are one transaction."""


class Ledger:
    """One open ledger file, used from one event loop. Methods with `by` check the role that asks.

    Every method that changes something may raise LedgerUnavailableError: nothing was changed then, and
    asking again with the same id is safe.
    """

    def __init__(self, engine: Engine) -> None:
        """Private: use `Ledger.open`."""
        self._engine = engine

    @classmethod
    async def open(cls, path: Path, *, journal_type: type[Journal] = Journal) -> Ledger:
        """Opens or creates the ledger at `path`; its folder must exist.

        Raises LedgerLockedError when another process has it open, LedgerNewerError, LedgerDamagedError or
        LedgerMigrationError when the file cannot be used (it is left as it is).
        """
        return cls(await Engine.open(path, journal_type))

    async def close_ledger(self) -> None:
        """Writes what is queued, closes the file and lets the next process in. A second call does nothing."""
        await self._engine.close()

    # Holds.

    async def hold(self, hold: Hold) -> HoldState:
        """Reserves the amount on the account and everything above it; durable when it returns.

        Raises ExceedsLimitError, AccountFrozenError, AccountClosedError or AccountNotFoundError; the id is
        used up then (IdAlreadyFailedError ever after). For an id that is known: the same hold again while it
        is held; HoldAlreadyPostedError or HoldAlreadyReleasedError once it is resolved, because nothing may
        be started under it; ExistsWithDifferent... when a field is not the same.
        """
        self._engine.check_ready()
        hold = _checked(hold)
        if known := self._engine.find(hold.hold_id):
            return await self._hold_again(hold, *known)
        at_us = _now_us()
        try:
            entry = self._engine.tree.hold(hold, at_us)
        except errors.BudgetError as refusal:
            if used_up := self._engine.tree.refuse(hold, refusal, at_us):
                await self._engine.durable([used_up])
            raise
        state = self._engine.tree.holds[hold.hold_id]
        await self._engine.durable([entry])
        return state

    async def hold_many(self, holds: Sequence[Hold], *, atomic: bool) -> HoldManyResult:
        """Takes many holds in one durable transaction: all or none, or the longest prefix that fits.

        With `atomic`, the first refusal is raised as `hold` would raise it, and nothing new is held. Without,
        the first hold that is refused carries its reason in the result, those after it BatchStoppedError.
        Unlike in `hold`, no id is used up by a refusal: ask again when there is room. A hold that is already
        held with the same fields counts as admitted. Raises BatchTooLargeError, InvalidNameError or
        InvalidAmountError for the whole call.
        """
        self._engine.check_ready()
        if len(holds) > HOLDS_MAX:
            raise errors.BatchTooLargeError(
                f"{len(holds)} holds were asked for in one call; at most {HOLDS_MAX} fit one transaction.",
                hint="Ask for fewer at a time.",
                holds=len(holds),
                most=HOLDS_MAX,
            )
        holds = [_checked(hold) for hold in holds]
        entries, in_flight, result = self._admit(holds, atomic=atomic)
        if entries:
            await self._engine.durable(entries)
        for operation in in_flight:
            await self._engine.wait(operation)
        return result

    async def settle(self, hold_id: str, actual_nusd: int, *, detail: str = "") -> HoldState:
        """Charges what was really used and gives the rest of the hold back.

        More than the hold is recorded in full (`overrun_nusd`) and freezes the account and everything above
        it. Raises HoldNotFoundError; for a hold that is resolved: the same answer for the same amount, else
        ExistsWithDifferentAmountError or HoldAlreadyReleasedError. `detail` is a remark, not part of the id.
        """
        self._engine.check_ready()
        check_amount(actual_nusd, what="The actual cost")
        hold = self._engine.tree.holds.get(hold_id)
        if hold is None or hold.state is not HoldPhase.HELD:
            return await self._resolved_before(hold_id, actual_nusd, release=False)
        entry = self._engine.tree.settle(hold, actual_nusd, clean_text(detail), _now_us())
        state = self._engine.tree.holds[hold_id]
        await self._engine.durable([entry])
        return state

    async def release(self, hold_id: str, *, proof: str) -> HoldState:
        """Gives the whole hold back: only with a proof that nothing was and will be spent under it.

        A timeout, a crash, a disconnect or a missing number is not a proof: settle with the worst case then.
        Raises ProofMissingError, HoldNotFoundError, HoldAlreadyPostedError.
        """
        self._engine.check_ready()
        if not proof.strip():
            raise errors.ProofMissingError(
                f"Hold {hold_id!r} cannot be given back without a proof.",
                hint="Say what shows that nothing was spent, or settle it.",
                hold_id=hold_id,
            )
        hold = self._engine.tree.holds.get(hold_id)
        if hold is None or hold.state is not HoldPhase.HELD:
            return await self._resolved_before(hold_id, 0, release=True)
        entry = self._engine.tree.release(hold, clean_text(proof), _now_us())
        state = self._engine.tree.holds[hold_id]
        await self._engine.durable([entry])
        return state

    def hold_state(self, hold_id: str) -> HoldState | None:
        """What became of a hold, however long ago; None if there never was one (or it was refused)."""
        if state := self._engine.tree.holds.get(hold_id):
            return state
        entry = self._engine.lookup.find(hold_id)
        return self._engine.lookup.hold(entry.seq) if entry and entry.kind == Kind.HOLD else None

    def open_holds(self, prefix: str = "") -> list[HoldState]:
        """Every hold that is still held and whose id starts with `prefix`."""
        return [
            hold
            for hold in self._engine.tree.holds.values()
            if hold.state is HoldPhase.HELD and hold.hold_id.startswith(prefix)
        ]

    # Accounts.

    async def open_account(
        self, operation_id: str, account: str, *, parent: str | None, limit_nusd: int, by: Role
    ) -> Account:
        """Opens an account under `parent` (None: the workspace).

        An agent may give it a limit up to its parent's, an owner any. Raises AccountExistsError,
        AccountNotFoundError, AccountFrozenError, AccountClosedError, ExceedsLimitError, NotAllowedError.
        """
        check_amount(limit_nusd, what="The limit")
        above = check_name(parent or ROOT, what="The parent account")
        return await self._order(Kind.OPEN_ACCOUNT, operation_id, account, by, limit_nusd, parent=above)

    async def set_limit(self, operation_id: str, account: str, limit_nusd: int, *, by: Role) -> Account:
        """Owner only. Raises LimitBelowCommittedError below what is spent and held."""
        check_amount(limit_nusd, what="The limit")
        return await self._order(Kind.SET_LIMIT, operation_id, account, by, limit_nusd)

    async def freeze(self, operation_id: str, account: str, *, reason: str, by: Role = Role.AGENT) -> Account:
        """Stops new holds at and below the account; what is held still settles."""
        return await self._order(Kind.FREEZE, operation_id, account, by, detail=reason)

    async def unfreeze(self, operation_id: str, account: str, *, reason: str, by: Role) -> Account:
        """Owner only. Only this account: one that was frozen above or below it stays so."""
        return await self._order(Kind.UNFREEZE, operation_id, account, by, detail=reason)

    async def close(
        self, operation_id: str, account: str, *, reason: str = "", by: Role = Role.AGENT
    ) -> Account:
        """For ever. Raises AccountInUseError while something is held or an account below is open."""
        return await self._order(Kind.CLOSE, operation_id, account, by, detail=reason)

    async def correct(
        self, operation_id: str, account: str, amount_nusd: int, reason: str, *, by: Role
    ) -> Account:
        """Owner only. Adds to what was spent (or takes from it, when negative) at and above the account.

        What does not fit under a limit is recorded as an overrun and freezes the chain.
        """
        size = -amount_nusd if type(amount_nusd) is int and amount_nusd < 0 else amount_nusd
        check_amount(size, what="The correction", least_nusd=1)
        return await self._order(Kind.CORRECT, operation_id, account, by, amount_nusd, detail=reason)

    def account(self, account: str) -> Account:
        """Raises AccountNotFoundError."""
        return self._engine.tree.node(account).snapshot()

    def accounts(self) -> list[Account]:
        """Every account, parents before their children."""
        return [node.snapshot() for node in self._engine.tree.nodes.values()]

    def chain(self, account: str) -> list[Account]:
        """The account and everything above it, upwards. Raises AccountNotFoundError."""
        return [node.snapshot() for node in self._engine.tree.node(account).chain]

    def frozen_by(self, account: str) -> str:
        """The nearest account, from this one upwards, that is frozen or closed; empty when none is."""
        for node in self._engine.tree.node(account).chain:
            if node.state is not AccountState.OPEN:
                return node.name
        return ""

    def free(self, account: str) -> int:
        """What a hold at the account may take now: the least that is free there and above, at least 0."""
        return max(0, self._engine.tree.free(account))

    # Budget requests.

    async def request(
        self, operation_id: str, account: str, amount_nusd: int, reason: str, *, by: Role
    ) -> BudgetRequest:
        """Asks the owner to raise the limit of the account by an amount; the operation id names the request.

        Raises AccountNotFoundError, AccountClosedError, TooManyRequestsError.
        """
        check_amount(amount_nusd, what="The amount asked for", least_nusd=1)
        await self._order(Kind.REQUEST, operation_id, account, by, amount_nusd, detail=reason)
        return self._engine.tree.requests[operation_id]

    async def decide(self, request_id: str, granted_nusd: int | None, *, by: Role) -> BudgetRequest:
        """Owner only. Raises the account's limit by `granted_nusd`, or says no (None). Once.

        Only the limit of that account: what is free may still be less, because of an account above it.
        Raises RequestNotFoundError, ExistsWithDifferent... when it was decided otherwise.
        """
        kind = Kind.DENY if granted_nusd is None else Kind.GRANT
        if granted_nusd is not None:
            check_amount(granted_nusd, what="The amount granted", least_nusd=1)
        request = self._engine.tree.requests.get(request_id)
        if request is None:
            raise errors.RequestNotFoundError(
                f"There is no budget request {request_id!r}.",
                hint="`evalpurse budget status` lists them.",
                request_id=request_id,
            )
        order = Order(kind, request_id + DECIDE_SUFFIX, request.account, Role(by), granted_nusd or 0)
        await self._once(order)
        return self._engine.tree.requests[request_id]

    def requests(self, state: RequestState | None = None) -> list[BudgetRequest]:
        """Budget requests, oldest first; all of them, or those in one state."""
        return [request for request in self._engine.tree.requests.values() if state in (None, request.state)]

    # The record.

    async def journal(self, after_seq: int, limit: int) -> list[JournalEntry]:
        """Durable entries with a sequence number above `after_seq`, in order, at most `limit`."""
        self._engine.check_ready()
        return await self._engine.journal(after_seq, limit)

    async def verify(self) -> Verification:
        """Rebuilds all balances and holds from the journal; compares with the stored ones and with memory."""
        self._engine.check_ready()
        memory = audit.Memory(
            self._engine.tree.last_seq,
            {account.account: account for account in self.accounts()},
            {hold.hold_id: hold for hold in self.open_holds()},
        )
        await self._engine.barrier()
        return await anyio.to_thread.run_sync(audit.verify, self._engine.path, memory)

    # Inside.

    def _admit(
        self, holds: Sequence[Hold], *, atomic: bool
    ) -> tuple[list[Entry], list[Operation], HoldManyResult]:
        """Decides a batch in one step: new entries, operations in flight to wait for, and the answer."""
        tree, known, at_us = self._engine.tree, self._engine.find_many([h.hold_id for h in holds]), _now_us()
        entries: list[Entry] = []
        in_flight: list[Operation] = []
        admitted: dict[str, None] = {}
        refused: list[tuple[str, EvalpurseError]] = []
        try:
            for at, hold in enumerate(holds):
                try:
                    if before := known.get(hold.hold_id):
                        self._check_again(hold, before[0])
                        in_flight.extend([before[1]] if before[1] else [])
                    else:
                        entries.append(tree.hold(hold, at_us))
                        known[hold.hold_id] = (entries[-1], None)
                except errors.BudgetError as refusal:
                    if atomic:
                        raise
                    refused = [(hold.hold_id, refusal), *_not_tried(holds[at + 1 :], hold.hold_id)]
                    break
                admitted[hold.hold_id] = None
        except BaseException:
            tree.take_back(entries)
            raise
        return entries, in_flight, HoldManyResult(list(admitted), refused)

    async def _hold_again(self, hold: Hold, entry: Entry, operation: Operation | None) -> HoldState:
        if operation:
            await self._engine.wait(operation)
        self._check_again(hold, entry)
        return self._known_hold(hold.hold_id)

    def _check_again(self, hold: Hold, entry: Entry) -> None:
        replays.check_hold(entry, hold)
        replays.check_still_held(self._known_hold(hold.hold_id))

    async def _resolved_before(self, hold_id: str, actual_nusd: int, *, release: bool) -> HoldState:
        known = self._engine.find(hold_id + RESOLVE_SUFFIX)
        if known is None:
            raise errors.HoldNotFoundError(
                f"There is no hold {hold_id!r}.",
                hint="Nothing may be charged without a hold; an owner can correct the account.",
                hold_id=hold_id,
            )
        entry, operation = known
        if operation:
            await self._engine.wait(operation)
        replays.check_resolution(entry, actual_nusd, release=release)
        return self._known_hold(hold_id)

    def _known_hold(self, hold_id: str) -> HoldState:
        state = self.hold_state(hold_id)
        if state is None:
            raise errors.InvariantBrokenError(f"Hold {hold_id!r} is in the journal and nowhere else.")
        return state

    async def _order(
        self,
        kind: Kind,
        operation_id: str,
        account: str,
        by: Role,
        amount_nusd: int = 0,
        *,
        detail: str = "",
        parent: str | None = None,
    ) -> Account:
        check_name(operation_id, what="The operation id")
        check_name(account, what="The account")
        await self._once(
            Order(kind, operation_id, account, Role(by), amount_nusd, clean_text(detail), parent)
        )
        return self.account(account)

    async def _once(self, order: Order) -> None:
        self._engine.check_ready()
        check_role(order)
        if known := self._engine.find(order.operation_id):
            entry, operation = known
            replays.check_order(entry, order)
            if operation:
                await self._engine.wait(operation)
            return
        await self._engine.durable([carry_out(self._engine.tree, order, _now_us())])


def _checked(hold: Hold) -> Hold:
    check_name(hold.hold_id, what="The hold id")
    check_name(hold.account, what="The account")
    check_amount(hold.amount_nusd, what="The amount to hold")
    purpose, prices_digest = clean_text(hold.purpose), clean_text(hold.prices_digest)
    if purpose is hold.purpose and prices_digest is hold.prices_digest:
        return hold
    return replace(hold, purpose=purpose, prices_digest=prices_digest)


def _not_tried(holds: Sequence[Hold], stopped_at: str) -> list[tuple[str, EvalpurseError]]:
    return [
        (
            hold.hold_id,
            errors.BatchStoppedError(
                f"Hold {hold.hold_id!r} was not tried: {stopped_at!r} of the same batch was refused.",
                hint="Ask again for this hold when there is room.",
                hold_id=hold.hold_id,
                stopped_at=stopped_at,
            ),
        )
        for hold in holds
    ]


def _now_us() -> int:
    return time.time_ns() // 1000
