"""Where the activations come from that a model is compared with: transformers, any callable, or a file."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from mrv2.testing.references import Answer, read_tensors, takes_options

T = TypeVar("T")

KINDS = ("in", "out", "more", "q", "k", "attended")
FOLDER = "failed for the checkpoint's folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What a reference's modules take and give for one sequence.

    Args:
        name: of the reference.
        ids: the sequence.
        tensors: `KIND.NAME` to a tensor, by the reference's own names: see `Recorder`; of an attention
            module `q` and `k` as they are compared, rotated, and `attended`, what comes of it before the projection.
        logits: what the model says in the end, of all tokens or of the last: [n, vocab] or [1, vocab], a batch of one
            before it or not. None: it isn't known.
        bare: whether `logits` is a tensor that a module returned without a name: of one without a head, hidden states.
    """

    name: str
    ids: list[int]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    bare: bool = False


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
            f"transformers can't load {folder}: {_first_line(error)}",
            where="--reference transformers",
            fix="give --reference MODULE:FUNCTION, which gives the reference as a torch module or as a function of "
            "token ids, or recorded activations (mrv2 parity --recorder)",
        ) from error
    return of_module(model, ids, "transformers", use_cache=False)


def of_module(model: nn.Module, ids: Sequence[int], name: str, **options: Any) -> Activations:
    """A torch module that takes token ids [1, n]."""
    tensors: dict[str, Tensor] = {}
    with torch.inference_mode(), _attention(model, tensors), Recorder(model) as recorder:
        out = model(torch.tensor([list(ids)]), **options)
    logits, named = _logits(out)
    return Activations(
        name=name,
        ids=list(ids),
        tensors=recorder.tensors | tensors,
        logits=logits,
        bare=logits is not None and not named,
    )


def _logits(out: Any) -> tuple[Tensor | None, bool]:
    """The logits in what a model returned, and whether it calls them so: its `logits`; else the tensor itself, or of
    several the first that has a value for more than a whole batch, as a loss has.
    """
    named = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(named, Tensor | np.ndarray):
        return torch.as_tensor(named), True
    for given in out if isinstance(out, tuple | list) else (out,):
        if isinstance(given, Tensor | np.ndarray) and given.ndim > 1:
            tensor = torch.as_tensor(given)
            if tensor.is_floating_point():
                return tensor, False
    return None, False


def _first_line(error: Exception, size: int = 200) -> str:
    """Type and first line of an exception, as much as fits a sentence: some go on with all that they would take."""
    first = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= size else f"{text[: size - 1].rstrip()}…"


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
    function of a list of ids that gives logits, or tensors by names such as `out.model.layers.0` (and `logits`); so
    what a conformance target takes as its reference is one too. What fails for the folder and gives logits for a list
    of ids stands for itself.

    Raises:
        TargetError: there is no such function, or it gives something else.
    """
    module, _, function = spec.partition(":")
    if (here := os.getcwd()) not in sys.path:  # behind all that is installed; a console script's path lacks it
        sys.path.append(here)
    make = _asked(spec, "can't be imported", lambda: getattr(importlib.import_module(module), function))
    made = _opened(spec, make, folder, ids)
    if isinstance(made, nn.Module):
        made.eval()
        return _asked(spec, "failed for token ids [1, n]", lambda: of_module(made, ids, spec))
    if isinstance(made, Answer):
        known = made.recorded[0] if made.recorded else list(ids)
        logits = _asked(spec, "failed for a list of token ids", lambda: made.logits(known, {}))
        return Activations(name=spec, ids=known, logits=logits)
    if not callable(made):
        raise _no_reference(f"{spec} gave a {type(made).__name__} for the checkpoint's folder, which can't be called")
    return _said(spec, ids, _asked(spec, "failed for a list of token ids", lambda: _ask(made, ids)))


def _opened(spec: str, make: Any, folder: Path, ids: Sequence[int]) -> Any:
    try:
        return make if isinstance(make, nn.Module) else _asked(spec, FOLDER, lambda: make(folder))
    except TargetError:
        try:
            logits, _ = _asked(spec, "failed for a list of token ids", lambda: _logits(_ask(make, ids)))
        except TargetError:  # it is no function of ids either, so what it said of the folder is what matters
            logits = None
        if logits is None:
            raise
        return make


def _ask(ask: Callable[..., Any], ids: Sequence[int]) -> Any:
    """As conformance tests ask: a second parameter is for a request's options."""
    with torch.inference_mode():
        return ask(list(ids), {}) if takes_options(ask) else ask(list(ids))


def _said(spec: str, ids: Sequence[int], found: Any) -> Activations:
    logits, _ = _logits(found)
    if logits is None and not isinstance(found, Mapping):
        raise _no_reference(f"{spec} gave a {type(found).__name__}, neither logits [n, vocab] nor tensors by name")
    named = {str(n): t for n, t in found.items()} if isinstance(found, Mapping) else {}
    named = {n: t for n, t in named.items() if n.partition(".")[0] in KINDS}
    odd = [n for n, t in named.items() if not isinstance(t, Tensor | np.ndarray)]
    if odd:
        raise _no_reference(f"{spec} gave a {type(named[odd[0]]).__name__} as {odd[0]!r}, not a tensor")
    if logits is None and not named:
        names = ", ".join(map(str, list(found)[:3])) or "nothing"
        raise _no_reference(f"{spec} gave {names}: no name begins with out. or in., and none is logits")
    tensors = {n: torch.as_tensor(t) for n, t in named.items()}
    return Activations(name=spec, ids=list(ids), tensors=tensors, logits=logits)


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
        "gives a torch module, or a function of token ids that gives logits [n, vocab], or tensors by names such as "
        "out.model.layers.0",
    )


def of_file(file: Path) -> Activations:
    """What a `Recorder` saved, or the same names in a `.npz`, or logits alone. Of several sequences the first, of
    those with activations if there are any.

    Raises:
        TargetError: it can't be read, or holds neither activations nor logits.
    """
    tensors = read_tensors(file, where="--reference")
    starts = sorted(n.removesuffix("input_ids") for n in tensors if n.endswith(".input_ids"))
    found: list[Activations] = []
    for start in starts:
        own = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
        found.append(
            Activations(
                name=f"recorded in {file.name}",
                ids=own["input_ids"].flatten().long().tolist(),
                tensors={n: t for n, t in own.items() if n.partition(".")[0] in KINDS},
                logits=own.get("logits"),
            )
        )
    usable = [a for a in found if a.tensors] or [a for a in found if a.logits is not None]
    if not usable:
        raise TargetError(
            f"{file} has {'no activations and no logits' if starts else 'no input_ids'}",
            where="--reference",
            fix="record with the file that `mrv2 parity --recorder` prints: 0.input_ids, 0.out.NAME, 0.in.NAME, "
            "0.logits",
        )
    return usable[0]


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
