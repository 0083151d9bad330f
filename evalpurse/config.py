"""Settings of one home folder, read once when the daemon starts and passed down from there.

They come from `config.toml` in the home folder, never from the environment of whichever client happened
to start the daemon. A key that is not known, or a value out of its range, stops the start by name.
"""

from __future__ import annotations

import math
import os
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from evalpurse.errors import EvalpurseError


class ConfigError(EvalpurseError):
    """A setting is unknown or out of range."""

    code: ClassVar[str] = "bad_config"


@dataclass(frozen=True)
class Settings:
    """Every setting, with its default.

    `local_usd_per_hour` is the price of one local sandbox (0: local runs cost only their model calls).
    `local_isolation` is `auto` (bubblewrap where it works), `require` (refuse to run without it) or `off`.
    `backend` is where experiments run that do not say. A period of 0 switches its schedule off.
    `vault_command` prints a JSON object of names and values: a list is run as it is, a text by a shell.
    `synced_secrets` names what is taken from it, each `NAME` or `NAME=name in the vault`.
    """

    local_max_parallel: int = max(2, 2 * (os.cpu_count() or 1))
    local_usd_per_hour: float = 0.0
    local_isolation: str = "auto"
    batch_runs_max: int = 20_000
    infra_retries: int = 2
    infra_retry_delay_s: float = 1.0
    http_port: int = 0
    reuse: bool = True
    backend: str = "local"
    modal_environment: str = ""
    modal_creates_per_s: float = 5.0
    modal_max_live: int = 500
    modal_cpu: float = 1.0
    modal_memory_mb: int = 2048
    modal_image: str = "python:3.12-slim"
    warm_every_s: float = 3600.0
    sweep_every_s: float = 600.0
    secrets_sync_every_s: float = 0.0
    vault_command: str | tuple[str, ...] = ""
    vault_timeout_s: float = 60.0
    synced_secrets: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Settings from a file; the defaults when there is none.

        Raises:
            ConfigError: names the file, the key and the range.
        """
        if not path.exists():
            return cls()
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is not valid TOML: {error}.", hint="Mend or remove the file."
            ) from error
        return replace(cls(), **{key: _checked(path, key, value) for key, value in given.items()})


_RANGES: dict[str, tuple[float, float]] = {
    "local_max_parallel": (1, 10_000),
    "local_usd_per_hour": (0, 1_000),
    "batch_runs_max": (1, 1_000_000),
    "infra_retries": (0, 10),
    "infra_retry_delay_s": (0, 600),
    "http_port": (0, 65_535),
    "modal_creates_per_s": (0.01, 1_000),
    "modal_max_live": (1, 100_000),
    "modal_cpu": (0.125, 64),
    "modal_memory_mb": (128, 512_000),
    "warm_every_s": (0, 604_800),
    "sweep_every_s": (1, 86_400),
    "secrets_sync_every_s": (0, 604_800),
    "vault_timeout_s": (1, 3_600),
}


def _checked(path: Path, key: str, value: Any) -> Any:
    known = {field.name: field.default for field in fields(Settings)}
    if key not in known:
        raise ConfigError(f"{path}: setting '{key}' is not known.", hint=f"Known: {', '.join(known)}.")
    default = known[key]
    if isinstance(default, tuple) or (key == "vault_command" and isinstance(value, list)):
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise ConfigError(f"{path}: {key} must be a list of texts.")
        return tuple(value)
    if isinstance(default, str):
        return _checked_text(path, key, value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} is {value!r}; it can be true or false.")
        return value
    low, high = _RANGES[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    whole = isinstance(default, float) or isinstance(value, int)
    if not number or not whole or not low <= value <= high:
        kind = "a number" if isinstance(default, float) else "a whole number"
        raise ConfigError(f"{path}: {key} is {value!r}; it must be {kind} from {low:g} to {high:g}.")
    return value


_CHOICES = {"local_isolation": ("auto", "require", "off"), "backend": ("local", "modal")}


def _checked_text(path: Path, key: str, value: Any) -> str:
    choices = _CHOICES.get(key)
    if choices and value not in choices:
        raise ConfigError(f"{path}: {key} is {value!r}; it can be {', '.join(map(repr, choices))}.")
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key} is {value!r}; it must be a text.")
    return value
