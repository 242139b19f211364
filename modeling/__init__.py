"""A Mixture-of-Experts decoder that one group of ranks can share; the names below load on first use."""

from importlib import import_module

_HOMES = {
    "GatherMoeConfig": "config",
    "GatherMoeModel": "model",
    "GatherMoeForCausalLM": "model",
}
__all__ = ["GatherMoeConfig", "GatherMoeForCausalLM", "GatherMoeModel"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
