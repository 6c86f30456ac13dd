"""Checkpoints are read as they were written, or refused with a message that names the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mrv2
import pytest
import torch

from mrv2_adapter_acme.shards import HEADER, INDEX, ShardError, ShardSource
from mrv2_adapter_acme.testing import CHECKPOINT
from mrv2_adapter_acme.weights import separate

FIRST, SECOND = "weights-00.acme", "weights-01.acme"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the index."""
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_a_tensor_is_what_the_file_holds() -> None:
    """Whole and in slices; nothing else of the file is looked at."""
    source = ShardSource(CHECKPOINT)
    index = json.loads((CHECKPOINT / INDEX).read_text())
    for name in source.names():
        entry = index["tensors"][name]
        tensor = source.read(name)
        raw = (CHECKPOINT / index["shards"][entry["shard"]]["file"]).read_bytes()[entry["offset"] :]
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == raw[: tensor.nbytes]
        assert (tuple(tensor.shape), tensor.dtype) == (source.shape(name), source.dtype(name))
        assert torch.equal(source.read(name, (slice(1, 2),)), tensor[1:2])


def test_every_read_maps_the_same_memory(folder: Path) -> None:
    """Nothing is copied, and what is done to a tensor stays out of the file."""
    before = (folder / FIRST).read_bytes()
    source = ShardSource(folder)
    assert source.read("tokens").data_ptr() == source.read("tokens").data_ptr()
    source.read("tokens").zero_()
    assert (folder / FIRST).read_bytes() == before


def cut(folder: Path) -> str:
    """A shard whose copy was stopped."""
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-100])
    return f"{SECOND} has {len(data) - 100} bytes, {len(data)} were written"


def lost(folder: Path) -> str:
    """A shard that was forgotten."""
    (folder / SECOND).unlink()
    return f"{SECOND} can't be read: No such file"


def swapped(folder: Path) -> str:
    """A shard in another's place, though of the right size."""
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes()[: HEADER.size] + data[HEADER.size :])
    return f"{SECOND} doesn't begin as shard 1"


def newer(folder: Path) -> str:
    """A format of the future."""
    edit(folder, lambda index: index.update(format="acme-shards/2"))
    return "format 'acme-shards/2', and this reads 'acme-shards/1'"


def no_index(folder: Path) -> str:
    """No index at all."""
    (folder / INDEX).unlink()
    return f"{INDEX} is absent"


def broken_index(folder: Path) -> str:
    """An index that ends early."""
    (folder / INDEX).write_text((folder / INDEX).read_text()[:300])
    return f"{INDEX} is absent or no index"


def beyond(folder: Path) -> str:
    """A tensor that lies outside of its shard."""
    edit(folder, lambda index: index["tensors"]["final.gain"].update(offset=1 << 40))
    return "puts final.gain where no shard has it"


def other_dtype(folder: Path) -> str:
    """A type that there isn't."""
    edit(folder, lambda index: index["tensors"]["tokens"].update(dtype="f4"))
    return "describes tokens"


@pytest.mark.parametrize("damage", [cut, lost, swapped, newer, no_index, broken_index, beyond, other_dtype])
def test_a_bad_checkpoint_is_refused_when_it_is_opened(damage: Callable[[Path], str], folder: Path) -> None:
    """Before anything of it is read."""
    message = damage(folder)
    with pytest.raises(ShardError) as caught:
        ShardSource(folder)
    assert message in caught.value.what
    assert str(folder) in str(caught.value)


def test_one_wrong_bit_is_seen_when_the_tensor_is_read(folder: Path) -> None:
    """By the checksum; other tensors can still be read."""
    entry = json.loads((folder / INDEX).read_text())["tensors"]["blocks.0.mem.out"]
    data = bytearray((folder / FIRST).read_bytes())
    data[entry["offset"] + 17] ^= 4
    (folder / FIRST).write_bytes(data)
    source = ShardSource(folder)
    source.read("tokens")
    with pytest.raises(ShardError, match=f"{FIRST} has other bytes for blocks.0.mem.out"):
        source.read("blocks.0.mem.out")
    with pytest.raises(ShardError, match=r"ACME-1 bad acme checkpoint: .*blocks\.0\.mem\.out"):
        mrv2.LLM(str(folder), adapters=[str(CHECKPOINT.parent)], device="cpu")


def test_heads_are_taken_apart_row_by_row() -> None:
    """Each row says where it came from: group, place in the group, row of the head."""
    groups, queries, size = 2, 3, 4
    labels = torch.cartesian_prod(torch.arange(groups), torch.arange(queries + 2), torch.arange(size))
    stored = labels.view(groups, queries + 2, size, 3)
    found = dict(separate(iter([("b.qkv", stored)])))
    assert found["b.q_proj.weight"].tolist() == [
        [g, n, r] for g in range(groups) for n in range(queries) for r in range(size)
    ]
    assert found["b.k_proj.weight"].tolist() == [[g, queries, r] for g in range(groups) for r in range(size)]
    assert found["b.v_proj.weight"].tolist() == [[g, queries + 1, r] for g in range(groups) for r in range(size)]


def test_what_has_another_layout_is_handed_on() -> None:
    """So that the strict loader names it."""
    flat = torch.zeros(40, 3)
    assert [name for name, _ in separate(iter([("b.qkv", flat), ("b.mlp.gate_up", flat)]))] == [
        "b.qkv",
        "b.mlp.gate_up",
    ]
