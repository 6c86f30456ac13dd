"""Where the activations come from that a model is compared with: transformers, any callable, or a file."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from mrv2.errors import TargetError
from mrv2.layers.base import WeightMap
from mrv2.loading import describe, raised_at
from mrv2.testing.recorders.record_activations import Recorder
from mrv2.testing.references import read_tensors

T = TypeVar("T")

KINDS = ("in", "out", "more", "q", "k", "attended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What a reference's modules take and give for one sequence.

    Args:
        name: of the reference.
        ids: the sequence.
        tensors: `KIND.NAME` to a tensor, by the reference's own names: see `Recorder`; of an attention
            module `q` and `k` as they are compared, rotated, and `attended`, what comes of it before the projection.
    """

    name: str
    ids: list[int]
    tensors: Mapping[str, Tensor]


def of_transformers(folder: Path, ids: Sequence[int], dtype: torch.dtype) -> Activations:
    """Transformers' model of a checkpoint.

    Raises:
        TargetError: transformers can't load it.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    except Exception as error:  # of transformers, of whatever it loads
        raise TargetError(
            f"transformers can't load {folder}: {type(error).__name__}: {error}",
            where="--reference transformers",
            fix="give recorded activations (mrv2 parity --recorder), or MODULE:FUNCTION",
        ) from error
    return of_module(model, ids, "transformers", use_cache=False)


def of_module(model: nn.Module, ids: Sequence[int], name: str, **options: Any) -> Activations:
    """A torch module that takes token ids [1, n]."""
    tensors: dict[str, Tensor] = {}
    with torch.inference_mode(), _attention(model, tensors), Recorder(model) as recorder:
        model(torch.tensor([list(ids)]), **options)
    return Activations(name=name, ids=list(ids), tensors=recorder.tensors | tensors)


@contextmanager
def _attention(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Note what transformers' attention functions get and give, which are no modules."""
    names = {id(module): name for name, module in model.named_modules()}
    homes = {type(module).__module__ for module in model.modules()}

    def watched(run: Any) -> Any:
        def attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = run(module, query, key, *args, **kwargs)
            name = names.get(id(module))
            for kind, tensor in (("q", query), ("k", key)):  # [1, heads, n, head_dim]
                tensors.setdefault(f"{kind}.{name}", tensor.detach().transpose(1, 2).flatten(2).clone())
            tensors.setdefault(f"attended.{name}", result[0].detach().flatten(2).clone())
            return result

        return attend

    with ExitStack() as stack:
        for home in homes:
            module: Any = sys.modules.get(home)
            if hasattr(module, "eager_attention_forward"):
                run = module.eager_attention_forward
                stack.enter_context(mock.patch.object(module, "eager_attention_forward", watched(run)))
        yield


def of_callable(spec: str, folder: Path, ids: Sequence[int]) -> Activations:
    """`MODULE:FUNCTION`, which takes the checkpoint's folder and gives a torch module that takes ids [1, n], or a
    callable that takes a list of ids and gives tensors by names such as `out.model.layers.0`.

    Raises:
        TargetError: there is no such function, or it gives something else.
    """
    module, _, function = spec.partition(":")
    if (here := os.getcwd()) not in sys.path:  # behind all that is installed; a console script's path lacks it
        sys.path.append(here)
    make = _asked(spec, "can't be imported", lambda: getattr(importlib.import_module(module), function))
    made = _asked(spec, "failed for the checkpoint's folder", lambda: make(folder))
    if isinstance(made, nn.Module):
        made.eval()
        return _asked(spec, "failed for token ids [1, n]", lambda: of_module(made, ids, spec))
    found = _asked(spec, "failed for a list of token ids", lambda: made(list(ids))) if callable(made) else None
    if not isinstance(found, Mapping):
        raise _no_reference(f"{spec} gave a {type(found or made).__name__}, not tensors by name")
    odd = [n for n, t in found.items() if not isinstance(t, Tensor | np.ndarray)]
    if odd:
        raise _no_reference(f"{spec} gave a {type(found[odd[0]]).__name__} as {odd[0]!r}, not a tensor")
    tensors = {str(n): torch.as_tensor(t) for n, t in found.items()}
    if not any(n.partition(".")[0] in KINDS for n in tensors):
        raise _no_reference(f"{spec} gave {', '.join(list(tensors)[:3]) or 'nothing'}: no name begins with out. or in.")
    return Activations(name=spec, ids=list(ids), tensors=tensors)


def _asked(spec: str, what: str, ask: Callable[[], T]) -> T:
    """What a user's code gives; whatever it raises is told with its line."""
    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        at = raised_at(error.__traceback__)
        raise _no_reference(f"{spec} {what}: {describe(error)}{f', raised at {at}' if at else ''}") from error


def _no_reference(what: str) -> TargetError:
    return TargetError(
        what,
        where="--reference",
        fix="give MODULE:FUNCTION, of a module that is installed or lies here: it takes the checkpoint's folder, and "
        "gives a torch module, or a function of token ids that gives tensors by names such as out.model.layers.0",
    )


def of_file(file: Path) -> Activations:
    """What a `Recorder` saved, or the same names in a `.npz`. Of several sequences the first.

    Raises:
        TargetError: it can't be read, or holds no activations.
    """
    tensors = read_tensors(file, where="--reference")
    ids = next((name for name in tensors if name.endswith(".input_ids")), None)
    start = "" if ids is None else ids.removesuffix("input_ids")
    found = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
    found = {n: t for n, t in found.items() if n.partition(".")[0] in KINDS}
    if ids is None or not found:
        raise TargetError(
            f"{file} has {'no input_ids' if ids is None else 'no activations'}",
            where="--reference",
            fix="record with the file that `mrv2 parity --recorder` prints: 0.input_ids, 0.out.NAME, 0.in.NAME",
        )
    return Activations(name=f"recorded in {file.name}", ids=tensors[ids].flatten().long().tolist(), tensors=found)


def read_names(file: Path) -> tuple[tuple[str, str], ...]:
    """A name map: a JSON object of regular expressions for the reference's names, and what takes their place.

    Raises:
        TargetError: it isn't that.
    """
    try:
        pairs = json.loads(file.read_text(encoding="utf-8"))
        for pattern, name in pairs.items():
            re.sub(pattern, name, "")
    except (OSError, ValueError, AttributeError, TypeError, re.error) as error:
        raise TargetError(
            f"{file} is no name map: {error}", where="--names", fix='give JSON: {"^blocks\\\\.": "model.layers."}'
        ) from error
    return tuple(pairs.items())


def our_names(
    tensors: Mapping[str, Tensor], names: Sequence[tuple[str, str]], weight_map: WeightMap, ours: Sequence[str]
) -> dict[str, Tensor]:
    """The reference's tensors by our points: its names through `names`, then as those of its weights through the
    adapter's `weight_map`. Attention goes by the module that holds it.
    """
    found: dict[str, Tensor] = {}
    for point, tensor in tensors.items():
        kind, _, name = point.partition(".")
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        mapped = (weight_map.canonical(f"{name}.weight") or f"{name}.weight").removesuffix(".weight")
        if kind in ("q", "k", "attended"):
            same = [o for o in ours if o == f"q.{mapped}" or o.startswith(f"q.{mapped}.")]
            mapped = same[0].removeprefix("q.") if len(same) == 1 else mapped
            kind = "out" if kind == "attended" else kind
        found[f"{kind}.{mapped}"] = tensor
    return found
