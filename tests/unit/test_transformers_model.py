"""The transformers model plugin over many architectures: exact, or refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import ARCHITECTURES, WINDOW
from test_native_model import assert_equal_on_text, hf, logits_of, random_sequences, reference_logits
from tiny_suite import TinySuite

from phloem.errors import ModelError
from phloem.interfaces import PluginContext
from phloem.plugins.model._hf import refusals
from phloem.plugins.model._hf.bridge import Bridge, MaskRule, register
from phloem.plugins.model._hf.probe import examine, window_of
from phloem.plugins.model._hf.runner import Runner
from phloem.plugins.model.native import NativeModel
from phloem.plugins.model.transformers import TransformersModel

TinyModel = Callable[[str], Path]
REFUSED = {"bloom": "ALiBi biases", "mpt": "ALiBi biases", "gpt_oss": "attention sinks"}
EXACT = [arch for arch in ARCHITECTURES if arch not in REFUSED]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(path: Path | str, **context: Any) -> TransformersModel:
    context = {"extras": {"path": str(path)}, **context}
    return TransformersModel(TransformersModel.Options(), PluginContext("model", "transformers", **context))


class TestGemma2(TinySuite):
    """The conformance suite where windows and soft-caps meet."""

    plugin = TransformersModel
    arch = "gemma2"


@pytest.mark.parametrize("arch", EXACT)
def test_logits_equal_the_plain_model(arch: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(arch)
    assert TransformersModel.supports(str(folder)) is None
    model = load(folder)
    sequences = random_sequences([1, 2 * WINDOW + 5, 7, WINDOW, WINDOW + 1], 500)
    ours = logits_of(model, sequences, split=WINDOW - 3)
    torch.testing.assert_close(ours, reference_logits(hf(folder), sequences), rtol=0, atol=2e-4)


@pytest.mark.parametrize("arch", ["llama3-rope", "mistral", "gemma3", "qwen3"])
def test_specs_agree_with_the_native_model(arch: str, tiny_model: TinyModel) -> None:
    """What the probe observes is what the native loader reads from the config."""
    observed = load(tiny_model(arch)).spec
    context = PluginContext("model", "native", extras={"path": str(tiny_model(arch))})
    read = NativeModel(NativeModel.Options(), context).spec
    assert (observed.layers, observed.groups) == (read.layers, read.groups)
    assert (observed.vocab_size, observed.context_length) == (read.vocab_size, read.context_length)


@pytest.mark.parametrize("arch", REFUSED)
def test_refusals_have_a_reason(arch: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(arch)
    assert REFUSED[arch] in (TransformersModel.supports(str(folder)) or "")
    with pytest.raises(ModelError, match=f"cannot be served exactly: .*{REFUSED[arch]}"):
        load(folder)


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("bloom", "it does not attend through transformers' attention interface"),
        ("gpt_oss", r"its attention takes attention sinks \(s_aux\)"),
    ],
)
def test_the_probe_refuses_too(arch: str, reason: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Architectures nobody listed are found out by running them."""
    monkeypatch.setattr(refusals, "_BY_TYPE", {})
    with pytest.raises(ModelError, match=reason):
        load(tiny_model(arch))


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
RECURRENT: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 8}, "0 of its 2 layers attend through"),
    "lfm2": ({"layer_types": ["conv", "full_attention"], **HEADS}, "layers of kind conv are not attention"),
    "diffllama": (HEADS, "its 2 layers attend 4 times"),
}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_state_outside_attention_is_refused(model_type: str, tmp_path: Path) -> None:
    import support
    import transformers

    extra, reason = RECURRENT[model_type]
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model(model_type, **sizes, **extra)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    support.write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=f"cannot be served exactly: .*{reason}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic' changes a token's keys"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope type 'longrope' changes"),
        ({"text_config": {"layer_types": ["full_attention", "linear_attention"]}}, "layers of kind linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "layers of kind chunked_attention"),
    ],
)
def test_what_a_config_shows(config: dict[str, Any], reason: str) -> None:
    assert reason in (refusals.refusal(config) or "")


def test_windows_are_read_off_masks() -> None:
    """Causal, sliding, and everything else."""

    def rule(sees: Callable[..., torch.Tensor]) -> MaskRule:
        return MaskRule(lambda batch, head, query, key: sees(query, key))

    assert window_of(rule(lambda q, k: k <= q), 100) is None
    assert window_of(rule(lambda q, k: (k <= q) & (q - k < 7)), 100) == 7
    assert window_of(None, 100) is None
    with pytest.raises(ModelError, match="neither causal nor a sliding window"):
        window_of(rule(lambda q, k: (k <= q) & (q // 8 == k // 8)), 100)
    with pytest.raises(ModelError, match="masks of its own"):
        window_of(torch.zeros(1, 1, 3, 3), 100)


def test_a_context_length_is_needed(tiny_model: TinyModel) -> None:
    model = hf(tiny_model("llama"))
    register()
    bridge = Bridge(model)
    with pytest.raises(ModelError, match="does not say how long a context may be"):
        examine(Runner(model, bridge), bridge, SimpleNamespace(num_hidden_layers=3))


def test_missing_weights_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    for file in tiny_model("olmo2").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"do not fit its config: missing tensor model\.layers\.1\.mlp"):
        load(tmp_path)


def test_unknown_architecture_is_an_error_of_ours(tiny_model: TinyModel, tmp_path: Path) -> None:
    for file in tiny_model("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}))
    with pytest.raises(ModelError, match=r"transformers cannot load .*never_heard_of"):
        load(tmp_path)


def test_half_precision_is_close(tiny_model: TinyModel) -> None:
    model = load(tiny_model("gemma2"), dtype="bfloat16")
    assert model.spec.dtype == "bfloat16"
    sequences = random_sequences([30], 500)
    ours, exact = logits_of(model, sequences, 9), logits_of(load(tiny_model("gemma2")), sequences, 9)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_missing_package_names_the_pip_line(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)
    assert 'pip install "phloem[transformers]"' in (TransformersModel.supports(str(tiny_model("llama"))) or "")
    with pytest.raises(ModelError) as error:
        load(tiny_model("llama"))
    assert error.value.hint == 'pip install "phloem[transformers]"'


def test_asking_imports_no_transformers(tiny_model: TinyModel) -> None:
    code = (
        "import sys; from phloem.plugins.model.transformers import TransformersModel\n"
        f"assert TransformersModel.supports({str(tiny_model('llama'))!r}) is None\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.real
@pytest.mark.slow  # of the fast ones tests/equivalence/test_real.py has this plugin on a real model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_logits_equal_the_plain_model(name: str, hf_folder: Callable[[str], Path]) -> None:
    """Prompts on both sides of Gemma's window of 512, in two chunks."""
    assert_equal_on_text(load(hf_folder(name)), name)


@pytest.mark.real
def test_gguf_weights_go_through_transformers(smollm2_path: str, hf_model: Any) -> None:
    """A GGUF file by our reader into transformers' model."""
    sequences = random_sequences([40], 40000)
    ours = logits_of(load(smollm2_path), sequences, 20)
    torch.testing.assert_close(ours, reference_logits(hf_model("smollm2-135m"), sequences), rtol=0, atol=2e-4)
