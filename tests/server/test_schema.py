"""Requests made from the OpenAPI document: answers are as documented, wrong ones are refused, no failure is ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from live import Live
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi import checks

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
PROGRAMS, PROGRAM = "/v1/programs", "/v1/programs/{program}"
OPERATIONS = tuple(f"{PROGRAM}/{what}" for what in ("append", "generate", "select", "fork"))
POST = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/abort", "/flush_cache")
POST += ("/pin", "/unpin", "/end_session")
POST += (PROGRAMS, f"{PROGRAMS}/delete", *OPERATIONS)
GET = ("/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics", "/config", PROGRAMS, PROGRAM)


@pytest.fixture(scope="module")
def live(tiny_model: Callable[[str], Path]) -> Iterator[Live]:
    # few slots, and little time: a generated request must not run for long
    with Live(tiny_model("llama"), "engine.context_length=64", "server.request_timeout_s=20") as server:
        yield server
        server.until(server.all_slots_back)
        assert server.metrics()["phloem_model_restarts_total"] == 0


@pytest.fixture(scope="module")
def schema(live: Live) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


def test_the_document_names_every_route(live: Live) -> None:
    document = live.http.get("/openapi.json").json()
    found = {(path, method) for path, item in document["paths"].items() for method in item}
    assert found == {(path, "post") for path in POST} | {(path, "get") for path in GET} | {(PROGRAM, "delete")}
    body = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "top_k", "user", "store"} <= set(body), "inert parameters are part of the document"
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("path", [*POST, "/v1/models/{model}"])
def test_generated_requests(schema: BaseSchema, path: str, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and (path == "/flush_cache" or path not in POST):
        pytest.skip("nothing can be invalid here")
    operation = schema[path]["POST" if path in POST else "GET"]
    wanted = [*CHECKS, checks.negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=wanted, timeout=60)

    run()
