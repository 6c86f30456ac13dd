"""GGUF: values, layouts, refusals, and conversion into an ordinary folder."""

from __future__ import annotations

import sys

import pytest
import torch

from mrv2.config import load_model_config
from mrv2.context import AdapterContext
from mrv2.errors import CheckpointFileError, MissingExtraError
from mrv2.layers.native import NativeLayers
from mrv2.loader import convert
from mrv2.loader.convert import convert_gguf
from mrv2.loader.gguf_source import GgufSource
from mrv2.loader.load import load_model
from mrv2.loader.source import SafetensorsSource, iter_tensors
from mrv2.loader.tokenizer import load_tokenizer
from mrv2.testing.checkpoints import make_checkpoint, read_tensors

gguf = pytest.importorskip("gguf")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}


@pytest.fixture
def tensors(tmp_path, tiny_config):
    def make(**changes):
        return read_tensors(make_checkpoint(tmp_path / "hf", tiny_config(**SIZES | changes)))

    return make


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_comes_back_under_its_name_and_in_its_order(tmp_path, tiny_config, tensors, write_gguf, tied):
    want = tensors(tie_word_embeddings=tied)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), want))
    got = dict(iter_tensors(source))
    assert set(got) == set(want)
    for name in want:
        assert torch.equal(got[name], want[name]), name
        assert source.shape(name) == tuple(want[name].shape)
    assert source.config.architectures == ["LlamaForCausalLM"]
    assert source.config.tie_word_embeddings == tied
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(source.read(name, (slice(3, 9),)), want[name][3:9])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_packed_values_are_those_of_the_gguf_package(tmp_path, tiny_config, tensors, write_gguf, kind):
    quantization = gguf.GGMLQuantizationType[kind]
    want = tensors()
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), want, quantization=quantization))
    name = "model.layers.2.mlp.down_proj.weight"
    packed = gguf.quants.quantize(want[name].numpy(), quantization)
    assert torch.equal(source.read(name), torch.tensor(gguf.quants.dequantize(packed, quantization)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 4096])
def test_a_converted_folder_is_an_ordinary_checkpoint(
    tmp_path, tiny_config, tensors, write_gguf, cache, adapter, registry, monkeypatch, dtype, shard_bytes
):
    monkeypatch.setattr(convert, "SHARD_BYTES", shard_bytes)
    want = tensors()
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), want), dtype=dtype)
    assert folder.parent == cache
    source = SafetensorsSource(folder)
    assert (len(source.files) > 1) == (shard_bytes == 4096)
    for name, tensor in iter_tensors(source):
        assert torch.equal(tensor, want[name].to(getattr(torch, dtype)))
    config = load_model_config(folder, registry)
    assert config.dtype == getattr(torch, dtype)
    assert config.eos_token_ids == (63,)
    load_model(config, adapter, NativeLayers(), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(AdapterContext(architecture="", path=folder))
    assert tokenizer.decode(tokenizer.encode("ABBA")) == "ABBA"
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "AB"}])) == "AB"


def test_a_file_without_vocabulary_gives_a_folder_without_tokenizer(tmp_path, tiny_config, tensors, write_gguf, cache):
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), tensors(), tokenizer=False))
    assert load_tokenizer(AdapterContext(architecture="", path=folder)) is None


@pytest.mark.parametrize("keep", [0, 3, 20, 400, 0.5, 0.98])
def test_truncated_files_are_refused_and_leave_nothing(tmp_path, tiny_config, tensors, write_gguf, cache, keep):
    file = write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), tensors())
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointFileError, match=r"m\.gguf"):
        convert_gguf(file)
    assert [p for p in cache.iterdir() if p.suffix != ".lock"] == []


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.9.unknown.weight"])
def test_a_tensor_that_would_be_dropped_is_refused(tmp_path, tiny_config, tensors, write_gguf, name):
    file = write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), tensors(), extra={name: torch.ones(4)})
    with pytest.raises(CheckpointFileError, match=name):
        GgufSource(file)


def test_rotary_scaling_that_would_be_dropped_is_refused(tmp_path, tiny_config, tensors, write_gguf):
    file = write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), tensors(), scaling="yarn")
    with pytest.raises(CheckpointFileError, match=r"rotary scaling \(yarn\)"):
        GgufSource(file)
    GgufSource(write_gguf(tmp_path / "n.gguf", tiny_config(**SIZES), tensors(), scaling="none"))


def test_a_tensor_of_another_shape_than_the_metadata_says_is_refused(tmp_path, tiny_config, tensors, write_gguf):
    name = "model.layers.0.mlp.up_proj.weight"
    file = write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), tensors() | {name: torch.ones(65, 32)})
    with pytest.raises(CheckpointFileError, match=r"blk\.0\.ffn_up\.weight is \[65, 32\]"):
        dict(iter_tensors(GgufSource(file)))


def test_without_the_gguf_package_the_error_has_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingExtraError, match="gguf package") as caught:
        GgufSource(tmp_path / "m.gguf")
    assert "pip install 'mrv2[gguf]'" in str(caught.value)


def test_accelerate_is_not_needed(tmp_path, tiny_config, tensors, write_gguf, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_config(**SIZES), tensors()))
