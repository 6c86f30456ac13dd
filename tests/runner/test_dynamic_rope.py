"""Rotary types that depend on a request's length: what transformers' cached generation gives, however we run it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mrv2 import SamplingParams
from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.testing.checkpoints import make_checkpoint

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "dynamic": LlamaConfig(
        **BASE,
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e2, "factor": 4.0},
    ),
    "longrope": LlamaConfig(
        **BASE,
        max_position_embeddings=96,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e2,
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 5.0, 9.0],
        },
    ),
}
# Shorter than the switch, ending beyond it, and longer from the start; two share a long prefix.
PROMPTS = [[5, 6, 7], list(range(20)), list(range(40)), list(range(45)), [9] * 24, [9] * 25]


def run(parts, prompts, prefix="r"):
    params = SamplingParams(temperature=0, max_tokens=16)
    requests = [parts.intake.request(f"{prefix}{i}", p, params) for i, p in enumerate(prompts)]
    parts.engine.add(requests)
    while parts.engine.has_work:
        parts.engine.step()
    return [r.tokens_np[len(r.prompt_np) :].tolist() for r in requests]


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_equal_transformers_alone_batched_chunked_hit_and_preempted(kind, tmp_path):
    folder = make_checkpoint(tmp_path / "model", CONFIGS[kind], seed=1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = []
    for prompt in PROMPTS:
        reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)  # it keeps its last state
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
        want.append(out[0, len(prompt) :].tolist())
    loaded = load(str(folder), EngineConfig(device="cpu"))
    assert loaded.config.max_model_len == 96
    base = {"device": "cpu", "block_size": 4, "max_num_seqs": 8, "max_num_tokens": 256}
    for settings in (
        {},
        {"max_chunk": 7},
        {"num_blocks": 22, "depth": 3},
        {"runner": "sync"},
        {"prefix_caching": False},
    ):
        parts = assemble(loaded, EngineConfig(**(base | settings)))
        assert run(parts, PROMPTS) == want, settings
        assert run(parts, PROMPTS, prefix="again") == want, settings
        assert (parts.engine.scheduler.stats.preemptions > 0) == ("num_blocks" in settings)
