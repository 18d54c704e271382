"""The pools of a cache that keeps the layers of each state group apart."""

from __future__ import annotations

from phloem.interfaces import PoolGroup
from phloem.model_spec import ModelSpec


def kinds(spec: ModelSpec) -> set[str]:
    """What kinds of state groups a model has; groups that no layer belongs to do not count."""
    used = {layer.group for layer in spec.layers}
    return {group.kind for i, group in enumerate(spec.groups) if i in used or group.kind == "recurrent"}


def pool_groups(spec: ModelSpec) -> tuple[PoolGroup, ...]:
    """A pool for each state group of a model that has layers, in the model's order."""
    made = []
    for i, group in enumerate(spec.groups):
        layers = tuple(at for at, layer in enumerate(spec.layers) if layer.group == i)
        if layers:
            made.append(PoolGroup(group.name, layers, group.window))
    return tuple(made)


def all_groups(spec: ModelSpec) -> tuple[PoolGroup, ...]:
    """Those of `pool_groups`, and behind them one for states. There is always one whose slots are tokens'."""
    groups = pool_groups(spec) or (PoolGroup("full", ()),)
    return (*groups, PoolGroup("recurrent", (), None, tuple(range(len(spec.states))))) if spec.states else groups
