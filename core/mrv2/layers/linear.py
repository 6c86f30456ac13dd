"""Projections, and how they are run on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrv2.kernels.token_tile import make_arrivals
from mrv2.layers.argmax_screen import ArgmaxScreen, screen_bytes
from mrv2.layers.base import Slot

# What was measured on one CPU thread in fp32. A single token: PyTorch's product, and best, by a twentieth, with the
# weight stored column by column. Several: oneDNN's product with a copy of the weight in its own blocked layout; without
# the copy, from three tokens on, oneDNN's with rows (a tenth to a fifth slower). Many: all alike.
PACKED_FROM = 2
UNPACKED_FROM = 3
ONEDNN_UP_TO = 128
PACK_FOR_TOKENS = 16


@functools.cache
def onednn_linear() -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    """The (linear, pack) of oneDNN, or None where this PyTorch doesn't have them or they don't work."""
    try:
        # Private to PyTorch's compiler, hence the trial.
        linear: Any = torch.ops.mkldnn._linear_pointwise.default
        pack: Any = torch.ops.mkldnn._reorder_linear_weight.default
        with torch.inference_mode(), torch.device("cpu"):
            x, weight, bias = torch.ones(3, 8), torch.arange(32.0).view(4, 8), torch.ones(4)
            good = F.linear(x, weight, bias)
            for w in (weight, pack(weight, PACK_FOR_TOKENS)):
                if not torch.allclose(linear(x, w, bias, "none", [], ""), good):
                    return None
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return linear, pack


def make_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter of the default dtype on the default device; loading fills it."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def row_slot(module: nn.Module, name: str, start: int = 0, size: int | None = None) -> Slot:
    """A slot for rows [start, start + size) of `module`'s parameter `name`; all rows by default.

    The parameter is looked up when loading, since materialising a model replaces it.
    """
    shape = module.get_parameter(name).shape
    rows = shape[0] if size is None else size

    def load(tensor: Tensor) -> None:
        with torch.no_grad():
            module.get_parameter(name)[start : start + rows].copy_(tensor)

    return Slot(name, (rows, *shape[1:]), load)


def own_slots(module: nn.Module) -> dict[str, Slot]:
    """One slot for each parameter of `module` itself, under the parameter's name."""
    return {name: row_slot(module, name) for name, _ in module.named_parameters(recurse=False)}


def store_by_columns(weight: nn.Parameter) -> None:
    """Transpose a matrix within its memory: same parameter, address, shape and values, other strides."""
    if not weight.is_contiguous() or 1 in weight.shape:
        return
    with torch.no_grad():
        columns = weight.t().contiguous()  # the fast direction of PyTorch's copy
        weight.data = weight.data.view(columns.shape).copy_(columns).t()


class LinearBase(nn.Module):
    """A projection `x @ weight.T + bias` whose weight may have a packed copy beside it.

    The parameter stays where it is and remains the truth. A copy that is older than the last write to the
    parameter isn't used; `pack` makes a new one, and stores the parameter itself by columns.
    """

    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self._packed: Tensor | None = None
        self._packed_version = 0
        self.settled: tuple[nn.Parameter, nn.Parameter | None] | None = None
        """Weight and bias, once they are final; another object after each load."""

    def full_weight(self) -> nn.Parameter:
        """The weight, [out, in]."""
        weight: nn.Parameter = self.weight  # type: ignore[assignment]
        return weight

    def project(self, x: Tensor) -> Tensor:
        """[num_tokens, in] to [num_tokens, out]."""
        if x.shape[0] == 1 and self.settled is not None:
            return F.linear(x, *self.settled)
        weight = self.full_weight()
        if PACKED_FROM <= x.shape[0] <= ONEDNN_UP_TO and weight.dtype is torch.float32 and weight.is_cpu:
            ops = onednn_linear()
            if ops is not None:
                if self._packed is not None and weight._version == self._packed_version:
                    return ops[0](x, self._packed, self.bias, "none", [], "")
                if x.shape[0] >= UNPACKED_FROM and weight.is_contiguous():
                    return ops[0](x, weight, self.bias, "none", [], "")
        return F.linear(x, weight, self.bias)

    def pack_bytes(self) -> int:
        """Memory that `pack` would take; 0 where it can't help."""
        weight = self.full_weight()
        if weight.dtype is not torch.float32 or weight.device.type != "cpu" or weight.is_inference():
            return 0  # an inference tensor doesn't tell when it was written to
        return weight.nbytes if onednn_linear() is not None else 0

    def unpack(self) -> None:
        """Drop the packed copy. The parameter objects are final from here on."""
        self._packed = None
        self.settled = (self.full_weight(), self.bias)

    def pack(self) -> None:
        """Make the packed copy anew."""
        ops = onednn_linear()
        assert ops is not None
        weight = self.full_weight()
        store_by_columns(weight)
        with torch.inference_mode():
            self._packed = ops[1](weight.detach(), PACK_FOR_TOKENS)
        self._packed_version = weight._version


