"""`mrv2 generate --record` and `mrv2 replay`: equal when nothing has changed, and what has changed by name."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv2.cli.app import run as mrv2
from mrv2.errors import RunFileError
from mrv2.testing.checkpoints import write_random
from mrv2.testing.runs import read_run, write_run

pytestmark = pytest.mark.timeout(240)

HELLO = Path(__file__).parents[2] / "examples" / "hello.py"
LINES = [
    {"id": "greedy", "prompt": "the cat", "temperature": 0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True},
    {"id": "seeded", "prompt": "the rat sat", "seed": 7, "max_tokens": 20},
    {"id": "hot", "prompt": "grüße", "temperature": 3.0, "top_k": 40, "max_tokens": 25, "ignore_eos": True},
    {"id": "stopped", "prompt": "the", "temperature": 2.0, "stop": ["e", "t", "\ufffd"], "max_tokens": 60},
    {"id": "late", "prompt": [5, 6, 7], "timeout": 1e-9, "max_tokens": 90, "ignore_eos": True},
    {"id": "cut", "prompt": [8, 9], "timeout": 0.03, "max_tokens": 90, "ignore_eos": True},
    {"id": "nucleus", "prompt": [9] * 40, "top_p": 0.8, "min_p": 0.01, "max_tokens": 15},
]


@pytest.fixture(scope="module")
def recorded(text_model, tmp_path_factory):
    """A run of seven requests on two rows, and its results."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    argv = ["generate", str(text_model), "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    assert mrv2([*argv, "--max-num-seqs", "2", "--max-num-tokens", "16", "--record", str(folder / "run.json")]) == 0
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return folder / "run.json", results


def replayed(capsys, *argv):
    """Exit code and JSON of a replay."""
    capsys.readouterr()
    code = mrv2(["replay", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def edited(recorded, tmp_path, edit):
    """A copy of the run with a change."""
    raw = json.loads(recorded[0].read_text())
    edit(raw)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(raw))
    return path


def test_the_file_holds_requests_seeds_and_results(recorded):
    run, results = read_run(recorded[0]), recorded[1]
    assert [one.id for one in run.requests] == [line["id"] for line in LINES]
    for one, result in zip(run.requests, results, strict=True):
        assert list(one.prompt) == result["prompt_token_ids"]
        assert list(one.tokens) == result["outputs"][0]["token_ids"]
        assert one.finish_reason == result["outputs"][0]["finish_reason"]
        assert one.sampling["seed"] is not None
    assert run.requests[1].sampling["seed"] == 7
    assert len(run.requests[0].logprobs) == 12
    late = run.requests[4]
    assert (late.finish_reason, late.ending.reason, late.complete) == ("timeout", "timeout", False)
    assert run.requests[3].stop_reason in ("e", "t", "\ufffd")
    assert sum(tokens for _, tokens in run.steps) >= sum(len(one.prompt) for one in run.requests if one.tokens)
    assert recorded[0].stat().st_mode & 0o077 == 0  # prompts are nobody else's


def test_a_replay_is_equal_and_takes_the_same_steps(recorded, capsys):
    code, found = replayed(capsys, recorded[0])
    assert (code, found["equal"], found["same_steps"], found["differences"]) == (0, True, True, [])
    assert found["num_tokens"] == sum(len(r["outputs"][0]["token_ids"]) for r in recorded[1])
    assert found["worst_logprob"] == 0
    assert mrv2(["replay", str(recorded[0])]) == 0
    out = capsys.readouterr().out
    assert out.startswith("equal: 7 requests")
    assert "environment, adapter, checkpoint, settings: as recorded" in out


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        (("--max-num-seqs", "1", "--sync"), {"max_num_seqs", "runner"}),
        (("--max-num-tokens", "64", "--no-prefix-caching"), {"max_num_tokens", "prefix_caching"}),
        (("--max-num-seqs", "6", "--debug-runner"), {"max_num_seqs", "debug"}),
    ],
)
def test_other_settings_give_the_same_tokens_and_are_named(recorded, capsys, argv, changed):
    code, found = replayed(capsys, recorded[0], *argv)
    assert (code, found["partings"]) == (0, [])
    assert {d["name"] for d in found["differences"]} == changed
    assert not found["same_steps"]


