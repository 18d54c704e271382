"""JSON schemas of the shapes that programs send: seeded, bounded wherever a random model would go on for ever."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator

Schema = dict[str, Any]

_WORDS = ("id", "name", "größe", "unit price", "is_open", "notes", "tags", "lines", "when", "owner", "kind", "x-rate")
_PATTERNS = ("^[A-Z]{2}-[0-9]{4}$", "^(red|green|blue)(-[a-z]{1,4})?$", "^[a-f0-9]{8}$", "^#[0-9a-fA-F]{3}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
_VALUES = ("low", "high", "größer", "世界", 'a "b"', "c\\d", 0, 7, -3, True, False, None)


def validate(instance: Any, schema: Any) -> None:
    """Against draft 2020-12, formats included. Raises jsonschema.ValidationError."""
    jsonschema.validate(instance, schema, Draft202012Validator, format_checker=Draft202012Validator.FORMAT_CHECKER)


def schemas(count: int, seed: int = 0) -> Iterator[tuple[str, Schema]]:
    """`count` schemas with names, each shape in turn; the same for the same seed."""
    for i in range(count):
        shape = _SHAPES[i % len(_SHAPES)]
        rng = random.Random(f"{seed} {i}")
        yield f"{shape.__name__.strip('_')}-{i}", shape(rng)


# --- values without parts


def _text(rng: random.Random) -> Schema:
    low = rng.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(1, 9)}


def _integer(rng: random.Random) -> Schema:
    low = rng.choice([-500, -1, 0, 1, 10, 2024])
    bound = rng.choice(["minimum", "exclusiveMinimum"])
    return {"type": "integer", bound: low, "maximum": low + rng.choice([2, 9, 150, 99_999])}


def _number(rng: random.Random) -> Schema:
    return {"type": "number", "minimum": rng.choice([-90, 0, -180]), "maximum": rng.choice([1, 90, 180])}


def _constant(rng: random.Random) -> Schema:
    return {"const": rng.choice([*_VALUES, [1, "a"], {"v": 1}])}


def _leaf(rng: random.Random) -> Schema:
    makers: tuple[Callable[[], Schema], ...] = (
        lambda: _text(rng),
        lambda: _integer(rng),
        lambda: _number(rng),
        lambda: {"type": "boolean"},
        lambda: {"enum": rng.sample(_VALUES, rng.randint(1, 5))},
        lambda: _constant(rng),
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"type": "string", "format": rng.choice(_FORMATS)},
    )
    return rng.choice(makers)()


# --- parts


def _maybe(rng: random.Random, schema: Schema) -> Schema:
    """Itself, or it or null, in one of the spellings."""
    how = rng.randrange(4)
    if how == 0 and isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]} if len(schema) == 1 else {"anyOf": [schema, _null()]}
    return {"anyOf": rng.sample([schema, _null()], 2)} if how == 1 else schema


def _null() -> Schema:
    return {"type": "null"}


def _list(rng: random.Random, items: Schema) -> Schema:
    low = rng.choice([0, 0, 1, 2])
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0 if low else 1, 2)}


def _closed(properties: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    properties = {name: _maybe(rng, _any(rng, depth - 1)) for name in names}
    return _closed(properties, [name for name in names if rng.random() < 0.6])


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.5:
        return _leaf(rng)
    return rng.choice([lambda: _object(rng, depth), lambda: _list(rng, _any(rng, depth - 1))])()


# --- whole schemas


def _record(rng: random.Random) -> Schema:
    """Nested objects with optional and nullable parts."""
    return _object(rng, 2) | {"title": "Record", "description": "What a form sends."}


def _order(rng: random.Random) -> Schema:
    """Lines by reference to a definition."""
    names = ["sku", "quantity", "price"]
    line = _closed({"sku": _text(rng), "quantity": _integer(rng), "price": _number(rng)}, names[: rng.randint(1, 3)])
    lines = _list(rng, {"$ref": "#/$defs/line"})
    top = {"order_id": _integer(rng), "currency": {"enum": ["EUR", "USD"]}, "lines": lines, "paid": {"type": "boolean"}}
    return _closed(top, ["order_id", "lines"]) | {"$defs": {"line": line}}


def _tree(rng: random.Random) -> Schema:
    """A node whose children, or whose one child, are of its own kind."""
    node = {"$ref": "#/$defs/node"}
    below = {"type": "array", "items": node, "maxItems": 1} if rng.random() < 0.5 else {"anyOf": [_null(), node]}
    defs = {"node": _closed({"value": _leaf(rng), "below": below}, ["value"] if rng.random() < 0.5 else [])}
    return {"$ref": "#/$defs/node", "$defs": defs}


def _mutual(rng: random.Random) -> Schema:
    """Two kinds that hold each other."""
    defs = {
        "folder": _closed({"name": _text(rng), "first": {"anyOf": [_null(), {"$ref": "#/$defs/file"}]}}, ["first"]),
        "file": _closed({"size": _integer(rng), "parent": {"anyOf": [_null(), {"$ref": "#/$defs/folder"}]}}, []),
    }
    return {"$ref": "#/$defs/folder", "$defs": defs}


def _event(rng: random.Random) -> Schema:
    """One of several kinds, told apart by a constant."""
    union = rng.choice(["anyOf", "oneOf"])
    kinds = rng.sample(["created", "moved", "gone", "größer"], rng.randint(2, 3))
    branches = [_closed({"kind": {"const": kind}, "data": _any(rng, 1)}, ["kind", "data"]) for kind in kinds]
    return {union: branches}


def _call(rng: random.Random) -> Schema:
    """A function's name and arguments."""
    arguments = _closed({"city": _text(rng), "days": _integer(rng), "unit": {"enum": ["C", "F"]}}, ["city"])
    return _closed({"name": {"const": "get_weather"}, "arguments": arguments}, ["name", "arguments"])


