"""Tiers in the configuration: what is refused says where it stands, and with which numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from phloem import Engine, tier_shelf
from phloem.config import load_config
from phloem.errors import ConfigError, PhloemError
from phloem.model_spec import ModelSpec
from phloem.tier_setup import build_tiers, fingerprint, identity

Tiny = Callable[[str], Path]


def written(folder: Path, cache: str, model: object = "none") -> str:
    path = folder / "engine.yaml"
    path.write_text(f"model: {{path: {model}}}\ngrammar: none\ncache:\n{cache}")
    return str(path)


def refused(path: str, sets: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, sets=sets, env={})
    return str(caught.value)


def refused_at_start(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Engine.from_yaml(path)
    return str(caught.value)


def test_every_mistake_has_its_place(tmp_path: Path) -> None:
    text = refused(
        written(
            tmp_path,
            "  host: {size: -1, write: sometimes, sise: 3}\n  disk: {paht: ./kv, size: 20GB}\n",
        )
    )
    assert "engine.yaml:4:10: cache.host.size: must be greater than or equal to 1, got -1" in text
    assert "engine.yaml:4:20: cache.host.write: must be 'through', 'hot' or 'back', got 'sometimes'" in text
    assert "engine.yaml:4:38: cache.host.sise: unknown key (did you mean 'size'?)" in text
    assert "cache.disk.path: is required" in text
    assert "engine.yaml:5:10: cache.disk.paht: unknown key (did you mean 'path'?)" in text
    assert "engine.yaml:5:22: cache.disk.size: must be a whole number, or one with a suffix such as 16k or 2GiB" in text


def test_an_unknown_storage_has_suggestions(tmp_path: Path) -> None:
    assert "no storage plugin is named 'fiel' (did you mean 'file'?)" in refused(
        written(tmp_path, "  disk: {use: fiel, path: ./kv, size: 1GiB}\n")
    )
    assert "engine.yaml:4:10: cache.disk.path: " in refused(written(tmp_path, "  disk: {path: '', size: 1GiB}\n"))


def test_a_cache_without_tiers_is_refused_with_both_lines(tmp_path: Path) -> None:
    text = refused(written(tmp_path, "  use: chunk\n  host: {size: 1GiB}\n  disk: {path: ./kv, size: 1GiB}\n"))
    for line, tier in ((5, "host: {size: 1GiB}"), (6, "disk: {path: ./kv, size: 1GiB}")):
        name = tier.partition(":")[0]
        assert f"engine.yaml:{line}:3: cache.{name}: needs a cache with tiers; cache 'chunk' has none" in text
        assert f"engine.yaml:{line}:3: {tier}" in text
    assert "engine.yaml:4:3: use: chunk" in text


def test_pins_and_eviction_rules_need_a_cache_that_shares(tmp_path: Path) -> None:
    text = refused(written(tmp_path, "  use: chunk\n  pin_share: 0.1\n  eviction: {use: slru, hits: 2}\n"))
    assert "engine.yaml:5:3: cache.pin_share: needs a cache with sharing; cache 'chunk' has none" in text
    assert "engine.yaml:6:3: cache.eviction: needs a cache with sharing; cache 'chunk' has none" in text
    assert "engine.yaml:4:3: use: chunk" in text
    assert load_config(written(tmp_path, "  use: chunk\n  eviction: lru\n"), env={}).cache.pin_share == 0


def test_the_disk_is_a_file_store_unless_it_says_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, "  disk: {path: ./kv, size: 1GiB}\n")
    config = load_config(path, env={})
    assert config.cache.disk.use == "file"
    assert config.dump()["cache"]["disk"] == {"use": "file", "path": "./kv", "size": 1 << 30}
    assert load_config(path, sets=["cache.disk=none"], env={}).cache.disk.use == "none"
    assert load_config(path, env={"PHLOEM_CACHE__DISK__SIZE": "2GiB"}).cache.disk.size == 2 << 30  # type: ignore[attr-defined]
    sets = ["cache.disk.path=kv", "cache.disk.size=1k", "cache.host.size=2k", "cache.host.write=hot"]
    config = load_config(sets=sets, env={})
    assert (config.cache.disk.use, config.cache.host.write) == ("file", "hot")  # type: ignore[union-attr]
    assert load_config(env={}).cache.disk.use == "none"
    assert load_config(env={}).cache.host is None


def test_a_tier_smaller_than_a_block_is_refused_with_the_arithmetic(tiny_model: Tiny, tmp_path: Path) -> None:
    block = "one block of 64 tokens x 768 bytes + 550 = 49,702 bytes"
    for size, bytes_ in (("20", "20"), ("48k", "49,152")):
        text = refused_at_start(written(tmp_path, f"  host: {{size: {size}}}\n  tokens: 512\n", tiny_model("llama")))
        assert f"engine.yaml:4:10: cache.host.size {bytes_} bytes is less than {block}" in text
        assert "a number without a suffix is bytes" in text
        disk = f"  disk: {{size: {size}, path: {tmp_path}/kv}}\n  tokens: 512\n"
        text = refused_at_start(written(tmp_path, disk, tiny_model("llama")))
        assert f"engine.yaml:4:10: cache.disk.size {bytes_} bytes is less than {block}" in text
    assert not (tmp_path / "kv").exists()


def test_a_block_is_whole_pages(tiny_model: Tiny, tmp_path: Path) -> None:
    cache = "  host: {size: 64k}\n  tokens: 960\n  page_size: 96\n"
    text = refused_at_start(written(tmp_path, cache, tiny_model("llama")))
    assert "one block of 96 tokens x 768 bytes + 806 = 74,534 bytes" in text


def test_more_host_memory_than_there_is_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    text = refused_at_start(written(tmp_path, "  host: {size: 900TiB}\n  tokens: 512\n", tiny_model("llama")))
    assert "engine.yaml:4:10: cache.host.size 921,600.00 GiB" in text
    assert "GiB are free" in text


@pytest.mark.parametrize("path", ["/proc/kv", "/sys/kv", "FILE", "FILE/kv"])
def test_a_folder_that_cannot_be_written_is_refused(tiny_model: Tiny, tmp_path: Path, path: str) -> None:
    (tmp_path / "FILE").write_text("")
    path = path.replace("FILE", str(tmp_path / "FILE"))
    text = refused_at_start(
        written(tmp_path, f"  disk: {{path: {path}, size: 1GiB}}\n  tokens: 512\n", tiny_model("llama"))
    )
    assert "engine.yaml:4:" in text
    assert f"cache.disk: the folder {path} cannot be used: " in text


def test_a_folder_in_use_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    path = written(tmp_path, f"  disk: {{path: {tmp_path}/kv, size: 1GiB}}\n  tokens: 512\n", tiny_model("llama"))
    with Engine.from_yaml(path):
        assert "in use by another engine" in refused_at_start(path)
    Engine.from_yaml(path).close()


def test_a_tier_must_hold_a_state_beside_a_block(tiny_model: Tiny, tmp_path: Path) -> None:
    for tier in ("host: {size: 18k}", f"disk: {{size: 18k, path: {tmp_path}/kv}}"):
        text = refused_at_start(written(tmp_path, f"  {tier}\n  tokens: 512\n", tiny_model("lfm2")))
        assert f"engine.yaml:4:10: cache.{tier[:4]}.size 18,432 bytes is less than one block of 64 tokens x 256" in text
        assert "bytes + 554, and one state of 1,024 bytes + 554, = 18,516 bytes" in text


def test_a_model_without_weights_to_read_has_no_disk(tmp_path: Path) -> None:
    class Model:
        path = str(tmp_path)
        spec: ModelSpec
        tokenizer: Any

    with pytest.raises(PhloemError, match="there are none to be read at"):
        fingerprint(Model())  # type: ignore[arg-type]


def test_a_block_that_may_not_wait_to_be_written_is_refused(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_shelf, "BACKLOG", 49_701)
    text = refused_at_start(
        written(tmp_path, f"  disk: {{size: 1GiB, path: {tmp_path}/kv}}\n  tokens: 512\n", tiny_model("llama"))
    )
    block = "one block of 64 tokens x 768 bytes + 550 = 49,702 bytes"
    assert f"engine.yaml:4:10: cache.disk: {block}, more than the 49,701 bytes that may wait" in text
    assert not (tmp_path / "kv").exists()


def test_adapters_have_no_disk(tiny_model: Tiny, tmp_path: Path) -> None:
    """They are known by name only, so stored KV might be another's."""
    path = written(tmp_path, "  disk: {path: ./kv, size: 1GiB}\n  tokens: 512\n", tiny_model("llama"))
    config = load_config(path, env={})
    with Engine.from_yaml(path, sets=["cache.disk=none"]) as made:
        parts = made.core.parts
        capabilities = parts.executor.model.spec.capabilities | {"adapters"}
        model: Any = type(
            "Model", (), {"spec": dataclasses.replace(parts.executor.model.spec, capabilities=capabilities)}
        )

        def unused(*_: Any, **__: Any) -> Any:
            raise AssertionError("it is refused before")

        with pytest.raises(ConfigError, match="adapters are known by their names only"):
            build_tiers(config, "radix", parts.ledger, model, parts.quant, None, unused, unused, unused)


def test_a_store_belongs_to_options_and_a_release_of_the_model_plugin(tiny_model: Tiny, tmp_path: Path) -> None:
    """`auto` and the name of what it chose are the same."""
    cache = f"  disk: {{path: {tmp_path}/kv, size: 1GiB}}\n  tokens: 512\n"
    found = []
    for model in ("", ", use: native", ", use: native}\nquant: {use: none, product: torch", ", name: mine"):
        path = written(tmp_path, cache, f"{tiny_model('llama')}{model}")
        with Engine.from_yaml(path) as made:
            tiers: Any = made.core.ledger.tiers
            config, parts = load_config(path, env={}), made.core.parts
            found.append(identity(config, parts.executor.model, parts.quant, tiers._ledger, tiers._layout))
    assert found[0] == found[1] == found[3]
    assert {name for name in found[0] if found[0][name] != found[2][name]} == {"quant"}
    assert found[0]["states"] == []
    assert found[0]["loader_version"] == metadata.version("phloem")
