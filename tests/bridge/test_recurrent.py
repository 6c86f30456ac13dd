"""The sample adapter with mixers of its own: states per request and caches per token, on vLLM's hybrid machinery."""

import random
from functools import lru_cache

import pytest

from recurrent import reference
from recurrent.config import TidalConfig

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
CONFIGS = {
    "hybrid": {},
    "states-only": {"mixers": ["decay", "average"]},
    "own-only": {"mixers": ["decay", "biased", "average", "biased"]},
    "big-state": {"mixers": ["decay", "attention", "average", "attention"], "decay_key": 31, "decay_value": 33},
}


class Oracle:
    def __init__(self, folder):
        self.folder = folder
        model = reference.Reference(folder)
        self.logprobs = lru_cache(maxsize=None)(lambda ids: model(ids).log_softmax(-1))

    def check(self, prompts, results):
        for prompt, (tokens, logprobs, _) in zip(prompts, results, strict=True):
            want = self.logprobs((*prompt, *tokens))[len(prompt) - 1 : -1]
            assert tokens == want.argmax(-1).tolist()
            # A decaying state hides a wrong start from the tokens, not from the log-probabilities.
            assert max(abs(float(w.max()) - got) for w, got in zip(want, logprobs, strict=True)) < 1e-4


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    def make(name):
        folder = tmp_path_factory.mktemp(name) / "model"
        reference.make_checkpoint(folder, TidalConfig(**SIZES | CONFIGS[name], max_position_embeddings=256), seed=3)
        return Oracle(folder)

    return make


def ragged(lens, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(n)] for n in lens]


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_reused_slots(name, oracle, engine, generate):
    one = oracle(name)
    prompts = ragged((1, 3, 44, 17, 8, 70, 5, 12))
    with engine(one.folder, max_model_len=128, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        for _ in range(2):
            one.check(prompts, generate(llm, prompts))


def test_prefix_hits(oracle, engine, generate):
    one = oracle("hybrid")
    prompts = ragged((100, 40, 90))
    with engine(one.folder, max_model_len=128, enable_prefix_caching=True) as llm:
        one.check(prompts, generate(llm, prompts))
        longer = [[*p, 5, 6, 7] for p in prompts]
        warm = generate(llm, longer)
        one.check(longer, warm)
        assert max(cached for _, _, cached in warm) > 0


@pytest.mark.parametrize("name", ["hybrid", "own-only"])
def test_preemptions(name, oracle, engine, generate, preemptions):
    one = oracle(name)
    prompts = ragged((100, 110, 120, 105, 115, 90), seed=1)
    with engine(one.folder, enable_prefix_caching=False, num_gpu_blocks_override=BLOCKS[name]) as llm:
        one.check(prompts, generate(llm, prompts, 50))
        assert preemptions(llm) > 0


BLOCKS = {"hybrid": 30, "own-only": 20}
"""Enough for a few requests to begin, and not for all of them to end."""
