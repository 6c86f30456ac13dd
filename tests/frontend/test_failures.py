"""Whatever fails, in whichever thread: everyone who waits hears of it, and only those it concerns."""

import asyncio
import time

import pytest

from mrv2 import LLM, SamplingParams
from mrv2.errors import EngineError, OutputError
from mrv2.runner.outputs import PendingOutput

LONG = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
WATCHED = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True, stop=("never",))


def all_fail(llm, futures, match):
    """Every waiter, and whoever comes later; then both threads end."""
    for future in futures:
        with pytest.raises(EngineError, match=match):
            future.result(timeout=30)

    async def stream():
        return [piece async for piece in llm.stream("d", LONG)]

    for call in (lambda: llm.submit(["d"], LONG), lambda: llm.generate("d", LONG), lambda: asyncio.run(stream())):
        with pytest.raises(EngineError, match=match):
            call()
    llm.close()
    assert not any(thread.is_alive() for thread in llm._driver._threads)


@pytest.mark.parametrize("params", [LONG, WATCHED], ids=["unwatched", "watched"])
def test_an_output_that_cannot_be_read(text_model, monkeypatch, params):
    wait, calls = PendingOutput.wait, []

    def failing(pending):
        calls.append(pending)
        if len(calls) == 5:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return wait(pending)

    monkeypatch.setattr(PendingOutput, "wait", failing)
    llm = LLM(str(text_model), max_num_seqs=2)
    all_fail(llm, llm.submit(["the cat", "d", "a", "the rat"], params), "RuntimeError: CUDA error: device-side assert")


@pytest.mark.parametrize("patience", [0, 1.0], ids=["at once", "behind a full queue of events"])
def test_the_output_thread_fails(text_model, monkeypatch, patience):
    llm = LLM(str(text_model), max_num_seqs=2)

    def failing(events):
        time.sleep(patience)
        raise MemoryError("no room for text")

    monkeypatch.setattr(llm._driver._outputs, "process", failing)
    all_fail(llm, llm.submit(["the cat", "d", "a"], WATCHED), "MemoryError: no room for text")


def test_the_first_failure_is_the_one_that_is_told(text_model, monkeypatch):
    llm = LLM(str(text_model), max_num_seqs=2)

    def failing(events):
        llm.model.module.lm_head.forward = llm.model.module.lm_head.greedy = None  # the engine's thread fails as well
        time.sleep(0.3)
        raise MemoryError("no room for text")

    monkeypatch.setattr(llm._driver._outputs, "process", failing)
    all_fail(llm, llm.submit(["the cat", "d", "a"], WATCHED), "TypeError")


def test_a_scheduler_that_refuses_a_request(text_model, monkeypatch):
    llm = LLM(str(text_model))
    add = llm._driver._engine.scheduler.add

    def failing(request):
        if request.req_id == "1":
            raise ValueError("not this one")
        add(request)

    monkeypatch.setattr(llm._driver._engine.scheduler, "add", failing)
    all_fail(llm, llm.submit(["the cat", "d", "a", "the rat"], LONG), "ValueError: not this one")


def test_a_tokenizer_that_fails_on_a_prompt_loses_only_that_request(text_model):
    with LLM(str(text_model), max_num_seqs=4) as llm:
        prompt = llm.model.tokenizer.encode("grüße")
        decode = llm.model.tokenizer.decode

        def failing(ids, *, skip_special_tokens=True):
            if len(ids) > 1 and list(ids) == prompt[-len(ids) :]:
                raise KeyError("no such token")
            return decode(ids, skip_special_tokens=skip_special_tokens)

        llm.model.tokenizer.decode = failing
        llm.model.tokenizer.decode_batch = lambda batch, *, skip_special_tokens=True: [failing(ids) for ids in batch]
        futures = llm.submit([[1, 2], prompt, [3, 4]], WATCHED)
        with pytest.raises(OutputError, match="no such token"):
            futures[1].result(timeout=30)
        for future in (futures[0], futures[2]):
            assert future.result(timeout=60).outputs[0].finish_reason == "length"
