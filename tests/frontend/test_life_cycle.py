"""The end of an engine: in a callback, in a forked child, with its process."""

import multiprocessing
import subprocess
import sys

import pytest

from mrv2 import LLM, SamplingParams
from mrv2.errors import EngineError

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(text_model):
    with LLM(str(text_model), max_num_seqs=8, max_num_tokens=64) as llm:
        yield llm


def test_closing_in_a_callback_returns(text_model):
    llm = LLM(str(text_model))
    future = llm.submit(["the cat"], GREEDY)[0]
    future.add_done_callback(lambda _: llm.close())
    assert future.result(timeout=60).outputs[0].finish_reason == "length"
    llm.close()


def _use_after_fork(llm, results):
    try:
        llm.generate("d", GREEDY)
    except EngineError as error:
        results.put(error.what)
    llm.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")
def test_a_forked_child_is_told_to_build_its_own(llm):
    llm.generate("d", GREEDY)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_use_after_fork, args=(llm, results))
    child.start()
    assert "forked" in results.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert llm.generate("d", GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_process_ends_by_itself_with_a_live_engine(text_model):
    code = (
        "from mrv2 import LLM, SamplingParams; import sys\n"
        "llm = LLM(sys.argv[1]); llm.submit(['d'] * 4, SamplingParams(max_tokens=100, ignore_eos=True))\n"
        "print('end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(text_model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Traceback" not in done.stderr
