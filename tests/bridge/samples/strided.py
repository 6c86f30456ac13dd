# /// adapter
# name = "strided-sample"
# sdk_api = "0.1"
# architectures = ["StridedForCausalLM"]
# owner = "tests"
# [capabilities]
# chunked_prefill = "both"
# prefix_caching = "both"
# tensor_parallel = "vllm"
# ///
"""An adapter whose requests say how far apart their tokens are. In vLLM it needs no model of its own: vLLM's class runs,
with positions from the adapter's state.
"""

import torch
from pydantic import BaseModel

import mrv2
from mrv2_adapter_llama.model import LlamaForCausalLM


class Options(BaseModel):
    stride: int = 1


class Stride(mrv2.InputPart):
    """Each token's request's stride."""

    key = "stride"
    options = Options

    def __init__(self, limits):
        self.host = torch.ones(limits.max_rows, dtype=torch.int64)
        self.by_row = self.host.to(limits.device)
        self.buffer = torch.zeros(limits.max_num_tokens, dtype=torch.int64, device=limits.device)

    def add_request(self, row, request):
        self.host[row] = Options.model_validate(request.sampling.extra_args).stride

    def flush(self):
        self.by_row.copy_(self.host)

    def fill(self, view):
        row = view.rows[view.token_to_i.clamp(min=0).long()].clamp(min=0).long()
        return self.buffer[: view.num_tokens].copy_(torch.where(view.token_to_i >= 0, self.by_row[row], 1))

    def fill_dummy(self, num_reqs, num_tokens):
        return self.buffer[:num_tokens].zero_()


class Positions(Stride):
    """What vLLM's class takes: an input of its own name, in place of vLLM's."""

    key = "positions"

    def fill(self, view):
        return super().fill(view).mul_(view.positions)


class State(mrv2.DefaultModelState):
    """In vLLM: the positions, and how many tokens each row has gained."""

    def __init__(self, model, limits, groups):
        super().__init__(model, limits, groups)
        self.parts = (Positions(limits),)
        self.gained = torch.zeros(limits.max_rows, dtype=torch.int64)

    def after_sample(self, view, num_sampled):
        rows = view.rows.clamp(min=0).long()
        self.gained.index_add_(0, rows, torch.where(view.rows >= 0, num_sampled, 0).long())


class StridedForCausalLM(LlamaForCausalLM):
    parts = (Stride,)

    def forward(self, input_ids, positions, ctx, stride):
        return super().forward(input_ids, positions * stride, ctx)


@mrv2.hookimpl
def mrv2_model(ctx):
    return LlamaForCausalLM if ctx.host == "vllm" else StridedForCausalLM


@mrv2.hookimpl
def mrv2_model_state(ctx):
    return State if ctx.host == "vllm" else None


@mrv2.hookimpl
def mrv2_vllm(ctx):
    return mrv2.VllmModel("LlamaForCausalLM")
