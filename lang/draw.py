"""Drawings of a traced program: SVG by a small layered layout, and Mermaid text. Both are the same for equal graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from . import ir
from .graph import Graph, Node, describe

LABEL = 44  # characters of a label; the whole text is the node's tooltip
CHARACTER = 7.3  # width of one in px, at 12 px monospace
ROW, BOX, GAP, MARGIN = 46, 26, 44, 24  # px: from row to row, height of a box, between lanes, around everything
# Fill by what a node does: known text, holes, the model's work, structure.
COLOURS: Mapping[str, str] = {
    "constant": "#f4f4f0",
    "argument": "#fff3c4",
    "variable": "#fff3c4",
    "media": "#f4f4f0",
    "gen": "#cfe8d5",
    "select": "#cfe0f4",
    "separate_reasoning": "#cfe8d5",
    "fork": "#ead9f2",
    "get_fork": "#ead9f2",
    "concat_and_append": "#ead9f2",
}
PLAIN = "#e9e9e9"


@dataclass(frozen=True, slots=True)
class Box:
    """Where a node is drawn: its middle in px, its width, and what stands in it."""

    node: Node
    x: float
    y: float
    width: float
    label: str


def svg(graph: Graph) -> str:
    """The graph as an SVG document. Columns are branches; a node is below all that it follows or reads.

    Solid lines are the order of a branch, dashed ones are results that are read.
    """
    boxes = layout(graph)
    width = max((box.x + box.width / 2 for box in boxes.values()), default=0) + MARGIN
    height = max((box.y + BOX / 2 for box in boxes.values()), default=0) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="12">',
        f"<title>{_xml(graph.title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        '<g fill="none" stroke="#555" marker-end="url(#tip)">',
        *_edges(graph, boxes),
        "</g>",
        *(_box(box) for box in boxes.values()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def layout(graph: Graph) -> dict[int, Box]:
    """A box for each node by id. Boxes never overlap: one lane per branch, one row per layer."""
    layers: dict[int, int] = {}
    for node in graph:  # written in order, so what a node needs has its layer already
        needed = [one for one in (node.before, *node.reads) if one is not None]
        layers[node.id] = 1 + max((layers[one.id] for one in needed), default=-1)
    labels = {node.id: _short(describe(node.expr)) for node in graph}
    wide = dict.fromkeys(graph.branches(), float(BOX))
    for node in graph:
        wide[node.branch] = max(wide[node.branch], len(labels[node.id]) * CHARACTER + 16)
    middles, left = {}, float(MARGIN)
    for branch in _lanes(graph):
        middles[branch] = left + wide[branch] / 2
        left += wide[branch] + GAP
    return {
        node.id: Box(
            node,
            middles[node.branch],
            MARGIN + BOX / 2 + ROW * layers[node.id],
            len(labels[node.id]) * CHARACTER + 16,
            labels[node.id],
        )
        for node in graph
    }


def _lanes(graph: Graph) -> list[int]:
    """Branches from left to right: each followed by those that fork from it."""
    children: dict[int, list[int]] = {}
    for branch, nodes in graph.branches().items():
        if branch and nodes[0].before is not None:
            children.setdefault(nodes[0].before.branch, []).append(branch)
    order, open_ = [], [0]
    while open_:
        branch = open_.pop()
        order.append(branch)
        open_ += reversed(children.get(branch, []))
    return order


def _edges(graph: Graph, boxes: Mapping[int, Box]) -> Iterator[str]:
    for node in graph:
        end = boxes[node.id]
        if node.before is not None:
            start = boxes[node.before.id]
            yield f'<path d="{_curve(start, end)}"/>'
        for read in node.reads:
            yield f'<path d="{_reading(boxes[read.id], end)}" stroke-dasharray="4 3"/>'


def _curve(start: Box, end: Box) -> str:
    """From the bottom of a box to the top of one below it."""
    y1, y2 = start.y + BOX / 2, end.y - BOX / 2
    bend = (y1 + y2) / 2
    return f"M{start.x:.1f},{y1:.1f} C{start.x:.1f},{bend:.1f} {end.x:.1f},{bend:.1f} {end.x:.1f},{y2:.1f}"


def _reading(start: Box, end: Box) -> str:
    """From a box to the side of one that reads it; in the same lane out to the right, past the boxes between."""
    if start.x == end.x:
        x1, x2 = start.x + start.width / 2, end.x + end.width / 2
        out = max(x1, x2) + GAP * 0.7
        return f"M{x1:.1f},{start.y:.1f} C{out:.1f},{start.y:.1f} {out:.1f},{end.y:.1f} {x2:.1f},{end.y:.1f}"
    side = end.x + end.width / 2 * (1 if start.x > end.x else -1)
    y1 = start.y + BOX / 2
    return f"M{start.x:.1f},{y1:.1f} C{start.x:.1f},{end.y:.1f} {start.x:.1f},{end.y:.1f} {side:.1f},{end.y:.1f}"


def _box(box: Box) -> str:
    left, top = box.x - box.width / 2, box.y - BOX / 2
    fill = COLOURS.get(box.node.expr.kind, PLAIN)
    whole = describe(box.node.expr) + (f"\n{box.node.line}" if box.node.line else "")
    return (
        f'<g><title>{_xml(whole)}</title><rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{BOX}" '
        f'rx="4" fill="{fill}" stroke="#777"/>'
        f'<text x="{box.x:.1f}" y="{box.y + 4:.1f}" text-anchor="middle">{_xml(box.label)}</text></g>'
    )


def mermaid(graph: Graph) -> str:
    """The graph as a Mermaid flowchart; each branch of a fork is a subgraph."""
    lines = ["flowchart TD"]
    for branch, nodes in graph.branches().items():
        indent = "  "
        if branch:
            lines.append(f'  subgraph b{branch}["branch {branch}"]')
            indent = "    "
        for node in nodes:
            opening, closing = _SHAPES.get(node.expr.kind, ("[", "]"))
            lines.append(f'{indent}n{node.id}{opening}"{_mermaid(_short(describe(node.expr)))}"{closing}')
        if branch:
            lines.append("  end")
    for node in graph:
        if node.before is not None:
            lines.append(f"  n{node.before.id} --> n{node.id}")
        lines += [f"  n{read.id} -.-> n{node.id}" for read in node.reads]
    return "\n".join(lines) + "\n"


_SHAPES: Mapping[str, tuple[str, str]] = {
    ir.Gen.kind: ("([", "])"),
    ir.Select.kind: ("{{", "}}"),
    ir.Argument.kind: ("[/", "/]"),
    ir.Variable.kind: ("[/", "/]"),
    ir.Fork.kind: (">", "]"),
}


def _short(text: str) -> str:
    return text if len(text) <= LABEL else text[: LABEL - 1] + "…"


def _xml(text: str) -> str:
    """Text as XML content. Characters that no XML document may hold are shown as U+FFFD."""
    return escape("".join(char if _allowed(char) else "\ufffd" for char in text))


def _allowed(char: str) -> bool:
    return char in "\t\n\r" or "\x20" <= char <= "\ud7ff" or "\ue000" <= char <= "\ufffd" or char >= "\U00010000"


def _mermaid(text: str) -> str:
    """Text inside quotes in Mermaid: all that its grammar or its HTML could read becomes a character code."""
    return "".join(char if char.isalnum() or char in _QUIET else f"#{ord(char)};" for char in text)


_QUIET = frozenset(" .,:=_-+()[]/…'?!")
