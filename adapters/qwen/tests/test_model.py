"""Tiny random Qwen2 and Qwen3 models against transformers: whole, chunked, token by token, padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mrv2.testing.checkpoints import read_tensors
from mrv2.testing.ragged import RaggedBatch, build_native
from mrv2_adapter_qwen.model import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 6}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
QWEN2: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "window-unused": {"sliding_window": 6, "max_window_layers": 0},
    "upper-layers-slide": SLIDING | {"max_window_layers": 1},
    "mixed": SLIDING | {"layer_types": MIXED},
    "yarn": {"rope_parameters": YARN},
    "partial-rotary": {"partial_rotary_factor": 0.5},
}
QWEN3: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 12},
    "head-size": {"head_dim": 32},
    "bias": {"head_dim": 12, "attention_bias": True},
    "tied": {"head_dim": 16, "tie_word_embeddings": True},
    "mixed": SLIDING | {"head_dim": 16, "layer_types": MIXED},
    "multi-query": {"head_dim": 16, "num_key_value_heads": 1},
    "yarn": {"head_dim": 16, "rope_parameters": YARN},
    "partial-rotary": {"head_dim": 16, "partial_rotary_factor": 0.5},
}
SPARSE = {"head_dim": 12, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
MOE: dict[str, dict[str, Any]] = {
    "plain": SPARSE | {"norm_topk_prob": True},
    "as-softmax-gives": SPARSE | {"norm_topk_prob": False},
    "dense-layers": SPARSE | {"mlp_only_layers": [0, 2]},
    "every-second": SPARSE | {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "dense": SPARSE | {"num_experts": 0},
    "one-expert": SPARSE | {"num_experts_per_tok": 1, "norm_topk_prob": True},
    "all-experts": SPARSE | {"num_experts_per_tok": 6},
    "window": SLIDING | SPARSE,
    "no-head-size": {name: value for name, value in SPARSE.items() if name != "head_dim"} | {"attention_bias": True},
    "tied-yarn": SPARSE | {"tie_word_embeddings": True, "rope_parameters": YARN},
}
CASES = [
    *((Qwen2ForCausalLM, transformers.Qwen2ForCausalLM, transformers.Qwen2Config, n, c) for n, c in QWEN2.items()),
    *((Qwen3ForCausalLM, transformers.Qwen3ForCausalLM, transformers.Qwen3Config, n, c) for n, c in QWEN3.items()),
    *(
        (Qwen3MoeForCausalLM, transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, n, c)
        for n, c in MOE.items()
    ),
]


def random_reference(reference_class: type, config: Any) -> torch.nn.Module:
    """A reference whose every parameter matters: norms and biases aren't left at ones and zeros."""
    torch.manual_seed(0)
    model = reference_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.6 if parameter.dim() == 1 else 0.0, std=0.15)
    return model


@pytest.mark.parametrize(("ours", "theirs", "config_class", "name", "changes"), CASES, ids=lambda v: str(v)[:40])
def test_logits_equal_transformers(
    ours: type, theirs: type, config_class: type, name: str, changes: dict, tmp_path: Path
) -> None:
    config = config_class(**SIZES | changes)
    reference = random_reference(theirs, config)
    reference.save_pretrained(tmp_path)  # experts lie apart in files, and packed in memory
    batch = RaggedBatch(*build_native(ours, config, read_tensors(tmp_path).items()))
    g = torch.Generator().manual_seed(1)
    ragged = [torch.randint(0, 97, (n,), generator=g).tolist() for n in (1, 5, 23, 8, 40, 13, 2, 31)]
    with torch.inference_mode():
        expected = [reference(torch.tensor([p])).logits[0] for p in ragged]
    for chunks, padding in ((None, 0), ((7,), 2), ((1,), 1), ((7, 1, 3), 0)):
        for got, want in zip(batch.logits(ragged, chunks=chunks, padding=padding), expected, strict=True):
            assert (got - want).abs().max() < 1e-4


def test_windows_are_declared_per_layer() -> None:
    config = transformers.Qwen3Config(**SIZES | SLIDING | {"head_dim": 16, "layer_types": MIXED})
    reference = random_reference(transformers.Qwen3ForCausalLM, config)
    _, layers = build_native(Qwen3ForCausalLM, config, reference.state_dict().items())
    assert [cache.window for cache in layers.caches.values()] == [6, None, 6, None]
