"""Weights: every tensor of a checkpoint arrives where it belongs, and nothing else does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mrv2.errors import LayerNameError, ModelBuildError, RecurrentFlagError, UnsupportedError, WeightsError
from mrv2.frontend.build import LoadedModel
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import build_model
from mrv2.loader.weights import load_weights
from mrv2.loading import describe, raised_at
from mrv2.testing.bench import Bench, Fed, run_alone
from mrv2.testing.compare import Pair, require_close
from mrv2.testing.results import NO_REFERENCE, ConformanceFailure, Level, NotApplicable, NotRun, check
from mrv2.testing.subject import Case
from mrv2.testing.torch_settings import require_unchanged

STATIC = (LayerNameError, ModelBuildError, RecurrentFlagError, UnsupportedError)
"""What keeps a model from being loaded and isn't about weights."""

EXPERT = re.compile(r"\.experts?\.\d+\.")


@check(Level.CPU, Level.GPU)
def loads(case: Case) -> None:
    """The checkpoint fills the model, strictly (W1, W2).

    The message lists names that are missing, left over, or of another shape. `weight_map` renames checkpoint names to
    the model's attribute paths; `mrv2 explain MRV2-202` has more.
    """
    error = case.load_error
    if isinstance(error, STATIC):
        raise NotRun(f"the model can't be built ({error.code} {error.title}): see the suite static")
    if error is not None:
        raise error


@check(Level.CPU, Level.GPU, runs=True)
def runs(case: Case) -> None:
    """The filled model runs: a row of hidden states per token, of its width and dtype, and numbers all of them.

    `forward` returns what `ctx.finish` gave it. Until it runs, checks that feed it aren't run.
    """
    require_unchanged(case.first_run.before, case.first_run.after, by="one call of forward")


class Scratch:
    """A second instance of the model, to be filled again and again."""

    def __init__(self, case: Case) -> None:
        self.layers = NativeLayers()
        self.case = case
        self.module: nn.Module = build_model(
            case.model_config,
            case.subject.adapter,
            self.layers,
            device=torch.device(case.device),
            dtype=torch.float32,
        )

    def fill(self, tensors: Mapping[str, Tensor]) -> LoadedModel:
        """Load these, strictly, in place."""
        weight_map: Any = self.module.weight_map
        load_weights(self.module, tensors.items(), weight_map, num_layers=self.case.model_config.num_layers)
        self.layers.finalize(self.module)
        return replace(self.case.loaded, module=self.module)


def _used(case: Case) -> list[str]:
    """Checkpoint names that the weight map doesn't ignore."""
    weight_map: Any = case.loaded.module.weight_map
    return [name for name in case.tensors if weight_map.canonical(name) is not None]


@check(Level.CPU)
def missing_tensors_are_refused(case: Case) -> None:
    """A checkpoint without one of its tensors is refused, whichever it is, and so is one with a tensor too many (W1).

    A slot that isn't filled would stay random, and the model would still write text. Slots are `optional` only if
    they have a value of their own; a `transform` yields nothing for what it didn't get.
    """
    scratch, tied = Scratch(case), set(_tied(case))
    for name in _used(case):
        rest = {n: t for n, t in case.tensors.items() if n != name}
        if name not in tied and not _refused(scratch, rest):
            raise ConformanceFailure(
                "a checkpoint with one tensor left out, with what the loader has to say of it",
                f"tensor {name}: left out, and loaded without a word",
                ["weight_map.transform makes up what it doesn't get", "the slot is declared optional"],
            )
    more = case.tensors | {"kit.unknown.weight": torch.zeros(2, 2)}
    if not _refused(scratch, more):
        raise ConformanceFailure(
            "a checkpoint with a tensor that no model has",
            "tensor kit.unknown.weight: loaded without a word",
            [
                "weight_map.ignored has a regex that matches everything",
                "weight_map.transform drops what it doesn't know",
            ],
        )


def _tied(case: Case) -> list[str]:
    report = Scratch(case)
    weight_map: Any = report.module.weight_map
    loaded = load_weights(report.module, case.tensors.items(), weight_map)
    return [n for n in case.tensors if weight_map.canonical(n) in (*loaded.tied, *loaded.defaulted)]


def _refused(scratch: Scratch, tensors: Mapping[str, Tensor]) -> bool:
    try:
        scratch.fill(tensors)
    except WeightsError:
        return True
    except Exception as error:  # of a transform: refused, but by accident
        raise ConformanceFailure(
            "a checkpoint with one tensor left out or added, with what the loader has to say of it",
            f"{describe(error)}, raised at {raised_at(error.__traceback__)}",
            ["weight_map.transform expects a tensor to be there"],
        ) from error
    return False


