"""The application: routes of the API plugins plus the server's own, behind limits, a key and one error shape."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from phloem.interfaces import Api

from .errors import ErrorBody, add_handlers
from .gate import Gate
from .metrics import Metrics
from .middleware import ApiKey, BodyLimit, CountAnswers


class Monitored(Protocol):
    """What the application asks about the engine behind the gate; `Supervisor` is one."""

    restarts: int

    @property
    def ready(self) -> bool: ...
    def health(self) -> tuple[bool, dict[str, Any]]: ...
    def latest(self) -> tuple[str, dict[str, Any]]: ...


class AbortBody(BaseModel):
    """POST /abort."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rid: str


def create_app(
    gate: Gate,
    engine: Monitored,
    apis: Sequence[Api],
    *,
    config: dict[str, Any],
    max_body: int,
    api_key: str | None = None,
    cors: Sequence[str] = (),
) -> FastAPI:
    """Build the application. `config` is what /config shows, secrets already taken out."""
    failures: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
    app = FastAPI(title="phloem", docs_url="/docs", redoc_url=None, responses=failures)
    metrics = Metrics(engine.latest, lambda: engine.restarts)
    add_handlers(app)
    app.include_router(_probes(gate, engine))
    app.include_router(_admin(gate, metrics, config))
    for api in apis:
        app.include_router(api.router(gate))
    # the last one added is the outermost
    app.add_middleware(BodyLimit, limit=max_body)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    if cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"], max_age=600
        )
    app.add_middleware(CountAnswers, count=metrics.count)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, without the 422 that FastAPI promises and our handlers turn into a 400."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version=metadata.version("phloem"), routes=app.routes)
        for path in app.openapi_schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            app.openapi_schema["components"]["schemas"].pop(name, None)
    return app.openapi_schema


def _probes(gate: Gate, engine: Monitored) -> APIRouter:
    """For load balancers and process managers; neither route touches the model process."""
    router = APIRouter(tags=["server"])

    @router.get("/health")
    async def health() -> Response:
        """200 while the model process lives and moves, else 503. Draining is healthy."""
        healthy, detail = engine.health()
        return JSONResponse(detail | {"healthy": healthy}, 200 if healthy else 503)

    @router.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken, else 503."""
        taking = engine.ready and not gate.draining
        return JSONResponse({"ready": taking, "draining": gate.draining}, 200 if taking else 503)

    return router


def _admin(gate: Gate, metrics: Metrics, config: dict[str, Any]) -> APIRouter:
    """For operators."""
    router = APIRouter(tags=["server"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        """Prometheus metrics; engine counters are at most one heartbeat old."""
        return PlainTextResponse(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/config")
    async def show_config() -> Response:
        """The resolved configuration, without secrets."""
        return JSONResponse(config)

    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Drop cached state that no request uses."""
        await gate.flush_cache()
        return JSONResponse({"flushed": True})

    @router.post("/abort")
    async def abort(body: AbortBody) -> Response:
        """Cancel exactly the call of that id; false if none runs."""
        return JSONResponse({"aborted": await gate.abort(body.rid)})

    return router
