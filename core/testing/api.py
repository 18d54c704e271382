"""Conformance of kind `api`: routes are built before there is a model, never clash, and a fake engine can serve them.

class TestMine(ApiSuite):
    plugin = MyApi
    calls = (("/my/generate", {"prompt": "hi"}),)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ..interfaces import Api, Service, ServiceInfo, TokenizerData
from ..messages import Event, GenerateCall, Usage
from ..tokenizer import Tokenizer
from .plugin import TOY_SPEC, PluginSuite

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class FakeService:
    """An engine that answers every choice with `reply`, one token an event; `calls` are what it was asked."""

    def __init__(self, reply: tuple[str, ...] = ("one", " two")) -> None:
        self.reply = reply
        self.calls: list[GenerateCall] = []
        self.aborted: list[str] = []
        self.info = ServiceInfo("toy", "/models/toy", TOY_SPEC, 4096, 0.0)
        words = {"one": 0, "two": 1, "hi": 2, "[UNK]": 3}
        raw = RawTokenizer(WordLevel(words, unk_token="[UNK]"))
        raw.pre_tokenizer = Whitespace()
        self.tokenizer = Tokenizer(TokenizerData(raw.to_str(), TEMPLATE))

    async def submit(self, call: GenerateCall) -> AsyncIterator[Event]:
        """The reply, word by word, for each choice in turn."""
        self.calls.append(call)
        for index in range(call.params.n):
            for i, text in enumerate(self.reply):
                last = i == len(self.reply) - 1
                usage = Usage(prompt_tokens=len(call.prompt), completion_tokens=len(self.reply)) if last else None
                reason = "stop" if last else None
                yield Event(
                    call_id=call.call_id, index=index, token_ids=[i], text=text, finish_reason=reason, usage=usage
                )

    async def abort(self, call_id: str) -> bool:
        """Noted in `aborted`."""
        self.aborted.append(call_id)
        return True

    async def stats(self) -> dict[str, Any]:
        """Nothing was counted."""
        return {}

    async def flush_cache(self) -> None:
        """There is no cache."""

    async def drop_hold(self, name: str) -> bool:
        """Nothing is held."""
        return False

    async def unpin(self, name: str) -> bool:
        """Nothing is pinned."""
        return False


class NoModelYet:
    """A service whose model is still loading: only the routes' existence may be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"`router` read service.{name}; it is called before the model is loaded")


class ApiSuite(PluginSuite):
    """Set `calls` to (path, JSON body) of requests that must succeed."""

    kind = "api"
    calls: ClassVar[tuple[tuple[str, dict[str, Any]], ...]] = ()

    def api(self) -> Api:
        """`make`, typed."""
        api: Api = self.make()
        return api

    def test_routes_need_no_model(self) -> None:
        """The routes are mounted while the model loads."""
        service: Any = NoModelYet()
        assert self.api().router(service).routes

    def test_routes_are_distinct(self) -> None:
        """No two routes share a path and a method."""
        service: Service = FakeService()
        routes: list[Any] = list(self.api().router(service).routes)
        served = [(route.path, method) for route in routes for method in getattr(route, "methods", None) or ()]
        assert len(served) == len(set(served))

    def test_serves_a_fake_engine(self) -> None:
        """Each of `calls` is answered, from an engine that is not there."""
        testclient = pytest.importorskip("fastapi.testclient")
        from fastapi import FastAPI

        service = FakeService()
        app = FastAPI()
        app.include_router(self.api().router(service))
        client = testclient.TestClient(app)
        for path, body in self.calls:
            reply = client.post(path, json=body)
            assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"
        assert len(service.calls) >= len(self.calls)
