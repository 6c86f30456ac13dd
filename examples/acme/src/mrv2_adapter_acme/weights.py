"""How names and layouts of our checkpoints become the model's.

Loading is strict: a tensor too many, too few, or of another shape is an error that names it. What `separate` doesn't
know it hands on as it is, so that the loader can say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrv2.layers import WeightMap
from torch import Tensor

PAIRS = {".mlp.gate_up": ("gate_proj", "up_proj"), ".mixer.keep_rate": ("keep_proj", "rate_proj")}
"""[n, 2, width]: the two halves of a pair alternate row by row."""


def separate(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Take apart what training keeps together.

    `qkv` is [groups, queries + 2, size, width]: of each head in turn its queries, its key, and its value, so that a
    device that trains some heads has one slice of it. Gains are stored less one.
    """
    for name, tensor in tensors:
        module, _, last = name.rpartition(".")
        pair = next((parts for end, parts in PAIRS.items() if name.endswith(end)), None)
        if last == "qkv" and tensor.dim() == 4 and tensor.shape[1] > 2:
            for part, rows in (("q", tensor[:, :-2]), ("k", tensor[:, -2]), ("v", tensor[:, -1])):
                yield f"{module}.{part}_proj.weight", rows.reshape(-1, tensor.shape[-1])
        elif pair is not None and tensor.dim() == 3 and tensor.shape[1] == 2:
            for part, rows in zip(pair, tensor.unbind(1), strict=True):
                yield f"{module}.{part}.weight", rows
        elif last == "gain":
            yield f"{module}.weight", 1 + tensor.float()
        else:
            yield name, tensor


WEIGHT_MAP = WeightMap(
    # (regex, replacement), applied in this order. A norm belongs to the layer that it feeds.
    rename=(
        (r"^tokens$", "model.embed_tokens.weight"),
        (r"^final\.", "model.norm."),
        (r"^blocks\.", "model.layers."),
        (r"\.pre\.", ".mixer.norm."),
        (r"\.post\.", ".mlp.norm."),
        (r"\.attn\.out$", ".mixer.o_proj.weight"),
        (r"\.mem\.out$", ".mixer.out_proj.weight"),
        (r"\.mem\.gate$", ".mixer.gate_proj.weight"),
        (r"\.(attn|mem)\.", ".mixer."),
        (r"\.ffn\.down$", ".mlp.down_proj.weight"),
        (r"\.ffn\.", ".mlp."),
    ),
    ignored=(),
    transform=separate,
)
