"""Whole checkpoints into a model: values, strictness, in-place reload."""

from __future__ import annotations

import pytest
import torch

from mrv2.config import load_model_config
from mrv2.errors import ModelBuildError, Mrv2Error, SlotError, UnsupportedError, WeightsError
from mrv2.layers.base import WeightMap
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import checkpoint_dtype, fill_model, load_model, open_source
from mrv2.loader.source import SafetensorsSource
from mrv2.testing.checkpoints import (
    defects,
    edit_config,
    make_checkpoint,
    read_tensors,
    split_into_shards,
    write_tensors,
)

CPU = torch.device("cpu")


@pytest.fixture
def load(adapter, registry):
    def run(folder, dtype=torch.float32):
        config = load_model_config(folder, registry)
        return load_model(config, adapter, NativeLayers(), device=CPU, dtype=dtype)

    return run


def unpacked(model):
    """Our parameters under the checkpoint's names."""
    out = {}
    for i, block in enumerate(model.model.layers):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = block.self_attn.norm.weight
        out[p + "post_attention_layernorm.weight"] = block.mlp.norm.weight
        out[p + "self_attn.o_proj.weight"] = block.self_attn.o_proj.weight
        out[p + "mlp.down_proj.weight"] = block.mlp.down_proj.weight
        qkv = block.self_attn.qkv_proj.weight.split([16, 8, 8])
        for name, part in zip("qkv", qkv, strict=True):
            out[f"{p}self_attn.{name}_proj.weight"] = part
        out[p + "mlp.gate_proj.weight"], out[p + "mlp.up_proj.weight"] = block.mlp.gate_up_proj.weight.chunk(2)
    out["model.embed_tokens.weight"] = model.model.embed_tokens.weight
    out["model.norm.weight"] = model.model.norm.weight
    out["lm_head.weight"] = model.lm_head.weight
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_value_arrives(tmp_path, tiny_config, load, tied, sharded):
    make_checkpoint(tmp_path, tiny_config(tie_word_embeddings=tied))
    want = read_tensors(tmp_path)
    if sharded:
        split_into_shards(tmp_path)
    model = load(tmp_path)
    got = unpacked(model)
    assert set(got) - {"lm_head.weight"} == set(want) - {"lm_head.weight"}
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.finalized == 1
    torch.testing.assert_close(model.table, torch.arange(4, dtype=torch.float64).cos())


