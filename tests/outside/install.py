"""`make outside`: installs the clients of this folder from its lock file, beside their scripts.

The lock file holds a digest for each package and no address: npm takes them from where it is set up to.
"""

from __future__ import annotations

import subprocess
import sys

from tests.outside.node import FOLDER, node, npm

if __name__ == "__main__":
    # What is optional are native builds for the inspector's web page, which the tests do not open.
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    done = subprocess.run(
        [node(), npm(), "ci", "--ignore-scripts", "--omit=optional", *quiet], cwd=FOLDER, check=False
    )
    sys.exit(done.returncode)
