"""Tiny random Llama, Mistral and Mixtral models against transformers: whole, chunked, token by token, padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mrv2.testing.checkpoints import read_tensors
from mrv2.testing.ragged import RaggedBatch, build_native
from mrv2_adapter_llama.model import LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "head-size": {"head_dim": 20},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "llama3": {"rope_parameters": SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "yarn": {"rope_parameters": SCALED | {"rope_type": "yarn"}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "partial-rotary-beside": {"partial_rotary_factor": 0.5},
    "partial-rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "old-spelling": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
}
MISTRAL: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 6},
    "window-of-one": {"sliding_window": 1},
    "no-window": {"sliding_window": None},
    "head-size": {"sliding_window": 9, "head_dim": 20},
}
MIXTRAL: dict[str, dict[str, Any]] = {
    "plain": {"num_local_experts": 4},
    "window": {"num_local_experts": 4, "sliding_window": 6, "head_dim": 20},
    "one-of-three": {"num_local_experts": 3, "num_experts_per_tok": 1, "hidden_act": "gelu"},
    "tied": {"num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True},
}
CASES = [
    *((LlamaForCausalLM, transformers.LlamaForCausalLM, transformers.LlamaConfig, n, c) for n, c in LLAMA.items()),
    *(
        (MistralForCausalLM, transformers.MistralForCausalLM, transformers.MistralConfig, n, c)
        for n, c in MISTRAL.items()
    ),
    *(
        (MixtralForCausalLM, transformers.MixtralForCausalLM, transformers.MixtralConfig, n, c)
        for n, c in MIXTRAL.items()
    ),
]


def random_reference(reference_class: type, config: Any) -> torch.nn.Module:
    """A reference whose every parameter matters: norms and biases aren't left at ones and zeros."""
    torch.manual_seed(0)
    model = reference_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.6 if parameter.dim() == 1 else 0.0, std=0.15)
    return model


def prompts(lens: tuple[int, ...]) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=g).tolist() for n in lens]


@pytest.mark.parametrize(("ours", "theirs", "config_class", "name", "changes"), CASES, ids=lambda v: str(v)[:40])
def test_logits_equal_transformers(
    ours: type, theirs: type, config_class: type, name: str, changes: dict, tmp_path: Path
) -> None:
    config = config_class(**SIZES | changes)
    reference = random_reference(theirs, config)
    reference.save_pretrained(tmp_path)  # experts lie apart in files, and packed in memory
    batch = RaggedBatch(*build_native(ours, config, read_tensors(tmp_path).items()))
    ragged = prompts((1, 5, 23, 8, 40, 13, 2, 31))
    with torch.inference_mode():
        expected = [reference(torch.tensor([p])).logits[0] for p in ragged]
    for chunks, padding in ((None, 0), ((7,), 2), ((1,), 1), ((7, 1, 3), 0)):
        for got, want in zip(batch.logits(ragged, chunks=chunks, padding=padding), expected, strict=True):
            assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_prompt_beyond_the_trained_length_equals_transformers(rope_type: str) -> None:
    """Alone there, in a batch of other lengths and in chunks here."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        factors = [1.0 + 0.2 * j for j in range(6)]
        rope |= {"original_max_position_embeddings": 16, "short_factor": factors, "long_factor": factors[::-1]}
    config = transformers.LlamaConfig(**SIZES | {"max_position_embeddings": 32, "rope_parameters": rope})
    reference = random_reference(transformers.LlamaForCausalLM, config)
    batch = RaggedBatch(*build_native(LlamaForCausalLM, config, reference.state_dict().items()))
    for chunks in (None, (7,), (5, 1)):
        ragged = prompts((10, 50, 32, 17))
        for got, prompt in zip(batch.logits(ragged, chunks=chunks), ragged, strict=True):
            fresh = random_reference(transformers.LlamaForCausalLM, config)  # theirs remembers the longest so far
            with torch.inference_mode():
                assert (got - fresh(torch.tensor([prompt])).logits[0]).abs().max() < 1e-4
