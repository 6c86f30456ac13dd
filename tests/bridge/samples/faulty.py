# /// adapter
# name = "faulty-sample"
# sdk_api = "0.1"
# architectures = ["MisnamedForCausalLM", "RaisingForCausalLM", "ModestForCausalLM", "BorrowedForCausalLM", "GreedyStateForCausalLM", "FlaggedForCausalLM", "WindowedForCausalLM"]
# owner = "tests"
# [capabilities]
# chunked_prefill = "both"
# recurrent = "both"
# ///
"""One defect per architecture, and one that declares no prefix caching."""

import torch

import mrv2
from mrv2_adapter_llama.model import LlamaForCausalLM, MistralForCausalLM


class MisnamedForCausalLM(LlamaForCausalLM):
    """Its head is stored under another name than it was given."""

    def __init__(self, L, config):
        super().__init__(L, config)
        self.head = L.lm_head("head_of_another_name", config.vocab_size, config.hidden_size)


class Offset(mrv2.InputPart):
    key = "offset"

    def __init__(self, limits):
        self.buffer = torch.zeros(limits.max_num_tokens, device=limits.device)

    def fill(self, view):
        return self.buffer[: view.num_tokens]

    def fill_dummy(self, num_reqs, num_tokens):
        return self.buffer[:num_tokens]


class BorrowedForCausalLM(LlamaForCausalLM):
    """Runs vLLM's class, whose forward can't take this part."""

    parts = (Offset,)

    def forward(self, input_ids, positions, ctx, offset):
        return super().forward(input_ids, positions, ctx)


class FlaggedForCausalLM(LlamaForCausalLM):
    """Says that it keeps states, and keeps none."""

    recurrent = True


class OwnAttention(mrv2.DefaultModelState):
    def prepare_attn(self, view):
        return {}


@mrv2.hookimpl
def mrv2_model(ctx):
    if ctx.architecture == "RaisingForCausalLM":
        raise RuntimeError("the library it needs is too old")
    classes = {
        "MisnamedForCausalLM": MisnamedForCausalLM,
        "BorrowedForCausalLM": BorrowedForCausalLM,
        "FlaggedForCausalLM": FlaggedForCausalLM,
        "WindowedForCausalLM": MistralForCausalLM,
    }
    return classes.get(ctx.architecture, LlamaForCausalLM)


@mrv2.hookimpl
def mrv2_vllm(ctx):
    return mrv2.VllmModel("LlamaForCausalLM") if ctx.architecture == "BorrowedForCausalLM" else None


@mrv2.hookimpl
def mrv2_model_state(ctx):
    return OwnAttention if ctx.architecture == "GreedyStateForCausalLM" else None
