"""`--from-config`: what a `config.json` adds to the answers, and what it asks for that nothing generated does.

Read as JSON and no more: no config class is imported and no code of a checkpoint runs, so any file will do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrv2.errors import InputFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a file says.

    Args:
        architecture: the class it names; empty: none that could be used.
        model_type: as written; empty: none that could be used.
        sizes: values that the generated config class takes as its defaults.
        open: what is left to do, a sentence each.
    """

    architecture: str
    model_type: str
    sizes: Mapping[str, Any]
    open: tuple[str, ...]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**53


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Of gated MLPs, as `mrv2.layers` has them."""

SIZES: dict[str, Callable[[object], bool]] = {
    "vocab_size": _is_size,
    "hidden_size": _is_size,
    "num_hidden_layers": _is_size,
    "num_attention_heads": _is_size,
    "num_key_value_heads": _is_size,
    "head_dim": _is_size,
    "hidden_act": lambda v: v in ACTIVATIONS,
    "rms_norm_eps": _is_number,
    "rope_theta": _is_number,
    "max_position_embeddings": _is_size,
    "tie_word_embeddings": _is_flag,
}
KIND_SIZES: Mapping[str, dict[str, Callable[[object], bool]]] = {
    "decoder": {"intermediate_size": _is_size, "sliding_window": _is_size},
    "moe": {
        "num_experts": _is_size,
        "num_experts_per_tok": _is_size,
        "moe_intermediate_size": _is_size,
        "norm_topk_prob": _is_flag,
        "sliding_window": _is_size,
    },
    "hybrid": {"intermediate_size": _is_size},
}
OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window", "norm_topk_prob", "tie_word_embeddings", "rope_theta")
"""Whose absence means something: nothing to be said of it."""

EXPERTS = r"(num|n)_(local_|routed_)?experts|num_experts_per_tok"
STATES = r"(ssm|mamba|linear|conv|time_mix|rwkv)_.*|.*(state|conv)_(size|dim|kernel)|d_state|d_conv"
FEATURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        r"(vision|audio|image|video)_.*",
        "images, audio or video: mrv2 has no media yet, the text model alone can run",
        (),
    ),
    (r"is_encoder_decoder", "an encoder beside the decoder: mrv2 runs decoders only", ()),
    (r"(kv|q)_lora_rank", "latent attention: no layer of mrv2 is that; a mixer with a cache of its own can be", ()),
    (r"quantization_config", "weights in fewer bits: only vLLM reads them, with its own layers", ()),
    (r".*(nextn|mtp)_.*", "layers that draft: mrv2 doesn't run them yet; list their tensors in `ignored`", ()),
    (r".*shared_expert.*", "experts that every token goes to: add an `L.gated_mlp` beside the others", ()),
    (r"n_group|topk_group|scoring_func", "another choice of experts: build it with `L.experts`", ()),
    (r"auto_map", "code in the checkpoint: it is never run, so write it down in this package", ()),
    (
        r"layer_types|.*layer_pattern",
        "layers that differ: `Block` gets the layer's number `i`, and builds all alike",
        (),
    ),
    (r"(final|attn)_logit_soft.*", "a soft cap: an argument of `L.lm_head` and of `L.self_attention`", ()),
    (r"attention_bias|qkv_bias|use_bias", "biases: arguments of `L.self_attention` and `L.gated_mlp`", ()),
    (r".*(qk|query_key)_(norm|layernorm).*", "normalised queries and keys: `qk_norm_eps` of `L.self_attention`", ()),
    (EXPERTS, "experts: `--kind moe` has them", ("decoder", "hybrid")),
    (STATES, "a state per request: `--kind hybrid` shows a mixer with one", ("decoder", "moe")),
)
"""Keys, what they mean, and for which kinds it is left to do; none named: for all. A key that is null or false, or an
empty list, asks for nothing."""

SILENT = re.compile(
    r"_.*|architectures|model_type|(torch_)?dtype|transformers_version|.*token_(id|index)|use_cache|initializer_range"
    r"|.*dropout|text_config|rope_parameters|rope_scaling|partial_rotary_factor|pretraining_tp|use_sliding_window"
    r"|max_window_layers|.*loss_coef|output_.*"
)
"""Keys that no model file has to read: facts about files, training, or rotary positions, which the layers read."""


def read_config(path: Path, kind: str) -> Found:
    """What `config.json` says to a project of a kind.

    Raises:
        InputFileError: it can't be read, or holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputFileError(f"it can't be read as JSON: {error}", where=str(file), fix="give a config.json") from error
    if not isinstance(raw, dict):
        raise InputFileError("it holds no JSON object", where=str(file), fix="give a config.json")
    inner = raw.get("text_config")
    text = raw | inner if isinstance(inner, dict) else raw
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        text = {"rope_theta": rope["rope_theta"]} | text
    wanted = SIZES | KIND_SIZES[kind]
    sizes = {key: text[key] for key, fits in wanted.items() if key in text and fits(text[key])}
    # What a layer can't have must not become a default: the generated tests would fail for it.
    for key in ("rms_norm_eps", "rope_theta"):
        if key in sizes:
            sizes[key] = float(sizes[key])
    architecture, open_ = _architecture(raw)
    model_type = text["model_type"] if isinstance(text.get("model_type"), str) else ""
    if isinstance(raw.get("model_type"), str):
        model_type = raw["model_type"]
    open_ += [*_features(text, kind), *_rotary(text), *_absent(text, wanted, sizes), *_unread(text, wanted)]
    return Found(
        architecture=architecture,
        model_type=model_type if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", model_type) else "",
        sizes=sizes,
        open=tuple(open_),
    )


