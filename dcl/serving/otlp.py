"""Bodies of `POST /v1/traces`: OTLP as protobuf or JSON, plain or gzip."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from dcl.serving.problems import ProblemError

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_IDS = ("traceId", "spanId", "parentSpanId")


def decode(body: bytes, kind: str, encoding: str, limit: int) -> dict[str, Any]:
    """The OTLP/JSON document in a body.

    Args:
        body: As it came in.
        kind: Content type without parameters.
        encoding: Content encoding.
        limit: Largest body after unpacking.

    Raises:
        ProblemError: If it cannot be read.
    """
    if encoding not in ("", "identity", "gzip"):
        raise ProblemError(415, f"Content-Encoding: expected gzip or none, got {encoding}")
    if encoding == "gzip":
        body = _unpack(body, limit)
    if kind == PROTOBUF:
        return _from_protobuf(body)
    if kind != JSON:
        raise ProblemError(
            415, f"Content-Type: expected {PROTOBUF} or {JSON}, got {kind or 'none'}"
        )
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ProblemError(400, "expected JSON") from None
    if not isinstance(document, dict):
        raise ProblemError(400, "expected a JSON object with resourceSpans")
    return document


def encode(kind: str) -> bytes:
    """The answer that all spans were taken, in the type of the request.

    Args:
        kind: Content type without parameters.
    """
    return b"" if kind == PROTOBUF else b"{}"  # an empty message has no bytes


def _unpack(body: bytes, limit: int) -> bytes:
    """What is in a gzip body, unless it is too much."""
    stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error:
        raise ProblemError(400, "expected gzip") from None
    if len(plain) > limit:
        raise ProblemError(413, f"expected at most {limit} bytes after unpacking")
    if not stream.eof:
        raise ProblemError(400, "expected whole gzip, got the start of it")
    return plain


def _from_protobuf(body: bytes) -> dict[str, Any]:
    """A protobuf request as OTLP/JSON, in which ids are hexadecimal."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        document = MessageToDict(ExportTraceServiceRequest.FromString(body))
    except (DecodeError, ValueError):  # ValueError: a text that is no UTF-8, a time out of range
        raise ProblemError(400, "expected an ExportTraceServiceRequest") from None
    for resource in document.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                span |= {name: _hex(span[name]) for name in _IDS if name in span}
    return document


def _hex(value: str) -> str:
    """An id in hexadecimal, from base64."""
    return base64.b64decode(value).hex()
