"""`mrv2 generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mrv2.cli.options import Adapters, Json

if TYPE_CHECKING:
    from mrv2.cli.batch import Job
    from mrv2.frontend.llm import LLM
    from mrv2.frontend.results import RequestOutput
    from mrv2.testing.replay import Recorder

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, GGUF file, hub id, or a bundled name: smollm2.")]
PromptText = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="Text; without it, standard input is read.")]
Input = Annotated[
    Path | None,
    typer.Option(
        "--input",
        "-i",
        help='JSONL, a line each: {"prompt": "text"}, {"prompt": [1, 2]} (token ids) or {"messages": […]}.',
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write results here instead of standard output.")]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Wrap the prompt in the chat template, or take it as it is.")]
System = Annotated[str | None, typer.Option("--system", help="System message, with --chat.")]
Stream = Annotated[
    bool | None, typer.Option("--stream/--no-stream", help="Print as it is generated; default on a terminal.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="0: all.")]
TopP = Annotated[float, typer.Option("--top-p")]
MinP = Annotated[float, typer.Option("--min-p")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes the draws repeatable.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop string; can be repeated.")]
StopIds = Annotated[list[int] | None, typer.Option("--stop-token-id", help="Can be repeated.")]
Logprobs = Annotated[int | None, typer.Option("--logprobs", help="Top log-probabilities per token, with --json.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds per request, after which it ends with what it has. Default: no limit."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:0 …")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Most tokens of one request.")]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Most requests at once.")]
MaxNumTokens = Annotated[int, typer.Option("--max-num-tokens", help="Most tokens in one step.")]
KvMemory = Annotated[int | None, typer.Option("--kv-memory", help="Bytes for the KV cache.")]
DebugRunner = Annotated[
    bool,
    typer.Option(
        "--debug-runner",
        help="Make faults of adapters and kernels show: late streams, poisoned memory, a watched KV cache. Slow.",
    ),
]
Graphs = Annotated[
    bool | None,
    typer.Option(
        "--graphs/--no-graphs", help="CUDA graphs of decode steps. Default: on a GPU, if the model allows it."
    ),
]
PrefixCaching = Annotated[
    bool | None, typer.Option("--prefix-caching/--no-prefix-caching", help="Default: if the adapter offers it.")
]
Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="RUN", help="Write what `mrv2 replay RUN` needs to a new file: prompts too."),
]


def command(
    model: Model,
    prompt: PromptText = None,
    input: Input = None,
    output: Output = None,
    chat: Chat = False,
    system: System = None,
    stream: Stream = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopIds = None,
    logprobs: Logprobs = None,
    ignore_eos: IgnoreEos = False,
    timeout: Timeout = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_tokens: MaxNumTokens = 2048,
    kv_memory: KvMemory = None,
    prefix_caching: PrefixCaching = None,
    graphs: Graphs = None,
    debug_runner: DebugRunner = False,
    record: Record = None,
    adapter: Adapters = None,
    json: Json = False,
) -> int:
    """Generate text."""
    from mrv2.cli.batch import Defaults, jobs_from_file, jobs_from_text, read_stdin, run_batch, run_stream
    from mrv2.errors import CommandLineError
    from mrv2.sample.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    for clash, what in (
        (prompt is not None and input is not None, "a PROMPT and --input"),
        (system is not None and not chat, "--system without --chat"),
        (
            bool(stream) and (json or input is not None or output is not None),
            "--stream with --json, --input or --output",
        ),
        (
            input is not None and output is not None and input.exists() and output.exists() and input.samefile(output),
            "--output and the same file as --input",
        ),
        (logprobs is not None and not (json or input is not None), "--logprobs without --json"),
    ):
        if clash:
            raise CommandLineError(f"{what} can't go together", where="mrv2 generate", fix="leave one of them out")
    defaults = Defaults(params=params, timeout=timeout, chat=chat, system=system)
    jobs: list[Job]
    if input is not None:
        jobs = jobs_from_file(input, defaults)
    else:
        jobs = jobs_from_text(read_stdin() if prompt is None else prompt, defaults)
    if record is not None:
        from mrv2.testing.runs import check_free

        check_free(record)
    llm, recorder = _load(
        model,
        adapter,
        record=record is not None,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        kv_memory=kv_memory,
        prefix_caching=prefix_caching,
        graphs=graphs,
        debug=debug_runner,
    )

    def note(job: Job, result: RequestOutput) -> None:
        if recorder is not None:
            recorder.note(job.line, job.id, result)

    with llm:
        if input is None and output is None and not json:
            show_pieces = sys.stdout.isatty() if stream is None else stream
            code = run_stream(llm, jobs[0], show_pieces=show_pieces, on_result=note)
        else:
            code = run_batch(llm, jobs, output, single=input is None, on_result=note)
    if recorder is not None and record is not None:
        count = recorder.write(record)
        what = f"{count} request{'s' if count != 1 else ''} recorded in {record}" if count else "nothing to record"
        print(f"[{what}]", file=sys.stderr)
    return code


def _load(model: str, adapters: list[str] | None, *, record: bool, **settings: Any) -> tuple[LLM, Recorder | None]:
    from mrv2.frontend.build import assemble, load
    from mrv2.frontend.engine_config import EngineConfig
    from mrv2.frontend.llm import LLM

    if not record:
        return LLM(model, adapters=adapters or (), **settings), None
    from mrv2.testing.replay import Recorder

    config = EngineConfig(**settings)
    loaded = load(model, config, adapters or ())
    recorder = Recorder(loaded, config, assemble(loaded, config), adapters=adapters or ())
    return LLM.from_parts(loaded, config, recorder.parts), recorder