class PackedLinear(LinearBase):
    """Several projections of one input in one product; see `LayerSet.packed`."""

    def __init__(self, in_size: int, sizes: Mapping[str, int], *, bias: bool) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        out_size = sum(self.sizes.values())
        self.weight = make_parameter(out_size, in_size)
        self.bias = make_parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """All parts side by side, [num_tokens, sum of sizes]."""
        return self.project(x)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """One [num_tokens, size] per part, in order."""
        return torch.split(self.project(x), list(self.sizes.values()), -1)

    def weight_slots(self) -> dict[str, Slot]:
        """`../<part>.weight` and `.bias`: the parts' names are beside this module's."""
        slots: dict[str, Slot] = {}
        start = 0
        for part, size in self.sizes.items():
            for name, _ in self.named_parameters(recurse=False):
                slots[f"../{part}.{name}"] = row_slot(self, name, start, size)
            start += size
        return slots


class Linear(LinearBase):
    """One projection."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = make_parameter(out_size, in_size)
        self.bias = make_parameter(out_size) if bias else None
        self._arrivals: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in] to [num_tokens, out]."""
        return self.project(x)

    def arrivals(self) -> Tensor:
        """This projection's own counters of programs, see `make_arrivals`."""
        if self._arrivals is None or self._arrivals.device != self.weight.device:
            self._arrivals = make_arrivals(self.weight.device)
        return self._arrivals

    def finalize_weights(self) -> None:
        """Have the counters before any graph is captured."""
        if self.weight.is_cuda:
            self.arrivals()

    def weight_slots(self) -> dict[str, Slot]:
        """`weight`, and `bias` if there is one."""
        return own_slots(self)


class LMHead(LinearBase):
    """Logits; see `LayerSet.lm_head`.

    A tied head has no parameter of its own and reads the embedding's, so that moving or materialising the
    model can't part them.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: nn.Module | None,
        tied_path: str,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        super().__init__()
        self._tied_to = None if tied_to is None else (tied_to,)  # in a tuple: not a sub-module
        self._tied_path = tied_path  # of the shared parameter, relative to this module
        self._shape = (vocab_size, hidden_size)
        self.bias = None
        if tied_to is None:
            self.weight = make_parameter(vocab_size, hidden_size)
        self.scale = scale
        self.soft_cap = soft_cap
        self._screen: ArgmaxScreen | None = None

    def full_weight(self) -> nn.Parameter:
        """The head's weight, or the embedding's."""
        return cast(nn.Parameter, self.weight if self._tied_to is None else self._tied_to[0].weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab]."""
        logits = self.project(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """The most likely token of `hidden` [1, hidden_size], [1] int64, where that can be had for less than all
        logits; None: it can't. A soft cap keeps the order but not small differences, so logits decide then.
        """
        current = self._screen is not None and self.full_weight()._version == self._packed_version
        if not current or hidden.shape[0] != 1 or self.scale <= 0 or self.soft_cap is not None:
            return None
        assert self._screen is not None
        return self._screen(hidden)

    def pack_bytes(self) -> int:
        """As for any projection, and the screen for `greedy`."""
        size = super().pack_bytes()
        return size + screen_bytes(self.full_weight()) if size else 0

    def unpack(self) -> None:
        """Drop the packed copy and the screen."""
        super().unpack()
        self._screen = None

    def pack(self) -> None:
        """Make both anew."""
        super().pack()
        weight = self.full_weight()
        self._screen = ArgmaxScreen(weight.detach()) if screen_bytes(weight) else None

    def weight_slots(self) -> dict[str, Slot]:
        """`weight`; without a value of its own when tied."""
        if self._tied_to is not None:
            return {"weight": Slot(self._tied_path, self._shape, None)}
        return own_slots(self)


def pack_linears(model: nn.Module, budget: int) -> int:
    """Remake the packed copies of `model`'s projections, in order, as far as `budget` bytes go.

    Returns:
        Bytes of all copies made.
    """
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    for linear in linears:
        linear.unpack()
    spent = 0
    for linear in linears:
        if 0 < (size := linear.pack_bytes()) <= budget - spent:
            linear.pack()
            spent += size
    return spent
