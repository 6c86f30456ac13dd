"""What is checked: small configs, where their weights come from, and what the answer is. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrv2.errors import TargetError

MIN_CONTEXT = 64
"""Tokens that a config must serve: requests of the suites are that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far log-probabilities may be from each other. Tokens of float32 runs have to be equal, ties aside."""

    cpu: float = 1e-4  # float32, on a CPU
    gpu: float = 1e-3  # float32, on a GPU, whose sums come in another order
    bf16: float = 0.35  # largest difference at a position, bfloat16 against float32
    bf16_mean: float = 0.06  # mean difference
    bf16_top1: float = 0.8  # share of positions with the same likeliest token


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What `mrv2_test_target` returns, and what a test class can say in its place.

    Args:
        configs: small configs by name, objects of the config class. Together they have to use everything that
            `adapter.toml` declares. Each serves at least `MIN_CONTEXT` tokens.
        reference: the answer: `transformers_reference()`, `recorded_reference(file)`, or any callable that takes the
            checkpoint's folder and returns one that takes token ids (and options, if it has a second parameter) and
            gives logits [len(ids), vocab]. None: invariances carry the proof.
        checkpoint: `(folder, config) -> anything` that writes a checkpoint with random weights; or the folder of one,
            which then stands for the only config. None: transformers writes it, for models that it has; for others
            every weight slot gets random values, under our own names.
        options: `extra_args` that requests may carry, several different ones. The empty one is always tried.
        wrong_options: `extra_args` that have to be refused.
        tolerances: how far is too far.
    """

    configs: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[Path], Any] | None = None
    checkpoint: Callable[[Path, Any], object] | Path | str | None = None
    options: Sequence[Mapping[str, Any]] = ()
    wrong_options: Sequence[Mapping[str, Any]] = ()
    tolerances: Tolerances = field(default_factory=Tolerances)

    def __post_init__(self) -> None:
        if not isinstance(self.configs, Mapping) or not all(isinstance(n, str) and n for n in self.configs):
            raise TargetError(f"configs is {self.configs!r}", where="Target", fix="give a dict: name to config")
        odd = [n for n in self.configs if Path(n).name != n or n == ".." or not n.isprintable()]
        if odd:
            raise TargetError(f"a config is called {odd[0]!r}", where="Target", fix="give names that files can have")
        if self.reference is not None and not callable(self.reference):
            raise TargetError(
                f"reference is {self.reference!r}",
                where="Target",
                fix="give transformers_reference(), recorded_reference(file), a callable, or None",
            )


TINY: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
"""As small as every host takes: vLLM's attention on a CPU wants heads of 32."""

EPSILON = 0.02
"""Of norms: no model's own, and large enough to be missed where a model has another, whatever scales its embeddings."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
"""Names that configs have for it."""


def tiny_config(config_class: type | str, **changes: Any) -> Any:
    """A small config of a transformers class, or of one that is built alike.

    Args:
        config_class: the class, or its name in transformers.
        changes: further arguments, in place of ours.
    """
    if isinstance(config_class, str):
        import transformers

        config_class = getattr(transformers, config_class)
    assert isinstance(config_class, type)
    known = inspect.signature(config_class).parameters
    others = any(p.kind is p.VAR_KEYWORD for p in known.values())
    tiny = {k: v for k, v in TINY.items() if others or k in known}
    tiny |= {k: EPSILON for k in EPSILONS if k in known or (others and hasattr(config_class, k))}
    if "head_dim" not in tiny:  # heads divide the hidden size then
        tiny["hidden_size"] = TINY["num_attention_heads"] * TINY["head_dim"]
    return config_class(**(tiny | changes))
