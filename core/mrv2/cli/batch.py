"""What `mrv2 generate` runs: jobs from a prompt or a JSONL file, a stream, or a batch with progress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from mrv2.errors import EngineError, InputFileError, Mrv2Error
from mrv2.frontend.llm import LLM, Message, Prompt
from mrv2.frontend.results import RequestOutput
from mrv2.frontend.ticket import ResultFuture
from mrv2.runner.request import FinishReason
from mrv2.sample.params import SamplingParams

_Outcome = ResultFuture | Mrv2Error
"""What became of a job: a result to come, or what is wrong with its line."""

OnResult = Callable[["Job", RequestOutput], None]
"""Told of each result."""

LINE_KEYS = frozenset({"id", "prompt", "messages", "timeout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds for all jobs, unless a line says otherwise."""

    params: SamplingParams
    timeout: float | None = None  # seconds per request
    chat: bool = False  # wrap text prompts in the chat template
    system: str | None = None  # message before them


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of a run, or what is wrong with its line."""

    line: int  # 1-based
    where: str = "mrv2 generate"  # for messages
    id: Any = None  # the caller's own, given back
    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    params: SamplingParams
    timeout: float | None = None
    error: Mrv2Error | None = None


def read_stdin() -> str:
    """The prompt from standard input, without the line break that ends a text file.

    Raises:
        InputFileError: it is a terminal, or not UTF-8.
    """
    if sys.stdin.isatty():
        raise InputFileError("there is no prompt", where="mrv2 generate", fix="give PROMPT, --input, or pipe a text in")
    return _decode(sys.stdin.buffer.read(), "standard input").removesuffix("\n").removesuffix("\r")


def jobs_from_text(text: str, defaults: Defaults) -> list[Job]:
    """One job from one prompt."""
    return [Job(line=1, params=defaults.params, timeout=defaults.timeout, **_content(text, defaults))]


def jobs_from_file(path: Path, defaults: Defaults) -> list[Job]:
    """One job a line; a wrong line becomes a job with an error, so that the others run.

    A line is a JSON object with `prompt` (text or token ids) or `messages`, an `id` to be given back, a
    `timeout` in seconds, and any field of `SamplingParams`; or just a JSON string. Empty lines are skipped.

    Raises:
        InputFileError: the file can't be read, or is not UTF-8.
    """
    try:
        text = _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InputFileError(str(error), where=str(path), fix="check the path and its permissions") from error
    jobs = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold any other kind of line break
        if line.strip():
            try:
                job = _parse_line(number, line, defaults)
            except Mrv2Error as error:
                job = Job(line=number, id=_id_of(line), params=defaults.params, error=error)
            jobs.append(replace(job, where=f"{path}, line {number}"))
    if not jobs:
        raise InputFileError("the file has no lines", where=str(path), fix='write {"prompt": "…"} lines')
    return jobs


def _ignore(job: Job, result: RequestOutput) -> None:
    pass


def run_stream(llm: LLM, job: Job, *, show_pieces: bool, on_result: OnResult = _ignore) -> int:
    """Print one answer, as it comes or at its end, and statistics on stderr."""
    prompt = _prompt(llm, job)
    if llm.model.tokenizer is None:
        result = llm.generate(prompt, job.params, timeout=job.timeout)[0]
        print(" ".join(str(t) for t in result.outputs[0].token_ids))
    else:
        result = asyncio.run(_print_pieces(llm, prompt, job, show_pieces=show_pieces))
    on_result(job, result)
    print(_statistics([result], result.timing.total_time), file=sys.stderr)
    return 0


async def _print_pieces(llm: LLM, prompt: Prompt, job: Job, *, show_pieces: bool) -> RequestOutput:
    async for piece in llm.stream(prompt, job.params, timeout=job.timeout):
        if show_pieces:
            print(piece.text, end="", flush=True)
        if piece.finished is not None:
            print("" if show_pieces else piece.finished.outputs[0].text, flush=True)
            return piece.finished
    raise EngineError("the stream ended without a result", where="mrv2 generate", fix="report this as a bug")


def run_batch(
    llm: LLM, jobs: Sequence[Job], output: Path | None, *, single: bool, on_result: OnResult = _ignore
) -> int:
    """Run all jobs as one batch; results as JSON in the order of the input, each as soon as its turn comes.

    Returns:
        2 if a line was wrong, else 0.
    """
    start = time.monotonic()
    started = deque(_start(llm, job, single=single) for job in jobs[:1])  # wrong alone, it leaves no file behind
    results: list[RequestOutput] = []
    num_errors = 0
    with _opened(output) as out, progress(len(jobs), "generating") as advance:

        def report(job: Job, outcome: _Outcome) -> None:
            nonlocal num_errors
            record: dict[str, Any] = {} if single else {"line": job.line, "id": job.id}
            if isinstance(outcome, Mrv2Error):
                num_errors += 1
                record["error"] = outcome.to_dict()
            else:
                results.extend(llm.wait([outcome]))
                on_result(job, results[-1])
                record |= _record(llm, results[-1])
            print(_dumps(record, out, indent=2 if single else None), file=out, flush=True)
            advance(1)

        for job in jobs[1:]:
            started.append(_start(llm, job, single=single))
            while started and _is_known(started[0][1]):
                report(*started.popleft())
        while started:
            report(*started.popleft())
    print(_statistics(results, time.monotonic() - start), file=sys.stderr)
    return 2 if num_errors else 0


def _start(llm: LLM, job: Job, *, single: bool) -> tuple[Job, _Outcome]:
    """Hand a job to the engine, once there is room; or say what is wrong with it."""
    try:
        if job.error is not None:
            raise job.error
        return job, llm.submit([_prompt(llm, job)], job.params, timeout=job.timeout, block=True)[0]
    except EngineError:
        raise
    except Mrv2Error as error:
        if single:
            raise
        placed = type(error)(error.what, where=job.where, fix=error.fix)
        print(placed, file=sys.stderr)
        return job, placed


def _is_known(outcome: _Outcome) -> bool:
    return isinstance(outcome, Mrv2Error) or outcome.done()


def _dumps(record: Mapping[str, Any], out: TextIO, *, indent: int | None) -> str:
    """JSON in readable characters, or in escapes where `out` couldn't take them."""
    text = json.dumps(record, ensure_ascii=False, indent=indent)
    try:
        text.encode(out.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(record, indent=indent)
    return text


def _record(llm: LLM, result: RequestOutput) -> dict[str, Any]:
    return {"model": llm.model.name, "adapter": llm.model.adapter} | result.to_dict()


def _prompt(llm: LLM, job: Job) -> Prompt:
    if job.messages is not None:
        return llm.chat_prompt(job.messages)
    assert job.prompt is not None
    return job.prompt


def _content(prompt: Any, defaults: Defaults) -> dict[str, Any]:
    if not defaults.chat:
        return {"prompt": prompt}
    before = [] if defaults.system is None else [{"role": "system", "content": defaults.system}]
    return {"messages": [*before, {"role": "user", "content": prompt}]}


def _parse_line(number: int, line: str, defaults: Defaults) -> Job:
    record = _load_json(line)
    record = {"prompt": record} if isinstance(record, str) else record
    if not isinstance(record, Mapping) or ("prompt" in record) == ("messages" in record):
        raise InputFileError("neither `prompt` nor `messages`, or both", fix='write {"prompt": "…"}')
    known = SamplingParams.field_names()
    unknown = sorted(set(record) - LINE_KEYS - known)
    if unknown:
        raise InputFileError(f"unknown keys: {', '.join(unknown)}", fix=f"use {', '.join(sorted(LINE_KEYS | known))}")
    content = _line_content(record, defaults)
    params = replace(defaults.params, **{k: v for k, v in record.items() if k in known})
    timeout = record.get("timeout", defaults.timeout)
    return Job(line=number, id=record.get("id"), params=params, timeout=timeout, **content)


def _load_json(line: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON number")

    try:
        return json.loads(line, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise InputFileError(f"not JSON: {error.msg} at column {error.colno}", fix="one JSON object a line") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise InputFileError(f"not usable JSON: {error}", fix="one JSON object a line") from error


def _id_of(line: str) -> Any:
    """The `id` of a line that is wrong otherwise, if it has one."""
    try:
        record = _load_json(line)
    except InputFileError:
        return None
    return record.get("id") if isinstance(record, Mapping) else None


def _line_content(record: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
            raise InputFileError(
                "`messages` is no list of {role, content}", fix='write [{"role": "user", "content": "…"}]'
            )
        return {"messages": messages}
    prompt = record["prompt"]
    ids = isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt)
    if not isinstance(prompt, str) and not ids:
        raise InputFileError("`prompt` is neither text nor a list of token ids", fix='write {"prompt": "…"}')
    return {"prompt": prompt} if ids else _content(prompt, defaults)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
    )


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputFileError(
            f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}, line {line}",
            where=where,
            fix="save the text as UTF-8",
        ) from error


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise InputFileError(str(error), where=str(path), fix="give a path that can be written") from error


@contextlib.contextmanager
def progress(total: int, doing: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, nothing in a pipe; what is yielded moves it on by a number of requests."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda count: bar.advance(task, count)


def _statistics(results: Sequence[RequestOutput], seconds: float) -> str:
    generated = sum(r.usage.generated_tokens for r in results)
    prompt = sum(r.usage.prompt_tokens for r in results)
    cached = sum(r.usage.cached_tokens for r in results)
    rate = generated / seconds if seconds else 0.0
    late = sum(r.outputs[0].finish_reason is FinishReason.TIMEOUT for r in results)
    return (
        f"[{len(results)} request{'s' if len(results) != 1 else ''}: {prompt} prompt tokens ({cached} cached), "
        f"{generated} generated in {seconds:.2f} s, {rate:.1f} tokens/s{f', {late} timed out' if late else ''}]"
    )
