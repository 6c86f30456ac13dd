"""An adapter's extra input per token, from an option per request: mixed values in one batch, in both hosts."""

from pathlib import Path

import pytest

from mrv2 import SamplingParams

SCALES = [0.0, 0.5, -0.3, 0.5, 2.0, 0.0]
OPTIONS = [{"scale": s} if s else {} for s in SCALES]


@pytest.fixture
def prompts_of(ragged):
    """Prompts of these lengths, of which the last differ in their first token alone."""

    def make(lens):
        prompts = ragged(lens)
        prompts[5] = [7, *prompts[4][1:]]
        return prompts

    return make


def parts_of(runner):
    return runner.model_state.ours.parts


def test_mixed_values_in_one_batch(scaled, engine, generate, runner_of, native, prompts_of):
    prompts = prompts_of((3, 30, 12, 50, 21, 21))
    with engine(scaled.folder, max_num_batched_tokens=24, enable_prefix_caching=False) as llm:
        for _ in range(2):
            got = generate(llm, prompts, 16, OPTIONS)
            scaled.check(prompts, got, OPTIONS)
        assert len(parts_of(runner_of(llm))[0].added) == 12
    params = [SamplingParams(temperature=0, max_tokens=16, extra_args=o) for o in OPTIONS]
    sample = str(Path(__file__).parent / "samples" / "scaled.py")
    with native(scaled.folder, adapters=[sample]) as llm:
        assert [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params)] == [t for t, _, _ in got]


def test_after_preemptions_too(scaled, engine, generate, preemptions, runner_of, prompts_of):
    prompts = prompts_of((60, 61, 90, 62, 40, 40))
    with engine(scaled.folder, num_gpu_blocks_override=14, enable_prefix_caching=False) as llm:
        got = generate(llm, prompts, 40, OPTIONS)
        assert preemptions(llm) > 0
        assert len(parts_of(runner_of(llm))[0].added) > len(prompts)
    scaled.check(prompts, got, OPTIONS)


def test_wrong_options_are_refused_and_others_go_on(scaled, engine, generate):
    from vllm.exceptions import VLLMValidationError

    prompt = [1, 2, 3]
    with engine(scaled.folder, enable_prefix_caching=False) as llm:
        for options, what in (({"scale": "loud"}, "scale: Input should be a valid number"), ({"sale": 1.0}, "'sale'")):
            with pytest.raises(VLLMValidationError, match=what):
                generate(llm, [prompt], 4, [options])
        option = {"scale": 0.5}
        scaled.check([prompt], generate(llm, [prompt], 4, [option]), [option])


def test_a_compiled_forward_takes_the_input(scaled, engine, generate, prompts_of):
    prompts = prompts_of((3, 30, 12, 50, 21, 21))
    with engine(scaled.folder, enforce_eager=False, enable_prefix_caching=False) as llm:
        got = generate(llm, prompts, 16, OPTIONS)
    scaled.check(prompts, got, OPTIONS)
