"""Small checkpoints with random weights, whole or with one defect, for tests of loaders and adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mrv2.errors import TargetError
from mrv2.layers.native import NativeLayers
from mrv2.loader.slots import collect_slots
from mrv2.loader.source import INDEX_NAME, SINGLE_NAME


def make_checkpoint(folder: Path, config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with random weights for a transformers config, as transformers lays it out.

    Norms and biases are random too: at their usual start values (1 and 0) a loader could swap or drop them
    unseen. Matrices are scaled so that a deep model neither explodes nor forgets its input.

    Args:
        folder: made if absent.
        config: of a causal language model that transformers has.
        seed: of all values.
        dtype: of all tensors.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).to(dtype)
    randomize(model, seed=seed)
    model.config.dtype = dtype
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return folder


def randomize(model: nn.Module, *, seed: int = 0) -> None:
    """Give every parameter of `model` random values, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            noise = noise * 0.1 + (0.0 if name.endswith("bias") else 1.0)
        else:
            noise = noise * parameter.shape[-1] ** -0.5
        with torch.no_grad():
            parameter.copy_(noise)


def write_random(folder: Path, model_class: Any, config: Any, *, where: str, seed: int = 0) -> None:
    """Write random values for every weight slot of a model, under our own names, to a folder.

    Args:
        folder: the checkpoint's; its config is there already.
        model_class: what the adapter's `mrv2_model` returns.
        config: of the model.
        where: the adapter, for messages.
        seed: of all values.

    Raises:
        TargetError: the adapter reads a format of its own, which nobody else can write.
    """
    weight_map = model_class.weight_map
    with torch.device("meta"):
        slots = collect_slots(model_class(NativeLayers(), config)).values()
    names = [s.name for s in slots if s.required]
    if weight_map.transform is not None or [weight_map.canonical(name) for name in names] != names:
        raise TargetError(
            "the adapter's weight_map changes names or values, so a checkpoint can't be made up",
            where=where,
            fix="let the target bring one: checkpoint=(folder, config) -> writes it there",
        )
    fake = nn.Module()
    tensors = {s.name: torch.empty(s.slot.shape or ()) for s in slots if s.required}
    for i, tensor in enumerate(tensors.values()):
        fake.register_parameter(str(i), nn.Parameter(tensor, requires_grad=False))
    randomize(fake, seed=seed)
    write_tensors(folder, tensors)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint of one file."""
    tensors: dict[str, Tensor] = load_file(folder / SINGLE_NAME)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replace a checkpoint's one file."""
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()},
        folder / SINGLE_NAME,
        metadata={"format": "pt"},
    )


def split_into_shards(folder: Path, num_shards: int = 2) -> None:
    """Turn a checkpoint of one file into shards and an index."""
    tensors = read_tensors(folder)
    (folder / SINGLE_NAME).unlink()
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ---- defects -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Defect:
    """One way in which a checkpoint is wrong, and what a loader's error has to say of it."""

    name: str
    apply: Callable[[Path], None]  # changes a whole checkpoint of one file, in place
    code: str  # of the error
    mentions: tuple[str, ...]  # names and numbers in its message


def _layer(i: int, rest: str) -> str:
    return f"model.layers.{i}.{rest}"


