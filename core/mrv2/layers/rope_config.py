"""Rotary parameters as configs spell them, brought to one form. Imports no transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mrv2.errors import RopeError

DEFAULT_THETA = 10_000.0
"""What a config without `rope_theta` means, in transformers as well."""

_COMMON = frozenset({"rope_type", "rope_theta", "partial_rotary_factor"})
# Keys of each type beyond the common ones: (required, optional), as transformers' rope functions read them.
_TYPES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        frozenset({"factor", "attention_factor"}),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "proportional": (frozenset(), frozenset({"factor"})),
}
_NESTED = ("rope_parameters", "rope_scaling")
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_NOTES = frozenset({"finetuned"})  # keys that tell how a checkpoint came about and change nothing

_LISTS = frozenset({"short_factor", "long_factor"})

MAX_FACTOR = 1e6
"""Largest stretch taken for meant: real ones are below a thousand, larger ones are damage."""

# (test, expected) of numbers by key; of others, any finite number will do.
_POSITIVE = (lambda v: v > 0, "a positive number")
_RULES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "rope_theta": _POSITIVE,
    "factor": (lambda v: 0 < v <= MAX_FACTOR, f"a positive number, at most {MAX_FACTOR:g}"),
    "partial_rotary_factor": (lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
    "original_max_position_embeddings": (lambda v: v >= 1 and v == int(v), "a positive integer"),
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
}

Value = int | float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary configuration, hashable: layers with equal specs share tables.

    Attributes:
        rope_type: a key of transformers' `ROPE_INIT_FUNCTIONS`, or "default".
        head_dim: size of the heads it is applied to.
        max_position: `max_position_embeddings` of the config.
        params: all other parameters, by name, sorted.
    """

    rope_type: str
    head_dim: int
    max_position: int
    params: tuple[tuple[str, Value], ...]

    @classmethod
    def parse(cls, rope: Mapping[str, Any], *, head_dim: int, max_position: int, where: str = "") -> RopeSpec:
        """Check `rope`, in either spelling, against what its type takes.

        Raises:
            RopeError: unknown type, unknown or missing key, a value out of range, or contradictory spellings.
        """
        params = rope_parameters(rope, where=where)
        rope_type = params.pop("rope_type")
        if rope_type not in _TYPES:
            raise RopeError(f"rope_type is {rope_type!r}", where=where, fix=f"use one of: {', '.join(sorted(_TYPES))}")
        required, optional = _TYPES[rope_type]
        missing = sorted(required - params.keys())
        unknown = sorted(params.keys() - required - optional - _COMMON)
        # Configs keep the pre-training length beside any type; those that don't scale by it have no use for it.
        if "original_max_position_embeddings" in unknown and rope_type in ("default", "linear", "proportional"):
            unknown.remove("original_max_position_embeddings")
            del params["original_max_position_embeddings"]
        if missing or unknown:
            parts = [f"lacks {', '.join(missing)}"] if missing else []
            parts += (
                [f"has {', '.join(f'{k}={params[k]!r}' for k in unknown)}, which it doesn't take"] if unknown else []
            )
            takes = ", ".join(sorted(required | optional | _COMMON))
            raise RopeError(f"rope_type {rope_type!r} {' and '.join(parts)}", where=where, fix=f"it takes: {takes}")
        frozen = {key: checked(key, value, where=where) for key, value in params.items()}
        return cls(rope_type, head_dim, max_position, tuple(sorted(frozen.items())))

    @property
    def dynamic(self) -> bool:
        """Frequencies depend on how long the request is, once that exceeds `fixed_up_to`."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def fixed_up_to(self) -> int | None:
        """Longest request whose tokens' rotation depends on their position alone; None: any."""
        if self.rope_type == "longrope":
            return int(dict(self.params)["original_max_position_embeddings"])  # type: ignore[arg-type]
        return self.max_position if self.rope_type == "dynamic" else None


