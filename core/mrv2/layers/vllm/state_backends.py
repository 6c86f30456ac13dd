"""vLLM's names for our states: a type per number of tensors, since prefix caching copies a state type by type.

Imports of vLLM are put off: the plugin registers the names in every process, most of which build no model.
"""

from __future__ import annotations

from typing import Any

STATE_TYPE = "MRV2_STATE_{}"
"""Name of a type, by the number of its tensors."""

MAX_TENSORS = 16
"""Most tensors of one state, padding between them counted."""


def register_state_types() -> None:
    """Add the types to vLLM's enumeration; specs are pickled with them to every process. May be called again."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Types

    if not hasattr(Types, "register"):  # 0.26 copies all states alike, and has one type for others' states
        return
    for n in range(1, MAX_TENSORS + 1):
        if STATE_TYPE.format(n) not in Types.__members__:
            Types.register(STATE_TYPE.format(n), f"{__name__}.StateBackend{n}")


def state_type(tensors: int) -> Any:
    """The member for states of so many tensors."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Types

    return Types[STATE_TYPE.format(tensors)] if hasattr(Types, "register") else Types.CUSTOM  # see above


def __getattr__(name: str) -> Any:
    """`StateBackend1` and so on: the paths under which the types are registered, all one class."""
    if not name.startswith("StateBackend"):
        raise AttributeError(name)
    from mrv2.layers.vllm.caches import StateBackend

    return StateBackend
