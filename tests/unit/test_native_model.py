"""The native model against transformers, its loader's checks, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import WINDOW
from tiny_suite import TinySuite

from phloem.errors import ModelError
from phloem.interfaces import PluginContext
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.plugins.model.native import NativeModel
from phloem.plugins.model.native.config import read_arch
from phloem.plugins.quant.none import NoQuant
from phloem.testing.ragged import Part, Ragged

TinyModel = Callable[[str], Path]
FAMILIES = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(path: Path | str, **context: Any) -> NativeModel:
    return NativeModel(NativeModel.Options(), PluginContext("model", "native", extras={"path": str(path)}, **context))


def logits_of(model: Any, sequences: list[list[int]], split: int) -> torch.Tensor:
    """Logits of all tokens: every sequence's first `split` tokens in one step, the rest in a second."""
    attention = TorchAttention(TorchAttention.Options(), PluginContext("attention", "torch"))
    ragged = Ragged(model.spec, slots=sum(map(len, sequences)) + 16)
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for low, high in ((0, split), (split, None)):
        parts = [Part(i, s[low:high]) for i, s in enumerate(sequences) if s[low:high]]
        batch = ragged.step(parts)
        out = model.logits(model.forward(batch, attention.prepare(batch, ragged.kv)))
        for part, block in zip(parts, out.split(batch.q_lens), strict=True):
            rows[part.sequence].append(block)
    return torch.cat([block for blocks in rows for block in blocks])


@torch.no_grad()
def reference_logits(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([s]), use_cache=False).logits[0].float() for s in sequences])


def random_sequences(lengths: list[int], vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, vocab, (n,), generator=generator).tolist() for n in lengths]


SPLIT, ROWS = 505, 24  # where the real prompts are cut, and how many rows before each end are compared


@cache
def reference_rows(name: str, text: tuple[int, ...], rows: tuple[int, ...]) -> torch.Tensor:
    """Logits of some positions of a text, by transformers' real model: one pass for all tests that want them."""
    from support import hf_model

    with torch.no_grad():
        out = hf_model(name)(torch.tensor([text]), use_cache=False, logits_to_keep=torch.tensor(rows))
    return out.logits[0]


def assert_equal_on_text(model: Any, name: str) -> None:
    """Texts on both sides of Gemma's window of 512, in a step of 505 tokens and one of the rest.

    Text, as logits of random tokens are ill-conditioned: transformers differs from itself in float64 by more there.
    """
    from support import CORPUS

    from phloem.tokenizer import Tokenizer

    tokens = Tokenizer(model.tokenizer).encode(CORPUS * 3)
    texts = [tokens[:513], tokens[7:11], tokens[20:560], tokens[100:161]]
    attention = TorchAttention(TorchAttention.Options(), PluginContext("attention", "torch"))
    ragged = Ragged(model.spec, slots=1200)
    for low, high in ((0, SPLIT), (SPLIT, None)):
        parts = [Part(i, text[low:high]) for i, text in enumerate(texts) if text[low:high]]
        batch = ragged.step(parts)
        hidden = model.forward(batch, attention.prepare(batch, ragged.kv))
        for part, block in zip(parts, hidden.split(batch.q_lens), strict=True):
            ends = [end for end in (SPLIT, len(texts[part.sequence])) if end <= len(texts[part.sequence])]
            rows = tuple(row for end in ends for row in range(max(0, end - ROWS), end))
            expected = reference_rows(name, tuple(texts[part.sequence]), rows)
            ours = model.logits(block[-ROWS:])
            at = rows.index(ragged.lengths[part.sequence] - len(ours))
            torch.testing.assert_close(ours, expected[at : at + len(ours)], rtol=1e-5, atol=2e-4)


