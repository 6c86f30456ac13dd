# /// adapter
# name = "hello"
# sdk_api = "0.1"
# architectures = ["HelloForCausalLM"]
# model_types = ["hello"]
# owner = "you"
# capabilities = { chunked_prefill = "native", prefix_caching = "native", cuda_graphs = "native" }
# ///
"""A whole adapter: a config that transformers doesn't know, and a model. No host is named."""

import transformers
from torch import nn

import mrv2
from mrv2.layers import WeightMap


class HelloConfig(transformers.PretrainedConfig):
    model_type = "hello"

    def __init__(self, vocab_size=256, width=32, depth=2, heads=4, context=512, **rest):
        super().__init__(**rest)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, width, depth
        self.heads, self.max_position_embeddings = heads, context


class Block(nn.Module):
    def __init__(self, L, c):
        super().__init__()
        self.attn = L.self_attention(
            "attn", c.hidden_size, num_heads=c.heads, num_kv_heads=1, head_dim=c.hidden_size // c.heads, window=None,
            rope={"rope_type": "default", "rope_theta": 1e4}, max_position=c.max_position_embeddings, norm_eps=1e-6,
        )  # fmt: skip
        self.mlp = L.gated_mlp("mlp", c.hidden_size, 4 * c.hidden_size, norm_eps=1e-6)

    def forward(self, h, positions, ctx):
        return self.mlp(self.attn(h, positions, ctx), ctx)


class HelloForCausalLM(nn.Module):
    weight_map = WeightMap(rename=((r"^transformer\.", ""),))  # checkpoint names to ours
    parts = ()  # extra inputs
    recurrent = False

    def __init__(self, L, c):
        super().__init__()
        self.embed = L.embedding("embed", c.vocab_size, c.hidden_size)
        self.layers = L.stack("layers", c.num_hidden_layers, lambda L, i: Block(L, c))
        self.norm = L.final_norm("norm", c.hidden_size, eps=1e-6)
        self.lm_head = L.lm_head("lm_head", c.vocab_size, c.hidden_size)

    def forward(self, input_ids, positions, ctx):
        return ctx.finish(self.norm, ctx.run(self.layers, ctx.embed(self.embed, input_ids), positions))


@mrv2.hookimpl
def mrv2_config(ctx):
    return HelloConfig


@mrv2.hookimpl
def mrv2_model(ctx):
    return HelloForCausalLM
