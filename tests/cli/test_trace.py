"""`mrv2 trace` as a process and from Python, on a CPU, with a tiny model and with a config alone."""

import json
import subprocess
import sys
import time

import pytest

from mrv2.bench.trace import Span, Trace, chrome_events
from mrv2.bench.trace_page import draw, nested
from mrv2.errors import CommandLineError

pytestmark = pytest.mark.timeout(240)

QUICK = ("--prompt-tokens", 8, "--device", "cpu")


def mrv2(*args):
    command = [sys.executable, "-m", "mrv2", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def check_lanes(events):
    """Durations, and nesting in each lane. Returns names of lanes by (pid, tid)."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for lane in lanes:
        spans = sorted((e["ts"], -e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == lane)
        assert spans
        around = []
        for start, length in spans:
            end = start - length
            assert start >= 0
            assert length <= 0
            while around and around[-1] <= start + 0.002:  # written with three digits
                around.pop()
            assert not around or end <= around[-1] + 0.002
            around.append(end)
    return lanes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "."], "it is a folder"),
        (["--html", "absent/t.html"], "absent is no folder"),
        (["-o", "same.x", "--html", "./same.x"], "would be written twice"),
        (["-o", "t.json", "-t", "nan"], "temperature=nan"),
    ],
)
def test_wrong_use_of_trace_is_named_before_anything_is_loaded(args, message, capfd):
    from mrv2.cli.app import run

    assert run(["trace", "x", *args]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("prompts", [False, True])
def test_trace_has_the_steps_of_the_engine_thread(config, tmp_path, prompts, check_self_contained):
    out, html = tmp_path / "t.json", tmp_path / "t.html"
    code, _, err = mrv2(
        *("trace", "--config", config, *QUICK, "--batch", 3, "--steps", 5, "-o", out, "--html", html),
        *(["--prompts"] if prompts else []),
    )
    assert code == 0, err
    events = json.loads(out.read_text())["traceEvents"]
    lanes = check_lanes(events)
    assert "mrv2-engine" in lanes.values()
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"host"}  # a CPU has no lanes of a device
    names = [e["name"] for e in events if e["ph"] == "X"]
    assert names.count("step") == 5
    for name in ("schedule", "launch", "wait", "process tokens"):
        assert names.count(name) >= 5, name
    text = html.read_text()
    check_self_contained(text)
    assert "Unavailable" in text
    assert str(config) in text
    assert text.count("(with prompts)") == prompts  # of five steps, the first


def test_a_trace_that_goes_nowhere_is_refused(config):
    code, _, err = mrv2("trace", "--config", config)
    assert code == 2
    assert "--html" in err


def test_hooks_are_gone_after_a_recording(text_model):
    from mrv2 import LLM
    from mrv2.bench.trace import record, recording

    with LLM(str(text_model), device="cpu", max_num_seqs=2) as llm:
        engine = llm._driver._engine
        owners = [engine, engine.scheduler, engine._runner, llm._driver._outputs, llm._driver._events]
        before = [dict(vars(owner)).keys() for owner in owners]
        with recording(llm) as host:
            llm.generate([[1, 2, 3]])
        assert {span.name for span in host.spans} >= {"step", "deliver"}
        assert {span.lane for span in host.spans} == {"mrv2-engine", "mrv2-outputs"}
        assert [vars(owner).keys() for owner in owners] == before
        count = len(host.spans)
        llm.generate([[1, 2, 3]])
        assert len(host.spans) == count
        trace = record(llm, batch=2, prompt_tokens=3, steps=4)
        assert trace.steps == 4


@pytest.mark.parametrize(
    ("batch", "settings"),
    [
        (8, {"max_num_tokens": 24}),  # prompts take several steps, so that the first requests are far ahead
        (2, {"max_chunk": 4}),
        (2, {"max_chunk": 1}),  # all steps have one token of each request
        (3, {"depth": 3}),
        (8, {"num_blocks": 1 + 8 * 5}),
    ],
)
def test_a_trace_shows_steps_in_which_all_requests_decode(text_model, batch, settings):
    from mrv2 import LLM
    from mrv2.bench.trace import record

    plans = []
    with LLM(str(text_model), device="cpu", max_num_seqs=batch, **settings) as llm:
        scheduler = llm._driver._engine.scheduler
        plan, columns = scheduler.plan, scheduler.columns

        def noted():
            made = plan()
            if made is not None:
                past_np = columns.scheduled_ub_np[made.rows_np] > columns.prefill_len_np[made.rows_np]
                plans.append((time.perf_counter(), int(past_np.sum()), made.num_reqs))
            return made

        scheduler.plan = noted
        trace = record(llm, batch=batch, prompt_tokens=20, steps=6)
    shown = [sizes for at, *sizes in plans if trace.start <= at <= trace.end]
    assert len(shown) >= 6
    assert all(sizes == [batch, batch] for sizes in shown)
    assert any(sizes != [batch, batch] for _, *sizes in plans)
    assert list(trace.prompts) == [False] * 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 2}, "max_num_seqs=2"),
        ({"max_num_seqs": 8, "num_blocks": 24}, "8 requests of .* together need"),
        ({"max_num_seqs": 8, "num_blocks": 6, "block_size": 14}, "KV cache of 70"),
        ({"max_num_seqs": 8, "max_model_len": 70}, "a context of 70"),
    ],
)
def test_a_trace_of_what_does_not_fit_is_refused(text_model, settings, message):
    from mrv2 import LLM
    from mrv2.bench.trace import record

    with LLM(str(text_model), device="cpu", **settings) as llm, pytest.raises(CommandLineError, match=message):
        record(llm, batch=8, prompt_tokens=64, steps=4)


def test_device_lanes_are_drawn_and_their_gaps_told(check_self_contained):
    host = [Span("engine", "step", 0.0, 1e-3), Span("engine", "wait", 1e-4, 9e-4)]
    device = [Span("stream 7", "first <kernel>", 0.0, 3e-4), Span("stream 7", "second", 5e-4, 1e-3)]
    trace = Trace(host=host, device=device, steps=1, start=0.0, end=1e-3, prompts=[False])
    assert sorted(check_lanes(chrome_events(trace)["traceEvents"]).values()) == ["engine", "stream 7"]
    html = draw(trace, "a trace")
    check_self_contained(html)
    assert "first &lt;kernel&gt;" in html
    assert "Busy 800 us" in html
    assert "20.0%" in html
    assert [depth for _, depth in nested(host)] == [0, 1]
