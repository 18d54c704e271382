"""Drawings of graphs: well-formed, nothing lost or overlapping, the same each time, hostile text escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.lang import draw, ir
from phloem.lang.graph import Graph, Node, describe

SVG = "{http://www.w3.org/2000/svg}"


def forked(text: str = "Tips on health:", branches: int = 3) -> Graph:
    """A program that forks, generates in each branch, and reads all results afterwards."""
    graph = Graph("tips", ("topic",))

    def add(expr: ir.Expr, branch: int, before: Node | None, *reads: Node) -> Node:
        graph.nodes.append(Node(len(graph.nodes), expr, branch, before, reads, "tips.py:7"))
        return graph.nodes[-1]

    first = add(ir.Constant(text), 0, None)
    fork = add(ir.Fork(branches), 0, first)
    ends = []
    for index in range(branches):
        start = add(ir.GetFork(index), index + 1, fork)
        ends.append(add(ir.Gen("tip", {"max_tokens": 8, "stop": [text]}), index + 1, start))
    add(ir.Variable("tip"), 0, fork, *ends)
    return graph


def test_svg_shows_every_node_and_edge() -> None:
    graph = forked()
    root = ElementTree.fromstring(graph.draw())
    labels = [element.text for element in root.iter(f"{SVG}text")]
    assert labels == [draw._short(describe(node.expr)) for node in graph]
    paths = [element for group in root.findall(f"{SVG}g") for element in group.findall(f"{SVG}path")]
    edges = sum((node.before is not None) + len(node.reads) for node in graph)
    assert len(paths) == edges
    assert sum("stroke-dasharray" in path.attrib for path in paths) == 3


@pytest.mark.parametrize("branches", [1, 2, 7])
def test_boxes_do_not_overlap_and_lie_inside(branches: int) -> None:
    graph = forked(branches=branches)
    boxes = list(draw.layout(graph).values())
    for place, one in enumerate(boxes):
        assert one.x - one.width / 2 >= draw.MARGIN
        for other in boxes[:place]:
            apart = abs(one.x - other.x) >= (one.width + other.width) / 2 or abs(one.y - other.y) >= draw.BOX
            assert apart, (one, other)
    root = ElementTree.fromstring(graph.draw())
    assert float(root.attrib["width"]) >= max(box.x + box.width / 2 for box in boxes)
    assert float(root.attrib["height"]) >= max(box.y + draw.BOX / 2 for box in boxes)


def test_a_node_is_below_what_it_follows_and_reads() -> None:
    graph = forked()
    boxes = draw.layout(graph)
    for node in graph:
        for needed in (node.before, *node.reads):
            assert needed is None or boxes[needed.id].y < boxes[node.id].y


def test_mermaid_is_what_its_grammar_allows() -> None:
    graph = forked('say "hi" & <b>go</b>; #1 `x` end\n')
    lines = graph.draw(format="mermaid").splitlines()
    assert lines[0] == "flowchart TD"
    node = r" {2,4}n\d+(\[|\(\[|\{\{|\[/|>)\"[^\"<>&`]*\"(\]|\]\)|\}\}|/\])"
    edge = r"  n\d+ (-->|-\.->) n\d+"
    assert all(re.fullmatch(rf'{node}|{edge}|  subgraph b\d+\["branch \d+"\]|  end', line) for line in lines[1:])
    assert sum("-.->" in line for line in lines) == 3
    assert sum(line == "  end" for line in lines) == 3
    assert "#34;hi#34;" in lines[1]


def test_equal_graphs_have_equal_drawings() -> None:
    assert forked().draw() == forked().draw()
    assert forked().draw(format="mermaid") == forked().draw(format="mermaid")


@given(st.text(max_size=60))
def test_any_text_is_escaped(text: str) -> None:
    graph = forked(text)
    root = ElementTree.fromstring(graph.draw())
    assert root.tag == f"{SVG}svg"
    assert not set(draw._mermaid(text)) & set('"<>&`')


def test_the_file_decides_the_format(tmp_path: Path) -> None:
    graph = forked("größer ✓")
    for name, start in (("x.svg", "<svg "), ("x.mmd", "flowchart TD")):
        text = graph.draw(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == text
        assert text.startswith(start)
    assert graph.draw(tmp_path / "x.txt", format="mermaid") == graph.draw(format="mermaid")
    with pytest.raises(ValueError, match=r"\.svg, \.mmd"):
        graph.draw(tmp_path / "x.png")
    with pytest.raises(ValueError, match="svg and mermaid"):
        graph.draw(format="png")


def test_an_empty_program_draws() -> None:
    graph = Graph("nothing", ())
    ElementTree.fromstring(graph.draw())
    assert graph.draw(format="mermaid") == "flowchart TD\n"
    assert str(graph).startswith("nothing(): 0 nodes, 1 branch")


def test_the_listing_names_branches_and_reads() -> None:
    lines = str(forked()).splitlines()
    assert lines[0] == "tips(topic): 9 nodes, 4 branches"
    assert lines[-1].split() == ["8", "0", "1", "variable", "tip", "3", "5", "7"]
    assert len({line.index("node") for line in lines[1:2]} | {line.index("fork 3") for line in lines[3:4]}) == 1
