"""The real adapters over the native layers: every defect of the list is refused, good checkpoints load whole."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from mrv2.config import load_model_config
from mrv2.errors import Mrv2Error
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import fill_model, load_model
from mrv2.loader.source import SafetensorsSource
from mrv2.loader.weights import collect_slots
from mrv2.registry import Registry
from mrv2.testing.checkpoints import defects, make_checkpoint, read_tensors

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
}


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


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_defect_is_refused_by_name(tmp_path, load, kind, tied):
    config = CONFIGS[kind](tie_word_embeddings=tied)
    for i, defect in enumerate(defects(config)):
        folder = make_checkpoint(tmp_path / str(i), config)
        defect.apply(folder)
        with pytest.raises(Mrv2Error) as caught:
            load(folder)
        message = str(caught.value)
        assert caught.value.code == defect.code, (defect.name, message)
        for text in defect.mentions:
            assert text in message, (defect.name, message)


def test_reload_in_place(tmp_path, load):
    old, new = (make_checkpoint(tmp_path / str(s), CONFIGS["qwen3"](), seed=s) for s in (1, 2))
    model, layers = load(old)
    fresh, _ = load(new)
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    fill_model(model, layers, SafetensorsSource(new), num_layers=3)
    assert addresses == {n: p.data_ptr() for n, p in model.named_parameters()}
    for (name, a), b in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b), name
