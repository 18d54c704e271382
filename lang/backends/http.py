"""Programs on a phloem server: their states live there, so forks are declared, a select is one tree, and what a branch
has computed stays while it lasts. Speaks the routes of the API plugin `program`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.chat import ChatTemplate
from phloem.errors import RequestError
from phloem.params import SamplingParams

from ..roles import Roles
from ._failures import broken_off, lacking, refused, unreachable
from ._http_path import HttpPath
from ._loops import Connected, PerLoop
from .base import Path

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
MOST_CONNECTIONS = 4096  # of one loop: calls that run at once; more wait for a free one
_DATA, _DONE = "data: ", "[DONE]"


class HttpBackend(Connected):
    """Implements `Backend` for one server. Thread-safe, usable from any event loop."""

    capabilities = frozenset(
        {"fork", "select", "group", "logprobs", "prompt_logprobs", "stop_regex"}
        | {"regex", "json_schema", "ebnf", "lark", "structural_tag", "choices"}
    )

    def __init__(
        self, base_url: str, api_key: str | None = None, *, timeout_s: float = 600.0, idle_s: float | None = None
    ) -> None:
        """`timeout_s` bounds the wait for each piece of an answer; `idle_s` is how long the server keeps a state that
        nobody uses (None: its own setting). Asks the server once, about its model. Raises PluginError without httpx,
        EngineDeadError where nobody answers, RequestError for a wrong key or a server without programs.
        """
        try:
            import httpx as package
        except ModuleNotFoundError as error:
            raise lacking("RuntimeEndpoint", "httpx") from error
        self._httpx = package
        self.url, self.idle_s = base_url.rstrip("/").removesuffix("/v1"), idle_s
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = package.Timeout(timeout_s, connect=CONNECT_S, pool=None)
        limits = package.Limits(max_connections=MOST_CONNECTIONS, max_keepalive_connections=64)

        def make() -> httpx.AsyncClient:
            return package.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=limits)

        self._clients = PerLoop(make, lambda client: client.aclose())
        self._model = self._about(headers)
        self.roles = _roles(self._model)
        self.bos: str = self._model["named_tokens"].get("bos_token", "")

    def _about(self, headers: dict[str, str]) -> dict[str, Any]:
        """What the server tells of its model. Blocks, for one round trip."""
        try:
            answer = self._httpx.get(f"{self.url}/v1/programs", headers=headers, timeout=CONNECT_S)
        except self._httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        if answer.status_code in (404, 405):
            raise RequestError(
                f"{self.url} offers no programs",
                hint="is it a phloem server with `program` in server.apis? For other servers there is OpenAI(...)",
            )
        found: dict[str, Any] = self._body(answer)
        return found

    def start(self, *, priority: int = 0, salt: str | None = None, group: str | None = None) -> Path:
        """A new path. The server learns of it with its first text. Runs of one `group` are each other's siblings."""
        asked = {"priority": priority or None, "salt": salt, "group": group, "idle_s": self.idle_s}
        return HttpPath(self, {name: value for name, value in asked.items() if value is not None})

    def ending(self, params: SamplingParams, end: str) -> SamplingParams:
        """Parameters inside a message: its end stops the generation, also where the model's files do not say so."""
        marks: dict[str, int] = self._model["special_tokens"]
        found = next((token for text, token in marks.items() if end.startswith(text)), None)
        if found is None or found in (*self._model["eos_token_ids"], *params.stop_token_ids):
            return params
        return msgspec.structs.replace(params, stop_token_ids=[*params.stop_token_ids, found])

    async def flush_cache(self) -> None:
        """Drop what the server has cached and does not use."""
        await self.call("POST", "/flush_cache")

    async def info(self) -> dict[str, Any]:
        """The server's address, its model, and what it tells of its programs."""
        return {"url": self.url, **(await self.call("GET", "/v1/programs"))}

    # --- requests

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request and its answer's JSON. Raises PhloemError."""
        try:
            answer = await self._clients.get().request(method, path, json=body)
        except self._httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        return self._body(answer)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer. Raises PhloemError, also for one that breaks off."""
        try:
            async with self._clients.get().stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self._body(answer)
                async for line in answer.aiter_lines():
                    if not line.startswith(_DATA):
                        continue
                    if line == _DATA + _DONE:
                        return
                    event = msgspec.json.decode(line.removeprefix(_DATA))
                    if "error" in event:
                        raise refused(0, event, self.url)
                    yield event
        except self._httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        raise broken_off(self.url)

    def _body(self, answer: httpx.Response) -> Any:
        try:
            body = answer.json()
        except ValueError:
            body = answer.text
        if answer.status_code >= 400:
            raise refused(answer.status_code, body, self.url)
        return body


def _roles(model: dict[str, Any]) -> Roles:
    """The roles of the server's model."""
    source: str | None = model["chat_template"]
    return Roles(None if source is None else ChatTemplate(source, model["named_tokens"]))
