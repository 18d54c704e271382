"""The packed matrix product against torch: odd shapes, every number of rows, strides, bias, accumulation."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from bench import product
from phloem import kernels
from phloem.errors import PluginError
from phloem.linear import Linear
from phloem.plugins.quant._compiled import Kernel
from phloem.plugins.quant._packed import SOURCE, PackedLinear


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel(SOURCE)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (16, 8), (33, 7), (64, 64), (100, 129), (960, 576)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 31, 32, 100])
def test_product(kernel: Kernel, threads: None, rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    weight, x = (torch.randn(n, inputs, generator=generator) for n in (outputs, rows))
    bias, total = torch.randn(outputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    packed = PackedLinear(kernel, Linear(weight))
    exact = x.double() @ weight.double().T
    close = {"rtol": 1e-5, "atol": 1e-5 * inputs**0.5}
    torch.testing.assert_close(packed(x).double(), exact, **close)
    with_bias = PackedLinear(kernel, Linear(weight, bias))
    torch.testing.assert_close(with_bias(x).double(), exact + bias, **close)
    torch.testing.assert_close(with_bias.add_to(total.clone(), x).double(), exact + bias + total, **close)
    wide = torch.randn(rows, inputs * 2, generator=generator)  # a view whose rows are further apart
    torch.testing.assert_close(
        packed(wide[:, :inputs]).double(), wide[:, :inputs].double() @ weight.double().T, **close
    )
    torch.testing.assert_close(packed(x.T.contiguous().T).double(), exact, **close)
    tokens = torch.randint(0, outputs, (9,), generator=generator)
    assert torch.equal(packed.rows(tokens), weight[tokens])


def test_rows_do_not_depend_on_their_company(kernel: Kernel) -> None:
    packed = PackedLinear(kernel, Linear(torch.randn(70, 90)))
    x = torch.randn(40, 90)
    together = packed(x)
    for rows in (1, 3, 8, 39):
        assert torch.equal(packed(x[:rows]), together[:rows])


def test_nothing_beyond_the_output_is_written(kernel: Kernel) -> None:
    packed = PackedLinear(kernel, Linear(torch.randn(37, 20)))
    y = torch.full((5, 50), 7.0)
    packed._multiply(torch.randn(5, 20), y[:, :37], add=False)
    assert (y[:, 37:] == 7.0).all()


def test_not_a_number_stays_one(kernel: Kernel) -> None:
    packed = PackedLinear(kernel, Linear(torch.randn(20, 20)))
    x = torch.zeros(2, 20)
    x[1, 3] = float("nan")
    assert packed(x)[0].isfinite().all()
    assert packed(x)[1].isnan().all()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "thing.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PluginError, match=r"no C\+\+ compiler"):
        kernels.load(source, tmp_path / "cache")


def test_a_build_is_kept_and_a_damaged_one_replaced(tmp_path: Path) -> None:
    source, cache = tmp_path / "thing.cpp", tmp_path / "cache"
    source.write_text('extern "C" int answer() { return 42; }')
    assert kernels.load(source, cache).answer() == 42
    (built,) = cache.iterdir()
    stamp = built.stat().st_mtime_ns
    kernels.load(source, cache)
    assert built.stat().st_mtime_ns == stamp
    damaged = cache / built.name
    damaged.unlink()  # the loaded library keeps its own file
    damaged.write_bytes(b"not a library")
    assert isinstance(kernels.load(source, cache), ctypes.CDLL)
    source.write_text('extern "C" int answer() { return 43; }')
    assert kernels.load(source, cache).answer() == 43


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """So that `auto` falls back on torch, as without a compiler."""
    source, folder = tmp_path / "thing.cpp", tmp_path / "file"
    source.write_text('extern "C" int answer() { return 42; }')
    folder.touch()
    with pytest.raises(PluginError, match=r"thing\.cpp cannot be compiled and loaded: .*file"):
        kernels.load(source, folder / "cache")


def test_a_source_that_does_not_compile_says_why(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(PluginError, match=r"cannot compile broken\.cpp: .*error"):
        kernels.load(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_bench_prints_a_row_per_size_and_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "LAYERS", 1)
    lines: list[str] = []
    assert product.main(["--rounds", "1", "--rows", "1,8", "--quant", "none,int8"], lines.append) == 0
    cells = [line.split("|")[1:3] for line in lines[3:]]
    assert [(int(rows), name.strip()) for rows, name in cells] == [
        (rows, name) for rows in (1, 8) for name in ("torch", "none", "int8")
    ]
