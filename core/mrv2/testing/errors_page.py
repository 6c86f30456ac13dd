"""`docs/errors.md`, made from the error classes.

python -m mrv2.testing.errors_page docs/errors.md
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from mrv2.errors import all_error_classes

_GROUPS = {
    "1": "Adapters and registry",
    "2": "Checkpoints, configs, tokenizers",
    "3": "Layers and kernels",
    "4": "Requests and the runner",
    "5": "Command line and files",
    "6": "Inside vLLM",
    "7": "Conformance kit",
}

_HEAD = """# Errors

Every error a user can meet has a code that never changes its meaning. `mrv2 explain CODE` prints the same text,
and that of codes which adapters bring themselves ([rule O3](adapter-contract.md)): those don't begin with `MRV2-`.
Exit codes: 1, the thing checked is wrong; 2, wrong use or input.

<!-- Made by `python -m mrv2.testing.errors_page docs/errors.md`; a test holds the two equal. -->
"""


def render() -> str:
    """The page."""
    parts = [_HEAD]
    group = ""
    for cls in all_error_classes():
        number = cls.code.removeprefix("MRV2-")
        if number[0] != group:
            group = number[0]
            parts.append(f"## {_GROUPS[group]}\n")
        parts.append(f"### {cls.code}\n\n**{cls.title}**, exit code {cls.exit_code}.\n\n{inspect.getdoc(cls)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
