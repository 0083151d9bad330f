"""A process that spends through a ledger as fast as it can, until it is killed.

Prints a JSON line for every operation, after the ledger said that it is durable. Arguments: path, seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

from evalpurse.budget.accounts import Hold, Role
from evalpurse.budget.ledger import Ledger


def tell(did: str, hold_id: str, actual: int = 0) -> None:
    print(json.dumps({"did": did, "hold_id": hold_id, "actual": actual}), flush=True)


async def spend(ledger: Ledger, worker: str, rng: random.Random) -> None:
    for at in range(100_000):
        holds = [Hold(f"{worker}.{at}.{each}", "exp", 1000) for each in range(rng.randint(1, 4))]
        result = await ledger.hold_many(holds, atomic=False)
        for hold_id in result.admitted:
            tell("hold", hold_id)
        for hold_id in result.admitted:
            if rng.random() < 0.1:
                await ledger.release(hold_id, proof="never started")
                tell("release", hold_id)
            elif rng.random() < 0.9:
                actual = rng.randint(0, 1000)
                await ledger.settle(hold_id, actual)
                tell("settle", hold_id, actual)


async def main(path: Path, seed: int) -> None:
    ledger = await Ledger.open(path)
    await ledger.set_limit("grant", "workspace", 10**9, by=Role.OWNER)
    await ledger.open_account("open", "exp", parent=None, limit_nusd=10**9, by=Role.AGENT)
    async with asyncio.TaskGroup() as tasks:
        for worker in range(8):
            tasks.create_task(spend(ledger, f"s{seed}.w{worker}", random.Random(seed * 100 + worker)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
