"""Options of `vllm serve` on a command line of ours: those that concern an adapter, read before vLLM starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mrv2.adapter import require
from mrv2.entry import AdapterEntry
from mrv2.errors import CommandLineError, UnsupportedError
from mrv2.manifest import Capability

HF_OVERRIDES = "--hf-overrides"


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it was given.

    Args:
        name: with dashes, without what follows a dot.
        inner: what follows the dot: `a.b` of `--hf-overrides.a.b`.
        value: None: none was given.
        written: the words it consists of.
    """

    name: str
    inner: str
    value: str | None
    written: tuple[str, ...]


def read_options(argv: Sequence[str]) -> tuple[Option, ...]:
    """`argv` cut into options, by vLLM's rules: `--a_b` is `--a-b`, `--a=1` is `--a 1`, `--a.b 1` is a key of `--a`.

    Words that follow no option, or are the second and later values of one, become options without a name.
    """
    found: list[Option] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not _is_option(word):
            found.append(Option("", "", word, (word,)))
            continue
        head, equals, value = word.partition("=")
        name, _, inner = head.partition(".")
        name = name.replace("_", "-")
        if equals:
            found.append(Option(name, inner, value, (word,)))
        elif words and not _is_option(words[0]):
            found.append(Option(name, inner, words[0], (word, words.pop(0))))
        else:
            found.append(Option(name, inner, None, (word,)))
    return tuple(found)


def _is_option(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def last(options: Sequence[Option], *names: str) -> Option | None:
    """The one of `names` that counts: the last."""
    return next((o for o in reversed(options) if o.name in names and not o.inner), None)


# -- what must not be given ------------------------------------------------------------------------------------


def refuse_clashes(options: Sequence[Option]) -> None:
    """Refuse what would run another model, or hide options from us.

    Raises:
        CommandLineError: naming the option.
    """
    reasons = {
        "--model": "MODEL is given to mrv2 serve itself",
        "--config": "its options can't be seen here, and some have to be merged with those that mrv2 adds; "
        "give them after --",
    }
    for option in options:
        if option.name in reasons:
            raise _wrong(option, reasons[option.name])
        if option.name == "--model-impl" and option.value not in ("auto", "vllm"):
            raise _wrong(option, "it would leave out the adapter's model")


def _wrong(option: Option, why: str, fix: str = "") -> CommandLineError:
    written = " ".join(option.written)
    return CommandLineError(f"{written}: {why}", where="options after --", fix=fix or f"leave out {option.name}")


# -- what asks for capabilities --------------------------------------------------------------------------------

ASKING: tuple[tuple[Capability, tuple[str, ...]], ...] = (
    (Capability.TENSOR_PARALLEL, ("--tensor-parallel-size", "-tp")),
    (Capability.PIPELINE_PARALLEL, ("--pipeline-parallel-size", "-pp")),
    (Capability.EXPERT_PARALLEL, ("--enable-expert-parallel", "-ep")),
    (Capability.SPECULATION, ("--speculative-config", "-sc")),
    (Capability.QUANTIZATION, ("--quantization", "-q")),
    (Capability.LORA, ("--enable-lora",)),
    (Capability.PREFIX_CACHING, ("--enable-prefix-caching",)),
    (Capability.CHUNKED_PREFILL, ("--enable-chunked-prefill",)),
)
"""Options that ask for a capability: with any value but 1, the size of what isn't divided."""

OFF: tuple[tuple[Capability, str], ...] = (
    (Capability.PREFIX_CACHING, "--no-enable-prefix-caching"),
    (Capability.CHUNKED_PREFILL, "--no-enable-chunked-prefill"),
    (Capability.CUDA_GRAPHS, "--enforce-eager"),
)
"""What vLLM does unless told otherwise, and how to tell it."""


def check_capabilities(options: Sequence[Option], entry: AdapterEntry) -> None:
    """What the options ask of the adapter; vLLM's own checks see the rest when the model is built.

    Raises:
        UnsupportedError: an option asks for a capability that isn't declared for vLLM.
    """
    for capability, names in ASKING:
        given = [o for o in options if o.name in names]  # with a dot as well: --speculative-config.method
        if given and given[-1].value != "1":
            require(capability, "vllm", entry, setting=" ".join(given[-1].written))


def switched_off(options: Sequence[Option], entry: AdapterEntry) -> tuple[str, ...]:
    """Options that turn off what vLLM would do by itself and the adapter doesn't declare. Asked for, it is refused."""
    given = {o.name for o in options}
    off: list[str] = []
    for capability, option in OFF:
        if option in given:
            continue
        try:
            require(capability, "vllm", entry)
        except UnsupportedError:
            off.append(option)
    return tuple(off)


# -- overrides of the config -----------------------------------------------------------------------------------


def merge_overrides(options: Sequence[Option], architecture: str) -> tuple[tuple[str, ...], str]:
    """The user's words without their config overrides, and these as one JSON object that chooses `architecture`.

    VLLM takes the last of several, and one with a dot over one without, so ours can't just be added.

    Raises:
        CommandLineError: an override is no JSON object, or chooses another architecture.
    """
    merged: dict[str, Any] = {}
    words: list[str] = []
    for option in options:
        if option.name != HF_OVERRIDES:
            words += option.written
            continue
        for path, value in _overrides(option):
            if path == ["architectures"] and value != [architecture]:
                raise _wrong(option, f"mrv2 serve chooses the architecture, {architecture}")
            _put(merged, path, value)
    return tuple(words), json.dumps(merged | {"architectures": [architecture]})


def _overrides(option: Option) -> Iterator[tuple[list[str], Any]]:
    """Paths and values of one option."""
    text = option.value or ""
    if option.inner:
        path = option.inner.removesuffix("+").split(".")
        if option.inner.endswith("+"):
            yield path, text.split(",")
            return
        try:
            yield path, json.loads(text)
        except ValueError:
            yield path, text
        return
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise _wrong(option, "it is no JSON object", f"for example {HF_OVERRIDES} '{{\"rope_theta\": 1e6}}'")
    for key, value in given.items():
        yield [key], value


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        below = tree.get(key)
        if not isinstance(below, dict):
            below = tree[key] = {}
        tree = below
    tree[path[-1]] = value
