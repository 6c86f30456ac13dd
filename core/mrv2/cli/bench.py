"""`mrv2 bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mrv2.cli.options import Adapters, Json, Model, RandomConfig

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = ("throughput", "steps", "arrivals")

ArmText = Annotated[
    list[str] | None,
    typer.Option(
        "--arm", metavar="[NAME:]SETTING=VALUE,…", help="Settings to compare. Can be repeated; arms take turns."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SETTING=VALUE", help="Engine setting of all arms. Can be repeated."),
]
Measures = Annotated[str, typer.Option("--measures", help=f"Of {', '.join(MEASURES)}, with commas.")]
Batches = Annotated[str, typer.Option("--batches", help="Requests at once, with commas.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=1)]
NewTokens = Annotated[int, typer.Option("--new-tokens", min=2, help="That each request generates.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="Of throughput. 0: greedy.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Decode steps to measure, per batch.")]
Requests = Annotated[int, typer.Option("--requests", min=2, help="That arrive at random times.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Arrivals a second. Default: 0.7 of the throughput.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are reported.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:0 …")]
Save = Annotated[Path | None, typer.Option("--output", "-o", help="Write the JSON document here.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a picture here.")]


def command(
    model: Model = None,
    config: RandomConfig = None,
    arm: ArmText = None,
    set: Set = None,
    measures: Measures = "throughput,steps,arrivals",
    batches: Batches = "1,8",
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    steps: Steps = 32,
    requests: Requests = 16,
    rate: Rate = None,
    repeat: Repeat = 3,
    device: Device = "auto",
    output: Save = None,
    html: Html = None,
    adapter: Adapters = None,
    json: Json = False,
) -> int:
    """Measure; exit code 130 after Ctrl-C. What stops it leaves what the rounds until then have shown."""
    from mrv2.bench.arms import Arm, Workload, parse_arm, parse_settings, run_arms
    from mrv2.cli.app import INTERRUPTED
    from mrv2.cli.options import model_folder
    from mrv2.cli.output import require_two_files, require_writable
    from mrv2.errors import Mrv2Error

    require_writable(output, option="mrv2 bench --output")
    require_writable(html, option="mrv2 bench --html")
    require_two_files(output, html, option="mrv2 bench --output, --html")
    sizes = _numbers(batches)
    chosen = _measures(measures)
    most = max(sizes)  # and room for prompts beside as many that decode
    base: dict[str, object] = {"device": device, "max_num_seqs": most, "max_num_tokens": max(2048, 2 * most)}
    for text in set or ():
        base |= parse_settings(text, where=f"--set {text}")
    workload = Workload(
        measures=chosen,
        batches=sizes,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        temperature=temperature,
        steps=steps,
        requests=requests,
        rate=rate,
    )
    with model_folder(model, config) as (name, random_weights):
        report, stopped = run_arms(
            name,
            [parse_arm(text) for text in arm or ()] or [Arm("default", {})],
            base | ({"weights": "random"} if random_weights else {}),
            workload,
            repeat=repeat,
            adapters=adapter or (),
            title=None if config is None else str(config),
            progress=_progress(),
        )
    try:
        _show(report, as_json=json)
    finally:  # also if nobody reads what is printed
        _write(report, output, html)
    if isinstance(stopped, Mrv2Error):
        raise stopped
    return INTERRUPTED if stopped else 0


def _numbers(text: str) -> list[int]:
    from mrv2.errors import CommandLineError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CommandLineError(f"--batches {text}", where="mrv2 bench", fix="give whole numbers, such as 1,32,256")
    return sorted({int(part) for part in parts})


def _measures(text: str) -> list[str]:
    from mrv2.errors import CommandLineError

    chosen = [part.strip() for part in text.split(",")]
    if unknown := [name for name in chosen if name not in MEASURES]:
        raise CommandLineError(
            f"there is no measure {', '.join(unknown)!r}", where="--measures", fix=f"choose of {', '.join(MEASURES)}"
        )
    return chosen


def _progress() -> Callable[[str], None]:
    """Says on a terminal what is going on; in a pipe, nothing."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda text: print(f"\r\x1b[2K{text} …", end="", file=sys.stderr, flush=True)


def _write(report: dict[str, Any], output: Path | None, html: Path | None) -> None:
    import json

    from mrv2.bench.plot import draw
    from mrv2.cli.output import write_text

    if output is not None:
        write_text(output, json.dumps(report, indent=2) + "\n", option="mrv2 bench --output")
    if html is not None:
        write_text(html, draw(report), option="mrv2 bench --html")


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    from mrv2.bench.plot import ARRIVAL_HEADERS, HEADERS, arrival_rows, reasons, rows
    from mrv2.cli.output import print_json, print_table

    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr)
    if as_json:
        print_json(report)
        return
    if lines := rows(report):
        print_table(HEADERS, lines)
        for reason in reasons(report):
            print(reason)
    if lines := arrival_rows(report):
        print()
        print_table(ARRIVAL_HEADERS, lines)