def hf(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


class TestLlama(TinySuite):
    """The conformance suite on one family without windows ..."""

    plugin = NativeModel
    arch = "llama3-rope"


class TestLfm2(TinySuite):
    """... on the one with short convolutions, whose state must be where it was left ..."""

    plugin = NativeModel
    arch = "lfm2"


class TestMamba2(TinySuite):
    """... on the one without any attention ..."""

    plugin = NativeModel
    arch = "mamba2"


class TestGemma3(TinySuite):
    """... and on the one with windows, two rotations and all the norms."""

    plugin = NativeModel
    arch = "gemma3"


@pytest.mark.parametrize("arch", FAMILIES)
def test_logits_equal_transformers(arch: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(arch)
    sequences = random_sequences([1, 2 * WINDOW + 5, 7, WINDOW, WINDOW + 1], 500)
    ours = logits_of(load(folder), sequences, split=WINDOW - 3)
    torch.testing.assert_close(ours, reference_logits(hf(folder), sequences), rtol=0, atol=2e-4)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn with mscale": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "beta_fast": 16,
                "truncate": False,
            }
        },
    ),
    "no window": ("mistral", {"sliding_window": None}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "window in later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
    ),
    "biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "soft-cap, untied": ("gemma3", {"final_logit_softcapping": 4.0, "tie_word_embeddings": False}),
    "scaled rope for full attention": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a family's config can switch, switched away from its default."""
    import support

    arch, changes = VARIANTS[name]
    model_type, extra = support.ARCHITECTURES[arch]
    monkeypatch.setitem(support.ARCHITECTURES, "variant", (model_type, extra | changes))
    folder = support.make_tiny_model("variant", tmp_path)
    sequences = random_sequences([3, 45, 9], 500)
    ours = logits_of(load(folder), sequences, split=11)
    torch.testing.assert_close(ours, reference_logits(hf(folder), sequences), rtol=0, atol=2e-4)


@pytest.mark.parametrize("arch", ["llama3-rope", "gemma3"])
def test_older_configs_mean_the_same(arch: str, tiny_model: TinyModel) -> None:
    """`rope_theta`, `rope_scaling`, `rope_local_base_freq` and `sliding_window_pattern`, as written before 2026."""
    config = json.loads((tiny_model(arch) / "config.json").read_text())
    new = read_arch(config)
    rope = config.pop("rope_parameters")
    if arch == "gemma3":
        del config["layer_types"]
        config |= {"sliding_window_pattern": 2, "rope_scaling": None, "rope_local_base_freq": 10000.0}
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
    else:
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert read_arch(config) == new


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_real_logits_equal_transformers(name: str, hf_folder: Callable[[str], Path]) -> None:
    """Prompts on both sides of Gemma's window of 512, in two chunks."""
    model = load(hf_folder(name))
    assert_equal_on_text(model, name)


@pytest.mark.real
def test_gguf_logits_equal_the_folder(smollm2_path: str, hf_folder: Callable[[str], Path]) -> None:
    """The same weights through our GGUF reader and through transformers' conversion."""
    sequences = random_sequences([40], 40000)
    ours, folder = (logits_of(load(path), sequences, 20) for path in (smollm2_path, hf_folder("smollm2-135m")))
    torch.testing.assert_close(ours, folder, rtol=0, atol=1e-4)


