"""What the conformance kit tests this adapter with: `mrv2 check qwen`."""

from __future__ import annotations

from mrv2.testing import Target, tiny_config, transformers_reference


def target() -> Target:
    """A small model of each architecture, against transformers."""
    mixed = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    sparse = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return Target(
        configs={
            "qwen2": tiny_config("Qwen2Config", **mixed),
            "qwen3": tiny_config("Qwen3Config", attention_bias=True, tie_word_embeddings=True),
            "qwen3-moe": tiny_config("Qwen3MoeConfig", **sparse),
        },
        reference=transformers_reference(),
    )
