"""`mrv2 parity`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mrv2.cli.options import Adapters, Json
from mrv2.cli.output import print_json, require_writable, write_text
from mrv2.errors import CommandLineError

if TYPE_CHECKING:
    from mrv2.frontend.build import LoadedModel
    from mrv2.testing.activations import Activations
    from mrv2.testing.ladder import Climbed
    from mrv2.testing.parity import Parity

Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Folder, GGUF file, hub id, or a bundled name: smollm2.")
]
Reference = Annotated[
    str,
    typer.Option(
        "--reference",
        metavar="WHAT",
        help="transformers; a .safetensors or .npz file of recorded activations; or MODULE:FUNCTION, which takes the "
        "checkpoint's folder and gives a torch module (compared module by module), or a function of token ids that "
        "gives logits (only those are compared).",
    ),
]
Names = Annotated[
    Path | None,
    typer.Option(
        "--names",
        metavar="FILE",
        help="JSON: regular expressions for the reference's module names, and what takes their place in ours, such as "
        '{"^blocks\\\\.": "model.layers."}. The adapter\'s own weight map is tried anyway.',
    ),
]
Ladder = Annotated[
    bool, typer.Option("--ladder", help="Instead: run it in ever more of the ways in which it is served.")
]
Recorder = Annotated[
    bool, typer.Option("--recorder", help="Print a file that records activations; it needs torch alone.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report as one HTML file.")]
Tokens = Annotated[int, typer.Option("--tokens", min=2, max=63, help="Length of the random sequence to compare.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the sequence, or of the ladder's prompts.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or auto. Of both sides.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]


def command(
    model: Model = None,
    reference: Reference = "transformers",
    names: Names = None,
    ladder: Ladder = False,
    recorder: Recorder = False,
    html: Html = None,
    tokens: Tokens = 24,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    adapter: Adapters = None,
    json: Json = False,
) -> int:
    """Compare a model; exit code 1 when something differs."""
    if recorder:
        from mrv2.testing import recorders

        print((Path(recorders.__path__[0]) / "record_activations.py").read_text(encoding="utf-8"), end="")
        return 0
    if model is None:
        raise CommandLineError("one model is needed", where="mrv2 parity", fix="give MODEL, or --recorder")
    if ladder and (html is not None or names is not None or reference != "transformers"):
        raise CommandLineError(
            "--ladder compares the model with itself", where="mrv2 parity", fix="leave out --reference, --names, --html"
        )
    require_writable(html, option="mrv2 parity --html")

    from mrv2.loading import stdout_to_stderr

    with stdout_to_stderr():
        loaded, device = _load(model, dtype, device, adapter or [])
    if ladder:
        return _climb(loaded, device, adapter or [], seed, json=json)
    with stdout_to_stderr():
        parity = _compare(loaded, device, _open(reference, loaded, tokens, seed), names)
    if json:
        from mrv2.testing.parity import to_dict

        print_json(to_dict(parity))
    else:
        _print(parity)
    if html is not None:
        _write(parity, html)
    return 1 if parity.first is not None or parity.misshapen else 0


def _load(model: str, dtype: str, device: str, adapters: list[str]) -> tuple[LoadedModel, str]:
    from mrv2.frontend.build import load
    from mrv2.frontend.engine_config import EngineConfig
    from mrv2.runner.device import choose_device

    device = str(choose_device(device))
    return load(model, EngineConfig(dtype=dtype, device=device), adapters), device


def _open(reference: str, loaded: LoadedModel, tokens: int, seed: int) -> Activations:
    import torch

    from mrv2.testing import activations

    if reference.endswith((".safetensors", ".npz")):
        return activations.of_file(Path(reference))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, loaded.config.vocab_size, (tokens,), generator=generator).tolist()
    if reference == "transformers":
        dtype = next(loaded.module.parameters()).dtype
        return activations.of_transformers(loaded.config.path, ids, dtype)
    if ":" in reference:
        return activations.of_callable(reference, loaded.config.path, ids)
    raise CommandLineError(
        f"{reference!r} is no reference",
        where="mrv2 parity --reference",
        fix="give transformers, a .safetensors or .npz file, or MODULE:FUNCTION",
    )


def _compare(loaded: LoadedModel, device: str, reference: Activations, names: Path | None) -> Parity:
    from mrv2.testing.activations import read_names
    from mrv2.testing.parity import compare_modules

    pairs = () if names is None else read_names(names)
    return compare_modules(loaded, reference, device=device, names=pairs)


def _write(parity: Parity, html: Path) -> None:
    from mrv2.testing.reports import picture, render

    depth = parity.depth
    svg = picture([p.module for p in depth], [p.error for p in depth], parity.bound)
    text = render("parity.html.jinja", parity=parity, svg=svg)
    write_text(html, text, option="mrv2 parity --html")


def _print(parity: Parity) -> None:
    from mrv2.testing.parity import bars
    from mrv2.testing.points import LOGITS

    print(f"{parity.model} with {parity.adapter}, beside {parity.reference}")
    print(
        f"{parity.num_tokens} tokens, {parity.dtype}; differences as a share of the largest value, | {parity.bound:g}\n"
    )
    ends = [p for p in parity.points if p.name == LOGITS and p not in parity.depth]
    print("\n".join(bars([*parity.depth, *ends], parity.bound)))
    first, growth, count = parity.first, parity.growth, len(parity.points)
    if growth is not None:
        print(f"\nwarning: within the bound, but the error grows {growth}")
    if first is None:
        all_ = f"all {count} points" if count > 1 else f"the only point, {parity.points[0].label},"
        agree = "agree" if count > 1 else "agrees"
        print(f"\n{all_}{' of the same shape' if parity.misshapen else ''} {agree}{' within it' if growth else ''}")
    else:
        points = list(parity.points)
        at = points.index(first)
        print("\naround the first difference, in the order in which the model runs:")
        print("\n".join(bars(points[max(at - 3, 0) : at + 3], parity.bound)))
        print(f"\nfirst difference: {first.label}, position {first.position}: {first.error:.3g}")
    if parity.causes:
        print(f"likely causes{' of the growth' if growth else ''}, in this order:")
        print("\n".join(f"  {n}. {cause}" for n, cause in enumerate(parity.causes, 1)))
    for what, why in parity.uncompared.items():
        print(f"{what} weren't compared: {why}")
    for what, names in (("of another shape", parity.misshapen), ("without a counterpart here", parity.unmatched)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            print(f"{what}: {', '.join(names[:5])}{more}")


def _climb(loaded: LoadedModel, device: str, adapters: list[str], seed: int, *, json: bool) -> int:
    from mrv2.loading import stdout_to_stderr
    from mrv2.local import is_path
    from mrv2.testing.ladder import climb
    from mrv2.testing.results import Outcome

    out = sys.stdout

    def show(rung: Climbed) -> None:
        if not json:
            note = f": {rung.message}" if rung.message else ""
            print(f"{rung.rung:<10} {rung.outcome:<14} {rung.switch}{note}", file=out, flush=True)

    with stdout_to_stderr():
        local = [a for a in adapters if is_path(a)]
        rungs = climb(loaded, device=device, adapters=local, seed=seed, on_rung=show)
    fell = next((r for r in rungs if r.outcome is Outcome.FAILED), None)
    if json:
        found = [{"rung": r.rung, "switch": r.switch, "outcome": r.outcome.value, "message": r.message} for r in rungs]
        print_json({"model": loaded.name, "first": None if fell is None else fell.rung, "rungs": found})
    elif fell is not None:
        print(f"\ntokens part at: {fell.rung} ({fell.switch})")
    else:
        left = [r.rung for r in rungs if r.outcome is Outcome.NOT_RUN]
        print("\ntokens are equal on every rung that ran" + (f"; not run: {', '.join(left)}" if left else ""))
    return 0 if fell is None else 1
