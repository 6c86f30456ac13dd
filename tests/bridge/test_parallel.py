"""Several processes: an engine apart from the front end, ranks of a layer, stages of the stack; and steps in flight."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENS = (1, 3, 70, 17, 33, 12, 5, 40)
EVEN = {"decay_heads": 4, "biased_heads": 4}  # what two ranks can divide
SCALES = [0.0, 0.5, -0.3, 0.5, 2.0, 0.0, 0.1, 1.0]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.fixture
def model(oracle, tidal, scaled):
    def make(name):
        own = {"input": lambda: scaled, "recurrent": lambda: tidal(**EVEN)}
        return own[name]() if name in own else oracle(name)

    return make


def look(llm):
    """Of each worker: its process, its model's class, and the names of its layers with caches."""

    def seen(worker):
        import os

        runner = worker.model_runner
        caches = runner.vllm_config.compilation_config.static_forward_context
        return os.getpid(), type(runner).__name__, type(runner.model).__name__, sorted(caches)

    return llm.collective_rpc(seen)


def check(one, llm, generate, prompts):
    options = [{"scale": s} if s and one.architecture.startswith("Scaled") else {} for s in SCALES]
    one.check(prompts, generate(llm, prompts, 12, options), options)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3", "qwen3-moe", "recurrent", "input"])
def test_ranks(name, model, processes, engine, generate, ragged):
    processes("spawn")
    one = model(name)
    caching = name != "input"  # the value isn't part of a block's key
    with engine(one.folder, **one.settings, **TENSOR, enable_prefix_caching=caching, max_num_batched_tokens=48) as llm:
        (first, *one_worker), (second, *other_worker) = look(llm)
        assert first != second
        assert one_worker == other_worker
        assert one_worker[:2] == ["CPUModelRunner", one.architecture]
        prompts = ragged(LENS)
        check(one, llm, generate, prompts)
        check(one, llm, generate, prompts)  # prefix hits


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3", "qwen3-moe", "recurrent", "input"])
def test_stages(name, model, processes, engine, generate, ragged):
    processes("spawn")
    one = model(name)
    caching = name != "input"
    with engine(
        one.folder, **one.settings, **PIPELINE, enable_prefix_caching=caching, max_num_batched_tokens=48
    ) as llm:
        (first, *_, early), (second, *_, late) = look(llm)
        assert first != second
        assert early
        assert late
        assert not set(early) & set(late)
        prompts = ragged(LENS)
        check(one, llm, generate, prompts)
        check(one, llm, generate, prompts)


def test_a_stage_without_states(tidal, processes, engine, generate, ragged):
    processes("spawn")
    one = tidal(mixers=["decay", "average", "attention", "biased"])
    with engine(one.folder, **PIPELINE, enable_prefix_caching=True, max_num_batched_tokens=48) as llm:
        prompts = ragged(LENS)
        check(one, llm, generate, prompts)
        check(one, llm, generate, prompts)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "recurrent", "input"])
def test_steps_in_flight(name, model, platform_sets, engine, generate, ragged):
    """A step is scheduled before the tokens of the one before are known. vLLM never does so on a CPU by itself."""
    platform_sets(lambda config: setattr(config.scheduler_config, "async_scheduling", True))
    one = model(name)
    with engine(one.folder, **one.settings, enable_prefix_caching=name != "input", max_num_batched_tokens=48) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert type(core.scheduler).__name__ == "AsyncScheduler"
        assert core.batch_queue_size == 2
        prompts = ragged(LENS)
        check(one, llm, generate, prompts)
        check(one, llm, generate, prompts)


@pytest.mark.alone  # what a process has done before it forks, a forked one may wait for in vain
def test_stages_with_steps_in_flight(model, processes, platform_sets, engine, generate, ragged):
    """Each stage has a step under way, in a forked process."""
    processes("fork")
    platform_sets(lambda config: setattr(config.scheduler_config, "async_scheduling", True))
    one = model("recurrent")
    with engine(one.folder, **PIPELINE, enable_prefix_caching=True, max_num_batched_tokens=48) as llm:
        assert llm.llm_engine.vllm_config.max_concurrent_batches == 3
        check(one, llm, generate, ragged(LENS))


@pytest.mark.parametrize("name", ["qwen3", "recurrent"])
def test_ranks_with_drafts_chunks_and_preemptions(
    name, model, processes, engine, generate, preemptions, drafts, ragged
):
    """Together, and the ranks agree on what was kept of each draft and who began again."""
    processes("spawn")
    one, prompts = model(name), ragged((60, 61, 50, 62, 55, 58), seed=1)
    tight = {"max_model_len": 128, "max_num_batched_tokens": 40, "enable_prefix_caching": False} | BLOCKS[name]
    with engine(one.folder, **one.settings, **TENSOR, **tight, speculative_config=NGRAM) as llm:
        one.check(prompts, generate(llm, prompts, 40))
        assert preemptions(llm) > 0
        proposed, accepted, _ = drafts(llm)
        assert 0 < accepted < proposed


BLOCKS = {"qwen3": {"num_gpu_blocks_override": 10}, "recurrent": {"num_gpu_blocks_override": 44}}
"""Enough for a few requests to begin, and not for all of them to end."""


@pytest.mark.parametrize("name", ["qwen3", "recurrent"])
def test_stages_with_chunks_and_preemptions(name, model, processes, engine, generate, preemptions, ragged):
    processes("spawn")
    one, prompts = model(name), ragged((60, 61, 50, 62, 55, 58), seed=1)
    tight = {"max_model_len": 128, "max_num_batched_tokens": 40, "enable_prefix_caching": False} | STAGED[name]
    with engine(one.folder, **one.settings, **PIPELINE, **tight) as llm:
        one.check(prompts, generate(llm, prompts, 40))
        assert preemptions(llm) > 0


STAGED = {"qwen3": {"num_gpu_blocks_override": 8}, "recurrent": {"num_gpu_blocks_override": 32}}
"""As `BLOCKS`: a stage has fewer caches."""


def test_drafts_and_stages_are_refused(oracle, processes, engine, capfd):
    processes("spawn")
    one = oracle("qwen3")
    with pytest.raises(RuntimeError), engine(one.folder, **one.settings, **PIPELINE, speculative_config=NGRAM):
        pass
    assert "drafts and pipeline stages, with which vLLM's runner fails" in capfd.readouterr().out