@check(Level.CPU, runs=True)
def every_tensor_matters(case: Case) -> None:
    """A change of any tensor changes what the model says.

    A tensor that is loaded and never used is a layer that was forgotten. What the model really doesn't need belongs
    into `weight_map.ignored`.
    """
    scratch, tied = Scratch(case), set(_tied(case))
    prompts = case.prompts((40, 24), seed=5)
    option = case.options[-1]
    before = _logprobs(scratch.fill(case.tensors), prompts, option, case.device)
    generator = torch.Generator().manual_seed(1)
    for name in _used(case):
        tensor = case.tensors[name]
        if name in tied or EXPERT.search(name) or not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        try:
            changed = scratch.fill(case.tensors | {name: tensor + 0.3 * noise})
        except WeightsError:
            continue  # its copy elsewhere has to be equal, so it is looked at
        after = _logprobs(changed, prompts, option, case.device)
        if torch.equal(before, after):
            raise ConformanceFailure(
                "log-probabilities before and after a change of one tensor",
                f"tensor {name}: no position differs",
                ["forward doesn't use the layer", "the layer's result is multiplied by zero, or overwritten",
                 "finalize_weights() keeps what it computed from the first weights"],
            )  # fmt: skip


def _logprobs(loaded: LoadedModel, prompts: list[list[int]], option: Mapping[str, Any], device: str) -> Tensor:
    bench = Bench(loaded, device=device, poison=False)
    requests = [Fed(p, option) for p in prompts]
    for row, request in enumerate(requests):
        bench.add(request, row)
    return torch.cat(bench.run(requests))


@check(Level.CPU, Level.GPU, runs=True)
def loading_again(case: Case) -> None:
    """Other weights loaded in place leave addresses as they were, and nothing of the old ones (W3).

    Teams that train need it. `finalize_weights()` has to compute everything anew each time it is called.
    """
    scratch = Scratch(case)
    generator = torch.Generator().manual_seed(2)
    tied = set(_tied(case))
    others = {
        n: t if n in tied else t + (0.2 * torch.randn(t.shape, generator=generator)).to(t.dtype)
        if t.is_floating_point() else t for n, t in case.tensors.items()
    }  # fmt: skip
    if tied:
        others = {n: t for n, t in others.items() if n not in tied}
    scratch.fill(case.tensors)
    (prompt,) = case.prompts((23,), seed=6)
    option = case.options[-1]
    addresses = {n: p.data_ptr() for n, p in scratch.module.named_parameters()}
    _logprobs(replace(case.loaded, module=scratch.module), [prompt], option, case.device)
    again = scratch.fill(others)
    moved = [n for n, p in scratch.module.named_parameters() if p.data_ptr() != addresses[n]]
    if moved:
        raise ConformanceFailure(
            "addresses of parameters before and after loading again",
            f"tensor {moved[0]}: moved, as have {len(moved) - 1} more",
            ["finalize_weights() or a slot's load assigns a new tensor: copy into the old one"],
        )
    got = run_alone(again, prompt, option, device=case.device, poison=False)
    want = run_alone(Scratch(case).fill(others), prompt, option, device=case.device, poison=False)
    require_close(
        [Pair(request="request 0", got=got, want=want)],
        compared="a model loaded a second time, in place, with a new one of the same weights",
        tolerance=case.tolerance,
        causes=["finalize_weights() keeps something of the first weights", "forward caches what it derived of them"],
    )


@check(Level.CPU, runs=True)
def one_token(case: Case) -> dict[str, Any] | None:
    """After a single token the model says what the reference says.

    With one token, attention has nothing to choose and rotation nothing to turn: what differs here are weights, norms,
    activations, or the order of layers. `mrv2 parity MODEL --reference WHAT` names the module where it begins, if WHAT
    has modules to compare: MODULE:FUNCTION that gives the reference as an nn.Module, or activations recorded by the
    file that `mrv2 parity --recorder` prints. A function of token ids shows no more than its logits.
    """
    if case.answer is None:
        raise NotApplicable(NO_REFERENCE)
    firsts = sorted({ids[0] for ids in case.answer.recorded}) or range(min(case.vocab_size, 12))
    pairs = []
    for token in firsts:
        want = case.answer.logprobs([token], {})
        if want is not None:
            got = run_alone(case.loaded, [token], {}, device=case.device, poison=False)
            pairs.append(Pair(request=f"token {token} alone", got=got, want=want))
    worst = require_close(
        pairs,
        compared=f"the model after one token with the reference ({case.answer.name})",
        tolerance=case.tolerance,
        causes=[
            "a tensor is stored transposed, permuted, or in another's place (gate and up, for one)",
            "norms: weights stored as an offset from one, another epsilon, or a norm before instead of after",
            "a residual that is left out, or added twice",
            "another activation, or a scale of embeddings, residuals or logits that is left out",
            "the head is tied and was read as untied, or the other way round",
        ],
    )
    return {"largest difference": worst}
