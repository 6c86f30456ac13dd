"""One arm of `vllm_host.py`: an engine of vLLM's in a process of its own, told what to do by lines of JSON.

    python benchmarks/vllm_arm.py '{"model": "FOLDER", …}'        # vLLM's settings

Each line on stdin is a command, `{"do": NAME, …}`; each gets one line on stdout, `{"ok": RESULT}` or `{"error": TEXT}`.
What vLLM and its processes print goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]


class Arm:
    """An engine, and what can be asked of it.

    Args:
        settings: of `vllm.LLM`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm  # before `start`: most of a minute, in which the other arms import it too

        self.vllm = vllm
        self.settings = settings
        self.llm: Any = None

    def start(self) -> dict[str, Any]:
        """Build the engine; what it says of itself."""
        began = time.perf_counter()
        self.llm = self.vllm.LLM(**self.settings)
        return {"seconds": round(time.perf_counter() - began, 1), "facts": self.llm.collective_rpc(facts)[0]}

    def generate(self, prompts: Prompts, n: int, **options: Any) -> list[dict[str, Any]]:
        """Per prompt `n` tokens, and by how much the best log-probability was above the next at each."""
        outs = self._run(prompts, n, **options, logprobs=2)
        results = []
        for out in outs:
            tokens = list(out.outputs[0].token_ids)
            best = [sorted((p.logprob for p in step.values()), reverse=True) for step in out.outputs[0].logprobs]
            results.append({"tokens": tokens, "gaps": [round(b[0] - b[1], 6) for b in best]})
        return results

    def score(self, texts: Prompts) -> list[list[tuple[float, int, float, float]]]:
        """Per text, of each token but the first: its log-probability, the best token, that one's, and the gap to the
        next best. One text a step: what a step holds decides how products are rounded, and which texts come together
        is a matter of time.
        """
        scored = []
        for text in texts:
            (out,) = self._run([text], 1, prompt_logprobs=2)
            rows = []
            for token, step in zip(text[1:], out.prompt_logprobs[1:], strict=True):
                best = sorted(((p.logprob, t) for t, p in step.items()), key=lambda pair: (-pair[0], pair[1]))
                rows.append((step[token].logprob, best[0][1], best[0][0], best[0][0] - best[1][0]))
            scored.append(rows)
        return scored

    def measure(self, batch: int, isl: int, osl: int, temperature: float, seed: int) -> float:
        """Seconds that `batch` requests of `isl` random tokens take for `osl` tokens each."""
        rng, vocab = random.Random(seed), self.llm.model_config.get_vocab_size()
        prompts = [[rng.randrange(vocab) for _ in range(isl)] for _ in range(batch)]
        began = time.perf_counter()
        self._run(prompts, osl, temperature=temperature)
        return time.perf_counter() - began

    def _run(self, prompts: Prompts, n: int, **options: Any) -> list[Any]:
        params = self.vllm.SamplingParams(
            **({"temperature": 0.0} | options), max_tokens=n, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outs: list[Any] = self.llm.generate(inputs, params, use_tqdm=False)
        assert all(len(out.outputs[0].token_ids) == n for out in outs)
        return outs


def facts(worker: Any) -> dict[str, Any]:
    """In a worker: which class runs, in which runner, with which attention and graphs."""
    runner = worker.model_runner
    model, config = runner.model, runner.vllm_config.compilation_config
    graphs = getattr(runner, "cudagraph_manager", None)
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "state": type(runner.model_state).__qualname__,
        "attention": sorted({group.backend.__name__ for groups in runner.attn_groups for group in groups}),
        "compilation": str(config.mode),
        "graphs": str(config.cudagraph_mode),
        "full_graphs": len(getattr(graphs, "graphs", ())),
    }


def main() -> None:
    # vLLM's processes inherit stdout and print there, so the answers get a file of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arm = Arm(json.loads(sys.argv[1]))
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        try:
            do: Callable[..., Any] = getattr(arm, command.pop("do"))
            answer = {"ok": do(**command)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
