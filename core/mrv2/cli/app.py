"""The table of commands, their lazy loading, and the one place where errors become exit codes."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mrv2.errors import CommandLineError, Mrv2Error
from mrv2.version import __version__

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command without its code.

    Args:
        target: `module:function`, imported when the command runs. The function's parameters are typer's; it
            returns its exit code, or None for 0.
        summary: one sentence.
        examples: two, whole command lines.
        wrong: what exit code 1 means; empty: it never comes.
    """

    target: str
    summary: str
    examples: tuple[str, str]
    wrong: str = ""

    @property
    def help(self) -> str:
        """Summary, examples, exit codes."""
        codes = ["0 done", "2 wrong use or input", f"{INTERRUPTED} stopped by Ctrl-C"]
        if self.wrong:
            codes.insert(1, f"1 {self.wrong}")
        # A paragraph that starts with a backspace keeps its line breaks.
        examples = "\n".join(["\b", "Examples:", *(f"  {example}" for example in self.examples)])
        return "\n\n".join([self.summary, examples, f"Exit codes: {', '.join(codes)}."])


COMMANDS: Mapping[str, Command] = {
    "list": Command(
        "mrv2.cli.list:command",
        "List the installed adapters without importing any of them.",
        ("mrv2 list", "mrv2 list --json"),
    ),
    "show": Command(
        "mrv2.cli.show:command",
        "Show one adapter: manifest, and which code supplies each hook and each method of its model state.",
        ("mrv2 show acme", "mrv2 show acme --adapter ./acme.py --json"),
    ),
    "new-adapter": Command(
        "mrv2.cli.new_adapter:command",
        "Make a complete package for a new adapter, which passes its own tests at once.",
        (
            "mrv2 new-adapter acme --kind decoder",
            "mrv2 new-adapter acme --kind moe --from-config ./config.json --ci gitlab",
        ),
    ),
    "doctor": Command(
        "mrv2.cli.doctor:command",
        "Take every adapter, or one, through all stages up to its model class, in both hosts, and say what is wrong.",
        ("mrv2 doctor", "mrv2 doctor acme --vllm --json"),
        wrong="an adapter or the environment is broken",
    ),
    "check": Command(
        "mrv2.cli.check:command",
        "Prove an adapter: run the conformance suites on its small configs, at every level that this machine has.",
        ("mrv2 check acme --html report.html", "mrv2 check ./acme --require L2 --junit junit.xml --record"),
        wrong="a check failed, or a required level didn't run",
    ),
    "parity": Command(
        "mrv2.cli.parity:command",
        "Compare a model with a reference module by module, or with itself in ever more of the ways it is served.",
        (
            "mrv2 parity ./model --reference my_training:build --html parity.html",
            "mrv2 parity ./model --ladder",
        ),
        wrong="something differs",
    ),
    "generate": Command(
        "mrv2.cli.generate:command",
        "Generate text with a model on this machine.",
        (
            'mrv2 generate smollm2 "What is the capital of France?" --chat --temperature 0',
            "mrv2 generate ./model --input prompts.jsonl --output answers.jsonl",
        ),
    ),
    "replay": Command(
        "mrv2.cli.replay:command",
        "Run a recorded run again, as it was or with one thing changed, and say where tokens part.",
        ("mrv2 replay run.json", "mrv2 replay run.json --eager --max-num-seqs 1 --json"),
        wrong="tokens differ",
    ),
    "serve": Command(
        "mrv2.cli.serve:command",
        "Serve a model by its adapter inside vLLM, with vLLM's OpenAI server.",
        (
            "mrv2 serve smollm2 -- --port 8000 --max-model-len 4096",
            "mrv2 serve ./model --dry-run -- --tensor-parallel-size 2",
        ),
    ),
    "bench": Command(
        "mrv2.cli.bench:command",
        "Measure throughput, step and inter-token times of a model, or of random weights at any config.",
        (
            "mrv2 bench smollm2 --batches 1,32 --html bench.html",
            "mrv2 bench --config ./config.json --arm whole:max_chunk=none --arm parts:max_chunk=64 -o bench.json",
        ),
    ),
    "trace": Command(
        "mrv2.cli.trace:command",
        "Record what host and device do in a few steps: for Perfetto, and as a picture.",
        (
            "mrv2 trace smollm2 -o trace.json --html trace.html",
            "mrv2 trace --config ./config.json --batch 32 --steps 4 --html trace.html",
        ),
    ),
    "explain": Command(
        "mrv2.cli.explain:command",
        "Explain an error code, or list all of them.",
        ("mrv2 explain MRV2-101", "mrv2 explain ACME-2 --adapter ./acme"),
    ),
    "catalog": Command(
        "mrv2.cli.catalog:command",
        "List the adapters that catalogues know, and how to install them.",
        ("mrv2 catalog", "MRV2_CATALOG=team.json mrv2 catalog --json"),
        wrong="the engine or an adapter's code failed",
    ),
}
"""Every command, in the order of the help."""