def _place(rng: random.Random) -> Schema:
    """A geographic feature: arrays of numbers of a fixed length."""
    position = {"type": "array", "items": _number(rng), "minItems": 2, "maxItems": 2}
    geometry = _closed({"type": {"const": "Point"}, "coordinates": position}, ["type", "coordinates"])
    return _closed({"type": {"const": "Feature"}, "geometry": geometry, "properties": _null()}, ["type", "geometry"])


def _tuple(rng: random.Random) -> Schema:
    """Values of fixed kinds in order."""
    heads = [_leaf(rng) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": heads, "items": False, "minItems": len(heads)}


def _formatted(rng: random.Random) -> Schema:
    """Strings of every format and pattern."""
    parts = [{"type": "string", "format": name} for name in _FORMATS]
    parts += [{"type": "string", "pattern": pattern} for pattern in _PATTERNS]
    chosen = rng.sample(parts, 3)
    return _closed({f"f{i}": part for i, part in enumerate(chosen)}, ["f0", "f2"])


def _plain(rng: random.Random) -> Schema:
    """A value without parts, a choice, or a list of them."""
    return rng.choice([_leaf, lambda r: _list(r, _leaf(r)), lambda r: {"anyOf": [_integer(r), _text(r), _null()]}])(rng)


def _deployment(rng: random.Random) -> Schema:
    """Deep configuration."""
    port = _closed({"port": {"type": "integer", "minimum": 1, "maximum": 65535}, "tcp": {"type": "boolean"}}, ["port"])
    image = {"type": "string", "pattern": "^[a-z]{1,8}:[0-9]{1,3}$"}
    container = _closed({"image": image, "ports": _list(rng, port)}, ["image"])
    spec = _closed({"replicas": _integer(rng), "containers": _list(rng, container)}, ["containers"])
    labels = _closed({"app": _text(rng), "tier": {"enum": ["web", "db"]}}, ["app"])
    return _closed({"kind": {"const": "Deployment"}, "labels": labels, "spec": spec}, ["kind", "spec"])


def _map(rng: random.Random) -> Schema:
    """Names by pattern, or numbers by any name: what few backends have."""
    if rng.random() < 0.5:
        return {"type": "object", "patternProperties": {"^x[0-9]$": _leaf(rng)}, "additionalProperties": False}
    return {"type": "object", "additionalProperties": _integer(rng), "maxProperties": rng.randint(1, 2)}


def _bounded(rng: random.Random) -> Schema:
    """Keywords beside each other: each backend must enforce all of them, or refuse."""
    return rng.choice(
        [
            {"type": "string", "pattern": "^a+b?$", "maxLength": rng.randint(1, 4)},
            {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
            {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0, "maximum": 999},
            {"type": "string", "format": "date", "minLength": 10},
            {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 90}]},
        ]
    )


_SHAPES: tuple[Callable[[random.Random], Schema], ...] = (
    *(_record, _order, _tree, _event, _call, _place, _tuple, _formatted, _plain, _mutual, _deployment, _map, _bounded),
)
