"""The second way into vLLM: vLLM's own model class, with the adapter's state."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from mrv2 import SamplingParams
from mrv2.testing.checkpoints import edit_config

SAMPLE = str(Path(__file__).parent / "samples" / "strided.py")
OPTIONS = [{}, {"stride": 2}, {"stride": 3}, {}, {"stride": 2}]
LENS = (3, 30, 12, 41, 21)
N = 12


@pytest.fixture(scope="module")
def strided(family, tmp_path_factory):
    """A checkpoint, and its reference: transformers with positions that are given."""
    one = family("LlamaConfig", num_attention_heads=2, num_key_value_heads=1)
    folder = tmp_path_factory.mktemp("strided") / "model"
    shutil.copytree(one.folder, folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    edit_config(folder, architectures=["StridedForCausalLM"])

    @torch.inference_mode()
    def logprobs(ids, options):
        positions = torch.arange(len(ids))[None] * options.get("stride", 1)
        # Without a mask, transformers takes jumps between positions for the borders of several texts.
        mask = torch.ones_like(positions)
        out = model(torch.tensor([ids]), attention_mask=mask, position_ids=positions, use_cache=False)
        return out.logits[0].log_softmax(-1)

    return type(one)(folder, "StridedForCausalLM", logprobs)


def test_vllms_class_with_our_state(strided, engine, generate, runner_of, preemptions, native, ragged):
    from vllm.exceptions import VLLMValidationError
    from vllm.model_executor.models.llama import LlamaForCausalLM

    prompts = ragged(LENS)
    with engine(
        strided.folder,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=6,
        max_model_len=96,
        enable_prefix_caching=False,
    ) as llm:
        runner = runner_of(llm)
        assert isinstance(runner.model, LlamaForCausalLM)
        assert type(runner.model_state.ours).__name__ == "State"
        with pytest.raises(VLLMValidationError, match="stride: Input should be a valid integer"):
            generate(llm, [[1]], 4, [{"stride": "far"}])
        got = generate(llm, prompts, N, OPTIONS)
        strided.check(prompts, got, OPTIONS)
        assert preemptions(llm) > 0
        assert int(runner.model_state.ours.gained.sum()) == N * len(prompts)
    params = [SamplingParams(temperature=0, max_tokens=N, extra_args=o) for o in OPTIONS]
    with native(strided.folder, adapters=[SAMPLE]) as llm:
        assert [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params)] == [t for t, _, _ in got]


def test_the_strides_matter(strided, ragged):
    """Control: the reference without strides says something else."""
    (prompt,) = ragged((30,))
    plain, apart = strided.logprobs(prompt, {}), strided.logprobs(prompt, {"stride": 2})
    assert (plain - apart).abs().max() > 1e-2
