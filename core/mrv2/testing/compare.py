"""Comparisons that say where the first difference is, and what most likely made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mrv2.testing.bench import run_alone
from mrv2.testing.results import ConformanceFailure

if TYPE_CHECKING:
    from mrv2.testing.subject import Case


UNWRITTEN = (
    "a cache or state was read where this request has written nothing, which holds NaN here: select with torch.where, "
    "for a state by `computed == 0` (load_state does), and never multiply by zero"
)
"""Likeliest cause of a value that is no number, of a model that gives numbers on its own."""

OF_THE_STEP = (
    "`forward` takes something from the whole step (`positions[0]`, a maximum, a mean) instead of each token's own "
    "`positions`"
)
"""Cause of a prompt that differs by how it is cut into steps, or by who else is in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One request's values and what they should be, both [positions, ...]."""

    request: str
    got: Tensor
    want: Tensor
    start: int = 0  # position of the first


def errors(pair: Pair) -> Tensor:
    """[positions] largest difference at each; infinite where one is NaN and the other isn't."""
    got, want = pair.got.float().cpu(), pair.want.float().cpu()
    if got.shape != want.shape:
        raise ConformanceFailure(
            f"shapes of {pair.request}", f"{list(got.shape)}, expected {list(want.shape)}", ["see what was compared"]
        )
    gap = (got - want).abs().flatten(1) if got.dim() > 1 else (got - want).abs()[:, None]
    gap = torch.where(got.flatten(1) == want.flatten(1), 0, gap) if got.dim() > 1 else gap  # equal infinities
    worst: Tensor = gap.nan_to_num(nan=float("inf")).max(1).values if gap.shape[1] else torch.zeros(len(gap))
    return worst


def require_close(
    pairs: Sequence[Pair],
    *,
    compared: str,
    tolerance: float,
    causes: Sequence[str],
    quantity: str = "log-probabilities",
    hints: Sequence[tuple[int, str]] = (),
) -> float:
    """Every position of every pair within `tolerance`; returns the largest difference.

    Args:
        pairs: one per request.
        compared: what with what.
        tolerance: largest difference allowed.
        causes: likely ones.
        quantity: what the values are.
        hints: (position, cause): put first if no position before it differs, and it or one of the next two does;
            of position 0, if that one does.

    Raises:
        ConformanceFailure: naming the first request and position.
    """
    found = [(pair, errors(pair)) for pair in pairs]
    worst = max((float(e.max()) for _, e in found if len(e)), default=0.0)
    wrong = [(pair, e > tolerance, e) for pair, e in found if bool((e > tolerance).any())]
    if not wrong:
        return worst
    pair, mask, gap = wrong[0]
    at = int(mask.nonzero()[0, 0])
    first = min(p.start + int(m.nonzero()[0, 0]) for p, m, _ in wrong)
    total, bad = sum(len(e) for _, e in found), sum(int(m.sum()) for _, m, _ in wrong)
    text = (
        f"{pair.request}, position {pair.start + at}: {quantity} differ by {_number(float(gap[at]))}, allowed is "
        f"{tolerance:g}; {bad} of {total} positions of {len(wrong)} of {len(found)} requests differ, by up to "
        f"{_number(worst)}" + (f", and none before position {first}" if first else "")
    )
    if float(gap[at]) == float("inf"):
        causes = (UNWRITTEN, *causes)
    hinted = [cause for at_, cause in hints if (at_ <= first <= at_ + 2 if at_ else not first)]
    raise ConformanceFailure(compared, text, tuple(dict.fromkeys((*hinted, *causes))))


def _number(x: float) -> str:
    return "NaN" if x == float("inf") else f"{x:.3g}"


def greedy_pair(request: str, want: Tensor, tokens: Sequence[int], logprobs: Sequence[float], *, start: int) -> Pair:
    """Generated tokens and their log-probabilities beside what they should be: each token the likeliest, ties aside,
    and its log-probability that of the likeliest.

    Args:
        request: its name.
        want: [n, vocab] log-probabilities after the prompt and after each token but the last, of the same tokens.
        tokens: n.
        logprobs: of them.
        start: position of the first token.
    """
    best, chosen = want.max(1).values, want.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    got = torch.stack((torch.tensor(logprobs), chosen), 1)
    return Pair(request=request, got=got, want=torch.stack((best, best), 1), start=start)


def right_alone(case: Case, ids: Sequence[int]) -> bool:
    """Whether the model agrees with the reference about a prompt, whole, alone and without options, as far as there is
    a reference: if not, a later comparison would blame the wrong thing.
    """
    want = None if case.answer is None else case.answer.logprobs(ids, {})
    if want is None:
        return True
    got = run_alone(case.loaded, ids, {}, device=case.device, poison=False)
    return float(errors(Pair(request="", got=got, want=want)).max()) <= case.tolerance


def describe(i: int, ids: Sequence[int], options: Mapping[str, Any] | None = None) -> str:
    """Name of a request in messages."""
    carrying = f" with options {dict(options)}" if options else ""
    return f"request {i} ({len(ids)} tokens{carrying})"
