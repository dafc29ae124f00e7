"""Makes the OpenAPI document of the JSON API from its endpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy._dashboard.api.endpoint import ErrorAnswer
from riverpy._version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._dashboard.api.endpoint import Endpoint

OPENAPI_VERSION = "3.1.0"
_SCHEMA_REFERENCE = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def make_openapi_document(
    endpoints: Sequence[Endpoint[Any]], server_url: str, description: str
) -> dict[str, object]:
    """Return the OpenAPI document of the JSON API.

    Args:
        endpoints: all endpoints.
        server_url: the URL of the API. It may be a path.
        description: a text for the user about the whole API.
    """
    answers = [ErrorAnswer, *(one.answer for one in endpoints)]
    inputs = [one.input for one in endpoints]
    _, schemas = msgspec.json.schema_components([*answers, *inputs], ref_template=_SCHEMA_REFERENCE)
    paths: dict[str, dict[str, object]] = {}
    for endpoint in endpoints:
        path = _PATH_PARAMETER.sub(r"{\1}", endpoint.path)
        schema = schemas[endpoint.input.__name__]
        paths.setdefault(path, {})[endpoint.method.lower()] = _make_operation(endpoint, schema)
    input_names = {one.__name__ for one in inputs}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "riverpy dashboard", "version": VERSION, "description": description},
        "servers": [{"url": server_url}],
        "paths": paths,
        "components": {
            "schemas": {name: one for name, one in schemas.items() if name not in input_names}
        },
    }


def _make_operation(endpoint: Endpoint[Any], schema: Mapping[str, Any]) -> dict[str, object]:
    """Return the OpenAPI operation of an endpoint. `schema` is the JSON schema of the endpoint's
    input."""
    in_path = _PATH_PARAMETER.findall(endpoint.path)
    members: dict[str, Any] = schema["properties"]
    required = schema.get("required", [])
    is_read = endpoint.method == "GET"
    operation: dict[str, object] = {
        "operationId": endpoint.respond.__name__,
        "summary": endpoint.summary,
        "parameters": [
            _make_parameter(
                name, member, "path" if name in in_path else "query", is_required=name in required
            )
            for name, member in members.items()
            if is_read or name in in_path
        ],
        "responses": {
            "200": _make_response("The answer.", endpoint.answer),
            **{
                str(status): _make_response(reason, ErrorAnswer)
                for status, reason in endpoint.errors.items()
            },
            "default": _make_response("The request was refused, or failed.", ErrorAnswer),
        },
    }
    body = {name: one for name, one in members.items() if name not in in_path}
    if body and not is_read:
        needed = [name for name in required if name in body]
        body_schema = {"type": "object", "properties": body, "required": needed}
        content = {"application/json": {"schema": body_schema}}
        operation["requestBody"] = {"required": bool(needed), "content": content}
    return operation


def _make_parameter(
    name: str, schema: Mapping[str, Any], place: str, *, is_required: bool
) -> dict[str, object]:
    members = {key: value for key, value in schema.items() if key != "description"}
    return {
        "name": name,
        "in": place,
        "required": is_required,
        "description": schema.get("description", ""),
        "schema": members,
    }


def _make_response(description: str, answer: type[msgspec.Struct]) -> dict[str, object]:
    schema = {"$ref": _SCHEMA_REFERENCE.format(name=answer.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
