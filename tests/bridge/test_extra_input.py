"""An adapter's extra input per token, from an option per request: mixed values in one batch, in both hosts."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from mrv2 import SamplingParams
from mrv2.testing.checkpoints import edit_config, make_checkpoint, read_tensors
from mrv2.testing.naive import NaiveGreedy

SCALES = [0.0, 0.5, -0.3, 0.5, 2.0, 0.0]
OPTIONS = [{"scale": s} if s else {} for s in SCALES]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """(folder, oracle of a scale)."""
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    folder = make_checkpoint(tmp_path_factory.mktemp("scaled") / "model", config, seed=2)
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    table = read_tensors(folder)["model.embed_tokens.weight"]
    edit_config(folder, architectures=["ScaledForCausalLM"])

    def oracle(scale):
        def logits_of(ids):
            x = table[list(ids)] * (1 + scale * torch.arange(len(ids)))[:, None]
            with torch.inference_mode():
                return reference(inputs_embeds=x[None], use_cache=False).logits[0, -1]

        return NaiveGreedy(logits_of)

    return folder, oracle


def prompts_of(lens):
    rng = random.Random(0)
    prompts = [[rng.randrange(61) for _ in range(n)] for n in lens]
    prompts[5] = [7, *prompts[4][1:]]
    return prompts


def parts_of(runner):
    return runner.model_state.ours.parts


def test_mixed_values_in_one_batch(scaled, engine, generate, runner_of, native):
    folder, oracle = scaled
    prompts = prompts_of((3, 30, 12, 50, 21, 21))
    want = [oracle(s)(p, 16) for s, p in zip(SCALES, prompts, strict=True)]
    with engine(folder, max_num_batched_tokens=24, enable_prefix_caching=False) as llm:
        for _ in range(2):
            assert [tokens for tokens, _, _ in generate(llm, prompts, 16, OPTIONS)] == want
        assert len(parts_of(runner_of(llm))[0].added) == 12
    params = [SamplingParams(temperature=0, max_tokens=16, extra_args=o) for o in OPTIONS]
    sample = str(Path(__file__).parent / "samples" / "scaled.py")
    with native(folder, adapters=[sample]) as llm:
        assert [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params)] == want


def test_after_preemptions_too(scaled, engine, generate, preemptions, runner_of):
    folder, oracle = scaled
    prompts = prompts_of((60, 61, 90, 62, 40, 40))
    with engine(folder, num_gpu_blocks_override=14, enable_prefix_caching=False) as llm:
        got = generate(llm, prompts, 40, OPTIONS)
        assert preemptions(llm) > 0
        assert len(parts_of(runner_of(llm))[0].added) > len(prompts)
    assert [tokens for tokens, _, _ in got] == [oracle(s)(p, 40) for s, p in zip(SCALES, prompts, strict=True)]


def test_wrong_options_are_refused_and_others_go_on(scaled, engine, generate):
    from vllm.exceptions import VLLMValidationError

    folder, oracle = scaled
    prompt = [1, 2, 3]
    with engine(folder, enable_prefix_caching=False) as llm:
        for options, what in (({"scale": "loud"}, "scale: Input should be a valid number"), ({"sale": 1.0}, "'sale'")):
            with pytest.raises(VLLMValidationError, match=what):
                generate(llm, [prompt], 4, [options])
        assert generate(llm, [prompt], 4, [{"scale": 0.5}])[0][0] == oracle(0.5)(prompt, 4)


def test_a_compiled_forward_takes_the_input(scaled, engine, generate):
    folder, oracle = scaled
    prompts = prompts_of((3, 30, 12, 50, 21, 21))
    with engine(folder, enforce_eager=False, enable_prefix_caching=False) as llm:
        got = generate(llm, prompts, 16, OPTIONS)
    assert [tokens for tokens, _, _ in got] == [oracle(s)(p, 16) for s, p in zip(SCALES, prompts, strict=True)]
