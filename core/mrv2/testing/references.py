"""Where right answers come from: transformers, any callable, or a file of recorded ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrv2.errors import TargetError


class Answer:
    """What a reference says of one checkpoint.

    Args:
        logits: (token ids, options) to logits [len(ids), vocab]; None: it doesn't know this sequence.
        name: for reports.
        recorded: the sequences that it knows; empty: any.
        layers: (token ids, options) to the residual stream after each layer, [len(ids), hidden] each, where it can.
    """

    def __init__(
        self,
        logits: Callable[[Sequence[int], Mapping[str, Any]], Tensor | None],
        name: str,
        recorded: Sequence[list[int]] = (),
        layers: Callable[[Sequence[int]], list[Tensor]] | None = None,
    ) -> None:
        self.name, self.recorded, self.layers = name, tuple(recorded), layers
        self._logits = lru_cache(maxsize=256)(lambda ids, options: logits(ids, dict(options)))

    def logits(self, ids: Sequence[int], options: Mapping[str, Any]) -> Tensor | None:
        """Logits at each position, [len(ids), vocab], as the reference gives them."""
        with torch.inference_mode():
            return self._logits(tuple(ids), tuple(sorted(options.items())))

    def logprobs(self, ids: Sequence[int], options: Mapping[str, Any]) -> Tensor | None:
        """Log-probabilities at each position, [len(ids), vocab] float32."""
        logits = self.logits(ids, options)
        return None if logits is None else logits.float().cpu().log_softmax(-1)


def answer_of(reference: Callable[[Path], Any], folder: Path) -> Answer:
    """Open a reference for a checkpoint.

    Raises:
        TargetError: what it returns can't be asked.
    """
    opened = reference(folder)
    if isinstance(opened, Answer):
        return opened
    name = getattr(reference, "__name__", type(reference).__name__)
    if not callable(opened):
        raise TargetError(
            f"{name} returned a {type(opened).__name__} for a checkpoint, not a callable",
            where="reference",
            fix="return what takes token ids and gives logits [len(ids), vocab]",
        )
    if takes_options(opened):
        return Answer(lambda ids, options: opened(list(ids), options), name)
    # It knows no options, so it can't tell what they should change.
    return Answer(lambda ids, options: None if options else opened(list(ids)), name)


def takes_options(ask: Callable[..., Any]) -> bool:
    """Whether a function of token ids has a second parameter, for a request's options."""
    return len([p for p in inspect.signature(ask).parameters.values() if p.kind in (0, 1, 2)]) > 1


def transformers_reference(model_class: Any = None) -> Callable[[Path], Answer]:
    """Transformers' model of the checkpoint, in float32, its cache off.

    Args:
        model_class: with `from_pretrained`; None: AutoModelForCausalLM.
    """

    def transformers(folder: Path) -> Answer:
        from transformers import AutoModelForCausalLM

        cls = model_class or AutoModelForCausalLM
        model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

        def run(ids: Sequence[int], **options: Any) -> Any:
            with torch.inference_mode():
                return model(input_ids=torch.tensor([list(ids)]), use_cache=False, **options)

        def layers(ids: Sequence[int]) -> list[Tensor]:
            # The last of `hidden_states` is already normalised.
            return [h[0] for h in run(ids, output_hidden_states=True).hidden_states[1:-1]]

        def logits(ids: Sequence[int], options: Mapping[str, Any]) -> Tensor | None:
            return None if options else run(ids).logits[0]

        return Answer(logits, "transformers", layers=layers)

    return transformers


def recorded_reference(file: str | Path) -> Callable[[Path], Answer]:
    """Logits that another program left in a file: for each sequence NAME `NAME.input_ids` [n] and `NAME.logits`
    [n, vocab], all computed with the checkpoint that the target names, and without options.

    Args:
        file: `.safetensors` or `.npz`.

    Raises:
        TargetError: when it is opened: the file is missing, or doesn't hold that.
    """

    def recorded(folder: Path) -> Answer:
        tensors = read_tensors(Path(file), where="recorded_reference")
        names = [n.removesuffix(".input_ids") for n in tensors if n.endswith(".input_ids")]
        bad = [n for n in names if f"{n}.logits" not in tensors or len(tensors[f"{n}.logits"]) != len(_ids(tensors, n))]
        if not names or bad:
            raise TargetError(
                f"{file} has {'no sequence' if not names else 'no fitting logits for ' + ', '.join(bad)}",
                where="recorded_reference",
                fix="store NAME.input_ids [n] and NAME.logits [n, vocab] for each sequence",
            )
        known = {tuple(_ids(tensors, n)): tensors[f"{n}.logits"] for n in names}

        def logits(ids: Sequence[int], options: Mapping[str, Any]) -> Tensor | None:
            # A causal model's answer about a beginning is the beginning of its answer.
            whole = (known[k] for k in known if not options and k[: len(ids)] == tuple(ids))
            found = next(whole, None)
            return None if found is None else found[: len(ids)]

        return Answer(logits, f"recorded in {Path(file).name}", recorded=[list(k) for k in known])

    return recorded


def _ids(tensors: Mapping[str, Tensor], name: str) -> list[int]:
    ids: list[int] = tensors[f"{name}.input_ids"].flatten().tolist()
    return ids


def read_tensors(file: Path, *, where: str) -> dict[str, Tensor]:
    """All tensors of a `.safetensors` or `.npz` file.

    Raises:
        TargetError: it can't be read.
    """
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(file)
    except Exception as error:  # of the system, of NumPy, of safetensors
        raise TargetError(
            f"{file} can't be read: {type(error).__name__}: {error}",
            where=where,
            fix="give a .safetensors or .npz file",
        ) from error
    return tensors
