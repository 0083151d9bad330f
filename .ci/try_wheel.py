"""Builds the wheel, installs it alone into a fresh environment, and tries what a user would try first.

The sources are out of reach: what works here works from the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, **env: str) -> str:
    """Runs a command away from the sources and returns what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tempfile.gettempdir(),
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        sys.exit(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", place / "dist", ROOT)
        wheel = next((place / "dist").glob("*.whl"))
        venv.create(place / "env", with_pip=True)
        python = place / "env" / "bin" / "python"
        run(python, *pip[1:], "install", "--quiet", "--require-hashes", "-r", ROOT / "requirements.lock")
        run(python, *pip[1:], "install", "--quiet", "--no-deps", wheel)
        evalpurse = place / "env" / "bin" / "evalpurse"
        home = {"EVALPURSE_HOME": str(place / "home")}
        print(run(evalpurse, "version", **home).strip())
        run(evalpurse, "daemon", "start", **home)
        try:
            status = json.loads(run(evalpurse, "budget", "status", "--json", **home))
            if status["workspace"]["limit_usd"] != 0:
                sys.exit(f"a fresh home has a purse: {status}")
            run(evalpurse, "skill", "install", "--dir", place / "skills", **home)
            if not (place / "skills" / "evalpurse" / "SKILL.md").exists():
                sys.exit("the wheel does not bring its skill")
        finally:
            run(evalpurse, "daemon", "stop", **home)
        print(f"{wheel.name} works on its own")


if __name__ == "__main__":
    main()
