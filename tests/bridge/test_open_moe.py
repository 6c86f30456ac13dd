"""The router and the experts on their own, with a choice that is the adapter's: `L.router` and `L.experts`."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from mrv2 import SamplingParams
from mrv2.errors import LayerArgumentError
from mrv2.testing.checkpoints import edit_config

SAMPLE = str(Path(__file__).parent / "samples" / "opened.py")
EXPERTS, SURE = 5, 0.6
LENS = (1, 3, 40, 17, 33, 21)


@pytest.fixture(scope="module")
def opened(family, tmp_path_factory):
    """A Mixtral, and transformers' with routers that leave an expert out where the first one is sure."""
    one = family("MixtralConfig", num_local_experts=EXPERTS, num_experts_per_tok=2)
    folder = tmp_path_factory.mktemp("opened") / "model"
    shutil.copytree(one.folder, folder)
    model = transformers.MixtralForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    edit_config(folder, architectures=["OpenedForCausalLM"], sure_above=SURE)
    left_out = []

    def leave_out(router, args, routed):
        logits, weights, experts = routed
        alone = (weights[:, :1] > SURE) & (torch.arange(2) > 0)
        left_out.append(float(alone.float().mean()))
        return logits, weights, torch.where(alone, EXPERTS, experts)  # an expert that isn't there

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(leave_out)

    @torch.inference_mode()
    def logprobs(ids, options):
        return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

    return type(one)(folder, "OpenedForCausalLM", logprobs), left_out


@pytest.mark.parametrize("eager", [True, False])
def test_a_choice_of_the_adapters(eager, opened, engine, generate, native, ragged):
    one, left_out = opened
    prompts = ragged(LENS)
    with engine(one.folder, enforce_eager=eager, max_num_batched_tokens=32) as llm:
        got = generate(llm, prompts)
    one.check(prompts, got)
    assert 0.05 < sum(left_out) / len(left_out) < 0.45  # some, of the half that could be
    if eager:
        with native(one.folder, adapters=[SAMPLE]) as llm:
            out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            assert [list(r.outputs[0].token_ids) for r in out] == [tokens for tokens, _, _ in got]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks(opened, processes, engine, generate, ragged):
    processes("spawn")
    one, _ = opened
    prompts = ragged(LENS)
    with engine(one.folder, tensor_parallel_size=2) as llm:
        one.check(prompts, generate(llm, prompts))


def test_more_experts_than_there_are(opened, engine, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(opened[0].folder, folder)
    edit_config(folder, num_experts_per_tok=EXPERTS + 1)
    with pytest.raises(LayerArgumentError, match="sends each token to 6 of 5 experts"), engine(folder):
        pass