def test_a_changed_tensor_is_found_and_named(recorded, text_model, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(text_model, other)
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = -tensors[name]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code, found = replayed(capsys, recorded[0], "--model", other)
    assert code == 1
    (difference,) = found["differences"]
    assert (difference["kind"], difference["name"]) == ("checkpoint", f"tensor {name}")
    first = found["partings"][0]
    assert first["number"] == min(p["number"] for p in found["partings"])
    assert (
        first["recorded"] == recorded[1][first["number"]]["outputs"][0]["token_ids"][first["position"]] != first["now"]
    )
    mrv2(["replay", str(recorded[0]), "--model", str(other)])
    out = capsys.readouterr().out
    assert f"  tensor {name}: recorded " in out
    assert f"first: request {first['number']} (line {first['line']}" in out


def test_where_tokens_part_and_by_how_much(recorded, text_model, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    def plant(raw):
        raw["requests"][0]["tokens"][5] ^= 1

    path = edited(recorded, tmp_path, plant)
    code, found = replayed(capsys, path)
    (parting,) = found["partings"]
    assert (code, parting["number"], parting["position"], parting["id"]) == (1, 0, 5, "greedy")
    before = read_run(recorded[0]).requests[0]
    planted = before.tokens[5] ^ 1
    assert (parting["recorded"], parting["now"]) == (planted, before.tokens[5])
    model = AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    ids = torch.tensor([[*before.prompt, *before.tokens[:5]]])
    with torch.inference_mode():
        want = model(ids).logits[0, -1].log_softmax(-1)
    assert found["logprobs"]["now"] == pytest.approx(float(want[before.tokens[5]]), abs=1e-4)
    likely = want.topk(64).indices.tolist()
    if planted in likely[:60]:
        assert found["logprobs"]["recorded"] == pytest.approx(float(want[planted]), abs=1e-4)
        assert found["logprobs"]["gap"] == pytest.approx(float(want.max() - want[planted]), abs=1e-4)
    elif planted not in likely:
        assert found["logprobs"]["recorded"] is None


def test_an_end_that_comes_earlier_or_for_another_reason_is_a_difference(recorded, tmp_path, capsys):
    def shorten(raw):
        del raw["requests"][2]["tokens"][20:]

    _, found = replayed(capsys, edited(recorded, tmp_path, shorten))
    (parting,) = found["partings"]
    assert (parting["number"], parting["position"], parting["recorded"]) == (2, 20, None)

    def rename(raw):
        raw["requests"][0]["finish_reason"] = "stop"

    _, found = replayed(capsys, edited(recorded, tmp_path, rename))
    (parting,) = found["partings"]
    assert (parting["number"], parting["finish"]) == (0, ["stop", "length"])


def test_a_changed_adapter_is_found_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(HELLO, tmp_path / "mine.py")
    scope = {}
    exec(HELLO.read_text(), scope)
    config = scope["HelloConfig"](architectures=["HelloForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    write_random(tmp_path / "model", scope["HelloForCausalLM"], config, where="hello")
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2, 3, 4, 5, 6, 7, 8]}\n{"prompt": [9, 8, 7, 6]}\n')
    argv = ["generate", "./model", "-i", "in.jsonl", "--adapter", "./mine.py", "-n", "30", "--record", "run.json"]
    assert mrv2(argv) == 0
    monkeypatch.chdir("/")  # relative names were made absolute
    assert mrv2(["replay", str(tmp_path / "run.json")]) == 2  # a file decides on no code
    assert f"--adapter {tmp_path / 'mine.py'}" in capsys.readouterr().err
    named = (tmp_path / "run.json", "--adapter", tmp_path / "mine.py")
    code, found = replayed(capsys, *named)
    assert (code, found["differences"]) == (0, [])
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace('"rope_theta": 1e4', '"rope_theta": 2.25'))
    monkeypatch.delitem(sys.modules, "mine")  # as in a new process
    code, found = replayed(capsys, *named)
    monkeypatch.delitem(sys.modules, "mine")
    assert code == 1
    assert [(d["kind"], d["name"]) for d in found["differences"]] == [("adapter", "file mine.py")]


def test_a_streamed_answer_is_recorded_too(text_model, tmp_path, capsys):
    path = tmp_path / "run.json"
    assert mrv2(["generate", str(text_model), "the mat", "--stream", "-n", "9", "--record", str(path)]) == 0
    assert "[1 request recorded in" in capsys.readouterr().err
    code, found = replayed(capsys, path)
    assert (code, found["same_steps"]) == (0, True)


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_file_that_exists_is_refused_before_anything_runs(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text("mine")
    assert mrv2(["generate", "no-such-model", "x", "--record", str(path)]) == 2
    assert "MRV2-704" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert mrv2(["generate", "no-such-model", "x", "--record", str(tmp_path / "absent" / "run.json")]) == 2
    assert "MRV2-704" in capsys.readouterr().err
    dangling = tmp_path / "link.json"
    dangling.symlink_to(tmp_path / "elsewhere")
    assert mrv2(["generate", "no-such-model", "x", "--record", str(dangling)]) == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_run_is_written_whole_and_over_nothing(recorded, tmp_path, monkeypatch, hard_links):
    def refuse(*args, **kwargs):
        raise OSError("there are no hard links")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    run, path = read_run(recorded[0]), tmp_path / "run.json"
    write_run(path, run)
    assert read_run(path) == run
    with pytest.raises(RunFileError, match="overwritten"):
        write_run(path, run)
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_file_that_appears_while_writing_is_kept(recorded, tmp_path, monkeypatch):
    path, real = tmp_path / "run.json", os.fsync

    def overtake(number):
        path.write_text("theirs")
        real(number)

    monkeypatch.setattr(os, "fsync", overtake)
    with pytest.raises(RunFileError, match="meanwhile"):
        write_run(path, read_run(recorded[0]))
    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda raw: raw.update(format=2, anything="new"),
            "format 2, written by mrv2 0.1.0; this version reads format 1",
        ),
        (lambda raw: raw.pop("format"), "no `format`"),
        (lambda raw: raw.update(format=True), "no `format`"),
        (lambda raw: raw.update(extra=1), "extra"),
        (lambda raw: raw["requests"][1].pop("tokens"), "requests.1.tokens"),
        (lambda raw: raw["requests"][1].update(prompt=[]), "requests.1.prompt"),
        (lambda raw: raw["requests"][1].update(tokens=["7"]), "requests.1.tokens.0"),
        (lambda raw: raw["requests"][1]["sampling"].update(seed=None), "no seed"),
        (lambda raw: raw["requests"][1]["sampling"].update(top_p=7), "top_p"),
        (lambda raw: raw["requests"][1]["sampling"].update(beams=7), "exactly the fields"),
        (lambda raw: raw["requests"][0].update(logprobs=[]), "as many"),
        (lambda raw: raw["identity"]["settings"].update(flux=7), "flux"),
        (lambda raw: raw.update(requests=[]), "requests"),
    ],
)
def test_a_file_that_is_no_run_is_refused_by_type(recorded, tmp_path, capsys, edit, message):
    path = edited(recorded, tmp_path, edit)
    assert mrv2(["replay", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("MRV2-704")
    assert message in err


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_garbage_is_refused_by_type(tmp_path, capsys, content):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    assert mrv2(["replay", str(path)]) == 2
    assert capsys.readouterr().err.startswith("MRV2-704")
    assert mrv2(["replay", str(tmp_path / "absent.json")]) == 2
    assert capsys.readouterr().err.startswith("MRV2-704")


def test_a_run_on_a_device_that_is_not_here_says_what_to_do(recorded, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    def move(raw):
        raw["identity"]["settings"] |= {"device": "cuda:0", "graphs": True, "depth": 2, "num_blocks": 10**9}

    path = edited(recorded, tmp_path, move)
    assert mrv2(["replay", str(path)]) == 2
    assert "--device cpu" in capsys.readouterr().err
    code, found = replayed(capsys, path, "--device", "cpu")
    assert code == 0
    assert {"device", "graphs"} <= {d["name"] for d in found["differences"]}
