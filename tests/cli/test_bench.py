"""`mrv2 bench` as a process, on a CPU, with a tiny model and with a config alone."""

import json
import random
import subprocess
import sys

import pytest

from mrv2.bench import arms
from mrv2.bench.arms import Arm, Workload, medians, parse_arm, run_arms
from mrv2.bench.plot import draw as draw_bench
from mrv2.bench.plot import reasons
from mrv2.bench.requests import measure_arrivals
from mrv2.bench.steps import measure_steps, start_decoding, stop
from mrv2.errors import CacheTooSmallError, CommandLineError
from mrv2.runner.graphs import default_plan
from mrv2.runner.intake import Intake
from mrv2.testing.freeze import replay_steps
from mrv2.testing.recorder import RecordedOps

pytestmark = pytest.mark.timeout(240)

QUICK = ("--prompt-tokens", 8, "--device", "cpu")


def mrv2(*args):
    command = [sys.executable, "-m", "mrv2", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def test_bench_compares_arms_of_a_config_alone(config, tmp_path, check_self_contained):
    out, html = tmp_path / "b.json", tmp_path / "b.html"
    code, text, err = mrv2(
        *("bench", "--config", config, *QUICK, "--batches", "1,3", "--new-tokens", 6, "--steps", 4, "--requests", 4),
        *("--repeat", 2, "--arm", "small:block_size=4", "--arm", "block_size=32", "-o", out, "--html", html),
    )
    assert code == 0, err
    assert "unavailable" in text  # what takes CUDA events is not made up
    report = json.loads(out.read_text())
    assert [arm["name"] for arm in report["arms"]] == ["small", "block_size=32"]
    assert report["settings"]["weights"] == "random"
    assert report["model"] == str(config)
    assert f"mrv2 bench: {config}" in html.read_text()
    assert not report["interrupted"]
    for arm in report["arms"]:
        assert [entry["batch"] for entry in arm["throughput"]] == [1, 3]
        for entry in arm["throughput"]:
            runs = [run["tokens_per_second"] for run in entry["runs"]]
            assert len(runs) == 2
            assert min(runs) <= entry["tokens_per_second"] <= max(runs)
            for run in entry["runs"]:
                assert run["tokens_per_second"] * run["seconds"] == pytest.approx(6 * entry["batch"], rel=0.01)
        for entry in arm["steps"]:
            assert 0 < entry["step_us"] <= entry["step_us_p99"]
            assert all(str(entry[name]).startswith("unavailable") for name in ("host_us", "device_us", "idle_us"))
        arrivals = arm["arrivals"]
        assert repr(arrivals["requests"]) == "4"  # a count, also as a median of two
        assert arm["load_s"] > 0
        assert arm["assemble_s"] > 0
        for times in (arrivals["first_token_ms"], arrivals["between_tokens_ms"]):
            assert 0 < times["p50"] <= times["p99"]
    # All arms have the same arrivals a second.
    assert len({arm["arrivals"]["rate"] for arm in report["arms"]}) == 1
    check_self_contained(html.read_text())


def test_bench_measures_a_model_and_prints_one_document(text_model):
    code, out, err = mrv2(
        *("bench", text_model, *QUICK, "--measures", "throughput", "--batches", 2, "--new-tokens", 4, "--repeat", 1),
        "--json",
    )
    assert code == 0, err
    report = json.loads(out)
    assert [arm["name"] for arm in report["arms"]] == ["default"]
    assert report["arms"][0]["steps"] == []
    assert report["arms"][0]["arrivals"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either MODEL or --config"),
        (["--config", "absent.json"], "there is no file"),
        (["x", "--arm", "a:blocksize=3"], "sets nothing"),
        (["x", "--measures", "speed"], "no measure"),
        (["x", "--batches", "1,two"], "whole numbers"),
        (["x", "--rate", "0"], "finite number above 0"),
        (["x", "--rate", "nan"], "finite number above 0"),
        (["x", "--rate", "-5"], "finite number above 0"),
        (["x", "--rate", "inf"], "finite number above 0"),
        (["x", "--measures", "steps,arrivals"], "arrivals need a rate"),
        (["x", "-t", "-1"], "temperature=-1.0"),
        (["x", "--arm", "a:depth=99"], "depth=99"),
        (["x", "--arm", "block_size=4", "--arm", "a:dtype=[1]"], "dtype=[1]"),
        (["x", "--arm", "device=[1]"], "device [1] is unknown"),
        (["x", "--arm", "device=null"], "device None is unknown"),
        (["x", "--arm", ""], "an arm has a name and settings"),
        (["x", "--arm", "x:"], "an arm has a name and settings"),
        (["x", "--arm", ":block_size=4"], "an arm has a name and settings"),
        (["x", "--arm", "a:block_size=4", "--arm", "a:block_size=8"], "two arms are named 'a'"),
        (["x", "-o", "absent/x.json"], "absent is no folder"),
        (["x", "--html", "."], "it is a folder"),
        (["x", "-o", "same.x", "--html", "./same.x"], "would be written twice"),
    ],
)
def test_wrong_use_is_named_before_anything_is_loaded(args, message, capfd):
    """No model is named x: that would be the message else."""
    from mrv2.cli.app import run

    assert run(["bench", *args]) == 2
    assert message in capfd.readouterr().err


