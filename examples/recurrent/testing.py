"""What the conformance kit tests this adapter with: `mrv2 check examples/recurrent`."""

from __future__ import annotations

from mrv2.testing import Target
from recurrent.config import TidalConfig
from recurrent.reference import Reference, make_checkpoint


def target() -> Target:
    """All mixers together, and states alone."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return Target(
        configs={
            "hybrid": TidalConfig(**sizes, max_position_embeddings=256),
            "states-only": TidalConfig(**sizes, max_position_embeddings=256, mixers=["decay", "average"]),
        },
        checkpoint=make_checkpoint,
        reference=Reference,
    )
