"""Sizes that vLLM's parallel settings have to divide."""

from __future__ import annotations

from mrv2.errors import LayerArgumentError


class SizeChecks:
    """Of a layer set, whose names and ranks it shares."""

    _prefix: str
    _ranks: int

    def _check_heads(self, name: str, num_heads: int, num_kv_heads: int) -> None:
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise self._argument(name, f"has {num_heads} query heads for {num_kv_heads} key/value heads")
        self._check_divides(name, num_heads)
        if num_kv_heads >= self._ranks:
            self._check_divides(name, num_kv_heads)
        elif self._ranks % num_kv_heads:
            raise self._argument(name, f"has {num_kv_heads} key/value heads for {self._ranks} ranks")

    def _check_divides(self, name: str, size: int) -> None:
        if size % self._ranks:
            raise self._argument(name, f"has a size of {size}, which {self._ranks} tensor-parallel ranks can't divide")

    def _check_choice(self, name: str, num_experts: int, top_k: int) -> None:
        if not 1 <= top_k <= num_experts:
            raise self._argument(name, f"sends each token to {top_k} of {num_experts} experts")

    def _argument(self, name: str, what: str) -> LayerArgumentError:
        return LayerArgumentError(
            f"{self._prefix}{name} {what}",
            where="arguments of the layer",
            fix="compare config.json with what the model file passes, and with vLLM's parallel settings",
        )
