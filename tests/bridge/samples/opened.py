# /// adapter
# name = "opened-sample"
# sdk_api = "0.1"
# architectures = ["OpenedForCausalLM"]
# owner = "tests"
# [capabilities]
# chunked_prefill = "both"
# prefix_caching = "both"
# sliding_window = "both"
# tensor_parallel = "vllm"
# ///
"""Mixtral with its mixture opened: the router and the experts are used on their own, and some tokens go to one alone."""

import torch
from torch import nn

import mrv2
from mrv2.layers import Stream
from mrv2_adapter_llama.model import MixtralBlock, MixtralForCausalLM


class OpenMoE(nn.Module):
    def __init__(self, L, c):
        super().__init__()
        sizes = {"num_experts": c.num_local_experts, "top_k": c.num_experts_per_tok}
        self.norm = L.norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        self.gate = L.router("gate", c.hidden_size, **sizes)
        self.experts = L.experts("experts", c.hidden_size, c.intermediate_size, **sizes, act=c.hidden_act)
        self.sure = c.sure_above

    def forward(self, h, ctx):
        x, residual = ctx.prenorm(self.norm, h)
        weights, experts = self.gate(x, ctx)
        # An expert that is sure is asked alone.
        first = torch.arange(experts.shape[1], device=x.device) == 0
        experts = torch.where((weights[:, :1] > self.sure) & ~first, -1, experts)
        return Stream(self.experts(x, weights, experts), residual)


class OpenedBlock(MixtralBlock):
    @staticmethod
    def feed_forward(L, c):
        return OpenMoE(L.scope("mlp"), c)


class OpenedForCausalLM(MixtralForCausalLM):
    block = OpenedBlock


@mrv2.hookimpl
def mrv2_model(ctx):
    return OpenedForCausalLM