def _architecture(raw: Mapping[str, Any]) -> tuple[str, list[str]]:
    names = raw.get("architectures")
    fitting = [n for n in names if isinstance(n, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", n)] if isinstance(
        names, list
    ) else []  # fmt: skip
    if not fitting:
        return "", ["`architectures` names no class: a checkpoint has to, or no adapter is found for it"]
    more = [f"`architectures` names {len(fitting)}: {', '.join(fitting)}; a host wants one"] if fitting[1:] else []
    return fitting[0], more


def _features(text: Mapping[str, Any], kind: str) -> list[str]:
    found = []
    for pattern, meaning, kinds in FEATURES:
        keys = [k for k, v in text.items() if re.fullmatch(pattern, k) and v not in (None, False, [], {}, 0)]
        if keys and (not kinds or kind in kinds):
            found.append(f"{_listed(keys)}: {meaning}")
    return found


ROTARY = ("partial_rotary_factor", "rope_scaling", "rope_parameters")
"""Keys that say more of rotary positions than their base."""


def _rotary(text: Mapping[str, Any]) -> list[str]:
    """What the layers follow, and the answer written beside them doesn't."""
    nested = [key for key in ROTARY if _per_layer_type(text.get(key))]
    keys = [key for key in ROTARY if key not in nested and _turns_otherwise(text.get(key))]
    found = (
        [f"{_listed(nested)}: one per layer type; `Block` chooses: `rope_parameters(c, layer_type)`"] if nested else []
    )
    if keys:
        follows = f"the model follows {'it' if len(keys) == 1 else 'them'}"
        found.append(f"{_listed(keys)}: {follows}; the answer and the small configs in `testing.py` don't yet")
    return found


def _per_layer_type(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values())


def _turns_otherwise(value: object) -> bool:
    """Whether a value asks for more than whole heads at the plain frequencies: 1, as a share, asks for nothing."""
    if not isinstance(value, dict):
        return value not in (None, 1)
    kind = value.get("rope_type", value.get("type"))
    plain = kind in (None, "default") or (kind == "linear" and value.get("factor") == 1)
    return not plain or value.get("partial_rotary_factor") not in (None, 1)


def _absent(
    text: Mapping[str, Any], wanted: Mapping[str, Callable[[object], bool]], sizes: Mapping[str, Any]
) -> list[str]:
    odd = [k for k in wanted if k not in sizes and text.get(k) is not None]
    absent = [k for k in wanted if k not in sizes and k not in odd and k not in OPTIONAL]
    found = [f"`{k}` is {json.dumps(text[k])[:40]}, which the generated code can't take: see `config.py`" for k in odd]
    if absent:
        found.append(f"{_listed(absent)}: not there, or under another name; `config.py` has a default of its own")
    return found


def _unread(text: Mapping[str, Any], wanted: Mapping[str, object]) -> list[str]:
    features = [pattern for pattern, _, _ in FEATURES]
    keys = [
        k for k in text
        if k not in wanted and not SILENT.fullmatch(k) and not any(re.fullmatch(p, k) for p in features)
    ]  # fmt: skip
    return [f"{_listed(keys)}: nothing reads {'it' if len(keys) == 1 else 'them'} yet"] if keys else []


MOST = 24
"""Keys of one sentence."""


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - MOST} more" if len(keys) > MOST else ""
    return ", ".join(f"`{_shown(key)}`" for key in keys[:MOST]) + more


def _shown(key: str) -> str:
    """On one line, and in characters that a file can hold."""
    return "".join(c if c.isprintable() else c.encode("unicode-escape").decode() for c in key[:60])