def changed(source: Path, target: Path, config: dict[str, Any], tensors: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model folder with an edited config and edited tensors."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    old = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(old | config))
    weights = load_file(source / "model.safetensors")
    tensors(weights)
    save_file(weights, target / "model.safetensors")
    return target


def test_wrong_weights_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Missing, superfluous and misshapen tensors, all in one message."""

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.layers.1.mlp.up_proj.weight"]
        weights["model.norm.weight"] = torch.zeros(3)
        weights["model.layers.7.odd"] = torch.zeros(1)

    with pytest.raises(ModelError) as error:
        load(changed(tiny_model("llama"), tmp_path / "m", {}, spoil))
    assert "missing tensor model.layers.1.mlp.up_proj.weight" in error.value.message
    assert "model.norm.weight is [3], expected [64]" in error.value.message
    assert "unexpected tensor model.layers.7.odd" in error.value.message


def test_tied_embeddings_are_stored_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A head in the file of a tied model is ignored, as by transformers; head and embedding are one tensor."""

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = torch.zeros(512, 64)

    model = load(changed(tiny_model("llama3-rope"), tmp_path / "m", {}, add))
    held = [thing for thing in vars(model).values() if isinstance(thing, torch.Tensor) and thing.numel() >= 512 * 64]
    assert held == []
    assert model._head is model._words
    hidden = torch.eye(64)
    assert torch.equal(model.logits(hidden).T, model.embed(torch.arange(512)))


@pytest.mark.parametrize("product", ["torch", "packed"])
@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("cap", [None, 4.0])
def test_columns_of_the_head(
    product: Any, changes: dict[str, Any], cap: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied or not, packed or not, with a soft-cap or not; hidden states large enough for the cap to bend."""
    import support

    model_type, extra = support.ARCHITECTURES["gemma3"]
    changes = {"final_logit_softcapping": cap, **changes}
    monkeypatch.setitem(support.ARCHITECTURES, "variant", (model_type, extra | changes))
    quant = NoQuant(NoQuant.Options(product=product), PluginContext("quant", "none"))
    extras = {"path": str(support.make_tiny_model("variant", tmp_path)), "quant": quant}
    model = NativeModel(NativeModel.Options(), PluginContext("model", "native", extras=extras))
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 40
    logits = model.logits(hidden)
    assert cap is None or 3.9 < logits.abs().max() <= cap
    for tokens in ([511], [3, 0, 511, 17, 16, 15], list(range(512))):
        got = model.logits_at(hidden[1], torch.tensor(tokens))
        torch.testing.assert_close(got, logits[1, tokens], rtol=1e-5, atol=1e-4)


def test_columns_of_a_bfloat16_head_are_rounded_like_the_rest(tiny_model: TinyModel) -> None:
    model = load(tiny_model("llama"), dtype="bfloat16")
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = model.logits_at(hidden[0], torch.arange(512))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, model.logits(hidden)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model type 'bert' is not one of llama, mistral"),
        ({"hidden_act": "relu"}, "activation 'relu' is not one of silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' changes a token's keys"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope type 'mrope' is not one of default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' lacks factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantised with 'awq' cannot be read"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None, expected a positive integer"),
        ({"layer_types": ["linear_attention"] * 3}, "does not name full_attention or sliding_attention 3 times"),
    ],
)
def test_refusals_have_a_reason(change: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """`supports` says it without reading weights, loading raises it."""
    folder = changed(tiny_model("llama"), tmp_path / "m", change, lambda _: None)
    (folder / "model.safetensors").unlink()
    assert message in (NativeModel.supports(str(folder)) or "")
    with pytest.raises(ModelError, match=re.escape(message)):
        load(folder)


def test_bad_dtype_is_named(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match="'float8' is not one of auto, float32, bfloat16, float16"):
        load(tiny_model("llama"), dtype="float8")


def test_half_precision_is_close(tiny_model: TinyModel) -> None:
    """bfloat16 on request, with float32 logits."""
    model = load(tiny_model("gemma3"), dtype="bfloat16")
    assert model.spec.dtype == "bfloat16"
    sequences = random_sequences([30], 500)
    ours, exact = logits_of(model, sequences, 9), logits_of(load(tiny_model("gemma3")), sequences, 9)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_imports_no_transformers(tiny_model: TinyModel) -> None:
    code = (
        "import sys; from phloem.interfaces import PluginContext; from phloem.plugins.model.native import NativeModel\n"
        f"context = PluginContext('model', 'native', extras={{'path': {str(tiny_model('llama'))!r}}})\n"
        "NativeModel(NativeModel.Options(), context)\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
