"""The audit: rebuilds every balance and every hold from the journal alone, and compares.

It shares no rule with the code that it checks: it reads rows, adds up, and says in a sentence what does not
agree with the stored balances, with the holds, or with what the running ledger has in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from evalpurse.budget.accounts import Account, Entry, HoldState, Verification
from evalpurse.budget.reader import Snapshot

PROBLEMS_MAX = 100


class Memory(NamedTuple):
    """What the running ledger believed right after the journal entry `last_seq`."""

    last_seq: int
    accounts: dict[str, Account]
    open_holds: dict[str, HoldState]


@dataclass
class _Balance:
    parent: str | None
    limit: int
    posted: int = 0
    held: int = 0
    overrun: int = 0
    state: str = "open"
    own: list[int] = field(default_factory=lambda: [0, 0, 0])

    def numbers(self) -> tuple[str | None, int, int, int, int, str]:
        return (self.parent, self.limit, self.posted, self.held, self.overrun, self.state)


@dataclass
class _HeldMoney:
    account: str
    amount: int
    state: str = "held"
    posted: int = 0
    overrun: int = 0


class _Books:
    """The ledger as the journal tells it, entry by entry."""

    def __init__(self) -> None:
        self.accounts: dict[str, _Balance] = {}
        self.holds: dict[int, _HeldMoney] = {}
        self.hold_seqs: dict[str, int] = {}
        self.open: set[str] = set()
        self.requests: dict[int, str] = {}
        self.entries = 0
        self.problems: list[str] = []

    def say(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)

    def read(self, entry: Entry) -> None:
        self.entries += 1
        if entry.seq != self.entries:
            self.say(f"Journal entry {self.entries} is missing: the next one is {entry.seq}.")
            self.entries = entry.seq
        if entry.kind == "open_account":
            self._open_account(entry)
        elif entry.account not in self.accounts and entry.kind != "hold_refused":
            self.say(f"Entry {entry.seq} ({entry.kind}) is about the unknown account {entry.account!r}.")
        elif entry.kind in ("hold", "settle", "overrun", "release"):
            self._hold(entry)
        else:
            self._other(entry)
        self._move(entry)

    def _open_account(self, entry: Entry) -> None:
        if entry.account in self.accounts:
            self.say(f"Entry {entry.seq} opens account {entry.account!r} a second time.")
        elif entry.parent is not None and entry.parent not in self.accounts:
            self.say(f"Entry {entry.seq} opens {entry.account!r} under the unknown {entry.parent!r}.")
        else:
            self.accounts[entry.account] = _Balance(entry.parent, entry.amount_nusd)

    def _hold(self, entry: Entry) -> None:
        moved = (entry.posted_nusd, entry.held_nusd, entry.overrun_nusd)
        if entry.kind == "hold":
            if entry.hold_id in self.hold_seqs:
                self.say(f"Entry {entry.seq} takes hold {entry.hold_id!r} a second time.")
            self.holds[entry.seq] = _HeldMoney(entry.account, entry.amount_nusd)
            self.hold_seqs[entry.hold_id or ""] = entry.seq
            self.open.add(entry.hold_id or "")
            right = (0, entry.amount_nusd, 0)
        else:
            hold = self.holds.get(entry.resolves_seq or 0)
            if hold is None or self.hold_seqs.get(entry.hold_id or "") != entry.resolves_seq:
                self.say(f"Entry {entry.seq} resolves hold {entry.hold_id!r}, which was never taken.")
                return
            if hold.state != "held" or hold.account != entry.account:
                self.say(f"Entry {entry.seq} resolves hold {entry.hold_id!r} a second time or elsewhere.")
            inside = min(entry.amount_nusd, hold.amount)
            right = (inside, -hold.amount, entry.amount_nusd - inside)
            hold.state = "released" if entry.kind == "release" else "settled"
            hold.posted, hold.overrun = inside, entry.amount_nusd - inside
            self.open.discard(entry.hold_id or "")
            if (entry.kind == "overrun") != (hold.overrun > 0) or (entry.kind == "release" and inside):
                self.say(f"Entry {entry.seq} is called {entry.kind} and charges {entry.amount_nusd}.")
        if moved != right:
            self.say(f"Entry {entry.seq} ({entry.kind}) moved {moved} where it should have moved {right}.")

    def _other(self, entry: Entry) -> None:
        moved = entry.posted_nusd + entry.overrun_nusd
        if entry.held_nusd or moved != (entry.amount_nusd if entry.kind == "correct" else 0):
            self.say(f"Entry {entry.seq} ({entry.kind}) moved money that it should not have moved.")
        if entry.kind == "set_limit":
            self.accounts[entry.account].limit = entry.amount_nusd
        elif entry.kind == "grant":
            self.accounts[entry.account].limit += entry.amount_nusd
        elif entry.kind in ("freeze", "unfreeze", "close"):
            states = {"freeze": "frozen", "unfreeze": "open", "close": "closed"}
            self.accounts[entry.account].state = states[entry.kind]
        if entry.kind == "request":
            self.requests[entry.seq] = "pending"
        elif entry.kind in ("grant", "deny"):
            if self.requests.get(entry.resolves_seq or 0) != "pending":
                self.say(f"Entry {entry.seq} decides a request that was not waiting.")
            self.requests[entry.resolves_seq or 0] = "granted" if entry.kind == "grant" else "denied"

    def _move(self, entry: Entry) -> None:
        name: str | None = entry.account
        if name in self.accounts:
            own = self.accounts[name].own
            own[0] += entry.posted_nusd
            own[1] += entry.held_nusd
            own[2] += entry.overrun_nusd
        while name is not None and (balance := self.accounts.get(name)) is not None:
            balance.posted += entry.posted_nusd
            balance.held += entry.held_nusd
            balance.overrun += entry.overrun_nusd
            if entry.overrun_nusd > 0 and balance.state == "open":
                balance.state = "frozen"
            if balance.posted < 0 or balance.held < 0 or balance.overrun < 0:
                self.say(f"After entry {entry.seq} account {name!r} has a negative balance.")
            if balance.posted + balance.held > balance.limit:
                self.say(
                    f"After entry {entry.seq} account {name!r} has {balance.posted} spent and {balance.held}"
                    f" held, above its limit of {balance.limit}."
                )
            name = balance.parent

    def check_sums(self) -> None:
        """A parent's balances are what happened at it and what its children have."""
        sums = {name: list(balance.own) for name, balance in self.accounts.items()}
        for balance in self.accounts.values():
            if balance.parent in sums:
                for at, number in enumerate((balance.posted, balance.held, balance.overrun)):
                    sums[balance.parent][at] += number
        for name, balance in self.accounts.items():
            if sums[name] != [balance.posted, balance.held, balance.overrun]:
                self.say(f"The balances of {name!r} are not the sum of what is below it: {sums[name]}.")


