"""The built-in components: what state groups keep at the nodes of the tree. Named by the kind of group they serve."""

from __future__ import annotations

from ._full import Full
from ._recurrent import Recurrent
from ._window import Window

__all__ = ["Full", "Recurrent", "Window"]
