"""The built-in APIs pass the conformance suite of their kind."""

from __future__ import annotations

from typing import Any, ClassVar

from phloem.plugins.api.native import NativeApi
from phloem.plugins.api.openai import OpenAIApi
from phloem.plugins.api.program import ProgramApi
from phloem.testing.api import ApiSuite, FakeService

Calls = tuple[tuple[str, dict[str, Any]], ...]
USER = [{"role": "user", "content": "hi"}]


class TestOpenAI(ApiSuite):
    plugin = OpenAIApi
    calls: ClassVar[Calls] = (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": ["hi", "hi one"], "stream": True, "n": 2}),
        ("/v1/chat/completions", {"messages": USER, "model": "toy"}),
        ("/v1/chat/completions", {"messages": USER, "stream": True}),
    )


class TestNative(ApiSuite):
    plugin = NativeApi
    calls: ClassVar[Calls] = (
        ("/generate", {"text": "hi"}),
        ("/generate", {"input_ids": [[1], [2]], "stream": True}),
    )


class TestProgram(ApiSuite):
    plugin = ProgramApi
    calls: ClassVar[Calls] = (("/v1/programs", {"text": "hi", "priority": 1}), ("/v1/programs", {}))

    def test_serves_a_fake_engine(self) -> None:
        """Making a program runs nothing; a fake engine is asked when one goes on."""
        from fastapi import FastAPI
        from fastapi.testclient import TestClient

        service, app = FakeService(), FastAPI()
        app.include_router(self.api().router(service))
        with TestClient(app) as client:
            paths = [f"/v1/programs/{client.post(path, json=body).json()['id']}" for path, body in self.calls]
            assert service.calls == []
            answer = client.post(f"{paths[0]}/generate", json={})
            assert answer.json()["text"] == "one two"
            assert client.get(paths[0]).json()["text"] == "hione two"
            assert client.post(f"{paths[0]}/fork", json={"n": 2}).status_code == 200
            assert client.delete(paths[1]).json() == {"ok": True}
        (call,) = service.calls
        assert (call.hold, call.priority) == (paths[0].rpartition("/")[2], 1)
