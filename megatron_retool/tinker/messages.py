"""The protobuf messages of the Tinker protocol (SDK 0.38.0), stated as a table, from which their classes are made.

A row is a field's number, name and type. A type is a scalar's or a message's name; ``T*`` is repeated, ``T?`` optional,
and ``{T}`` a map from text. The wire has only numbers and types, so the names here are ours. Fields that the server
does not read (where a datum's tokens come from, say) are left out: protobuf skips them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "megatron_retool.tinker"
_TABLE: dict[str, list[tuple[int, str, str]]] = {
    "SparseRows": [(1, "values", "bytes"), (2, "row_starts", "bytes"), (3, "columns", "bytes")],
    "Tensor": [(1, "dense", "bytes?"), (2, "sparse_rows", "SparseRows"), (3, "dtype", "int32"), (4, "shape", "int64*")],
    "Text": [(1, "tokens", "bytes")],
    "Image": [(1, "data", "bytes"), (2, "format", "string"), (3, "expected_tokens", "int32?")],
    "Audio": [(1, "dmel", "bytes")],
    "Chunk": [(1, "text", "Text"), (2, "image", "Image"), (3, "audio", "Audio")],
    "Datum": [(1, "model_input", "Chunk*"), (2, "loss_fn_inputs", "{Tensor}")],
    "ConfigValue": [(1, "number", "double?"), (2, "text", "string?")],
    "ForwardBackwardRequest": [
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "Datum*"),
        (4, "loss_fn", "string"),
        (5, "loss_fn_numbers", "{double}"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config", "{ConfigValue}"),
    ],
    "BatchedTensor": [(1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "int32"), (4, "trailing", "int64*")],
    "Record": [(1, "type_tag", "string"), (2, "fields", "{BatchedTensor}"), (3, "num_datums", "int64")],
    "ForwardBackwardOutput": [(1, "output_type", "string"), (2, "records", "Record*"), (3, "metrics", "{double}")],
    "TopTokens": [(1, "token_ids", "bytes"), (2, "log_probs", "bytes"), (3, "k", "uint32"), (4, "length", "uint32")],
    "Sequence": [
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "log_probs", "bytes?"),
        (4, "top", "TopTokens"),
    ],
    "SampleResponse": [
        (1, "sequences", "Sequence*"),
        (2, "prompt_log_probs", "bytes?"),
        (3, "top_prompt", "TopTokens"),
        (4, "prompt_cache_hit_tokens", "int32"),
        (5, "target_log_probs", "Tensor"),
    ],
}
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


def _set_type(field: Any, kind: str) -> None:
    field.type = _SCALARS.get(kind, _MESSAGE)
    if field.type == _MESSAGE:
        field.type_name = f".{_PACKAGE}.{kind}"


def _add_map(message: Any, field: Any, kind: str) -> None:
    """A map is a repeated message of key and value, whose name protobuf derives from the field's."""
    entry = message.nested_type.add(name="".join(word.capitalize() for word in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    for number, name, of in ((1, "key", "string"), (2, "value", kind)):
        _set_type(entry.field.add(name=name, number=number, label=_OPTIONAL), of)
    field.label, field.type = _REPEATED, _MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _add_fields(message: Any, rows: Iterable[tuple[int, str, str]]) -> None:
    for number, name, kind in rows:
        field = message.field.add(name=name, number=number, label=_OPTIONAL)
        if kind.startswith("{"):
            _add_map(message, field, kind[1:-1])
            continue
        if kind.endswith("*"):
            field.label = _REPEATED
        elif kind.endswith("?"):
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{name}")
        _set_type(field, kind.rstrip("*?"))


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="megatron_retool_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, rows in _TABLE.items():
        _add_fields(file.message_type.add(name=name), rows)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _TABLE}


MESSAGES = _message_classes()
"""Message classes by their names in the table."""
