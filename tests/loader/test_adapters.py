"""The real adapters over the native layers: every defect of the list is refused, good checkpoints load whole."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from mrv2.config import load_model_config
from mrv2.errors import Mrv2Error, WeightsError
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import fill_model, load_model
from mrv2.loader.source import SafetensorsSource
from mrv2.loader.weights import collect_slots
from mrv2.registry import Registry
from mrv2.testing.checkpoints import defects, expert_defects, make_checkpoint, read_tensors, write_tensors

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda **kw: LlamaConfig(**SIZES | {"architectures": ["LlamaForCausalLM"]} | kw),
    "llama with biases": lambda **kw: LlamaConfig(
        **SIZES | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True} | kw
    ),
    "mistral": lambda **kw: MistralConfig(**SIZES | {"architectures": ["MistralForCausalLM"]} | kw),
    "qwen2": lambda **kw: Qwen2Config(**SIZES | {"architectures": ["Qwen2ForCausalLM"]} | kw),
    "qwen3": lambda **kw: Qwen3Config(**SIZES | {"architectures": ["Qwen3ForCausalLM"]} | kw),
    "qwen3-moe": lambda **kw: Qwen3MoeConfig(
        **SIZES
        | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "mlp_only_layers": [1]}
        | kw
    ),
    "mixtral": lambda **kw: MixtralConfig(
        **SIZES | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4} | kw
    ),
}
EXPERTS = {
    "qwen3-moe": ("model.layers.2.mlp.experts.3.up_proj.weight", (24, 32)),
    "mixtral": ("model.layers.1.block_sparse_moe.experts.1.w3.weight", (48, 32)),
}
"""One expert's up projection."""


@pytest.fixture(scope="module")
def installed():
    return Registry.discover()


@pytest.fixture
def load(installed):
    def run(folder):
        config = load_model_config(folder, installed)
        layers = NativeLayers()
        adapter = installed.resolve(config.architecture)
        return load_model(config, adapter, layers, device=torch.device("cpu"), dtype=torch.float32), layers

    return run


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_a_good_checkpoint_is_used(tmp_path, load, kind, tied):
    make_checkpoint(tmp_path, CONFIGS[kind](tie_word_embeddings=tied))
    model, layers = load(tmp_path)
    want = read_tensors(tmp_path)
    slots = collect_slots(model)
    assert {n for n, s in slots.items() if s.required} == {model.weight_map.canonical(n) for n in want}
    filled = sum(p.numel() for p in model.parameters())
    assert filled == sum(t.numel() for t in want.values())
    total = sum(p.double().sum().item() for p in model.parameters())
    assert total == pytest.approx(sum(t.double().sum().item() for t in want.values()))
    assert len(layers.caches) == 3


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_defect_is_refused_by_name(tmp_path, load, kind, tied):
    config = CONFIGS[kind](tie_word_embeddings=tied)
    assert_refused(tmp_path, load, config, defects(config))


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_defect_of_an_expert_is_refused_by_name(tmp_path, load, kind):
    up_proj, shape = EXPERTS[kind]
    make_checkpoint(tmp_path / "whole", CONFIGS[kind]())
    assert read_tensors(tmp_path / "whole")[up_proj].shape == shape
    assert_refused(tmp_path, load, CONFIGS[kind](), expert_defects(up_proj, shape))


def test_experts_packed_into_one_tensor_are_refused_by_name(tmp_path, load):
    """As transformers keeps them in memory: two tensors a layer instead of three an expert."""
    make_checkpoint(tmp_path, CONFIGS["qwen3-moe"](num_experts=100))
    tensors = read_tensors(tmp_path)
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(100)]
    packed = {"model.layers.0.mlp.experts.down_proj": torch.stack([tensors.pop(name) for name in names])}
    write_tensors(tmp_path, tensors | packed)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert "not used by the model (1): model.layers.0.mlp.experts.down_proj" in str(caught.value)
    assert "not in the checkpoint (100): model.layers.0.mlp.experts.0.down_proj.weight" in str(caught.value)


def assert_refused(tmp_path, load, config, each):
    for i, defect in enumerate(each):
        folder = make_checkpoint(tmp_path / str(i), config)
        defect.apply(folder)
        with pytest.raises(Mrv2Error) as caught:
            load(folder)
        message = str(caught.value)
        assert caught.value.code == defect.code, (defect.name, message)
        for text in defect.mentions:
            assert text in message, (defect.name, message)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "mixtral"])
def test_reload_in_place(tmp_path, load, kind):
    old, new = (make_checkpoint(tmp_path / str(s), CONFIGS[kind](), seed=s) for s in (1, 2))
    model, layers = load(old)
    fresh, _ = load(new)
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    fill_model(model, layers, SafetensorsSource(new), num_layers=3)
    assert addresses == {n: p.data_ptr() for n, p in model.named_parameters()}
    for (name, a), b in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b), name
