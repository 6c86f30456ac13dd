"""An adapter's logits processor natively, beside requests without a wish. In vLLM: tests/bridge/test_processors.py."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mrv2 import LLM, SamplingParams
from mrv2.errors import RequestError
from mrv2.testing.checkpoints import edit_config, make_checkpoint

SAMPLE = str(Path(__file__).parents[1] / "bridge" / "samples" / "steered.py")
OPTIONS = [{}, {"fresh": True}, {"favour": 7}, {"fresh": True, "favour": 9}, {"fresh": True}]
N = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    folder = make_checkpoint(tmp_path_factory.mktemp("steered") / "model", config, seed=3)
    edit_config(folder, architectures=["SteeredForCausalLM"])
    return folder


@torch.inference_mode()
def expected(model, prompt, options):
    ids, logprobs = list(prompt), []
    for _ in range(N):
        plain = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        scores = plain.clone()
        if options.get("fresh"):
            scores[ids] = float("-inf")
        if "favour" in options and len(ids) % 2 == 0:
            scores[options["favour"]] += 100
        ids.append(int(scores.argmax()))
        logprobs.append(float(plain[ids[-1]]))
    return ids[len(prompt) :], pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"runner": "sync"}, {"max_num_seqs": 2, "max_chunk": 8}, {"debug": True}])
def test_tokens_are_steered_and_log_probabilities_are_not(settings, folder):
    rng = random.Random(1)
    prompts = [[rng.randrange(61) for _ in range(n)] for n in (3, 20, 12, 33, 7)]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(str(folder), adapters=[SAMPLE], **settings) as llm:
        for logprobs in (None, 0):
            params = [SamplingParams(temperature=0, max_tokens=N, logprobs=logprobs, extra_args=o) for o in OPTIONS]
            for prompt, options, result in zip(prompts, OPTIONS, llm.generate(prompts, params), strict=True):
                want, plain = expected(model, prompt, options)
                assert list(result.outputs[0].token_ids) == want
                if logprobs is not None:
                    assert [p.logprob for p in result.outputs[0].logprobs] == plain


def test_wrong_options_are_refused(folder):
    with LLM(str(folder), adapters=[SAMPLE]) as llm:
        for options, what in (({"favour": "much"}, "favour: .*read by Steer"), ({"flavour": 1}, "'flavour'")):
            with pytest.raises(RequestError, match=f"(?s){what}"):
                llm.generate([[1]], SamplingParams(extra_args=options))
