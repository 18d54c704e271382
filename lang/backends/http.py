"""Programs on a phloem server: their states live there, so forks are declared, a select is one tree, and what a branch
has computed stays while it lasts. Speaks the routes of the API plugin `program`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.chat import ChatTemplate
from phloem.errors import RequestError
from phloem.params import SamplingParams

from ..roles import Roles
from ._endings import Endings
from ._failures import broken_off, lacking, refused, surrogate, unreachable
from ._http_path import HttpPath
from ._lanes import Lanes
from ._loops import Connected, PerLoop
from .base import Path

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
END_S = 5.0  # longest wait for the server to drop states
MOST_CONNECTIONS = 4096  # of one loop: calls that run at once; more wait for a free one
_DATA, _DONE = "data: ", "[DONE]"
_JSON = {"Content-Type": "application/json"}


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
        secured = package.create_ssl_context()  # takes longer to make than many a request: one for all clients
        timeout = package.Timeout(timeout_s, connect=CONNECT_S, pool=None)
        single = package.Limits(max_connections=1)

        def make() -> httpx.AsyncClient:
            return package.AsyncClient(
                base_url=self.url, headers=headers, timeout=timeout, limits=single, verify=secured
            )

        self._clients = PerLoop(lambda: Lanes(make, MOST_CONNECTIONS), lambda lanes: lanes.aclose())
        # for what blocks: it keeps no connection, so that nobody has to close it
        none = package.Limits(max_keepalive_connections=0)
        self._plain = package.Client(base_url=self.url, headers=headers, timeout=END_S, limits=none, verify=secured)
        self._endings = Endings(self._drop)
        self._model = self._about()
        self.roles = _roles(self._model)
        self.bos: str = self._model["named_tokens"].get("bos_token", "")

    def _about(self) -> dict[str, Any]:
        """What the server tells of its model. Blocks, for one round trip."""
        try:
            answer = self._plain.get("/v1/programs", timeout=CONNECT_S)
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
        await asyncio.to_thread(self.flush_ended)
        await self.call("POST", "/flush_cache")

    async def info(self) -> dict[str, Any]:
        """The server's address, its model, and what it tells of its programs."""
        await asyncio.to_thread(self.flush_ended)
        return {"url": self.url, **(await self.call("GET", "/v1/programs"))}

    # --- states that have ended

    def drop(self, state: str) -> None:
        """Have the server drop a state, soon. Never waits."""
        self._endings.add(state)

    def flush_ended(self) -> None:
        """Have the server drop what has ended by now, and wait for it."""
        self._endings.flush()

    def _drop(self, states: list[str]) -> None:
        with contextlib.suppress(self._httpx.HTTPError):  # nobody there, who could keep them; or they expire
            self._plain.post("/v1/programs/delete", json={"ids": states})

    async def aclose(self) -> None:
        """Have the server drop what has ended, and close the connections."""
        await asyncio.to_thread(self.flush_ended)
        await super().aclose()

    def close(self) -> None:
        """`aclose` for sync callers. Called on an event loop, it waits for nothing."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.flush_ended()
        else:
            self._endings.hurry()
        super().close()

    # --- requests

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request and its answer's JSON. Raises PhloemError."""
        content = _encoded(body)
        try:
            async with self._clients.get().lane() as client:
                answer = await client.request(method, path, content=content, headers=_JSON)
        except self._httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        return self._body(answer)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer. Raises PhloemError, also for one that breaks off."""
        content = _encoded(body)
        try:
            async with (
                self._clients.get().lane() as client,
                client.stream("POST", path, content=content, headers=_JSON) as answer,
            ):
                if answer.status_code != 200:
                    await answer.aread()
                    self._body(answer)
                done = False
                async for line in answer.aiter_lines():
                    if done or not line.startswith(_DATA):
                        continue
                    if line == _DATA + _DONE:
                        done = True  # read to its end, the answer leaves its connection to the next request
                        continue
                    event = msgspec.json.decode(line.removeprefix(_DATA))
                    if "error" in event:
                        raise refused(0, event, self.url)
                    yield event
        except self._httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        if not done:
            raise broken_off(self.url)

    def _body(self, answer: httpx.Response) -> Any:
        try:
            body = msgspec.json.decode(answer.content)
        except (msgspec.DecodeError, ValueError):
            body = answer.text
        if answer.status_code >= 400:
            raise refused(answer.status_code, body, self.url)
        return body


def _encoded(body: dict[str, Any] | None) -> bytes | None:
    """A body as JSON. Raises RequestError for text that is not Unicode."""
    try:
        return None if body is None else msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise surrogate(error) from None


def _roles(model: dict[str, Any]) -> Roles:
    """The roles of the server's model."""
    source: str | None = model["chat_template"]
    return Roles(None if source is None else ChatTemplate(source, model["named_tokens"]))