def checked(key: str, value: Any, *, where: str = "") -> Value:
    """`value` as a hashable number or tuple of numbers.

    Raises:
        RopeError: it isn't what `key` takes.
    """
    test, expected = _RULES.get(key, (lambda v: True, "a finite number"))
    if key == "truncate":
        expected = "true or false"
        if isinstance(value, bool):
            return value
    elif key in _LISTS:
        expected = "a list of positive numbers"
        if isinstance(value, list | tuple) and all(_finite(v) and v > 0 for v in value):
            return tuple(float(v) for v in value)
    elif _finite(value) and test(value):
        number: int | float = value
        return number
    raise RopeError(f"{key} is {_brief(value)}, not {expected}", where=where, fix=f"correct {key} in config.json")


def _finite(value: Any) -> bool:
    """Whether it is a number of float's range; JSON has NaN, Infinity and integers of any length."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def rope_parameters(
    config: Any, layer_type: str | None = None, *, whole_heads: bool = False, where: str = ""
) -> dict[str, Any]:
    """Rotary parameters of `config` in one flat dict with `rope_type` and `rope_theta`.

    Understood are `rope_parameters` (transformers 5), `rope_scaling` with `rope_theta` beside it (older), the
    parameters themselves, `rope_type` or `type`, and parameters per layer type.

    Args:
        config: a config object, `config.json` as a mapping, or its rope entry.
        layer_type: which entry to use where they are given per layer type.
        whole_heads: the family rotates whole heads, whatever `partial_rotary_factor` says. transformers' classes of
            such families never read that key with type "default", and fail in other types with it.
        where: for messages.

    Raises:
        RopeError: two spellings of one key with different values; entries per layer type, and none chosen; a
            `partial_rotary_factor` out of range, or that a family of whole heads can't follow.
    """
    found: dict[str, tuple[Any, str]] = {}
    for origin, key, value in _entries(config, layer_type, where):
        key = "rope_type" if key == "type" else key
        if value is None or key in _NOTES:
            continue
        if key in found and found[key][0] != value:
            other, there = found[key]
            raise RopeError(
                f"{key} is given twice: {there} is {other!r}, {origin} is {value!r}",
                where=where,
                fix="keep one of them in config.json",
            )
        found.setdefault(key, (value, origin))
    params = {key: value for key, (value, _) in found.items()}
    params.setdefault("rope_type", "default")
    params.setdefault("rope_theta", DEFAULT_THETA)
    if whole_heads and "partial_rotary_factor" in params:
        _check_whole_heads(params, where)
    return params


def _check_whole_heads(params: dict[str, Any], where: str) -> None:
    """Drop `partial_rotary_factor` where it changes nothing, refuse it where it would have to."""
    rope_type, factor = params["rope_type"], params["partial_rotary_factor"]
    checked("partial_rotary_factor", factor, where=where)
    if rope_type == "default":
        del params["partial_rotary_factor"]
    elif factor != 1 and rope_type != "proportional":  # which keeps the head's size
        raise RopeError(
            f"partial_rotary_factor is {factor} with rope_type {rope_type!r}, and this family rotates whole heads",
            where=where,
            fix="take partial_rotary_factor out of config.json",
        )


def _entries(config: Any, layer_type: str | None, where: str) -> Iterator[tuple[str, str, Any]]:
    """(where it stands, key, value) of everything that says something about rotary embeddings."""

    def get(key: str) -> Any:
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    nested = [(name, entry) for name in _NESTED if isinstance(entry := get(name), Mapping)]
    if not nested and isinstance(config, Mapping) and not _is_model_config(config):
        entry = _choose(config, layer_type, where)
        yield from ((key, key, value) for key, value in entry.items() if key not in _NESTED)
        return
    for name, entry in nested:
        yield from ((f"{name}.{key}", key, value) for key, value in _choose(entry, layer_type, where).items())
    yield from ((key, key, get(key)) for key in _BESIDE)


def _is_model_config(config: Mapping[str, Any]) -> bool:
    return "model_type" in config or "architectures" in config or "hidden_size" in config


def _choose(entry: Mapping[str, Any], layer_type: str | None, where: str) -> Mapping[str, Any]:
    """The entry of one layer type, where they are given per layer type."""
    inner = {key: value for key, value in entry.items() if isinstance(value, Mapping)}
    if not inner:
        return entry
    if layer_type not in inner:
        raise RopeError(
            f"rotary parameters are given per layer type ({', '.join(inner)}), and {layer_type!r} is asked for",
            where=where,
            fix="the model file has to pass one entry: rope_parameters(config, layer_type)",
        )
    return inner[layer_type]
