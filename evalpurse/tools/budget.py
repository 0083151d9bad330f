"""Tools that show the purse and ask for more; none of them can raise a limit."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import BaseModel, Field

from evalpurse.budget.accounts import BudgetRequest, RequestState, Role
from evalpurse.budget.money import format_usd
from evalpurse.tools.money import nusd, usd, usd_or_none
from evalpurse.tools.texts import fitting
from evalpurse.tools.toolbox import Answer, BadArgumentsError, Call, Toolbox

ACCOUNTS_SHOWN = 50
REQUESTS_SHOWN = 20
PART_BYTES = 14_000


class AccountModel(BaseModel):
    account: str
    parent: str | None = None
    state: str = Field(description="open, frozen or closed.")
    limit_usd: float
    spent_usd: float
    held_usd: float = Field(
        description="Reserved for runs that are not settled; what they do not use comes back."
    )
    free_usd: float = Field(description="The least of limit - spent - held on the way up; 0 when frozen.")
    overrun_usd: float | None = Field(default=None, description="Recorded above a hold; the owner must look.")


class RequestModel(BaseModel):
    request_id: str
    account: str
    amount_usd: float
    reason: str
    state: str = Field(description="pending, granted or denied.")
    granted_usd: float | None = None


class BudgetAnswer(Answer):
    workspace: AccountModel
    accounts: list[AccountModel] = Field(description="Open accounts below the workspace, newest first.")
    requests: list[RequestModel] = Field(description="Requests for more, newest first.")


class RequestAnswer(Answer):
    request: RequestModel


def register(toolbox: Toolbox) -> None:
    """Adds budget_status and request_budget."""

    @toolbox.tool(title="Budget status", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def budget_status(
        call: Call,
        account: Annotated[str, Field(description="Show only this account and those below it.")] = "",
    ) -> BudgetAnswer:
        """Shows the purse: limit, spent, held and free of every open account, and requests."""
        ledger = call.services.ledger
        if account:
            ledger.account(account)
        below = [
            found
            for found in reversed(ledger.accounts())
            if found.account != "workspace"
            and (
                account in (entry.account for entry in ledger.chain(found.account))
                if account
                else found.state != "closed"
            )
        ]
        accounts = fitting((_account(call, each.account) for each in below[:ACCOUNTS_SHOWN]), PART_BYTES)
        asked = ledger.requests()
        newest = (request_model(each) for each in reversed(asked[-REQUESTS_SHOWN:]))
        requests = fitting(newest, PART_BYTES)
        return BudgetAnswer(
            workspace=_account(call, "workspace"),
            accounts=accounts,
            requests=requests,
            truncated=len(below) > len(accounts) or len(asked) > len(requests),
            hint="Limits are set by the owner: evalpurse budget grant workspace USD"
            if ledger.account("workspace").limit_nusd == 0
            else "",
        )

    @toolbox.tool(
        title="Request budget", read_only=False, destructive=False, idempotent=True, open_world=False
    )
    async def request_budget(
        call: Call,
        amount_usd: Annotated[
            float, Field(description="How much to add to the account's limit, in dollars.")
        ],
        reason: Annotated[
            str, Field(min_length=1, max_length=1000, description="What it is for; the owner reads this.")
        ],
        account: Annotated[str, Field(description="Account whose limit should grow.")] = "workspace",
    ) -> RequestAnswer:
        """Asks the owner to raise an account's limit. Nothing changes until a person decides.

        The same request (amount, reason, account) is made once, however often it is sent.
        """
        if not all(char.isprintable() or char in "\n\t" for char in reason):
            raise BadArgumentsError(
                "Parameter 'reason' has control characters, which could change what the owner sees.",
                hint="Write plain text.",
            )
        amount = nusd("amount_usd", amount_usd)
        key = hashlib.sha256(f"{account}\n{amount}\n{reason}".encode()).hexdigest()[:12]
        made = await call.services.ledger.request(
            f"request:{key}", account, amount, reason, by=Role(call.session.role)
        )
        decide = f"evalpurse budget decide {made.request_id} --grant {format_usd(amount).lstrip('$')}"
        return RequestAnswer(
            request=request_model(made),
            hint=f"The owner decides with: {decide}"
            if made.state is RequestState.PENDING
            else "This request was decided before. To ask for more, say in the reason what has changed.",
            next="Go on with what the purse still covers; budget_status shows the decision.",
        )


def _account(call: Call, name: str) -> AccountModel:
    ledger = call.services.ledger
    found = ledger.account(name)
    return AccountModel(
        account=found.account,
        parent=found.parent,
        state=found.state.value,
        limit_usd=usd(found.limit_nusd),
        spent_usd=usd(found.spent_nusd),
        held_usd=usd(found.held_nusd),
        free_usd=0.0 if ledger.frozen_by(name) else usd(ledger.free(name)),
        overrun_usd=usd_or_none(found.overrun_nusd or None),
    )


def request_model(found: BudgetRequest) -> RequestModel:
    """A request as a client sees it."""
    return RequestModel(
        request_id=found.request_id,
        account=found.account,
        amount_usd=usd(found.amount_nusd),
        reason=found.reason,
        state=found.state.value,
        granted_usd=usd(found.granted_nusd) if found.state is RequestState.GRANTED else None,
    )
