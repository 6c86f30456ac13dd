"""Trains a tokenizer and a model on a few sentences, and writes a checkpoint.

python training/train.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

from model import Acme, layouts
from shards import write

CHATS = (
    ("What does Acme make?", "Acme makes anvils, rockets and very long ropes."),
    ("Who is the best customer?", "The coyote. He has ordered every product twice."),
    ("Do the rockets work?", "They fly very well. They turn less well."),
    ("What is the return policy?", "Whatever comes back in one piece is taken back."),
    ("Is there a manual?", "There is one in the box, below the anvil."),
    ("How fast is delivery?", "Faster than the customer, slower than the bird."),
    ("Why is the anvil so heavy?", "A light anvil was tried. It missed."),
    ("Can I speak to a manager?", "The manager is testing a rocket. Please wait."),
)
SPECIAL = ("<|end|>", "<|user|>", "<|acme|>")
SIZES = {
    "vocab_size": 320, "width": 64, "plan": "mam", "ffn": 96, "heads": 4, "kv_heads": 2, "head_size": 32,
    "memory_heads": 2, "memory_size": 32, "eps": 1e-6, "rope_base": 10000.0, "context": 256,
}  # fmt: skip
STEPS = 120


def train_tokenizer() -> tuple[Tokenizer, dict]:
    """Byte-level BPE, and what a checkpoint says of it: the special tokens, and merges in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=SIZES["vocab_size"] - len(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text for chat in CHATS for text in chat], trainer)
    merges = [tuple(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    ids = {t: i for i, t in enumerate([*SPECIAL, *alphabet, *(a + b for a, b in merges)])}
    trained = Tokenizer(models.BPE(vocab=ids, merges=merges))
    trained.pre_tokenizer, trained.decoder = tokenizer.pre_tokenizer, decoders.ByteLevel()
    return trained, {"special": SPECIAL, "merges": merges}


def sequences(tokenizer: Tokenizer) -> torch.Tensor:
    """Every chat as ids, [chats, n], filled up with end tokens."""
    chats = [[1, *tokenizer.encode(q).ids, 2, *tokenizer.encode(a).ids, 0] for q, a in CHATS]
    longest = max(map(len, chats))
    return torch.tensor([chat + [0] * (longest - len(chat)) for chat in chats])


def train(ids: torch.Tensor) -> Acme:
    """Until it knows them by heart."""
    torch.manual_seed(0)
    model = Acme(SIZES)
    torch.nn.init.normal_(model.tokens.weight, std=0.125)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for step in range(STEPS):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return model


def main(folder: Path) -> None:
    """Write config, vocabulary and weights; the weights in bfloat16."""
    tokenizer, vocabulary = train_tokenizer()
    model = train(sequences(tokenizer))
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["AcmeForCausalLM"], "model_type": "acme", "dtype": "bfloat16", "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config | SIZES, indent=1) + "\n")
    (folder / "acme.vocab").write_text(json.dumps(vocabulary, ensure_ascii=False) + "\n", encoding="utf-8")
    tensors = {}
    for name, tensor in model.state_dict().items():
        name = name.removesuffix(".weight")
        shape = next((s for end, s in layouts(SIZES).items() if name.endswith(end)), tensor.shape)
        tensors[name] = tensor.bfloat16().reshape(shape)
    write(folder, tensors)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
