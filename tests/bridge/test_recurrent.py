"""The sample adapter with mixers of its own: states per request and caches per token, on vLLM's hybrid machinery."""

import pytest

from mrv2.bridge.older import ONE_LAYOUT
from mrv2.errors import UnsupportedError

CONFIGS = {
    "hybrid": {},
    "states-only": {"mixers": ["decay", "average"]},
    "own-only": {"mixers": ["decay", "biased", "average", "biased"]},
    "big-state": {"mixers": ["decay", "attention", "average", "attention"], "decay_key": 31, "decay_value": 33},
}
PREFIX = {"hybrid": {}, "alike": {"mixers": ["decay", "attention", "decay"]}}


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_reused_slots(name, tidal, engine, generate, ragged):
    one = tidal(**CONFIGS[name])
    prompts = ragged((1, 3, 44, 17, 8, 70, 5, 12))
    with engine(one.folder, max_model_len=128, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        for _ in range(2):
            one.check(prompts, generate(llm, prompts))


@pytest.mark.parametrize("name", ["hybrid", "alike"])
def test_prefix_hits(name, tidal, engine, generate, ragged):
    one = tidal(**PREFIX[name])
    prompts = ragged((100, 40, 90))
    if name == "hybrid" and ONE_LAYOUT:
        with (
            pytest.raises(UnsupportedError, match="states of 2 layouts"),
            engine(one.folder, max_model_len=128, enable_prefix_caching=True),
        ):
            pass
        return
    with engine(one.folder, max_model_len=128, enable_prefix_caching=True) as llm:
        one.check(prompts, generate(llm, prompts))
        longer = [[*p, 5, 6, 7] for p in prompts]
        warm = generate(llm, longer)
        one.check(longer, warm)
        assert max(cached for _, _, cached in warm) > 0


@pytest.mark.parametrize("name", ["hybrid", "own-only"])
def test_preemptions(name, tidal, engine, generate, preemptions, ragged):
    one = tidal(**CONFIGS[name])
    prompts = ragged((100, 110, 120, 105, 115, 90), seed=1)
    with engine(one.folder, enable_prefix_caching=False, num_gpu_blocks_override=BLOCKS[name]) as llm:
        one.check(prompts, generate(llm, prompts, 50))
        assert preemptions(llm) > 0


BLOCKS = {"hybrid": 30, "own-only": 20}
"""Enough for a few requests to begin, and not for all of them to end."""
