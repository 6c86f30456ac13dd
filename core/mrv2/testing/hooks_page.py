"""`docs/hooks.md`, made from the hook specifications.

python -m mrv2.testing.hooks_page docs/hooks.md
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from mrv2 import hookspecs
from mrv2.api import PROJECT
from mrv2.testing.surface import signature_text

_HEAD = """# Hooks

Hooks choose and build; methods run. A hook is a function of the adapter's package, marked `@mrv2.hookimpl` and called
`mrv2_…`, which a host calls when a model is loaded; a step calls none. Each takes `ctx`, an `mrv2.AdapterContext`, or
no argument at all. All but `mrv2_model` may be left out: the default then holds, as with a hook that returns None.

```python
import mrv2


@mrv2.hookimpl
def mrv2_model(ctx):
    from mrv2_adapter_acme.model import AcmeForCausalLM

    return AcmeForCausalLM
```

Import what is heavy inside of hooks, as here: `mrv2 doctor` and vLLM import the package where no model is loaded.

Only the adapter that serves the architecture is asked, whatever others are installed: each adapter has a plugin manager
of its own, so no order of registration matters. `mrv2 show NAME` prints the file and line behind each hook.

- [MRV2-110](errors.md#mrv2-110): a function `mrv2_…` is no hook, isn't marked, or takes something else than `ctx`; or
  there is no `mrv2_model`.
- [MRV2-111](errors.md#mrv2-111), with adapter, hook, file and line: a hook raises, or returns what is refused below.
  One of mrv2's own errors (`Mrv2Error`) that a hook raises passes unchanged.
- [MRV2-109](errors.md#mrv2-109): the import, or under `mrv2 doctor` and `mrv2 show` a hook, doesn't return in
  `MRV2_IMPORT_TIMEOUT` seconds.

What a hook prints goes to standard error.

<!-- Made by `python -m mrv2.testing.hooks_page docs/hooks.md`; a test holds the two equal. -->
"""

_LABELS = ("Called", "Refused")


def render() -> str:
    """The page."""
    return "\n".join([_HEAD, *(_section(name) for name in hookspecs.HOOKS)])


def _section(name: str) -> str:
    function = getattr(hookspecs, name)
    options: dict[str, Any] = getattr(function, f"{PROJECT}_spec")
    assert options["firstresult"], "the head says that one adapter answers"
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    labels = {text.partition(":")[0]: text.partition(":")[2].strip() for text in paragraphs}
    missing = [label for label in _LABELS if label not in labels]
    assert not missing, f"{name} doesn't say: {', '.join(missing)}"
    said = [text for text in paragraphs if text.partition(":")[0] not in _LABELS]
    listed = "\n".join(f"- **{label}** {_indented(labels[label])}" for label in _LABELS)
    return (
        f"## {name}\n\n```python\ndef {name}{signature_text(function)}\n```\n\n" + "\n\n".join([*said, listed]) + "\n"
    )


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
