"""The same adapter and checkpoint in vLLM, natively, and in transformers: equal tokens, close log-probabilities."""

import pytest

from mrv2 import SamplingParams

LENS = (1, 3, 100, 17, 33, 70, 5, 12)


@pytest.mark.parametrize(
    "name", ["llama", "llama-rope", "mistral-window", "qwen2", "qwen2-mixed", "qwen3", "qwen3-moe", "mixtral"]
)
def test_a_ragged_batch_and_prefix_hits(name, oracle, engine, generate, runner_of, native, ragged):
    one, prompts = oracle(name), ragged(LENS)
    with engine(one.folder, **one.settings) as llm:
        model = runner_of(llm).model
        assert type(model).__name__ == one.architecture
        assert any(c.__module__.startswith("mrv2_adapter_") for c in type(model).__mro__)
        cold = generate(llm, prompts)
        one.check(prompts, cold)
        assert [cached for _, _, cached in cold] == [0] * len(prompts)
        warm = generate(llm, prompts)
        one.check(prompts, warm)
        assert [cached for _, _, cached in warm] == [(len(p) - 1) // 32 * 32 for p in prompts]
    with native(one.folder) as llm:
        out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        assert [list(r.outputs[0].token_ids) for r in out] == [tokens for tokens, _, _ in cold]


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "qwen3-moe", "mixtral"])
def test_chunks_and_preemptions(name, oracle, engine, generate, preemptions, ragged):
    one, prompts = oracle(name), ragged((60, 61, 90, 62, 40, 95), seed=1)
    with engine(
        one.folder,
        **one.settings,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=15,
        enable_prefix_caching=False,
    ) as llm:
        one.check(prompts, generate(llm, prompts, 40))
        assert preemptions(llm) > 0


def test_a_compiled_model(oracle, engine, generate, ragged):
    one, prompts = oracle("llama"), ragged(LENS)
    with engine(one.folder, **one.settings, enforce_eager=False) as llm:
        one.check(prompts, generate(llm, prompts))
