"""What the conformance kit tests this adapter with: `mrv2 check llama`."""

from __future__ import annotations

from mrv2.testing import Target, tiny_config, transformers_reference


def target() -> Target:
    """A small model of each architecture, against transformers."""
    return Target(
        configs={
            "llama": tiny_config("LlamaConfig", tie_word_embeddings=True),
            "mistral": tiny_config("MistralConfig", sliding_window=9),
            "mixtral": tiny_config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        },
        reference=transformers_reference(),
    )
