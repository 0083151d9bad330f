"""What the ledger promises to everybody who may spend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from evalpurse.budget import errors
from evalpurse.budget.accounts import AccountState, Hold, HoldPhase, Kind, RequestState, Role
from evalpurse.budget.ledger import HOLDS_MAX, Ledger
from evalpurse.budget.money import AMOUNT_NUSD_MAX, NUSD_PER_USD

pytestmark = pytest.mark.anyio

OWNER, AGENT, VIEWER = Role.OWNER, Role.AGENT, Role.VIEWER
USD = NUSD_PER_USD


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Ledger]:
    """A ledger with workspace ($10) > camp ($10) > exp ($4), closed and verified at the end."""
    with anyio.fail_after(30):
        ledger = await Ledger.open(path)
        try:
            await ledger.set_limit("grant", "workspace", 10 * USD, by=OWNER)
            await ledger.open_account("o1", "camp", parent=None, limit_nusd=10 * USD, by=AGENT)
            await ledger.open_account("o2", "exp", parent="camp", limit_nusd=4 * USD, by=AGENT)
            yield ledger
            verification = await ledger.verify()
            assert verification.problems == ()
        finally:
            await ledger.close_ledger()


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    async with opened(tmp_path / "ledger.sqlite") as found:
        yield found


def balances(ledger: Ledger, account: str) -> tuple[int, int, int]:
    found = ledger.account(account)
    return found.posted_nusd, found.held_nusd, found.overrun_nusd


async def test_a_new_ledger_has_an_empty_workspace_and_nothing_to_spend(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite")
    assert [account.account for account in ledger.accounts()] == ["workspace"]
    assert ledger.free("workspace") == 0
    with pytest.raises(errors.ExceedsLimitError):
        await ledger.hold(Hold("h", "workspace", 1))
    assert (await ledger.verify()).clean
    await ledger.close_ledger()
    assert (tmp_path / "ledger.sqlite").stat().st_mode & 0o777 == 0o600


async def test_a_hold_reserves_on_the_whole_chain_and_settling_gives_the_rest_back(ledger: Ledger) -> None:
    state = await ledger.hold(Hold("h1", "exp", 3 * USD, "prices", "a run"))
    assert state.open
    for account in ("exp", "camp", "workspace"):
        assert balances(ledger, account) == (0, 3 * USD, 0)
    assert ledger.free("exp") == USD
    assert ledger.free("camp") == 7 * USD
    settled = await ledger.settle("h1", 2 * USD, detail="done")
    assert (settled.state, settled.posted_nusd, settled.charged_nusd) == (HoldPhase.SETTLED, 2 * USD, 2 * USD)
    for account in ("exp", "camp", "workspace"):
        assert balances(ledger, account) == (2 * USD, 0, 0)
    assert ledger.open_holds() == []
    assert ledger.hold_state("h1") == settled


async def test_a_hold_that_does_not_fit_somewhere_above_is_refused_with_the_numbers(ledger: Ledger) -> None:
    await ledger.hold(Hold("other", "camp", 8 * USD))
    with pytest.raises(errors.ExceedsLimitError) as caught:
        await ledger.hold(Hold("h1", "exp", 3 * USD))
    facts = caught.value.facts
    assert (facts["account"], facts["need_nusd"], facts["free_nusd"]) == ("camp", 3 * USD, 2 * USD)
    assert "$3.00 is needed and $2.00 is free" in str(caught.value)
    assert "request_budget" in str(caught.value)
    assert balances(ledger, "exp") == (0, 0, 0)
    assert ledger.hold_state("h1") is None


async def test_the_last_dollar_goes_to_exactly_as_many_as_fit(ledger: Ledger) -> None:
    async def one(at: int) -> bool:
        try:
            await ledger.hold(Hold(f"h{at}", "exp", USD))
        except errors.ExceedsLimitError:
            return False
        return True

    won = await asyncio.gather(*(one(at) for at in range(50)))
    assert sum(won) == 4
    assert won[:4] == [True] * 4
    assert ledger.free("exp") == 0


async def test_twelve_callers_with_one_id_make_one_hold(ledger: Ledger) -> None:
    states = await asyncio.gather(*(ledger.hold(Hold("same", "exp", USD)) for _ in range(12)))
    assert len(set(states)) == 1
    assert balances(ledger, "workspace") == (0, USD, 0)
    settled = await asyncio.gather(*(ledger.settle("same", 5) for _ in range(12)))
    assert len(set(settled)) == 1
    kinds = [entry.kind for entry in await ledger.journal(4, 100)]
    assert kinds == [Kind.HOLD, Kind.SETTLE]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"account": "camp"}, errors.ExistsWithDifferentAccountError),
        ({"amount_nusd": 2}, errors.ExistsWithDifferentAmountError),
        ({"prices_digest": "other"}, errors.ExistsWithDifferentPricesError),
        ({"purpose": "other"}, errors.ExistsWithDifferentPurposeError),
        ({"hold_id": "o1"}, errors.ExistsWithDifferentKindError),
    ],
)
async def test_an_id_with_another_field_is_a_conflict_that_changes_nothing(
    ledger: Ledger, changed: dict[str, Any], error: type[errors.BudgetError]
) -> None:
    hold = Hold("h1", "exp", 1, "prices", "a run")
    await ledger.hold(hold)
    with pytest.raises(error) as caught:
        await ledger.hold(replace(hold, **changed))
    assert caught.value.code.startswith("exists_with_different_")
    result = await ledger.hold_many([replace(hold, **changed)], atomic=False)
    assert result.admitted == []
    assert type(result.refused[0][1]) is error
    assert balances(ledger, "workspace") == (0, 1, 0)


async def test_a_refused_id_stays_refused_even_when_there_is_room(ledger: Ledger) -> None:
    too_much = Hold("h1", "exp", 5 * USD)
    with pytest.raises(errors.ExceedsLimitError):
        await ledger.hold(too_much)
    await ledger.set_limit("more", "exp", 9 * USD, by=OWNER)
    for again in (too_much, replace(too_much, amount_nusd=1)):
        with pytest.raises(errors.IdAlreadyFailedError) as caught:
            await ledger.hold(again)
        assert caught.value.facts["first_code"] == "exceeds_limit"
    await ledger.hold(replace(too_much, hold_id="h2"))


async def test_a_hold_on_an_account_that_does_not_exist_is_refused_for_ever(ledger: Ledger) -> None:
    with pytest.raises(errors.AccountNotFoundError):
        await ledger.hold(Hold("h1", "new", 1))
    await ledger.open_account("o3", "new", parent=None, limit_nusd=1, by=AGENT)
    with pytest.raises(errors.IdAlreadyFailedError):
        await ledger.hold(Hold("h1", "new", 1))


async def test_nothing_may_start_again_under_a_hold_that_is_resolved(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", 9))
    await ledger.hold(Hold("h2", "exp", 9))
    await ledger.settle("h1", 4)
    await ledger.release("h2", proof="the sandbox was never created")
    with pytest.raises(errors.HoldAlreadyPostedError):
        await ledger.hold(Hold("h1", "exp", 9))
    with pytest.raises(errors.HoldAlreadyReleasedError):
        await ledger.hold(Hold("h2", "exp", 9))
    result = await ledger.hold_many([Hold("h1", "exp", 9), Hold("h3", "exp", 9)], atomic=False)
    assert result.admitted == []
    assert [error.code for _, error in result.refused] == ["hold_already_posted", "batch_stopped"]


async def test_a_hold_is_resolved_once_and_the_same_resolution_gives_the_same_answer(ledger: Ledger) -> None:
    for name in ("settled", "released"):
        await ledger.hold(Hold(name, "exp", 9))
    settled = await ledger.settle("settled", 4, detail="first")
    released = await ledger.release("released", proof="never started")
    assert await ledger.settle("settled", 4, detail="again, in other words") == settled
    assert await ledger.release("released", proof="in other words") == released
    assert await ledger.settle("released", 0) == released
    with pytest.raises(errors.ExistsWithDifferentAmountError):
        await ledger.settle("settled", 5)
    with pytest.raises(errors.HoldAlreadyPostedError):
        await ledger.release("settled", proof="no")
    with pytest.raises(errors.HoldAlreadyReleasedError):
        await ledger.settle("released", 1)
    with pytest.raises(errors.HoldNotFoundError):
        await ledger.settle("never", 1)
    assert balances(ledger, "workspace") == (4, 0, 0)


async def test_a_release_needs_a_proof(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", 9))
    with pytest.raises(errors.ProofMissingError):
        await ledger.release("h1", proof="  ")
    assert balances(ledger, "exp") == (0, 9, 0)


async def test_more_than_the_hold_is_recorded_in_full_and_freezes_the_chain(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", USD))
    await ledger.hold(Hold("h2", "exp", USD))
    state = await ledger.settle("h1", 50 * USD)
    assert (state.posted_nusd, state.overrun_nusd, state.charged_nusd) == (USD, 49 * USD, 50 * USD)
    assert ledger.frozen_by("exp") == "exp"
    for account in ledger.chain("exp"):
        assert (account.state, account.spent_nusd) == (AccountState.FROZEN, 50 * USD)
        assert account.posted_nusd + account.held_nusd <= account.limit_nusd
    with pytest.raises(errors.AccountFrozenError):
        await ledger.hold(Hold("h3", "camp", 1))
    await ledger.settle("h2", USD)
    assert [entry.kind for entry in await ledger.journal(6, 100)] == [
        Kind.OVERRUN,
        Kind.HOLD_REFUSED,
        Kind.SETTLE,
    ]


async def test_an_owner_who_unfreezes_does_not_get_the_overrun_for_free(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", USD))
    await ledger.settle("h1", 3 * USD)
    for at, account in enumerate(("workspace", "camp", "exp")):
        await ledger.unfreeze(f"thaw{at}", account, reason="looked at it", by=OWNER)
    assert ledger.free("exp") == USD
    with pytest.raises(errors.ExceedsLimitError):
        await ledger.hold(Hold("h2", "exp", USD + 1))


async def test_a_batch_is_all_or_nothing_when_asked(ledger: Ledger) -> None:
    await ledger.hold(Hold("old", "exp", USD))
    batch = [Hold("old", "exp", USD), *(Hold(f"h{at}", "exp", USD) for at in range(5))]
    with pytest.raises(errors.ExceedsLimitError):
        await ledger.hold_many(batch, atomic=True)
    assert [hold.hold_id for hold in ledger.open_holds()] == ["old"]
    assert balances(ledger, "workspace") == (0, USD, 0)
    result = await ledger.hold_many(batch[:4], atomic=True)
    assert result.admitted == ["old", "h0", "h1", "h2"]
    assert result.refused == []
    assert balances(ledger, "workspace") == (0, 4 * USD, 0)


async def test_a_batch_takes_the_longest_prefix_and_its_rest_may_ask_again(ledger: Ledger) -> None:
    batch = [Hold(f"h{at}", "exp", USD) for at in range(6)]
    result = await ledger.hold_many(batch, atomic=False)
    assert result.admitted == ["h0", "h1", "h2", "h3"]
    assert [error.code for _, error in result.refused] == ["exceeds_limit", "batch_stopped"]
    for name in result.admitted:
        await ledger.settle(name, USD // 4)
    result = await ledger.hold_many(batch[4:], atomic=False)
    assert result.admitted == ["h4", "h5"]


async def test_the_same_hold_twice_in_one_batch_is_one_hold(ledger: Ledger) -> None:
    result = await ledger.hold_many([Hold("h", "exp", 5)] * 3, atomic=True)
    assert result.admitted == ["h"]
    assert balances(ledger, "exp") == (0, 5, 0)
    with pytest.raises(errors.ExistsWithDifferentAmountError):
        await ledger.hold_many([Hold("g", "exp", 5), Hold("g", "exp", 6)], atomic=True)
    assert balances(ledger, "exp") == (0, 5, 0)


async def test_batches_that_share_holds_in_flight_all_get_their_answer(ledger: Ledger) -> None:
    first, second, third = (Hold(f"h{at}", "exp", 5) for at in range(3))
    results = await asyncio.gather(
        ledger.hold(first),
        ledger.hold_many([first, second], atomic=True),
        ledger.hold_many([first, second, third], atomic=False),
        ledger.hold_many([second, first], atomic=True),
        ledger.hold(third),
    )
    assert results[2].admitted == ["h0", "h1", "h2"]
    assert results[3].admitted == ["h1", "h0"]
    assert balances(ledger, "workspace") == (0, 15, 0)


async def test_a_batch_that_is_too_large_or_malformed_is_refused_as_a_whole(ledger: Ledger) -> None:
    with pytest.raises(errors.BatchTooLargeError) as caught:
        await ledger.hold_many([Hold("h", "exp", 1)] * (HOLDS_MAX + 1), atomic=False)
    assert caught.value.facts["most"] == HOLDS_MAX
    with pytest.raises(errors.InvalidAmountError):
        await ledger.hold_many([Hold("a", "exp", 1), Hold("b", "exp", -1)], atomic=False)
    assert ledger.open_holds() == []


async def test_two_thousand_holds_are_one_durable_transaction(ledger: Ledger, tmp_path: Path) -> None:
    result = await ledger.hold_many([Hold(f"h{at:04d}", "exp", 1000) for at in range(2000)], atomic=True)
    assert len(result.admitted) == 2000
    assert len({entry.at for entry in (await ledger.journal(4, 5000))}) == 1
    assert balances(ledger, "workspace") == (0, 2_000_000, 0)
    assert len(ledger.open_holds("h19")) == 100


async def test_an_agent_cannot_raise_what_a_person_set(ledger: Ledger) -> None:
    refused: list[Callable[[], Any]] = [
        lambda: ledger.set_limit("x", "exp", USD, by=AGENT),
        lambda: ledger.unfreeze("x", "exp", reason="", by=AGENT),
        lambda: ledger.correct("x", "exp", -1, "please", by=AGENT),
        lambda: ledger.open_account("x", "new", parent="exp", limit_nusd=1, by=VIEWER),
        lambda: ledger.request("x", "exp", 1, "more", by=VIEWER),
        lambda: ledger.freeze("x", "exp", reason="", by=VIEWER),
        lambda: ledger.close("x", "exp", by=VIEWER),
    ]
    for attempt in refused:
        with pytest.raises(errors.NotAllowedError):
            await attempt()
    request = await ledger.request("r", "exp", USD, "more", by=AGENT)
    for granted in (USD, None):
        with pytest.raises(errors.NotAllowedError):
            await ledger.decide(request.request_id, granted, by=AGENT)
    with pytest.raises(errors.ExceedsLimitError) as caught:
        await ledger.open_account("x", "new", parent="exp", limit_nusd=4 * USD + 1, by=AGENT)
    assert caught.value.facts["limit_nusd"] == 4 * USD
    await ledger.open_account("x", "new", parent="exp", limit_nusd=4 * USD, by=AGENT)


async def test_a_limit_never_goes_below_what_is_spent_and_held(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", USD))
    await ledger.hold(Hold("h2", "exp", USD))
    await ledger.settle("h1", USD // 2)
    with pytest.raises(errors.LimitBelowCommittedError) as caught:
        await ledger.set_limit("less", "camp", USD, by=OWNER)
    assert caught.value.facts["committed_nusd"] == USD * 3 // 2
    lowered = await ledger.set_limit("less", "camp", USD * 3 // 2, by=OWNER)
    assert lowered.free_nusd == 0


async def test_orders_are_idempotent_too(ledger: Ledger) -> None:
    await ledger.set_limit("first", "exp", 2 * USD, by=OWNER)
    await ledger.set_limit("second", "exp", 3 * USD, by=OWNER)
    assert (await ledger.set_limit("first", "exp", 2 * USD, by=OWNER)).limit_nusd == 3 * USD
    with pytest.raises(errors.ExistsWithDifferentAmountError):
        await ledger.set_limit("first", "exp", USD, by=OWNER)
    with pytest.raises(errors.ExistsWithDifferentKindError):
        await ledger.freeze("first", "exp", reason="")
    with pytest.raises(errors.ExistsWithDifferentParentError):
        await ledger.open_account("o2", "exp", parent=None, limit_nusd=4 * USD, by=AGENT)
    with pytest.raises(errors.AccountExistsError):
        await ledger.open_account("o3", "exp", parent="camp", limit_nusd=4 * USD, by=AGENT)
    await ledger.freeze("ice", "exp", reason="a")
    with pytest.raises(errors.ExistsWithDifferentPurposeError):
        await ledger.freeze("ice", "exp", reason="b")


async def test_a_frozen_account_stops_holds_below_it_and_nothing_else(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", 5))
    await ledger.freeze("ice", "camp", reason="odd bills")
    assert ledger.frozen_by("exp") == "camp"
    assert ledger.frozen_by("workspace") == ""
    with pytest.raises(errors.AccountFrozenError, match="camp"):
        await ledger.hold(Hold("h2", "exp", 1))
    with pytest.raises(errors.AccountFrozenError):
        await ledger.open_account("o9", "new", parent="exp", limit_nusd=1, by=AGENT)
    await ledger.hold(Hold("h3", "workspace", 1))
    await ledger.settle("h1", 5)
    await ledger.unfreeze("thaw", "camp", reason="fine", by=OWNER)
    await ledger.hold(Hold("h4", "exp", 1))


async def test_a_closed_account_is_closed_for_ever(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", 0))
    with pytest.raises(errors.AccountInUseError):
        await ledger.close("c1", "exp")
    with pytest.raises(errors.AccountInUseError):
        await ledger.close("c1", "camp")
    await ledger.settle("h1", 0)
    assert (await ledger.close("c1", "exp")).state is AccountState.CLOSED
    with pytest.raises(errors.AccountClosedError):
        await ledger.hold(Hold("h2", "exp", 0))
    for again in (
        ledger.unfreeze("x", "exp", reason="", by=OWNER),
        ledger.set_limit("x", "exp", 1, by=OWNER),
        ledger.close("c2", "exp"),
        ledger.request("x", "exp", 1, "more", by=AGENT),
        ledger.open_account("x", "below", parent="exp", limit_nusd=0, by=OWNER),
    ):
        with pytest.raises(errors.AccountClosedError):
            await again
    with pytest.raises(errors.NotAllowedError):
        await ledger.close("c3", "workspace", by=OWNER)


async def test_an_owner_corrects_up_and_down_and_what_does_not_fit_is_an_overrun(ledger: Ledger) -> None:
    await ledger.correct("c1", "exp", 3 * USD, "the provider's invoice", by=OWNER)
    assert balances(ledger, "workspace") == (3 * USD, 0, 0)
    await ledger.correct("c2", "exp", 2 * USD, "more of it", by=OWNER)
    assert balances(ledger, "workspace") == (3 * USD, 0, 2 * USD)
    assert ledger.account("workspace").state is AccountState.FROZEN
    await ledger.correct("c2b", "exp", USD, "and more", by=OWNER)
    assert balances(ledger, "workspace") == (3 * USD, 0, 3 * USD)
    await ledger.correct("c3", "exp", -4 * USD, "a refund", by=OWNER)
    assert balances(ledger, "workspace") == (2 * USD, 0, 0)
    with pytest.raises(errors.InvalidAmountError):
        await ledger.correct("c4", "exp", -2 * USD - 1, "too much", by=OWNER)
    with pytest.raises(errors.InvalidAmountError):
        await ledger.correct("c4", "exp", 0, "nothing", by=OWNER)


async def test_a_request_waits_for_the_owner_who_decides_once(ledger: Ledger) -> None:
    asked = await ledger.request("r1", "exp", 5 * USD, "the sweep needs it", by=AGENT)
    assert (asked.state, asked.asked_by, asked.reason) == (RequestState.PENDING, AGENT, "the sweep needs it")
    assert ledger.requests(RequestState.PENDING) == [asked]
    granted = await ledger.decide("r1", 2 * USD, by=OWNER)
    assert (granted.state, granted.granted_nusd) == (RequestState.GRANTED, 2 * USD)
    assert ledger.account("exp").limit_nusd == 6 * USD
    assert await ledger.decide("r1", 2 * USD, by=OWNER) == granted
    with pytest.raises(errors.ExistsWithDifferentAmountError):
        await ledger.decide("r1", 3 * USD, by=OWNER)
    with pytest.raises(errors.ExistsWithDifferentKindError):
        await ledger.decide("r1", None, by=OWNER)
    await ledger.request("r2", "exp", USD, "and more", by=AGENT)
    assert (await ledger.decide("r2", None, by=OWNER)).state is RequestState.DENIED
    assert ledger.account("exp").limit_nusd == 6 * USD
    assert ledger.requests(RequestState.PENDING) == []
    with pytest.raises(errors.RequestNotFoundError):
        await ledger.decide("r3", 1, by=OWNER)


async def test_an_agent_cannot_flood_the_owner_with_requests(ledger: Ledger) -> None:
    for at in range(100):
        await ledger.request(f"r{at}", "exp", 1, "please", by=AGENT)
    with pytest.raises(errors.TooManyRequestsError):
        await ledger.request("r100", "exp", 1, "please", by=AGENT)


@pytest.mark.parametrize("amount", [-1, 1.5, True, "5", None, float("nan"), AMOUNT_NUSD_MAX + 1, 10**30])
async def test_amounts_that_are_not_money_change_nothing(ledger: Ledger, amount: Any) -> None:
    await ledger.hold(Hold("h1", "exp", 5))
    for attempt in (
        ledger.hold(Hold("h2", "exp", amount)),
        ledger.settle("h1", amount),
        ledger.set_limit("x", "exp", amount, by=OWNER),
        ledger.open_account("x", "new", parent=None, limit_nusd=amount, by=OWNER),
        ledger.request("x", "exp", amount, "", by=AGENT),
    ):
        with pytest.raises((errors.InvalidAmountError, errors.AmountOverflowError)):
            await attempt
    assert balances(ledger, "workspace") == (0, 5, 0)


@pytest.mark.parametrize("name", ["", " x", "a#settle", "a\nb", "x" * 201, "é", "\ud800", None, 5])
async def test_names_that_cannot_be_told_apart_are_refused(ledger: Ledger, name: Any) -> None:
    for attempt in (
        ledger.hold(Hold(name, "exp", 1)),
        ledger.freeze(name, "exp", reason=""),
        ledger.open_account("x", name, parent=None, limit_nusd=0, by=OWNER),
    ):
        with pytest.raises(errors.InvalidNameError):
            await attempt


async def test_remarks_that_cannot_be_stored_as_they_are_never_stop_a_charge(ledger: Ledger) -> None:
    await ledger.hold(Hold("h1", "exp", 5, purpose="\ud800" * 3))
    await ledger.settle("h1", 5, detail="\udfff" + "x" * 10_000 + "\x00")
    hold, settled = (await ledger.journal(0, 100))[-2:]
    assert hold.detail == "\\ud800" * 3
    assert len(settled.detail) < 2_100
    with pytest.raises(errors.HoldAlreadyPostedError):
        await ledger.hold(Hold("h1", "exp", 5, purpose="\ud800" * 3))


async def test_charges_too_large_to_add_up_leave_the_hold_as_it_was(ledger: Ledger) -> None:
    for name in ("h1", "h2", "h3"):
        await ledger.hold(Hold(name, "exp", 1))
    await ledger.settle("h1", AMOUNT_NUSD_MAX)
    await ledger.settle("h2", AMOUNT_NUSD_MAX - 1)
    with pytest.raises(errors.AmountOverflowError):
        await ledger.settle("h3", AMOUNT_NUSD_MAX)
    assert [hold.hold_id for hold in ledger.open_holds()] == ["h3"]


async def test_a_cancelled_caller_does_not_lose_its_hold(tmp_path: Path) -> None:
    async with opened(tmp_path / "ledger.sqlite") as ledger:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await ledger.hold(Hold("h1", "exp", 5))
        assert scope.cancelled_caught
        state = ledger.hold_state("h1")
        assert state is not None
        assert state.open
        assert await ledger.hold(Hold("h1", "exp", 5)) == state
        with anyio.CancelScope() as scope:
            scope.cancel()
            await ledger.settle("h1", 3)
        assert (await ledger.settle("h1", 3)).posted_nusd == 3
    reopened = await Ledger.open(tmp_path / "ledger.sqlite")
    assert balances(reopened, "workspace") == (3, 0, 0)
    await reopened.close_ledger()


async def test_everything_is_the_same_after_closing_and_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with opened(path) as ledger:
        for at in range(4):
            await ledger.hold(Hold(f"h{at}", "exp", 100, "prices", "a run"))
        await ledger.settle("h0", 50)
        await ledger.settle("h1", 150)
        await ledger.release("h2", proof="never started")
        await ledger.request("r1", "exp", 5, "more", by=AGENT)
        with pytest.raises(errors.AccountFrozenError):
            await ledger.hold(Hold("h9", "exp", 1))
        before = (ledger.accounts(), ledger.open_holds(), ledger.requests(), await ledger.journal(0, 100))
        states = [ledger.hold_state(f"h{at}") for at in range(4)]
    ledger = await Ledger.open(path)
    assert before == (ledger.accounts(), ledger.open_holds(), ledger.requests(), await ledger.journal(0, 100))
    assert states == [ledger.hold_state(f"h{at}") for at in range(4)]
    assert (await ledger.settle("h0", 50)).posted_nusd == 50
    with pytest.raises(errors.IdAlreadyFailedError):
        await ledger.hold(Hold("h9", "exp", 1))
    assert (await ledger.verify()).clean
    await ledger.close_ledger()
    with pytest.raises(errors.LedgerUnavailableError, match="closed"):
        await ledger.settle("h3", 1)
    with pytest.raises(errors.LedgerUnavailableError, match="closed"):
        ledger.hold_state("h0")
    await ledger.close_ledger()


async def test_closing_writes_what_is_still_queued(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await ledger.set_limit("grant", "workspace", 10 * USD, by=OWNER)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(ledger.hold(Hold(f"h{at}", "workspace", 1))) for at in range(100)]
        await asyncio.sleep(0)
        await ledger.close_ledger()
    assert all(task.result().open for task in waiting)
    ledger = await Ledger.open(path)
    assert len(ledger.open_holds()) == 100
    await ledger.close_ledger()


async def test_the_journal_is_read_in_order_and_in_pages(ledger: Ledger) -> None:
    await ledger.hold_many([Hold(f"h{at}", "exp", 1) for at in range(20)], atomic=True)
    first = await ledger.journal(0, 10)
    rest = await ledger.journal(first[-1].seq, 100)
    assert [entry.seq for entry in [*first, *rest]] == list(range(1, 25))
    assert [entry.operation_id for entry in first[:4]] == ["workspace", "grant", "o1", "o2"]
    assert await ledger.journal(24, 10) == []
