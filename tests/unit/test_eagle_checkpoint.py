"""Heads in every layout that is read, and those that are refused: for another target, torn, foreign."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import (
    as_first_eagle,
    as_specforge,
    as_speculators,
    config_of,
    make_head,
    read_head,
    tensors_of,
    write_head,
)
from equivalence.harness import engine

from phloem.errors import ConfigError, ModelError
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.spec._eagle_checkpoint import Checkpoint, read_checkpoint
from phloem.plugins.spec._eagle_source import heads, locate

Tiny = Callable[[str], Path]
SPEC = ModelSpec("toy", 512, 1024, (LayerSpec(2, 16, 16),), hidden_size=64, depth=3)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As much of a model as a head's config is made from."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 512}))
    return folder


def same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.shape == other.shape
    assert set(one.tensors) == set(other.tensors)
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    assert torch.equal(one.tokens, other.tokens)
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle"])
def test_layouts_are_one_head(tmp_path: Path, target: Path, algorithm: str) -> None:
    config = config_of(target, algorithm=algorithm, layers=[1, 2, 3] if algorithm == "eagle3" else [3])
    tensors = tensors_of(config)
    ours = read_checkpoint(write_head(tmp_path / "ours", config, tensors), SPEC)
    layouts = [as_speculators, as_specforge if algorithm == "eagle3" else as_first_eagle]
    for layout in layouts:
        same(read_checkpoint(write_head(tmp_path / layout.__name__, *layout(config, tensors)), SPEC), ours)


def test_a_pickled_head(tmp_path: Path, target: Path) -> None:
    """As the first heads were published; nothing but tensors is unpickled."""
    head = make_head(tmp_path / "head", target)
    ours = read_checkpoint(head, SPEC)
    torch.save(read_head(head)[1], head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    same(read_checkpoint(head, SPEC), ours)


def test_layers_where_nothing_is_said(tmp_path: Path) -> None:
    """EAGLE-3's: what enters layers 2, depth // 2 and depth - 3."""
    from dataclasses import replace

    deep = replace(SPEC, depth=30)
    config = config_of_depth(tmp_path, 30)
    flat, tensors = as_specforge(config, tensors_of(config))
    del flat["eagle_config"]
    assert read_checkpoint(write_head(tmp_path / "head", flat, tensors), deep).shape.layers == (2, 15, 27)