def verify(path: Path, memory: Memory) -> Verification:
    """Reads the whole journal once, in one read transaction; blocks, so call it in a thread."""
    books = _Books()
    with Snapshot(path) as file:
        for (verdict,) in file.rows("PRAGMA quick_check"):
            if verdict != "ok":
                books.say(f"The file is damaged: {verdict}.")
        for row in file.rows("SELECT * FROM journal ORDER BY seq"):
            books.read(Entry(*row))
            if books.entries == memory.last_seq:
                _compare_memory(books, memory)
        if books.entries < memory.last_seq:
            books.say(f"The journal ends at {books.entries}; memory is at {memory.last_seq}.")
        books.check_sums()
        _compare_stored(books, file)
    return Verification(books.entries, len(books.accounts), len(books.holds), tuple(books.problems))


def _compare_memory(books: _Books, memory: Memory) -> None:
    rebuilt = {name: balance.numbers() for name, balance in books.accounts.items()}
    believed = {
        each.account: (
            each.parent,
            each.limit_nusd,
            each.posted_nusd,
            each.held_nusd,
            each.overrun_nusd,
            each.state.value,
        )
        for each in memory.accounts.values()
    }
    _compare(books, "Account", "memory", rebuilt, believed)
    open_holds = {name: books.holds[books.hold_seqs[name]] for name in books.open}
    _compare(
        books,
        "Open hold",
        "memory",
        {name: (hold.account, hold.amount) for name, hold in open_holds.items()},
        {hold.hold_id: (hold.account, hold.amount_nusd) for hold in memory.open_holds.values()},
    )


def _compare_stored(books: _Books, file: Snapshot) -> None:
    stored_accounts = {
        row[0]: tuple(row[1:])
        for row in file.rows(
            "SELECT account, parent, limit_nusd, posted_nusd, held_nusd, overrun_nusd, state FROM accounts"
        )
    }
    rebuilt = {name: balance.numbers() for name, balance in books.accounts.items()}
    _compare(books, "Account", "the stored balances", rebuilt, stored_accounts)
    stored_holds = {
        row[0]: tuple(row[1:])
        for row in file.rows("SELECT seq, account, amount_nusd, state, posted_nusd, overrun_nusd FROM holds")
    }
    rebuilt_holds = {
        seq: (hold.account, hold.amount, hold.state, hold.posted, hold.overrun)
        for seq, hold in books.holds.items()
    }
    _compare(books, "Hold of entry", "the stored holds", rebuilt_holds, stored_holds)
    stored_requests = dict(file.rows("SELECT seq, state FROM requests"))
    _compare(books, "Request of entry", "the stored requests", books.requests, stored_requests)


def _compare(books: _Books, what: str, where: str, rebuilt: dict[Any, Any], found: dict[Any, Any]) -> None:
    for key in rebuilt.keys() | found.keys():
        if rebuilt.get(key) != found.get(key):
            books.say(f"{what} {key!r}: the journal says {rebuilt.get(key)}, {where} say {found.get(key)}.")
