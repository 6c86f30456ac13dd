"""Record what each module of a PyTorch model takes and gives, for `mrv2 parity MODEL --reference dump.safetensors`.

Needs torch alone. Copy this one file into the training repository:

    from record_activations import Recorder

    with torch.no_grad(), Recorder(model) as recorder:
        logits = model(input_ids)  # one sequence, [1, n]
    recorder.save("dump.safetensors", input_ids, logits)

Each tensor is copied when it is seen: a buffer that the model writes again later would else show its last value
everywhere.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


class Recorder:
    """Watches a model within a `with` block.

    Attributes:
        tensors: of each module NAME, when it is first called: `out.NAME` its output, of a tuple the first; `more.NAME`
            the second of a tuple (a residual that is kept apart); `in.NAME` the input, of linear layers and of members
            of a list of modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        """Start."""
        members = {id(m) for parent in self._model.modules() if isinstance(parent, nn.ModuleList) for m in parent}
        for name, module in self._model.named_modules():
            if not name:
                continue
            if isinstance(module, nn.Linear) or id(module) in members:
                self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
            self._keep("in", name, given[:1])

        return note

    def _after(self, name: str) -> Any:
        def note(module: nn.Module, args: object, out: Any) -> None:
            values = list(out) if isinstance(out, (tuple, list)) else [out]
            self._keep("out", name, values[:1])
            self._keep("more", name, values[1:2])

        return note

    def _keep(self, kind: str, name: str, values: list[Any]) -> None:
        if values and isinstance(values[0], Tensor) and values[0].is_floating_point():
            self.tensors.setdefault(f"{kind}.{name}", values[0].detach().clone())

    def save(self, file: str | Path, input_ids: Tensor, logits: Tensor | None = None) -> None:
        """Write a safetensors file.

        Args:
            file: its path.
            input_ids: of the one sequence, [n] or [1, n].
            logits: [n, vocab] or [1, n, vocab].
        """
        tensors = {"0.input_ids": input_ids.flatten().long()} | {f"0.{k}": t for k, t in self.tensors.items()}
        if logits is not None:
            tensors["0.logits"] = logits.detach().reshape(-1, logits.shape[-1])
        write_safetensors(Path(file), tensors)


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """The format in full: the header's length in 8 bytes, the header as JSON, then the data."""
    header: dict[str, Any] = {}
    end = 0
    data = [t.detach().cpu().contiguous() for t in tensors.values()]
    for name, tensor in zip(tensors, data, strict=True):
        size = tensor.numel() * tensor.element_size()
        shape, offsets = list(tensor.shape), [end, end + size]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for tensor in data:
            out.write(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()))
