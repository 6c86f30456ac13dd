"""Checkpoints as training keeps them: an index, and shards of raw values with a header each.

The format in full is described where it is read, `src/mrv2_adapter_acme/shards.py`.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

HEADER = struct.Struct("<8sQQ40x")
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def write(folder: Path, tensors: Mapping[str, Tensor], *, shard_bytes: int = 160 << 10) -> None:
    """Write tensors in their own dtypes, a new shard whenever one is full."""
    shards, entries = [bytearray()], {}
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        if shards[-1] and len(shards[-1]) + len(data) > shard_bytes:
            shards.append(bytearray())
        body = shards[-1]
        body.extend(bytes(-len(body) % 64))
        entries[name] = {
            "shard": len(shards) - 1,
            "offset": HEADER.size + len(body),
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "crc32": zlib.crc32(data),
        }
        body.extend(data)
    files = []
    for number, body in enumerate(shards):
        file = folder / f"weights-{number:02}.acme"
        file.write_bytes(HEADER.pack(b"ACMESHRD", number, len(body)) + body)
        files.append({"file": file.name, "bytes": HEADER.size + len(body)})
    index = {"format": "acme-shards/1", "shards": files, "tensors": entries}
    lines = json.dumps(index).replace('}, "', '},\n"')
    (folder / "weights.index.json").write_text(lines + "\n")


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, into memory."""
    index = json.loads((folder / "weights.index.json").read_text())
    files = [(folder / shard["file"]).read_bytes() for shard in index["shards"]]
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    found = {}
    for name, entry in index["tensors"].items():
        count = torch.Size(entry["shape"]).numel()
        body = bytearray(files[entry["shard"]])
        found[name] = torch.frombuffer(body, dtype=dtypes[entry["dtype"]], count=count, offset=entry["offset"])
        found[name] = found[name].view(entry["shape"])
    return found
