"""What `mrv2 check` needs: a checkpoint that training wrote, and the answer that training recorded for it.

There is no second model here: the training code runs elsewhere, and what it computes is known of some sequences only.
Of others, invariances carry the proof.
"""

from __future__ import annotations

from pathlib import Path

from mrv2.testing import Target, recorded_reference

CHECKPOINT = Path(__file__).parent / "tiny"
RECORDED = Path(__file__).parent / "reference" / "recorded.safetensors"


def target() -> Target:
    """One small checkpoint, which uses all that `adapter.toml` declares."""
    return Target(checkpoint=CHECKPOINT, reference=recorded_reference(RECORDED))
