"""`phloem serve`: its arguments, what it refuses before loading anything, and what /config shows."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from test_openai_api import refused

from phloem.config import Config, load_config
from phloem.errors import ConfigError
from phloem.server import model_process
from phloem.server.command import read_config, serve
from phloem.server.serve import Server


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    return parser.parse_args(given)


def parsed(*given: str) -> Config:
    return read_config(arguments(*given))


def test_a_model_or_a_file(tmp_path: Path) -> None:
    assert parsed().model.path == "smollm2-135m"
    assert parsed("gemma3-270m").model.path == "gemma3-270m"
    file = tmp_path / "engine.yaml"
    file.write_text("model: {path: mine}\nserver: {port: 1234, host: 0.0.0.0}\n")
    config = parsed(str(file), "--port", "4321")
    assert (config.model.path, config.server.port, config.server.host) == ("mine", 4321, "0.0.0.0")
    config = parsed(str(file), "--set", "server.port=1", "--set", "cache.page_size=4", "--host", "::1")
    assert (config.server.port, config.cache.page_size, config.server.host) == (1, 4, "::1")


def test_a_mistake_is_located(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("server:\n  prot: 1234\n")
    with pytest.raises(ConfigError, match=r"engine.yaml:2:3: server.prot: .*did you mean 'port'"):
        parsed(str(file))


@pytest.mark.parametrize("missing", ["uvicorn", "zmq", "fastapi", "prometheus_client"])
def test_a_missing_package_is_named_with_the_line_that_mends_it(missing: str) -> None:
    program = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from phloem.plugins.command.main import main\nsys.exit(main(['serve', 'nothing', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert missing.replace("zmq", "pyzmq").replace("_", "-") in done.stderr
    assert "pip install 'phloem[server]'" in done.stderr


def test_a_model_process_that_began_early_ends_with_a_wrong_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there before the configuration has been read, and never told anything."""
    began: list[asyncio.subprocess.Process] = []
    spawn = model_process.spawn

    async def kept() -> asyncio.subprocess.Process:
        began.append(await spawn((sys.executable, "-c", "import sys; sys.stdin.read()")))
        return began[0]

    monkeypatch.setattr(model_process, "spawn", kept)
    with pytest.raises(ConfigError, match=r"server\.prot"):
        serve.run(arguments("nothing", "--set", "server.prot=1"))
    assert [process.returncode for process in began] == [-signal.SIGKILL]


def test_a_worker_whose_parent_says_nothing_ends_quietly() -> None:
    done = subprocess.run([sys.executable, *model_process.WORKER[1:]], input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_servers_own_process_imports_no_torch() -> None:
    """The model process does, meanwhile."""
    program = (
        "import sys\nfrom phloem.config import load_config\nimport phloem.server.serve\n"
        "load_config(sections={'model': {'path': 'nothing'}})\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_secrets_stay_secret() -> None:
    sections = {"server": {"port": 0, "api_key": {"env": "THE_KEY"}}}
    server = Server(load_config(sections=sections, env={"THE_KEY": "sesame"}))

    async def test() -> None:
        transport = httpx.ASGITransport(server.http.config.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            refused(await client.get("/config"), None, "missing or wrong", status=401)
            shown = await client.get("/config", headers={"Authorization": "Bearer sesame"})
            assert shown.json()["server"]["api_key"] == {"env": "THE_KEY"}
            assert "sesame" not in shown.text

    asyncio.run(test())
    assert server.url.startswith("http://127.0.0.1:")
    server.socket.close()


@pytest.mark.parametrize(("host", "reason"), [("256.0.0.1", "cannot listen on 256.0.0.1"), ("::zz", "cannot listen")])
def test_an_address_that_cannot_be_bound(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Server(load_config(sections={"server": {"host": host, "port": 0}}, env={}))
