"""Records what the trained model computes, for the people who serve it: they get this file and a checkpoint, no code.

mrv2 parity --recorder > record_activations.py     # one file that needs torch alone
python training/record.py CHECKPOINT recorded.safetensors
"""

import json
import sys
from pathlib import Path

import torch
from record_activations import Recorder, write_safetensors

from model import Acme
from shards import read

ACTIVATIONS = 8
"""Tokens of the sequence whose activations are kept as well."""
LOGITS = (44, 30)
"""Tokens of those of which only logits are."""


def load(folder: Path) -> Acme:
    """The model of a checkpoint, in float32."""
    model = Acme(json.loads((folder / "config.json").read_text())).eval()
    tensors = read(folder)
    for name, tensor in model.state_dict().items():
        tensor.copy_(tensors[name.removesuffix(".weight")].reshape(tensor.shape))
    return model


def main(folder: Path, file: Path) -> None:
    """One sequence with activations, and others with logits."""
    model = load(folder)
    ids = torch.randint(0, model.tokens.num_embeddings, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with Recorder(model) as recorder:
            logits = model(ids[:, :ACTIVATIONS])
        found = {"0.input_ids": ids[0, :ACTIVATIONS], "0.logits": logits[0]}
        found |= {f"0.{name}": tensor for name, tensor in recorder.tensors.items()}
        for number, n in enumerate(LOGITS, 1):
            some = ids.roll(7 * number)[:, :n]
            found |= {f"{number}.input_ids": some[0], f"{number}.logits": model(some)[0]}
    write_safetensors(file, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