def _drop(*names: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = read_tensors(folder)
        for name in names:
            del tensors[name]
        write_tensors(folder, tensors)

    return apply


def _add(name: str, *shape: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        write_tensors(folder, read_tensors(folder) | {name: torch.zeros(shape)})

    return apply


def _change(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = read_tensors(folder)
        tensors[name] = make(tensors[name])
        write_tensors(folder, tensors)

    return apply


def _drop_layer(i: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        write_tensors(folder, {n: t for n, t in read_tensors(folder).items() if not n.startswith(_layer(i, ""))})

    return apply


def _copy_layer(source: int, target: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = read_tensors(folder)
        prefix = _layer(source, "")
        copies = {_layer(target, n.removeprefix(prefix)): t for n, t in tensors.items() if n.startswith(prefix)}
        write_tensors(folder, tensors | copies)

    return apply


def _truncate(folder: Path) -> None:
    data = (folder / SINGLE_NAME).read_bytes()
    (folder / SINGLE_NAME).write_bytes(data[: len(data) * 2 // 3])


def _cut_header(folder: Path) -> None:
    (folder / SINGLE_NAME).write_bytes((folder / SINGLE_NAME).read_bytes()[:20])


def _lose_shard(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _wrong_index(folder: Path) -> None:
    split_into_shards(folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][_layer(0, "self_attn.q_proj.bias")] = "model-00001-of-00002.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))


def _tensor_in_two_shards(folder: Path) -> None:
    split_into_shards(folder)
    first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    tensors = load_file(first)
    save_file(load_file(second) | {"model.norm.weight": torch.zeros(4)} | tensors, second)


def _only_pickle(folder: Path) -> None:
    (folder / SINGLE_NAME).rename(folder / "pytorch_model.bin")


def defects(config: Any) -> Iterator[Defect]:
    """Defects of a dense decoder's checkpoint with at least three layers, under transformers' usual names.

    Args:
        config: the transformers config it was made for.
    """
    hidden, last = config.hidden_size, config.num_hidden_layers - 1
    v_proj, gate, norm = (_layer(1, f"{n}.weight") for n in ("self_attn.v_proj", "mlp.gate_proj", "input_layernorm"))
    rows = config.num_key_value_heads * (getattr(config, "head_dim", None) or hidden // config.num_attention_heads)
    one_more = lambda t: torch.cat([t, t[:1]])  # noqa: E731
    weights, file = "MRV2-202", "MRV2-203"
    yield Defect("v_proj missing", _drop(v_proj), weights, (v_proj,))
    extra = _layer(1, "self_attn.o_proj.bias")
    yield Defect("extra o_proj.bias", _add(extra, hidden), weights, (extra,))
    shapes = (str([rows + 1, hidden]), str([rows, hidden]))
    yield Defect("v_proj with too many rows", _change(v_proj, one_more), weights, (v_proj, *shapes))
    yield Defect(
        "v_proj with too few rows", _change(v_proj, lambda t: t[1:]), weights, (v_proj, str([rows - 1, hidden]))
    )
    ff = str([config.intermediate_size + 1, hidden])
    yield Defect("gate_proj with too many rows", _change(gate, one_more), weights, (gate, ff))
    yield Defect("norm missing", _drop(norm), weights, (norm,))
    yield Defect("norm of another size", _change(norm, lambda t: t[:-1]), weights, (norm, str([hidden - 1])))
    unknown = _layer(1, "self_attn.unknown.weight")
    yield Defect("tensor of an unknown layer", _add(unknown, 4, 4), weights, (unknown,))
    yield Defect("fewer layers than the config says", _drop_layer(last), weights, (f"{last} in the checkpoint",))
    more = f"{last + 2} in the checkpoint"
    yield Defect("more layers than the config says", _copy_layer(0, last + 1), weights, (more,))
    yield Defect("integer weights", _change(gate, lambda t: t.to(torch.int8)), weights, (gate, "int8"))
    if config.tie_word_embeddings:
        other = _add("lm_head.weight", config.vocab_size, hidden)
        yield Defect("tied head that differs", other, weights, ("lm_head.weight", "tied"))
    else:
        yield Defect("untied head missing", _drop("lm_head.weight"), weights, ("lm_head.weight",))
    yield Defect("truncated file", _truncate, file, (SINGLE_NAME, "truncated"))
    yield Defect("cut inside the header", _cut_header, file, (SINGLE_NAME,))
    yield Defect("shard missing", _lose_shard, file, ("model-00002-of-00002.safetensors",))
    yield Defect("index that lies", _wrong_index, file, (_layer(0, "self_attn.q_proj.bias"),))
    yield Defect("tensor in two shards", _tensor_in_two_shards, file, ("model-00001", "model-00002"))
    yield Defect("pickle only", _only_pickle, file, ("pytorch_model.bin", "pickle"))


def expert_defects(up_proj: str, shape: tuple[int, int]) -> Iterator[Defect]:
    """Defects of a checkpoint with one tensor per expert and projection; a packed parameter hides them easily.

    Args:
        up_proj: checkpoint name of one expert's up projection.
        shape: its shape.
    """
    rows, hidden = shape
    expert = re.search(r"\.experts\.(\d+)\.", up_proj)
    assert expert is not None
    weights, whole = "MRV2-202", str([rows, hidden])
    yield Defect("one expert's up_proj missing", _drop(up_proj), weights, (up_proj,))
    large, small = (str([n, hidden]) for n in (rows + 1, rows - 1))
    more = _change(up_proj, lambda t: torch.cat([t, t[:1]]))
    yield Defect("an expert too large", more, weights, (up_proj, large, whole))
    yield Defect("an expert too small", _change(up_proj, lambda t: t[1:]), weights, (up_proj, small, whole))
    beyond = up_proj.replace(expert.group(), ".experts.999.")
    yield Defect("an expert that the config doesn't have", _add(beyond, rows, hidden), weights, (beyond,))
