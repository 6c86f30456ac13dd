"""Drafts verified by adapters' models: the tokens are those without drafts, whatever part of a draft is kept."""

import pytest

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def check(one, llm, generate, drafts, prompts, n):
    one.check(prompts, generate(llm, prompts, n))
    proposed, accepted, per_position = drafts(llm)
    assert 0 < accepted < proposed  # some kept, some not
    assert per_position[0] > per_position[2] > 0  # cut within a draft, and kept as a whole


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3", "qwen3-moe"])
def test_n_grams_for_attention(name, oracle, engine, generate, drafts, ragged):
    one = oracle(name)
    with engine(one.folder, **one.settings, speculative_config=NGRAM, max_num_batched_tokens=24) as llm:
        check(one, llm, generate, drafts, ragged((1, 3, 70, 17, 33, 12)), 24)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_n_grams_for_states(prefix_caching, tidal, engine, generate, drafts, ragged):
    """States are rolled back to the last accepted token, and move from block to block on the way."""
    one = tidal()
    prompts = ragged((1, 44, 17, 8, 30))
    with engine(
        one.folder, speculative_config=NGRAM, max_num_batched_tokens=24, enable_prefix_caching=prefix_caching
    ) as llm:
        check(one, llm, generate, drafts, prompts, 60)
