"""An adapter with an input of its own, per request and per token, and an option that sets it."""

import random

import pytest
import torch
from transformers import LlamaConfig

from mrv2 import LLM, SamplingParams
from mrv2.errors import RequestError
from mrv2.testing.checkpoints import make_checkpoint, read_tensors
from mrv2.testing.naive import NaiveGreedy

ADAPTER = '''
# /// adapter
# name = "scaled"
# sdk_api = "0.1"
# architectures = ["ScaledForCausalLM"]
# owner = "tests"
# capabilities = { chunked_prefill = "native", prefix_caching = "native" }
# ///
import mrv2
import torch
from mrv2_adapter_llama.model import LlamaForCausalLM
from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    model_config = ConfigDict(strict=True)
    scale: float = 0.0


class ReqScale(mrv2.InputPart):
    """Each token's request's scale, times its position."""
    key = "req_scale"
    options = Options

    def __init__(self, limits):
        self.host = torch.zeros(limits.max_rows)
        self.by_row = torch.zeros(limits.max_rows, device=limits.device)
        self.buffer = torch.zeros(limits.max_num_tokens, device=limits.device)

    def add_request(self, row, request):
        self.host[row] = Options.model_validate(request.sampling.extra_args).scale

    def flush(self):
        self.by_row.copy_(self.host)

    def fill(self, view):
        row = view.rows[view.token_to_i.clamp(min=0).long()].clamp(min=0).long()
        value = torch.where(view.token_to_i >= 0, self.by_row[row] * view.positions, 0.0)
        return self.buffer[: view.num_tokens].copy_(value)

    def fill_dummy(self, num_reqs, num_tokens):
        return self.buffer[:num_tokens].zero_()


class ScaledForCausalLM(LlamaForCausalLM):
    parts = (ReqScale,)

    def forward(self, input_ids, positions, ctx, req_scale):
        h = ctx.embed(self.model.embed_tokens, input_ids, lambda x: x * (1 + req_scale[:, None]))
        return ctx.finish(self.model.norm, ctx.run(self.model.layers, h, positions))


@mrv2.hookimpl
def mrv2_model(ctx):
    return ScaledForCausalLM
'''


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """(folder, adapter file, oracle of a scale)."""
    import transformers

    folder = tmp_path_factory.mktemp("scaled") / "model"
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    make_checkpoint(folder, config, seed=2)
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    table = read_tensors(folder)["model.embed_tokens.weight"]
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "ScaledForCausalLM"))
    file = folder.parent / "scaled.py"
    file.write_text(ADAPTER)

    def oracle(scale):
        def logits_of(ids):
            x = table[list(ids)] * (1 + scale * torch.arange(len(ids)))[:, None]
            with torch.inference_mode():
                return reference(inputs_embeds=x[None], use_cache=False).logits[0, -1]

        return NaiveGreedy(logits_of)

    return folder, file, oracle


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_chunk": 7},
        {"num_blocks": 20, "block_size": 4, "depth": 3},
        {"runner": "sync"},
        {"debug": True, "max_chunk": 7, "depth": 2},
    ],
    ids=["whole", "chunked", "preempted", "sync", "debug"],
)
def test_mixed_values_in_one_batch_equal_the_oracle(scaled, settings):
    folder, file, oracle = scaled
    rng = random.Random(0)
    scales = [0.0, 0.5, -0.3, 0.5, 2.0, 0.0]
    prompts = [[rng.randrange(61) for _ in range(rng.randint(3, 30))] for _ in scales]
    prompts[3] = prompts[1]  # equal options may share a prefix …
    prompts[5] = prompts[4]  # … others may not
    params = [SamplingParams(temperature=0, max_tokens=16, extra_args={"scale": s} if s else {}) for s in scales]
    with LLM(str(folder), adapters=[str(file)], max_num_seqs=6, **settings) as llm:
        for _ in range(2):
            out = llm.generate(prompts, params)
            got = [list(r.outputs[0].token_ids) for r in out]
            assert got == [oracle(s)(p, 16) for s, p in zip(scales, prompts, strict=True)]
        assert (llm.stats.preemptions > 0) == ("num_blocks" in settings)


def test_options_are_validated_by_the_parts_model(scaled):
    folder, file, _ = scaled
    with LLM(str(folder), adapters=[str(file)]) as llm:
        for options, what in (({"scale": "loud"}, "scale: Input should be a valid number"), ({"sale": 1.0}, "'sale'")):
            with pytest.raises(RequestError, match=what):
                llm.generate([[1, 2]], SamplingParams(extra_args=options))
