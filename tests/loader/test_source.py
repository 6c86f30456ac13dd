"""Safetensors folders: lazy reads, slices, shards, and files that lie."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from mrv2.errors import CheckpointFileError
from mrv2.loader.source import INDEX_NAME, SafetensorsSource, iter_tensors, tensor_infos


@pytest.fixture
def tensors():
    return {
        "a": torch.arange(12.0).view(3, 4),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.int64),
    }


def test_headers_reads_and_slices(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert {(i.name, i.shape, i.dtype) for i in tensor_infos(source)} == {
        (n, tuple(t.shape), t.dtype) for n, t in tensors.items()
    }
    for name, tensor in iter_tensors(source):
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(source.read("a", (slice(1, 3), slice(0, 2))), tensors["a"][1:3, :2])


def test_one_file_of_another_name_is_enough(tmp_path, tensors):
    save_file(tensors, tmp_path / "weights.safetensors")
    assert SafetensorsSource(tmp_path).files == (tmp_path / "weights.safetensors",)


def test_several_files_need_an_index(tmp_path, tensors):
    save_file(tensors, tmp_path / "one.safetensors")
    save_file(tensors, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointFileError, match="2 safetensors files and no model"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "\xff", "[" * 100_000]
)
def test_a_malformed_index_is_refused(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointFileError, match="index"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/hosts", "x.bin"])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, tensors, file):
    save_file(tensors, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    with pytest.raises(CheckpointFileError, match="no safetensors file of this folder"):
        SafetensorsSource(folder)


def test_a_tensor_that_the_index_leaves_out_is_refused(tmp_path, tensors):
    save_file(tensors, tmp_path / "s.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "s.safetensors", "b": "s.safetensors"}}))
    with pytest.raises(CheckpointFileError, match=r"tensor c is in s\.safetensors but not in the index"):
        SafetensorsSource(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointFileError, match="there is no safetensors file"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 30, 0.5, 0.99])
def test_every_truncation_is_noticed(tmp_path, tensors, keep):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointFileError, match="truncated or no safetensors file"):
        SafetensorsSource(tmp_path)


def test_pickle_is_refused_without_being_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointFileError, match="runs code"):
        SafetensorsSource(tmp_path)


def dangling(path):
    path.symlink_to(path.parent / "blobs" / "gone")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (dangling, r"model\.safetensors is a link to .*gone, which doesn't exist"),
        (os.mkfifo, r"model\.safetensors is no regular file"),
        (os.mkdir, r"model\.safetensors is no regular file"),
    ],
)
def test_what_is_no_regular_file_is_refused_without_opening_it(tmp_path, tensors, make, message):
    make(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFileError, match=message):
        SafetensorsSource(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "other.safetensors")}))
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointFileError, match=message):  # not another file in its stead
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["s.safetensors", INDEX_NAME])
@pytest.mark.parametrize("make", [dangling, os.mkfifo])
def test_shards_and_index_have_to_be_regular_files(tmp_path, tensors, make, name):
    save_file(tensors, tmp_path / "s.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "s.safetensors")}))
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(CheckpointFileError, match=f"{name} is "):
        SafetensorsSource(tmp_path)


def test_a_file_that_vanishes_while_it_is_opened_is_named(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"x")

    def vanish(path, **options):
        path.unlink()
        raise FileNotFoundError(path)

    monkeypatch.setattr("mrv2.loader.source.safe_open", vanish)
    with pytest.raises(CheckpointFileError, match="size unknown"):
        SafetensorsSource(tmp_path)
