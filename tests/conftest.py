"""Fixtures shared by all tests; the work is in support.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Libraries read this as they load, here and in the servers that tests start.
    os.environ["OMP_NUM_THREADS"] = "1"

# The same examples on every run: a change is judged by what it changes. `--hypothesis-profile=random` looks further.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model(arch)` is the folder of a tiny random model, made once per session (see support.ARCHITECTURES)."""
    root = tmp_path_factory.mktemp("tiny")

    def make(arch: str) -> Path:
        folder = root / arch
        return folder if (folder / "config.json").exists() else support.make_tiny_model(arch, folder)

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return support.real_path("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> str:
    """Gemma 3 270M as a GGUF file."""
    return support.real_path("gemma3-270m")


@pytest.fixture(scope="session")
def hf_folder() -> Callable[[str], Path]:
    """`hf_folder(name)` is a safetensors folder that transformers made from the GGUF file of a known name."""
    return support.hf_folder


@pytest.fixture(scope="session")
def hf_model() -> Callable[[str], Any]:
    """`hf_model(name)` is the reference transformers model in float32."""
    return support.hf_model
