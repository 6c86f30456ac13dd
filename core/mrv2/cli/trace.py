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
    from mrv2.cli.output import print_json, require_two_files, require_writable, write_text
    from mrv2.errors import CommandLineError
    from mrv2.frontend.llm import LLM
    from mrv2.sample.params import SamplingParams

    if output is None and html is None and not json:
        raise CommandLineError("the trace would go nowhere", where="mrv2 trace", fix="give --output, --html or --json")
    require_writable(output, option="mrv2 trace --output")
    require_writable(html, option="mrv2 trace --html")
    require_two_files(output, html, option="mrv2 trace --output, --html")
    SamplingParams(temperature=temperature)  # what it refuses is refused before the model is loaded
    settings: dict[str, object] = {"device": device, "max_num_seqs": batch, "max_num_tokens": max(2048, 2 * batch)}
    for text in set or ():
        settings |= parse_settings(text, where=f"--set {text}")
    with model_folder(model, config) as (name, random_weights):
        settings |= {"weights": "random"} if random_weights else {}
        with LLM(name, adapters=adapter or (), **settings) as llm:
            trace = record(
                llm, batch=batch, prompt_tokens=prompt_tokens, steps=steps, temperature=temperature, prompts=prompts
            )
    events, title = chrome_events(trace), f"mrv2 trace: {config or name}, batch {batch}"
    try:
        if json:
            print_json(events)
    finally:  # also if nobody reads what is printed
        if output is not None:
            write_text(output, json_module.dumps(events) + "\n", option="mrv2 trace --output")
        if html is not None:
            write_text(html, draw(trace, title), option="mrv2 trace --html")