def config_of_depth(tmp_path: Path, depth: int) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_hidden_layers": depth, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return config_of(tmp_path)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 0.25),
        ({"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1.0),
    ],
)
def test_stretched_rotations(tmp_path: Path, target: Path, scaling: dict[str, Any], expected: float) -> None:
    """The fastest frequency: all are slower by a factor, or only the slow ones."""
    config = config_of(target, rope_scaling=scaling)
    shape = read_checkpoint(write_head(tmp_path / "head", config, tensors_of(config)), SPEC).shape
    assert float(shape.inverse_frequencies()[0]) == pytest.approx(expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target": {"name": "other", "hidden_size": 576, "vocab_size": 49152, "depth": 30}},
     r"for another model \(other\) than toy: it wants 576 hidden states where it has 64; 49,152 tokens in the "
     r"vocabulary where it has 512; 30 layers where it has 3"),
    ({"layers": [1, 2, 7]}, "the states of layer 7 where there are those of 0 to 3"),
    ({"layers": [1, 2]}, "fc.weight is 64 x 192, not 64 x 128"),
    ({"format": "another"}, "its format is 'another', version 1; this reader knows 'phloem-eagle', version 1"),
    ({"version": 2}, "its format is 'phloem-eagle', version 2"),
    ({"algorithm": "eagle"}, "its config says eagle, and its tensors are those of another algorithm"),
    ({"draft_vocab_size": 100}, "d2t has 200 entries for a draft vocabulary of 100"),
    ({"intermediate_size": 100}, "mlp.gate_proj.weight is 96 x 64, not 100 x 64"),
    ({"num_attention_heads": None}, "its config.json lacks num_attention_heads"),
    ({"hidden_act": "gelu"}, "its activation is 'gelu'"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "its rope type is 'yarn'; known are"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor, high_freq_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "its factor is 0, which is no number above 0"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 1}}, "are equal"),
    ({"rope_theta": "10k"}, "its rope_theta is '10k', which is no number above 0"),
    ({"rms_norm_eps": "x"}, "its rms_norm_eps is 'x', which is no number above 0"),
    ({"hidden_size": None}, "its config.json lacks hidden_size"),
    ({"hidden_size": 128}, "it wants features 128 wide where embeddings are 64"),
    ({"num_attention_heads": 0}, "its num_attention_heads is 0, which is no size"),
    ({"num_key_value_heads": 3}, "its 4 attention heads do not share 3 of keys and values evenly"),
    ({"head_dim": 15}, "its heads are 15 wide, which cannot be rotated by pairs"),
    ({"draft_vocab_size": "abc"}, "its draft_vocab_size is 'abc', which is no size"),
    ({"layers": ["a", 1, 2]}, r"its layers are \['a', 1, 2\], which are no numbers of layers"),
    ({"layers": []}, r"its layers are \[\], which are no numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), REFUSED)
def test_configs_that_do_not_fit(tmp_path: Path, target: Path, changes: dict[str, Any], told: str) -> None:
    config = config_of(target)
    head = write_head(tmp_path / "head", config | changes, tensors_of(config))
    with pytest.raises(ModelError, match=told):
        read_checkpoint(head, SPEC)


def changed(name: str, tensor: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (changed("norm.weight", None), "norm.weight is missing"),
        (
            changed("midlayer.self_attn.q_norm.weight", torch.ones(16)),
            "q_norm.weight is nothing that this reader knows",
        ),
        (changed("norm.weight", torch.full((64,), torch.nan)), "norm.weight is not of finite numbers"),
        (changed("midlayer.self_attn.q_proj.weight", None), "it is no EAGLE head"),
        (changed("d2t", None), "it proposes 200 of 512 tokens, and no d2t says which"),
        (
            changed("d2t", torch.full((200,), 400)),
            "d2t means tokens 400 to 599, 200 different ones, of a vocabulary of 512",
        ),
        (changed("d2t", -torch.arange(200)), "d2t means tokens 0 to 0, 1 different ones"),
        (changed("t2d", torch.ones(512, dtype=torch.bool)), "t2d marks 512 tokens, and they are not those of d2t"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None], told: str
) -> None:
    config = config_of(target)
    tensors = tensors_of(config)
    change(tensors)
    with pytest.raises(ModelError, match=told):
        read_checkpoint(write_head(tmp_path / "head", config, tensors), SPEC)


def test_files_that_are_torn_or_foreign(tmp_path: Path, target: Path) -> None:
    head = make_head(tmp_path / "head", target)
    whole = (head / "model.safetensors").read_bytes()
    for torn in (b"", whole[:100], whole[:-1000]):
        (head / "model.safetensors").write_bytes(torn)
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: "):
            read_checkpoint(head, SPEC)
    (head / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"it has no \*\.safetensors and no \*\.bin"):
        read_checkpoint(head, SPEC)
    for text in ("{", "[1]"):
        (head / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"its config\.json"):
            read_checkpoint(head, SPEC)
    with pytest.raises(ModelError, match=r"its config\.json cannot be read"):
        read_checkpoint(target / "nowhere", SPEC)


# --- which head is meant


def test_the_head_that_is_shipped_for_a_target(tmp_path: Path, target: Path) -> None:
    config = config_of(target)
    config["target"]["name"] = "smollm2-135m"
    head = write_head(tmp_path / "heads" / "small", config, tensors_of(config))
    names = ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "/models/SmolLM2-135M-Instruct.Q4_1.gguf"]
    for name in names:
        assert locate("auto", (name,), tmp_path / "heads") == head
    assert locate("small", ("another",), tmp_path / "heads") == head
    for name in ("smollm2-1.7b", "smollm2-135mx", "another"):
        with pytest.raises(ModelError, match=rf"no head is shipped for {re.escape(name)} \(shipped: smollm2-135m\)"):
            locate("auto", (name,), tmp_path / "heads")
    with pytest.raises(
        ModelError, match="there is no head 'nothing': no such folder, and no hub id; shipped are small"
    ):
        locate("nothing", ("another",), tmp_path / "heads")
    assert locate(str(head), ()) == head
    with pytest.raises(ModelError, match=r"there is no head '.*config\.json': it is no folder"):
        locate(str(head / "config.json"), (), tmp_path / "heads")


def test_shipped_heads_are_whole() -> None:
    """Each names its target, how it was trained, and stays small."""
    for _, _, folder in heads():
        config = json.loads((folder / "config.json").read_text())
        assert config["training"]
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 20_000_000


def test_refusals_say_where(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    head = make_head(tmp_path / "head", folder, layers=[1, 2, 9])
    with pytest.raises(
        ModelError, match=rf"spec\.eagle3: model: {re.escape(str(head))}: it was trained for another model"
    ):
        engine(folder, spec=[{"use": "eagle3", "model": str(head)}])
    with pytest.raises(ModelError, match=r"spec\.eagle: model: no head is shipped for "):
        engine(folder, spec=[{"use": "eagle"}])
    with pytest.raises(ConfigError, match="'eagle' needs model with hidden_states; model 'llama' has none"):
        engine(folder, spec=[{"use": "eagle"}], model={"use": "transformers"})
