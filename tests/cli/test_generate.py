"""`mrv2 generate` as a process: prompt, pipe, chat, JSONL, wrong input, Ctrl-C, no network."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(240)


def mrv2(*args, stdin=None, env=None, **kwargs):
    """Run `python -m mrv2` and return (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "mrv2", *map(str, args)],
        input=stdin if stdin is None or isinstance(stdin, bytes) else stdin.encode(),
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        timeout=200,
        check=False,
        **kwargs,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture
def here(capfd):
    """here(*args): as `mrv2`, in this process, which has imported everything."""
    from mrv2.cli.app import run

    def call(*args):
        capfd.readouterr()
        code = run([*map(str, args)])
        return code, *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def no_network(tmp_path_factory):
    """Environment in which opening a socket raises."""
    folder = tmp_path_factory.mktemp("nonet")
    (folder / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*a, **k):\n"
        "    raise AssertionError('a socket was opened')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_json_of_one_prompt_without_any_network(text_model, no_network):
    code, out, err = mrv2(
        "generate", text_model, "the cat", "-t", 0, "-n", 6, "--ignore-eos", "--logprobs", 2, "--json", env=no_network
    )
    assert code == 0, err
    result = json.loads(out)
    completion = result["outputs"][0]
    assert len(completion["token_ids"]) == len(completion["logprobs"]) == 6
    assert completion["finish_reason"] == "length"
    assert len(completion["logprobs"][0]["top"]) == 2
    assert result["prompt"] == "the cat"
    assert result["adapter"].startswith("mrv2-adapter-llama")
    assert result["timing"]["total_time"] > 0
    assert result["usage"]["generated_tokens"] == 6
    assert "6 generated" in err


def test_text_from_argument_pipe_and_stream_is_the_same(text_model):
    base = ("generate", text_model, "-t", 0, "-n", 20, "--ignore-eos")
    code, whole, err = mrv2(*base, "the rat")
    assert code == 0, err
    assert mrv2(*base, stdin="the rat")[1] == whole
    assert mrv2(*base, "the rat", "--stream")[1] == whole
    assert "\x1b" not in err  # no colours or bars in a pipe


def test_chat_uses_template_and_system_message(text_model):
    code, out, err = mrv2("generate", text_model, "the hat", "--chat", "--system", "the mat", "-n", 2, "--json")
    assert code == 0, err
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text_model)
    want = "<turn>system: the mat<turn>user: the hat<turn>"
    assert tokenizer.decode(json.loads(out)["prompt_token_ids"], skip_special_tokens=False) == want


def test_jsonl_runs_the_good_lines_and_names_the_bad_ones(text_model, tmp_path):
    lines = [
        '{"id": "a", "prompt": "the cat", "max_tokens": 3}',
        '{"prompt": "the cat"',
        "",
        '{"prompt": [1, 2, 3], "temperature": 0}',
        '{"prompt": "x", "max_tokenz": 3}',
        '{"prompt": "x", "temperature": -1}',
        '{"prompt": ""}',
        '{"prompt": [1, 99999]}',
        '{"messages": [{"role": "user", "content": "the hat"}]}',
        '{"messages": "hello"}',
        '{"id": 7}',
        '"just text"',
        "[1, 2]",
        '{"prompt": {"a": 1}}',
        '{"prompt": "x", "stop": 5}',
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    code, out, err = mrv2("generate", text_model, "-i", source, "-o", target, "-n", 4, "--ignore-eos")
    assert code == 2
    assert out == ""
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["line"] for r in records] == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    good = {r["line"]: r for r in records if "error" not in r}
    assert sorted(good) == [1, 4, 9, 12]
    assert good[1]["id"] == "a"
    assert [len(good[n]["outputs"][0]["token_ids"]) for n in (1, 4, 9, 12)] == [3, 4, 4, 4]
    for record in records:
        if "error" in record:
            assert f"line {record['line']}" in record["error"]["where"]
            assert record["error"]["code"] in ("MRV2-401", "MRV2-501")
            assert f"line {record['line']}" in err
            assert record["error"]["fix"]


def test_no_line_can_stop_the_others(text_model, tmp_path):
    deep = "[" * 100_000
    lines = [
        '{"id": "kept", "prompt": "x", "temperature": ' + "9" * 5000 + "}",
        '{"prompt": ' + deep,
        '{"prompt": "x", "temperature": 1' + "0" * 400 + "}",
        '{"prompt": "a\\ud800"}',
        '{"id": "\\ud800", "prompt": "the cat"}',
        '{"prompt": "one\u2028two\x85three"}',
        '{"id": "named", "prompt": 5}',
        '{"prompt": "x", "temperature": NaN}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": []}',
        '{"prompt": "x", "skip_special_tokens": "no"}',
        '{"prompt": "x", "extra_args": {"nonsense": 1}}',
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    code, out, err = mrv2(
        "generate", text_model, "-i", source, "-n", 2, "--ignore-eos", env={"PYTHONIOENCODING": "ascii"}
    )
    assert code == 2
    assert "Traceback" not in err
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["line"] for r in records] == list(range(1, 13))
    assert [r["line"] for r in records if "error" not in r] == [5, 6]
    assert records[4]["id"] == "\ud800"
    assert records[5]["prompt"] == "one\u2028two\x85three"
    assert records[6]["id"] == "named"


