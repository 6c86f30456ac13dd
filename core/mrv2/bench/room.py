"""Whether requests that shall decode together fit: rows, context and cache, asked before anything is measured."""

from __future__ import annotations

import math

from mrv2.errors import CommandLineError
from mrv2.frontend.engine_config import MAX_DEPTH
from mrv2.runner.kv_cache import KVCacheManager
from mrv2.runner.scheduler import Scheduler

IN_FLIGHT = MAX_DEPTH
"""Most steps whose outputs haven't come back."""


def prompt_steps(scheduler: Scheduler, batch: int, prompt_len: int) -> int:
    """Steps until `batch` requests that start together, each with a row, are all past their prompts, at most; the
    first ones decode meanwhile.

    A step spends all its tokens, or it brings every request that has a row a chunk further. Of the first kind there are
    as many as prompts need if the k-th of them finds k requests that decode already; of the second, as many as one
    prompt has chunks.

    Raises:
        CommandLineError: prompts can't be cut, and beside those that decode there is no room for a whole one.
    """
    budgets = [scheduler.max_num_tokens - decoding for decoding in range(batch)]
    if not scheduler.chunked_prefill:
        budgets = [budget // prompt_len * prompt_len for budget in budgets]
    if budgets[-1] <= 0:
        raise CommandLineError(
            f"beside {batch - 1} requests that decode, a step has no room for a whole prompt of {prompt_len} tokens",
            where="engine settings",
            fix="raise max_num_tokens, or lower --prompt-tokens or the batch",
        )
    chunk, ends = min(scheduler.max_chunk, prompt_len), 0
    if scheduler.kv.keeps_states:  # chunks are cut at edges of blocks, and the last edge is one of them
        chunk, ends = -(-chunk // 2), 1
    return math.ceil(sum(prompt_len / budget for budget in budgets)) + -(-prompt_len // chunk) + ends


def require_rows(scheduler: Scheduler, batch: int, *, name: str) -> None:
    """Refuse more requests than can run at once.

    Raises:
        CommandLineError: there are fewer rows.
    """
    rows = len(scheduler.columns.open_np)
    if batch > rows:
        raise CommandLineError(
            f"{batch} requests shall run together, and {name} has max_num_seqs={rows}",
            where="engine settings",
            fix="raise max_num_seqs, or lower the batch",
        )


def require_alone(scheduler: Scheduler, tokens: int, *, name: str, fix: str) -> None:
    """Refuse requests that are too long, prompt and output together.

    Args:
        scheduler: of the engine that shall run them.
        tokens: of each.
        name: of what would run them, for the message.
        fix: which options make them shorter, for the message.

    Raises:
        CommandLineError: the context or the cache holds less.
    """
    context = scheduler.columns.tokens_np.shape[1]
    for most, what, setting in (
        (context, "a context", "max_model_len"),
        (scheduler.kv.capacity, "a KV cache", "num_blocks or kv_memory"),
    ):
        if tokens > most:
            raise CommandLineError(
                f"{tokens} tokens of a request are needed, and {name} has {what} of {most}",
                where="engine settings",
                fix=f"lower {fix}, or raise {setting}",
            )


def require_together(scheduler: Scheduler, batch: int, *, prompt_len: int, tokens: int, name: str, fix: str) -> None:
    """Refuse requests that couldn't all decode at the same time without any of them being preempted.

    Args:
        scheduler: of the engine that shall run them.
        batch: requests; there are as many rows.
        prompt_len: tokens of each prompt.
        tokens: of each, prompt and output together.
        name: of what would run them, for the message.
        fix: which options make them shorter, for the message.

    Raises:
        CommandLineError: the context is too short or the cache too small.
    """
    require_alone(scheduler, tokens, name=name, fix=fix)
    needed, usable = _blocks(scheduler, batch, prompt_len=prompt_len, tokens=tokens), scheduler.kv.pool.num_usable
    if needed > usable:
        raise CommandLineError(
            f"{batch} requests of {tokens} tokens together need {needed} blocks of KV cache, and {name} has {usable}",
            where="engine settings",
            fix=f"raise num_blocks or kv_memory, or lower the batch, {fix}",
        )


def _blocks(scheduler: Scheduler, batch: int, *, prompt_len: int, tokens: int) -> int:
    kv = scheduler.kv
    full = batch * _blocks_of(kv, prompt_len, tokens)
    # The last one is admitted only if some blocks stay free for those that run already.
    early = prompt_len + prompt_steps(scheduler, batch, prompt_len)
    spare = min((batch - 1) * kv.num_paged, kv.pool.num_usable // 20)
    admitted = (batch - 1) * _blocks_of(kv, prompt_len, min(early, tokens)) + kv.blocks_for(prompt_len) + spare
    return max(full, admitted) + len(kv.states) * (batch + kv.keeps_states)


def _blocks_of(kv: KVCacheManager, prompt_len: int, tokens: int) -> int:
    """Blocks in paged groups that one request holds at most; a window gives back what is behind it."""
    size, blocks = kv.block_size, 0
    for group in kv.groups[: kv.num_paged]:
        held = tokens if group.window is None else max(prompt_len, group.window + IN_FLIGHT + size)
        blocks += -(-min(held, tokens) // size)
    return blocks