def test_what_does_not_fit_the_context_is_named(config):
    code, _, err = mrv2("bench", "--config", config, "--prompt-tokens", 500, "--device", "cpu")
    assert code == 2
    assert "--prompt-tokens" in err


def test_arms_have_names_and_typed_values():
    arm = parse_arm("big cache:max_num_seqs=8,graphs=False,dtype=float32,kv_memory=none")
    assert arm.name == "big cache"
    assert arm.settings == {"max_num_seqs": 8, "graphs": False, "dtype": "float32", "kv_memory": None}
    assert parse_arm("device=cuda:0").settings == {"device": "cuda:0"}
    with pytest.raises(CommandLineError):
        parse_arm("name:depth")


def test_medians_reach_into_dictionaries():
    runs = [{"a": 1, "b": {"c": 5.0}}, {"a": 9, "b": {"c": 7.0}}, {"a": 2, "b": {"c": 6.0}}]
    assert medians(runs) == {"a": 2, "b": {"c": 6.0}}
    assert str(medians([{"n": 6, "s": 0.1}, {"n": 6, "s": 0.2}])) == "{'n': 6, 's': 0.15}"


class Engines:
    """Engines of the tiny config, and what their schedulers planned."""

    def __init__(self, folder):
        from mrv2.frontend.build import load
        from mrv2.frontend.engine_config import EngineConfig

        self.loaded = load(str(folder), EngineConfig(device="cpu", weights="random"))

    def __call__(self, **settings):
        from mrv2.frontend.build import assemble
        from mrv2.frontend.engine_config import EngineConfig

        return assemble(self.loaded, EngineConfig(**{"device": "cpu", "weights": "random", **settings}))


