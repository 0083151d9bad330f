"""What a launch asks for, checked before any money moves."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from evalpurse.budget.money import format_usd
from evalpurse.runs.errors import BadLaunchError

REPEATS_MAX = 1_000
VARIANTS_MAX = 100
PARALLEL_MAX = 10_000


@dataclass(frozen=True)
class LaunchRequest:
    """The arguments of a launch. Money in nano-dollars; `case_ids` empty means the whole split."""

    suite: str
    variants: Sequence[str]
    repeats: int
    cap_nusd: int
    allowance_nusd: int
    idempotency_key: str
    baseline: str = ""
    account: str = "workspace"
    split: str = "dev"
    backend: str = "local"
    strategy: str = "grid"
    case_ids: Sequence[str] = ()
    max_parallel: int = 0
    reuse: bool = True

    @property
    def experiment_id(self) -> str:
        """Derived from the key, so that the same key always means the same experiment."""
        return "exp_" + hashlib.sha256(self.idempotency_key.encode()).hexdigest()[:10]

    @property
    def digest(self) -> str:
        """Over every argument: the same key with another digest is a conflict."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self) -> None:
        """The rules that need no look at the store.

        Raises:
            BadLaunchError: names the argument, its value and its range.
        """
        key = self.idempotency_key
        if not 1 <= len(key) <= 200 or not key.isprintable():
            raise BadLaunchError(
                f"idempotency_key has {len(key)} characters; it needs 1 to 200 printable ones.",
                hint="Choose one key for each experiment that you mean, and send it again on a retry.",
            )
        if self.strategy != "grid":
            raise BadLaunchError(f"strategy is {self.strategy!r}; this version has 'grid'.")
        self._check_names()
        if not 1 <= self.repeats <= REPEATS_MAX:
            raise BadLaunchError(f"repeats is {self.repeats}; it must be from 1 to {REPEATS_MAX}.")
        if not 0 <= self.max_parallel <= PARALLEL_MAX:
            raise BadLaunchError(
                f"max_parallel is {self.max_parallel}; it must be from 0 (the default) to {PARALLEL_MAX}."
            )
        if self.cap_nusd <= 0:
            raise BadLaunchError(
                f"cap_usd is {format_usd(self.cap_nusd)}; it must be above zero.",
                hint="The cap is the most that this experiment may ever cost; dry_run shows the worst case.",
            )
        if self.allowance_nusd < 0:
            raise BadLaunchError(
                f"allowance_usd is {format_usd(self.allowance_nusd)}; it must not be negative."
            )

    def _check_names(self) -> None:
        if not self.variants:
            raise BadLaunchError("variants is empty.", hint="Name at least one; list_variants shows them.")
        if len(self.variants) > VARIANTS_MAX:
            raise BadLaunchError(
                f"{len(self.variants)} variants were named; one experiment takes at most {VARIANTS_MAX}.",
                hint="Launch several experiments, each with the baseline.",
            )
        twice = sorted(name for name, count in Counter(self.variants).items() if count > 1)
        if twice:
            raise BadLaunchError(f"variants names {', '.join(twice)} more than once.", hint="Name each once.")
        if self.baseline and self.baseline not in self.variants:
            raise BadLaunchError(
                f"baseline {self.baseline!r} is not among the variants {', '.join(self.variants)}.",
                hint="Add it to variants, so that it runs in the same blocks.",
            )