_ROOT_HELP = "Model-family adapters: list and prove them, and run their models. Each command has its own --help."


class _ReaderLeftError(Exception):
    """The reader of standard output has closed it; typer would turn a BrokenPipeError into exit code 1."""


class LazyGroup(TyperGroup):
    """A group whose commands are names and help texts until one of them is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the placeholder by the real command. Completion passes here too."""
        name, placeholder, rest = super().resolve_command(ctx, args)
        return (name, placeholder, rest) if name is None else (name, load(name), rest)


def load(name: str) -> Any:
    """Import one command and build it."""
    entry = COMMANDS[name]
    module, _, function = entry.target.partition(":")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    code = getattr(importlib.import_module(module), function)

    @functools.wraps(code)
    def guarded(*args: Any, **options: Any) -> int | None:
        try:
            result: int | None = code(*args, **options)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise _ReaderLeftError from error
        return result

    app.command(name=name, help=entry.help)(guarded)
    return typer.main.get_command(app)


def build() -> LazyGroup:
    """The root group, with placeholders for commands."""
    app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, help=_ROOT_HELP)
    app.callback()(_root)
    root = typer.main.get_command(app)
    assert isinstance(root, LazyGroup)
    for name, entry in COMMANDS.items():
        root.add_command(TyperCommand(name, help=entry.summary, rich_markup_mode=None))
    return root


def _print_version(asked: bool) -> None:
    if asked:
        print(f"mrv2 {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", is_eager=True, help="Print the version and leave.", callback=_print_version)
]


def _root(version: _Version = False) -> None:
    """Options before the command."""


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. All errors of users end here."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is escaped, never an error
            stream.reconfigure(errors="backslashreplace")
    if not argv:
        run(["--help"])
        return 2
    as_json = "--json" in argv
    try:
        code = build().main(args=list(argv), prog_name="mrv2", standalone_mode=False)
    except Mrv2Error as error:
        return _report(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except _ReaderLeftError:
        # As in `mrv2 list | head -1`: nothing is wrong, and nothing more can be said.
        _say_no_more()
        return 0
    except Exception as error:
        usage = _usage_message(error)
        if usage is None:
            raise
        return _report(CommandLineError(usage, where="mrv2 " + " ".join(argv), fix="see --help"), as_json=as_json)
    if code == INTERRUPTED:
        print("stopped", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _usage_message(error: Exception) -> str | None:
    # typer raises the exceptions of click, or of its own copy of click; both have this method, nothing else has.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return str(error.format_message())
    return None


def _report(error: Mrv2Error, *, as_json: bool) -> int:
    if not as_json:
        print(error, file=sys.stderr)
        return error.exit_code
    try:
        print(json.dumps({"error": error.to_dict()}, indent=2), flush=True)
    except BrokenPipeError:
        _say_no_more()
    return error.exit_code


def _say_no_more() -> None:
    """Let standard output lead nowhere, or the interpreter would fail to flush it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
