"""The messages of event files: of TensorBoard and of W&B, as far as they hold numbers.

Both are Protocol Buffers. Only the fields that are read or written are declared; the library passes
over the others. It is optional: ``pip install 'distdiag[metrics]'``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

# By message its fields: name, number, and a scalar type or another message; ``*`` means repeated.
_EVENT: Final = {
    "Plugin": {"plugin_name": (1, "string")},
    "Metadata": {"plugin_data": (1, "Plugin")},
    "Shape": {"dim": (2, "Dim*")},
    "Dim": {"size": (1, "int64")},
    "Tensor": {
        "dtype": (1, "int32"),
        "tensor_shape": (2, "Shape"),
        "tensor_content": (4, "bytes"),
        "float_val": (5, "float*"),
        "double_val": (6, "double*"),
        "int_val": (7, "int32*"),
        "string_val": (8, "bytes*"),
        "int64_val": (10, "int64*"),
    },
    "Value": {
        "tag": (1, "string"),
        "simple_value": (2, "float"),
        "tensor": (8, "Tensor"),
        "metadata": (9, "Metadata"),
    },
    "Summary": {"value": (1, "Value*")},
    "Session": {"status": (1, "int32")},
    "Event": {
        "wall_time": (1, "double"),
        "step": (2, "int64"),
        "file_version": (3, "string"),
        "summary": (5, "Summary"),
        "session_log": (7, "Session"),
    },
}
_RECORD: Final = {
    "Item": {
        "key": (1, "string"),
        "nested_key": (2, "string*"),
        "integer": (5, "sint64"),
        "number": (6, "double"),
        "text": (7, "string"),
        "json": (8, "string"),
        "value_json": (16, "string"),
    },
    "Step": {"num": (1, "int64")},
    "History": {"item": (1, "Item*"), "step": (2, "Step")},
    "Record": {"num": (1, "int64"), "history": (2, "History")},
}
_SCALARS: Final = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "int32": 5,
    "string": 9,
    "bytes": 12,
    "sint64": 18,
}
_MESSAGE: Final = 11


class NoProtobufError(Exception):
    """The library that reads Protocol Buffers is not installed."""


@lru_cache(maxsize=2)
def message_class(name: str) -> Any:  # noqa: ANN401 - the class is made while it runs
    """Return the class of the message ``Event`` (TensorBoard) or ``Record`` (W&B).

    Raises:
        NoProtobufError: the library is not installed.

    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise NoProtobufError from None
    package = f"distdiag_{name.lower()}"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    for message, fields in (_EVENT if name == "Event" else _RECORD).items():
        described = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            plain = kind.rstrip("*")
            added = described.field.add(name=field, number=number, label=3 if "*" in kind else 1)
            added.type = _SCALARS.get(plain, _MESSAGE)
            if added.type == _MESSAGE:
                added.type_name = f".{package}.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


def decode_errors() -> tuple[type[Exception], ...]:
    """Return what the library raises for bytes that are no message."""
    from google.protobuf.message import DecodeError

    return (DecodeError, ValueError)


def as_text(value: str | bytes) -> str:
    """Return the text of a field; the library leaves what is no UTF-8 as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
