"""A small model of our own over slots, with the things that make loading hard: packing, tying, renames."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from mrv2.layers.base import PARAM_SLOT, Slot, WeightMap


def copier(target: Tensor):
    return lambda source: target.copy_(source)


class Packed(nn.Module):
    def __init__(self, width: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), width))
        if bias:
            self.bias = nn.Parameter(torch.empty(sum(parts.values())))

    def weight_slots(self) -> dict[str, Slot]:
        slots, start = {}, 0
        for part, size in self.parts.items():
            for name, p in self.named_parameters():
                rows = p.data[start : start + size]
                slots[f"../{part}.{name}"] = Slot(name, tuple(rows.shape), copier(rows))
            start += size
        return slots


class Whole(nn.Module):
    def __init__(self, *shape: int, tied_to: nn.Module | None = None) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to is not None else nn.Parameter(torch.empty(*shape))

    def weight_slots(self) -> dict[str, Slot]:
        load = None if self.tied else copier(self.weight.data)
        return {"weight": Slot("weight", tuple(self.weight.shape), load)}


class Block(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.self_attn = nn.Module()
        self.self_attn.norm = Whole(c.hidden_size)
        self.self_attn.qkv_proj = Packed(c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv})
        self.self_attn.o_proj = Whole(c.hidden_size, q)
        self.mlp = nn.Module()
        self.mlp.norm = Whole(c.hidden_size)
        self.mlp.gate_up_proj = Packed(c.hidden_size, dict.fromkeys(("gate_proj", "up_proj"), c.intermediate_size))
        self.mlp.down_proj = Whole(c.hidden_size, c.intermediate_size)


class Model(nn.Module):
    weight_map = WeightMap(
        rename=(
            (r"\.input_layernorm\.", ".self_attn.norm."),
            (r"\.post_attention_layernorm\.", ".mlp.norm."),
        )
    )
    parts = ()
    recurrent = False

    def __init__(self, layers, config) -> None:
        super().__init__()
        c = config
        self.model = nn.Module()
        self.model.embed_tokens = Whole(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.model.norm = Whole(c.hidden_size)
        tied_to = self.model.embed_tokens if c.tie_word_embeddings else None
        self.lm_head = Whole(c.vocab_size, c.hidden_size, tied_to=tied_to)
        self.register_buffer("table", torch.arange(c.head_dim, dtype=torch.float64).cos(), persistent=False)
        self.finalized = 0

    def finalize_weights(self) -> None:
        self.finalized += 1


@dataclass
class Adapter:
    model: type = Model
    source: object = None
    config: type | None = None
    own_tokenizer: object = None

    def model_class(self, ctx):
        return self.model

    def weight_source(self, ctx):
        return self.source

    def config_class(self, ctx):
        return self.config

    def tokenizer(self, ctx):
        return self.own_tokenizer


@dataclass
class Registry:
    adapter: Adapter
    by_model_type: Adapter | None = None

    def resolve(self, architecture):
        return self.adapter

    def for_model_type(self, model_type):
        return self.by_model_type


@pytest.fixture
def adapter():
    return Adapter()


@pytest.fixture
def registry(adapter):
    return Registry(adapter)


@pytest.fixture
def make_module():
    """Small modules with slots, by kind."""
    return {"packed": Packed, "whole": Whole, "model": Model, "slot": Slot, "attribute": PARAM_SLOT}


@pytest.fixture
def tiny_config():
    from transformers import LlamaConfig

    def make(**changes):
        sizes = {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            "architectures": ["LlamaForCausalLM"],
        }
        return LlamaConfig(**sizes | changes)

    return make


def permuted(weight, heads):
    """The row order in which GGUF keeps rotary projections of this family: pairs side by side."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture
def write_gguf():
    """Writes a small GGUF from a config and tensors under transformers' names."""
    gguf = pytest.importorskip("gguf")

    def run(path, config, tensors, *, quantization=None, tokenizer=True, extra=None, scaling=None):
        w = gguf.GGUFWriter(path, "llama")
        w.add_name("tiny")
        w.add_block_count(config.num_hidden_layers)
        w.add_context_length(config.max_position_embeddings)
        w.add_embedding_length(config.hidden_size)
        w.add_feed_forward_length(config.intermediate_size)
        w.add_head_count(config.num_attention_heads)
        w.add_head_count_kv(config.num_key_value_heads)
        w.add_rope_dimension_count(config.head_dim)
        w.add_layer_norm_rms_eps(config.rms_norm_eps)
        w.add_rope_freq_base(10000.0)
        w.add_vocab_size(config.vocab_size)
        if scaling:
            w.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        if tokenizer:
            w.add_tokenizer_model("gpt2")
            w.add_tokenizer_pre("smollm")
            w.add_token_list([chr(ord("A") + i) for i in range(config.vocab_size - 2)] + ["AB", "<end>"])
            w.add_token_types([1] * (config.vocab_size - 1) + [3])
            w.add_token_merges(["A B"])
            w.add_eos_token_id(config.vocab_size - 1)
            w.add_chat_template("{{ messages[0]['content'] }}")
        for name, tensor in (tensors | (extra or {})).items():
            values = tensor.float().numpy()
            stem, _, kind = name.rpartition(".")
            if stem.endswith("q_proj"):
                values = permuted(values, config.num_attention_heads)
            if stem.endswith("k_proj"):
                values = permuted(values, config.num_key_value_heads)
            if stem.startswith("model.layers."):
                _, _, number, inner = stem.split(".", 3)
                stem = f"blk.{number}.{GGUF_NAMES[inner]}"
            else:
                stem = OUTER_NAMES.get(stem, stem)
            if quantization is not None and values.ndim == 2:
                packed = gguf.quants.quantize(values, quantization)
                w.add_tensor(f"{stem}.{kind}", packed, raw_dtype=quantization)
            else:
                w.add_tensor(f"{stem}.{kind}", values)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return path

    return run


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MRV2_CACHE", str(folder))
    return folder