@pytest.fixture(scope="module")
def engines(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    (folder / "config.json").write_text(config.read_text())
    return Engines(folder)


def planned(scheduler):
    """A list that gets decodes and requests of each step planned from now on."""
    plan, sizes = scheduler.plan, []

    def noted():
        made = plan()
        if made is not None:
            past_np = scheduler.columns.scheduled_ub_np > scheduler.columns.prefill_len_np
            sizes.append((int(past_np[made.rows_np].sum()), made.num_reqs))
        return made

    scheduler.plan = noted
    return sizes


@pytest.mark.parametrize(
    ("batch", "prompt_len", "settings"),
    [
        (8, 40, {"max_num_tokens": 24}),  # the first requests are far ahead of the last
        (4, 40, {"max_chunk": 3}),
        (2, 20, {"max_chunk": 1, "depth": 3}),
        (16, 3, {"max_num_tokens": 16}),  # beside fifteen that decode, a token is left for a prompt
        (3, 40, {"block_size": 5, "num_blocks": 1 + 3 * 18}),  # just enough
    ],
)
def test_measured_steps_are_decodes_of_the_whole_batch(engines, batch, prompt_len, settings):
    parts = engines(max_num_seqs=batch, **settings)
    scheduler = parts.engine.scheduler
    before = planned(scheduler)
    start_decoding(parts, batch, prompt_len=prompt_len, steps=4, rng=random.Random(0))
    assert any(sizes != (batch, batch) for sizes in before)
    before.clear()
    measure_steps(parts, 4)
    assert before == [(batch, batch)] * 12
    stop(parts, batch)
    assert not parts.engine.has_work
    assert scheduler.stats.preemptions == 0


def test_steps_that_are_no_decodes_of_the_batch_are_refused(engines):
    from mrv2.sample.params import SamplingParams

    parts = engines(max_num_seqs=2, num_blocks=8)  # 112 tokens for both
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    parts.engine.add([parts.intake.request(f"step-{i}", [1, 2, 3], params) for i in range(2)])
    for _ in range(50):
        parts.engine.step()
    with pytest.raises(CommandLineError, match="preempted"):
        measure_steps(parts, 2)
    stop(parts, 2)
    with pytest.raises(CommandLineError, match="0 requests"):
        measure_steps(parts, 2)


BASE = {"device": "cpu", "weights": "random"}
WORK = {
    "measures": ["steps"],
    "batches": [1],
    "prompt_tokens": 64,
    "new_tokens": 64,
    "temperature": 0.0,
    "steps": 32,
    "requests": 2,
    "rate": None,
}


@pytest.mark.parametrize(
    ("settings", "work", "message"),
    [
        ({"num_blocks": 8, "block_size": 12}, {}, "KV cache of 84"),
        ({"num_blocks": 8, "block_size": 10}, {}, "KV cache of 70"),
        ({"num_blocks": 8}, {"measures": ["throughput"]}, "KV cache of 112"),
        ({"num_blocks": 8}, {"measures": ["arrivals"], "rate": 5.0}, "KV cache of 112"),
        ({"num_blocks": 40}, {"batches": [4]}, "4 requests of .* together need .* and a has 39"),
        ({"max_model_len": 128}, {}, "a context of 128"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_measured(engines, monkeypatch, settings, work, message):
    monkeypatch.setattr(arms, "load", lambda *_: engines.loaded)
    with pytest.raises(CommandLineError, match=message) as found:
        run_arms("x", [Arm("a", settings)], BASE, Workload(**WORK | work), repeat=1)
    assert found.value.fix


def test_requests_that_wait_for_each_other_are_no_reason_to_refuse(engines, monkeypatch):
    monkeypatch.setattr(arms, "load", lambda *_: engines.loaded)
    work = WORK | {"measures": ["throughput"], "batches": [4], "new_tokens": 8}
    report, _ = run_arms("x", [Arm("a", {"num_blocks": 8})], BASE, Workload(**work), repeat=1)
    assert report["arms"][0]["throughput"][0]["tokens_per_second"] > 0


def test_arms_with_other_rows_get_the_same_work(engines, monkeypatch):
    """What one of them skips is said, isn't asked for, and changes nothing else."""
    given = {}
    request = Intake.request

    def noted(intake, req_id, prompt_ids, *args, **kwargs):
        given.setdefault(intake, []).append((req_id, list(prompt_ids)))
        return request(intake, req_id, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(Intake, "request", noted)
    monkeypatch.setattr(arms, "load", lambda *_: engines.loaded)
    work = Workload(**WORK | {"measures": ["steps", "arrivals"], "batches": [1, 2, 64], "rate": 50.0, "steps": 2})
    few, many = Arm("few", {"max_num_seqs": 2}), Arm("many", {"max_num_seqs": 64, "max_num_tokens": 65})
    with pytest.raises(CommandLineError, match=r"many has a context of 200"):  # for 64 the context would be too short
        run_arms("x", [few, many], BASE | {"max_model_len": 200}, work, repeat=1)
    given.clear()
    many.settings = {"max_num_seqs": 64}
    few.steps.clear()
    report, _ = run_arms("x", [few, many], BASE, work, repeat=1)
    entries = {arm["name"]: arm["steps"] for arm in report["arms"]}
    assert [(entry["batch"], len(entry["runs"])) for entry in entries["few"]] == [(1, 1), (2, 1), (64, 0)]
    assert entries["few"][-1]["step_us"] == "unavailable: max_num_seqs=2"
    assert "-: unavailable: max_num_seqs=2 (few, batch 64)" in reasons(report)
    assert "max_num_seqs=2 (few" in draw_bench(report)
    first, second = given.values()
    own = [pair for pair in second if pair not in first]
    assert len(first) > 3
    assert all(pair in second for pair in first)
    assert {req_id for req_id, _ in own} == {f"step-{i}" for i in range(64)}


def test_no_graph_is_captured_while_arrivals_are_measured(engines):
    """Also on a CPU, where graphs are emulated: with more requests at once, and prompts longer than at the start."""
    parts = engines(graphs=False, max_num_seqs=8, depth=2)
    graphs = replay_steps(parts, RecordedOps(), default_plan(parts.limits))
    parts.engine._runner.capture_common()
    captured, request = [], parts.intake.request

    def noted(req_id, *args, **kwargs):
        captured.append((req_id.split("-")[0], graphs.stats.captures))
        return request(req_id, *args, **kwargs)

    parts.intake.request = noted
    before = graphs.stats.captures
    result = measure_arrivals(parts, rate=200.0, count=8, prompt_len=300, new=20)
    assert result["requests"] == 8
    assert [kind for kind, _ in captured] == ["warm"] * 8 + ["arrival"] * 8
    assert captured[8][1] > before
    assert graphs.stats.captures == captured[8][1]


def test_rounds_before_an_interruption_are_kept(engines, monkeypatch, tmp_path, capfd):
    from mrv2.cli.app import run

    monkeypatch.setattr(arms, "load", lambda *_: engines.loaded)
    calls = []

    def timed(llm, *args, **kwargs):
        calls.append(llm.config.block_size)
        if len(calls) > 2 * 2 * 2 + 2:  # in the third round's second visit
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(arms, "timed_batch", timed)
    out, html = tmp_path / "b.json", tmp_path / "b.html"
    options = ["--arm", "block_size=4", "--arm", "block_size=8", "-o", str(out), "--html", str(html), *map(str, QUICK)]
    command = ["bench", "x", "--measures", "throughput", "--batches", "2", *options]
    assert run([*command, "--repeat", "3"]) == 130
    report = json.loads(out.read_text())
    assert report["interrupted"]
    assert report["repeat"] == 2
    assert [len(arm["throughput"][0]["runs"]) for arm in report["arms"]] == [2, 2]
    assert "Interrupted" in html.read_text()
    assert "block_size=8" in capfd.readouterr().out
    out.unlink()
    assert run([*command, "--repeat", "1"]) == 130  # at once, with nothing to keep
    assert not out.exists()


def test_rounds_before_an_error_are_kept(engines, monkeypatch, tmp_path, capfd):
    from mrv2.cli.app import run

    monkeypatch.setattr(arms, "load", lambda *_: engines.loaded)
    calls = []

    def timed(*_, **__):
        calls.append(1)
        if len(calls) > 3:  # in the second round
            raise CacheTooSmallError("no room", where="a test", fix="none")
        return 0.5

    monkeypatch.setattr(arms, "timed_batch", timed)
    out = tmp_path / "b.json"
    options = ["-o", str(out), *map(str, QUICK)]
    command = ["bench", "x", "--measures", "throughput", "--batches", "2", *options]
    assert run([*command, "--repeat", "3"]) == 2
    report = json.loads(out.read_text())
    assert (report["interrupted"], report["repeat"]) == (True, 1)
    assert "no room" in capfd.readouterr().err


def test_large_batches_have_room_for_prompts_by_default(engines, monkeypatch, capfd):
    from mrv2.cli.app import run

    monkeypatch.setattr(arms, "load", lambda *_: engines.loaded)
    options = ["--measures", "steps", "--batches", "2048", "--prompt-tokens", "8", "--steps", "1", "--repeat", "1"]
    assert run(["bench", "x", *options, "--device", "cpu"]) == 0, capfd.readouterr().err
