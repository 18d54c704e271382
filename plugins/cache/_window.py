"""Component `window`: layers that see the last w tokens only. What lies further back than that is not needed."""

from __future__ import annotations

from typing import ClassVar

from phloem.components import Component


class Window(Component):
    """Keeps the last w - 1 tokens before each place from which somebody may go on, and lets go of others first."""

    requires: ClassVar[tuple[str, ...]] = ()  # the default goes with every cache
