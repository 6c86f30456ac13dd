"""What of the environment keeps vLLM from loading us. Called by our own commands: a plug-in left out can't speak."""

from __future__ import annotations

from collections.abc import Mapping

from mrv2.errors import PluginExcludedError

PLUGIN = "mrv2"
"""Name of our entry point in `vllm.general_plugins`."""


def check_plugins(env: Mapping[str, str]) -> None:
    """See that vLLM will load our plug-in.

    Raises:
        PluginExcludedError: `VLLM_PLUGINS` leaves it out; an empty value leaves out all.
    """
    listed = env.get("VLLM_PLUGINS")
    if listed is not None and PLUGIN not in (name.strip() for name in listed.split(",")):
        raise PluginExcludedError(
            f"VLLM_PLUGINS is {listed!r}, which leaves out {PLUGIN}",
            where="environment",
            fix=f"add {PLUGIN} to VLLM_PLUGINS, or unset it",
        )