@pytest.mark.parametrize(
    ("args", "code", "what"),
    [
        (("-i", "{tmp}/absent.jsonl"), "MRV2-501", "absent.jsonl"),
        (("-i", "{tmp}/latin1.jsonl"), "MRV2-501", "not UTF-8: byte 0xe9 at offset 12, line 1"),
        (("-i", "{tmp}/empty.jsonl"), "MRV2-501", "no lines"),
        (("-i", "{tmp}/empty.jsonl", "prompt"), "MRV2-", "can't go together"),
        (("x", "--system", "y"), "MRV2-", "--system without --chat"),
        (("x", "--temperature", "-1"), "MRV2-401", "temperature=-1.0"),
        (("x", "--kv-memory", "10"), "MRV2-402", "at least 2 are needed"),
        (("x", "--max-model-len", "100000"), "MRV2-403", "exceeds the model's context"),
        (("the " * 200,), "MRV2-401", "one must be left to generate"),
        (("",), "MRV2-401", "the prompt is empty"),
        (("x", "-o", "{tmp}/no/such/folder/out"), "MRV2-501", "No such file"),
        (("x", "--device", "cpu", "--graphs"), "MRV2-403", "graphs=True, and the model runs on cpu"),
        (("x", "--dtype", "int3"), "MRV2-403", "dtype='int3'"),
        (("-i", "{tmp}/empty.jsonl", "-o", "{tmp}/empty.jsonl"), "MRV2-", "the same file as --input"),
        (("x", "-o", "/dev/full"), "MRV2-501", "No space left"),
        (("x", "--adapter", "{tmp}/absent.py"), "MRV2-", "doesn't exist"),
    ],
)
def test_wrong_use_says_what_and_exits_2(text_model, here, tmp_path, args, code, what):
    (tmp_path / "latin1.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    exit_code, out, err = here("generate", text_model, *(a.format(tmp=tmp_path) for a in args))
    assert (exit_code, out) == (2, "")
    assert code in err
    assert what in err
    assert "fix:" in err
    assert "Traceback" not in err


def test_stdin_that_is_not_utf8(text_model):
    code, _, err = mrv2("generate", text_model, stdin=b"abc\xff")
    assert code == 2
    assert "not UTF-8: byte 0xff at offset 3" in err


def test_an_error_as_json(text_model):
    code, out, _ = mrv2("generate", text_model, "", "--json")
    assert code == 2
    assert json.loads(out)["error"]["code"] == "MRV2-401"


def test_debug_mode_and_time_limit(text_model):
    base = ("generate", text_model, "the cat", "-t", 0, "-n", 8, "--ignore-eos")
    code, out, err = mrv2(*base, "--debug-runner", "--timeout", 1000, "--json")
    assert code == 0, err
    plain = mrv2(*base, "--json")[1]
    assert json.loads(out)["outputs"] == json.loads(plain)["outputs"]
    code, out, err = mrv2(*base, "--timeout", -1)
    assert (code, out) == (2, "")
    assert "MRV2-401" in err
    assert "timeout=-1.0 is out of range" in err


def test_a_time_limit_that_is_met(text_model):
    code, out, err = mrv2("generate", text_model, "the cat", "-n", 120, "--ignore-eos", "--timeout", 1e-9, "--json")
    assert code == 0, err
    assert json.loads(out)["outputs"][0]["finish_reason"] == "timeout"
    assert "1 timed out" in err


def test_ctrl_c_stops_at_once_and_quietly(text_model):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mrv2",
            "generate",
            str(text_model),
            "the cat",
            "-n",
            "100",
            "-t",
            "0",
            "--stream",
            "--ignore-eos",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        # A shell's background job ignores the signal, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    process.stdout.read(1)  # generation has begun
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    if process.returncode != 0:  # a tiny model may have been done already
        assert process.returncode == 130
        assert b"Traceback" not in err
    assert time.monotonic() - start < 20


def test_a_reader_that_leaves_is_no_error(text_model):
    generate = f'"{sys.executable}" -m mrv2 generate "{text_model}" "the cat" -n 100 --ignore-eos --stream'
    command = f"{generate} | head -c 1 >/dev/null"
    done = subprocess.run(
        ["bash", "-c", command + "; exit ${PIPESTATUS[0]}"], capture_output=True, timeout=200, check=False
    )
    assert done.returncode in (0, 141)
    assert b"Traceback" not in done.stderr


def test_an_error_whose_reader_has_left_keeps_its_exit_code():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mrv2", "generate", "./nothing", "hello", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=200, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (2, b"")
