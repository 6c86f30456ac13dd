# /// adapter
# name = "steered-sample"
# sdk_api = "0.1"
# architectures = ["SteeredForCausalLM"]
# owner = "tests"
# [capabilities]
# chunked_prefill = "both"
# prefix_caching = "both"
# logits_processors = "both"
# speculation = "vllm"
# pipeline_parallel = "vllm"
# ///
"""An adapter with a logits processor: on request, tokens of the text so far are forbidden, and even positions favour one."""

import torch
from pydantic import BaseModel

import mrv2
from mrv2_adapter_llama.model import LlamaForCausalLM


class Options(BaseModel):
    fresh: bool = False
    favour: int = -1


class Steer(mrv2.LogitsProcessor):
    options = Options

    def __init__(self, limits):
        self.host = torch.full((limits.max_rows, 2), -1, dtype=torch.int32)
        self.by_row = self.host.to(limits.device)

    def add_request(self, row, request):
        options = Options.model_validate(request.sampling.extra_args)
        self.host[row] = torch.tensor([options.fresh, options.favour])
        return options.fresh or options.favour >= 0

    def flush(self):
        self.by_row.copy_(self.host)

    def apply(self, logits, view):
        rows = view.rows.clamp(min=0).long()
        fresh, favour = self.by_row[rows, 0] > 0, self.by_row[rows, 1].long()
        ids = view.table.all_token_ids[rows].long()
        known = torch.arange(ids.shape[1], device=ids.device) < view.positions[:, None]
        seen = torch.zeros_like(logits).scatter_add_(1, torch.where(known, ids, 0), known.to(logits.dtype))
        logits.masked_fill_((seen > 0) & fresh[:, None], float("-inf"))
        now = (favour >= 0) & (view.positions % 2 == 0)
        bonus = torch.zeros_like(logits).scatter_(1, favour.clamp(min=0)[:, None], 100.0)
        logits += torch.where(now[:, None], bonus, 0.0)


@mrv2.hookimpl
def mrv2_model(ctx):
    return LlamaForCausalLM


@mrv2.hookimpl
def mrv2_logits_processors(ctx):
    return [Steer]
