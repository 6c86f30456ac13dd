# /// adapter
# name = "scaled-sample"
# sdk_api = "0.1"
# architectures = ["ScaledForCausalLM"]
# owner = "tests"
# [capabilities]
# chunked_prefill = "both"
# prefix_caching = "both"
# tensor_parallel = "vllm"
# pipeline_parallel = "vllm"
# speculation = "vllm"
# ///
"""An adapter with an extra input per token, from an option per request."""

import torch
from pydantic import BaseModel, ConfigDict

import mrv2
from mrv2_adapter_llama.model import LlamaForCausalLM


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
        self.added = []

    def add_request(self, row, request):
        self.added.append(request.req_id)
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
