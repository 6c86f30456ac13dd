"""The command line. Light until a command runs: `mrv2 --help` imports neither torch nor pydantic."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the `mrv2` script and of `python -m mrv2`."""
    from mrv2.cli.app import run

    sys.exit(run(sys.argv[1:]))
