"""`mrv2 trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mrv2.cli.options import Adapters, Json, Model, RandomConfig

Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Requests that run together.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=1)]
Steps = Annotated[int, typer.Option("--steps", min=1, help="How many to record.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")]
Prompts = Annotated[bool, typer.Option("--prompts", help="Record the first steps, with the prompts, not decode steps.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SETTING=VALUE", help="Engine setting. Can be repeated.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:0 …")]
Save = Annotated[Path | None, typer.Option("--output", "-o", help="Write the trace here; ui.perfetto.dev opens it.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a picture here.")]


def command(
    model: Model = None,
    config: RandomConfig = None,
    batch: Batch = 1,
    prompt_tokens: PromptTokens = 64,
    steps: Steps = 4,
    temperature: Temperature = 0.0,
    prompts: Prompts = False,
    set: Set = None,
    device: Device = "auto",
    output: Save = None,
    html: Html = None,
    adapter: Adapters = None,
    json: Json = False,
) -> None:
    """Record."""
    import json as json_module

    from mrv2.bench.arms import parse_settings
    from mrv2.bench.trace import chrome_events, record
    from mrv2.bench.trace_page import draw
    from mrv2.cli.options import model_folder
    from mrv2.cli.output import print_json
    from mrv2.errors import CommandLineError
    from mrv2.frontend.llm import LLM

    if output is None and html is None and not json:
        raise CommandLineError("the trace would go nowhere", where="mrv2 trace", fix="give --output, --html or --json")
    settings: dict[str, object] = {"device": device, "max_num_seqs": batch, "max_num_tokens": max(2048, batch)}
    for text in set or ():
        settings |= parse_settings(text, where=f"--set {text}")
    with model_folder(model, config) as (name, random_weights):
        settings |= {"weights": "random"} if random_weights else {}
        with LLM(name, adapters=adapter or (), **settings) as llm:
            trace = record(
                llm, batch=batch, prompt_tokens=prompt_tokens, steps=steps, temperature=temperature, prompts=prompts
            )
    events = chrome_events(trace)
    if output is not None:
        output.write_text(json_module.dumps(events) + "\n", encoding="utf-8")
    if html is not None:
        html.write_text(draw(trace, f"mrv2 trace: {name}, batch {batch}"), encoding="utf-8")
    if json:
        print_json(events)