def test_tensors_are_converted_and_the_default_dtype_is_restored(tmp_path, tiny_config, load):
    make_checkpoint(tmp_path, tiny_config(), dtype=torch.bfloat16)
    model = load(tmp_path, dtype=torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_every_defect_is_refused_by_name(tmp_path, tiny_config, load, tied):
    config = tiny_config(tie_word_embeddings=tied)
    for i, defect in enumerate(defects(config)):
        folder = make_checkpoint(tmp_path / str(i), config)
        defect.apply(folder)
        with pytest.raises(Mrv2Error) as caught:
            load(folder)
        message = str(caught.value)
        assert caught.value.code == defect.code, (defect.name, message)
        for text in defect.mentions:
            assert text in message, (defect.name, message)
        assert str(folder) in message, defect.name


def test_tied_head_that_is_equal_is_accepted(tmp_path, tiny_config, load):
    make_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True))
    tensors = read_tensors(tmp_path)
    write_tensors(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    load(tmp_path)


def test_a_message_has_few_names_and_the_total(tmp_path, tiny_config, load):
    make_checkpoint(tmp_path, tiny_config(num_hidden_layers=12))
    write_tensors(tmp_path, {n: t for n, t in read_tensors(tmp_path).items() if "mlp" not in n})
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    line = next(ln for ln in str(caught.value).splitlines() if "not in the checkpoint" in ln)
    assert "(36)" in line
    assert line.count("mlp.") == 8


def test_a_missing_tensor_is_named_as_the_checkpoint_would(tmp_path, tiny_config, load):
    make_checkpoint(tmp_path, tiny_config())
    tensors = read_tensors(tmp_path)
    del tensors["model.layers.1.post_attention_layernorm.weight"]
    write_tensors(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.post_attention_layernorm\.weight"):
        load(tmp_path)


def test_reload_keeps_addresses_and_takes_the_new_values(tmp_path, tiny_config, load):
    old = make_checkpoint(tmp_path / "old", tiny_config(), seed=1)
    new = make_checkpoint(tmp_path / "new", tiny_config(), seed=2)
    model = load(old)
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    fill_model(model, NativeLayers(), SafetensorsSource(new), num_layers=3)
    assert addresses == {n: p.data_ptr() for n, p in model.named_parameters()}
    assert model.finalized == 2
    for name, tensor in read_tensors(new).items():
        assert torch.equal(unpacked(model)[name], tensor)


def test_a_checkpoint_that_does_not_fit_leaves_a_running_model_as_it_was(tmp_path, tiny_config, load):
    good = make_checkpoint(tmp_path / "good", tiny_config(), seed=1)
    bad = make_checkpoint(tmp_path / "bad", tiny_config(), seed=2)
    next(d for d in defects(tiny_config()) if d.name == "v_proj missing").apply(bad)
    model = load(good)
    with pytest.raises(WeightsError, match="Nothing has been loaded"):
        fill_model(model, NativeLayers(), SafetensorsSource(bad), num_layers=3)
    for name, tensor in read_tensors(good).items():
        assert torch.equal(unpacked(model)[name], tensor)


def test_a_model_class_that_ignores_the_configs_layer_count_is_refused(tmp_path, tiny_config, adapter, registry):
    make_checkpoint(tmp_path, tiny_config())
    config = load_model_config(tmp_path, registry)
    model = adapter.model(None, config.hf_config)
    with pytest.raises(WeightsError, match=r"the config says 4, the model class built model\.layers 3"):
        fill_model(model, NativeLayers(), SafetensorsSource(tmp_path), num_layers=4)


def test_a_quantised_checkpoint_is_refused_by_method(tmp_path, tiny_config, load):
    make_checkpoint(tmp_path, tiny_config())
    edit_config(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedError, match="awq"):
        load(tmp_path)


def test_a_parameter_without_slot_is_our_own_fault(tmp_path, tiny_config, adapter, load):
    class Sloppy(adapter.model):
        def __init__(self, layers, config):
            super().__init__(layers, config)
            self.extra = torch.nn.Linear(3, 3)

    adapter.model = Sloppy
    make_checkpoint(tmp_path, tiny_config())
    with pytest.raises(SlotError, match=r"\(2\): extra\.weight, extra\.bias"):
        load(tmp_path)


def test_an_adapters_own_source_is_used(tmp_path, tiny_config, adapter, registry, load):
    make_checkpoint(tmp_path, tiny_config())
    tensors = read_tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    class Memory:
        files = ()

        def names(self):
            return list(tensors)

        def shape(self, name):
            return tuple(tensors[name].shape)

        def dtype(self, name):
            return tensors[name].dtype

        def read(self, name, index=None):
            return tensors[name] if index is None else tensors[name][index]

    adapter.source = Memory()
    assert torch.equal(load(tmp_path).lm_head.weight, tensors["lm_head.weight"])


def test_checkpoint_dtype_is_the_configs_else_the_files(tmp_path, tiny_config, adapter, registry):
    make_checkpoint(tmp_path, tiny_config(), dtype=torch.bfloat16)
    config = load_model_config(tmp_path, registry)
    assert checkpoint_dtype(config, open_source(config, adapter)) == torch.bfloat16
    edit_config(tmp_path, dtype=None)
    config = load_model_config(tmp_path, registry)
    assert config.dtype is None
    assert checkpoint_dtype(config, open_source(config, adapter)) == torch.bfloat16


def test_an_absurd_layer_count_is_refused_before_anything_is_built(tmp_path, tiny_config, adapter, load):
    class Untouched(adapter.model):
        def __init__(self, layers, config):
            pytest.fail("built")

    adapter.model = Untouched
    make_checkpoint(tmp_path, tiny_config())
    edit_config(tmp_path, num_hidden_layers=10**6)
    with pytest.raises(WeightsError, match=r"model\.layers has 1000000 in the config, 3 in the checkpoint") as caught:
        load(tmp_path)
    assert str(tmp_path) in caught.value.where
    write_tensors(tmp_path, {"a": torch.zeros(1)})
    with pytest.raises(WeightsError, match="1000000 in the config, none in the checkpoint"):
        load(tmp_path)


def test_a_transform_may_bring_the_layers(tmp_path, tiny_config, adapter, load):
    """Names tell nothing then: here all layers come in one tensor each."""
    make_checkpoint(tmp_path, tiny_config())
    tensors = read_tensors(tmp_path)
    layers = {n.removeprefix("model.layers.0.") for n in tensors if ".0." in n}
    stacked = {f"all.{n}": torch.stack([tensors[f"model.layers.{i}.{n}"] for i in range(3)]) for n in layers}
    write_tensors(tmp_path, {n: t for n, t in tensors.items() if ".layers." not in n} | stacked)

    def unstack(pairs):
        for name, tensor in pairs:
            if not name.startswith("all."):
                yield name, tensor
                continue
            for i, part in enumerate(tensor):
                new = f"model.layers.{i}.{name.removeprefix('all.')}".replace("input_layernorm", "self_attn.norm")
                yield new.replace("post_attention_layernorm", "mlp.norm"), part

    class Stacked(adapter.model):
        weight_map = WeightMap(transform=unstack)

    adapter.model = Stacked
    assert torch.equal(
        load(tmp_path).model.layers[2].mlp.norm.weight, tensors[f"{LAST}.post_attention_layernorm.weight"]
    )


def test_a_transform_may_ask_for_the_config(tmp_path, tiny_config, adapter, load):
    """All of each head in turn in one matrix, whose shape doesn't tell how many heads it holds (W2)."""
    config = tiny_config()
    make_checkpoint(tmp_path, config)
    tensors, parts = read_tensors(tmp_path), [f"self_attn.{part}_proj.weight" for part in "qkv"]
    groups, size = config.num_key_value_heads, config.head_dim
    for i in range(3):
        apart = [tensors.pop(f"model.layers.{i}.{part}").unflatten(0, (groups, -1, size)) for part in parts]
        tensors[f"model.layers.{i}.self_attn.qkv"] = torch.cat(apart, 1).flatten(0, 2)
    write_tensors(tmp_path, tensors)

    def apart(pairs, config):
        queries = config.num_attention_heads // config.num_key_value_heads
        for name, tensor in pairs:
            if not name.endswith(".qkv"):
                yield name, tensor
                continue
            heads = tensor.unflatten(0, (config.num_key_value_heads, -1, config.head_dim))
            for part, rows in zip("qkv", heads.split([queries, 1, 1], dim=1), strict=True):
                yield name.replace("qkv", f"{part}_proj.weight"), rows.flatten(0, 2)

    class Interleaved(adapter.model):
        weight_map = WeightMap(rename=adapter.model.weight_map.rename, transform=apart)

    make_checkpoint(tmp_path / "whole", config)
    want = load(tmp_path / "whole").model.state_dict()
    adapter.model = Interleaved
    loaded = load(tmp_path).model
    assert all(torch.equal(tensor, want[name]) for name, tensor in loaded.state_dict().items())
    assert Interleaved.weight_map.transform is apart  # of the class, which other checkpoints have too


LAST = "model.layers.2"


@pytest.mark.parametrize("error", [AttributeError("config has no depth"), MemoryError(), GeneratorExit()])
def test_a_constructor_that_raises_is_named_with_its_line(tmp_path, tiny_config, adapter, load, error):
    class Broken(adapter.model):
        def __init__(self, layers, config):
            raise error

    adapter.model = Broken
    make_checkpoint(tmp_path, tiny_config())
    with pytest.raises(ModelBuildError, match=rf"{type(error).__name__}.* raised at .*test_load\.py:\d+") as caught:
        load(tmp_path)
    assert caught.value.__cause__ is error
    assert str(tmp_path) in caught.value.where


def test_more_memory_than_there_is_is_a_typed_error(tmp_path, tiny_config, adapter, load):
    class Huge(adapter.model):
        def __init__(self, layers, config):
            super().__init__(layers, config)
            self.table = torch.empty(2**60)

    adapter.model = Huge
    make_checkpoint(tmp_path, tiny_config())
    with pytest.raises(ModelBuildError, match="RuntimeError"):
        load(tmp_path)


def test_what_a_constructor_prints_goes_to_stderr(tmp_path, tiny_config, adapter, load, capsys):
    class Chatty(adapter.model):
        def __init__(self, layers, config):
            print("building")
            super().__init__(layers, config)

    adapter.model = Chatty
    make_checkpoint(tmp_path, tiny_config())
    load(tmp_path)
    captured = capsys.readouterr()
    assert (captured.out, "building" in captured.err) == ("", True)
