"""What a caller may ask of the sampler. Imports no torch: clients and adapters use it as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mrv2.errors import RequestError

MAX_LOGPROBS = 64
"""Most log-probabilities that can be asked for per token."""

MAX_STOP_TOKEN_IDS = 32
"""Most stop token ids of one request, the model's own end tokens included (a column of fixed width)."""

MIN_TEMPERATURE = 1e-5
"""Below it dividing could overflow, and no second token has a chance anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Per-request sampling and stopping options.

    Args:
        max_tokens: most tokens to generate; None: up to the context's end.
        temperature: 0 is greedy, and so is anything below `MIN_TEMPERATURE`; otherwise logits are divided by it
            before filtering.
        top_k: keep the k most likely tokens; 0: all.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        seed: makes the request's draws repeatable, whatever runs beside it; None: drawn by the engine.
        logprobs: per generated token, the log-probabilities of this many most likely tokens and of the
            token itself, from the model's own distribution (before temperature and filters); None: off.
        stop: strings that end generation; the text is cut before the first of them.
        stop_token_ids: token ids that end generation, beside the model's own end tokens.
        ignore_eos: go on past the model's own end tokens.
        skip_special_tokens: leave special tokens out of the text.
        extra_args: options that an adapter defines and validates.

    Raises:
        RequestError: a value is out of range; the message names the field.
    """

    max_tokens: int | None = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stop: object = self.stop  # callers may give one string, or lists
        object.__setattr__(self, "stop", _as_tuple((stop,) if isinstance(stop, str) else stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        for name, ok, want in self._rules():
            if not ok:
                raise RequestError(
                    f"{name}={getattr(self, name)!r} is out of range: {want}",
                    where="SamplingParams",
                    fix=f"set {name} accordingly",
                )

    def _rules(self) -> list[tuple[str, bool, str]]:
        def real(x: object, low: float, high: float) -> bool:
            # Compared before it is converted: an integer may be too large for a float.
            number = isinstance(x, int | float) and not isinstance(x, bool)
            return number and low <= x <= high  # type: ignore[operator]

        def whole(x: object, low: int, high: int) -> bool:
            return isinstance(x, int) and not isinstance(x, bool) and low <= x <= high

        def many(x: object, each: Callable[[object], bool] = lambda _: True) -> bool:
            return isinstance(x, tuple) and all(each(item) for item in x)

        big = 2**31 - 1
        return [
            (
                "max_tokens",
                self.max_tokens is None or whole(self.max_tokens, 1, big),
                "an integer of at least 1, or None",
            ),
            ("temperature", real(self.temperature, 0, 1e6), "a finite number of at least 0"),
            ("top_k", whole(self.top_k, 0, big), "an integer of at least 0 (0: all)"),
            ("top_p", real(self.top_p, 0, 1) and self.top_p > 0, "in (0, 1]"),
            ("min_p", real(self.min_p, 0, 1), "in [0, 1]"),
            ("seed", self.seed is None or whole(self.seed, 0, 2**63 - 1), "an integer in [0, 2**63), or None"),
            (
                "logprobs",
                self.logprobs is None or whole(self.logprobs, 0, MAX_LOGPROBS),
                f"in [0, {MAX_LOGPROBS}], or None",
            ),
            ("stop", many(self.stop, lambda s: isinstance(s, str) and s != ""), "a list of non-empty strings"),
            ("stop_token_ids", many(self.stop_token_ids, lambda t: whole(t, 0, big)), "a list of ids of at least 0"),
            (
                "stop_token_ids",
                many(self.stop_token_ids) and len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS // 2,
                f"at most {MAX_STOP_TOKEN_IDS // 2} ids",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("skip_special_tokens", isinstance(self.skip_special_tokens, bool), "true or false"),
            ("extra_args", isinstance(self.extra_args, Mapping), "a mapping"),
        ]

    @classmethod
    def field_names(cls) -> frozenset[str]:
        """Names a JSONL line or a caller may set."""
        return frozenset(f.name for f in fields(cls))


def _as_tuple(values: object) -> object:
    return tuple(values) if isinstance(values, list | tuple) else values
