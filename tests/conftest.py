"""Fixtures that every test file shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from evalpurse.home import Home

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A fresh home folder, made."""
    return Home(tmp_path / "home").create()
