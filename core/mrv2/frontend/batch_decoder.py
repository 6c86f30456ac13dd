"""Decodes for many requests in one call, so that a tokenizer in native code is out of Python for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mrv2.loader.tokenizer import Tokenizer
from mrv2.runner.request import Request

Windows = tuple[list[int], ...]
Texts = list[str] | Exception
"""What a request's windows say, or why the tokenizer couldn't tell."""


class BatchDecoder:
    """A tokenizer's decoding, with failures kept to the requests that caused them.

    Attributes:
        seconds: processor time that decoding has taken in this thread so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seconds = 0.0

    def __call__(self, work: Sequence[tuple[Request, Windows]]) -> list[Texts]:
        """The texts of every request's windows."""
        results: list[Texts] = [[] for _ in work]
        for skip in (True, False):
            mine = [i for i, (request, _) in enumerate(work) if request.sampling.skip_special_tokens is skip]
            windows = [window for i in mine for window in work[i][1]]
            if not windows:
                continue
            try:
                texts = iter(self._decode(windows, skip))
                for i in mine:
                    results[i] = [next(texts) for _ in work[i][1]]
            except Exception as error:
                if len(mine) == 1:
                    results[mine[0]] = error
                    continue
                for i in mine:  # whose fault is it?
                    results[i] = self([work[i]])[0]
        return results

    def _decode(self, windows: list[list[int]], skip: bool) -> list[str]:
        began = time.thread_time()
        try:
            return self._tokenizer.decode_batch(windows, skip_special_tokens=skip)
        finally:
            self.seconds += time.thread_time() - began
