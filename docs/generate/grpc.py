"""docs/reference/grpc.md from the .proto file: its calls, messages and enums, with the comments that stand there."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from docs.generate import ROOT, cell, escaped, table

PROTO: Final = ROOT / "smq/clients/proto/smq/v1/smq.proto"
_HEAD: Final = """\
# The gRPC API

Generated from `smq/clients/proto/smq/v1/smq.proto` by `make docs`; do not edit.

The package is `smq.v1`, and every node serves it on its gRPC port, 7401 unless it is configured otherwise. The Python
clients ([clients.md](../clients.md)) and Spark use nothing else. For another language, generate stubs from that file,
as `examples/grpc-go` does: it has the numbers of the fields. Where a call has several requests or answers, they are a
stream.
"""
_FILE, _MESSAGE, _ENUM, _SERVICE = (12,), 4, 5, 6  # numbers of descriptor.proto: `syntax`, and the lists of the file
_FIELD, _VALUE, _METHOD = 2, 2, 2

Comments = dict[tuple[int, ...], str]


def render() -> str:
    file = described()
    comments = comments_of(file)
    services = (part for i, one in enumerate(file.service) for part in _service(one, (_SERVICE, i), comments))
    messages = (part for i, one in enumerate(file.message_type) for part in _message(one, (_MESSAGE, i), comments))
    enums = (part for i, one in enumerate(file.enum_type) for part in _enum(one, (_ENUM, i), comments))
    parts = [_HEAD, f"{escaped(comments[_FILE])}\n", *services, "## Messages\n", *messages, "## Enums\n", *enums]
    return "\n".join(parts)


def described() -> FileDescriptorProto:
    """The file as protoc reads it, comments included."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "set"
        options = [f"-I{PROTO.parent}", "--include_source_info", f"--descriptor_set_out={out}", PROTO.name]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options], check=True)
        (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def comments_of(file: FileDescriptorProto) -> Comments:
    """What stands before and beside each element, paragraph by paragraph, by the element's path."""
    texts: Comments = {}
    for place in file.source_code_info.location:
        lines = f"{place.leading_comments}\n{place.trailing_comments}".strip("\n").split("\n")
        paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
        if any(paragraphs):
            texts[tuple(place.path)] = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return texts


def _service(service: ServiceDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"## {service.name}\n"
    yield from _comment(path, comments)
    rows = [_call(method, comments[*path, _METHOD, i]) for i, method in enumerate(service.method)]
    yield table(("call", "messages", "meaning"), rows)


def _call(method: MethodDescriptorProto, comment: str) -> tuple[str, ...]:
    request = _link(method.input_type, "requests" if method.client_streaming else "request")
    answer = _link(method.output_type, "answers" if method.server_streaming else "answer")
    return f"`{method.name}`", f"{request}, {answer}", cell(comment)


def _message(message: DescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {message.name}\n"
    yield from _comment(path, comments)
    maps = {f".smq.v1.{message.name}.{nested.name}": nested for nested in message.nested_type}
    rows = []
    for i, field in enumerate(message.field):
        choice = [f"one of `{message.oneof_decl[field.oneof_index].name}`"] if _is_choice(field) else []
        meaning = "; ".join([*choice, *filter(None, [comments.get((*path, _FIELD, i))])])
        rows.append((f"`{field.name}` {_type(field, maps)}", meaning))
    yield _list(rows) if rows else "Empty.\n"


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {enum.name}\n"
    yield from _comment(path, comments)
    yield _list((f"`{value.name}`", comments.get((*path, _VALUE, i), "")) for i, value in enumerate(enum.value))


def _list(rows: Iterable[tuple[str, str]]) -> str:
    """A line each: of a hundred small tables, the heads would be most of the page."""
    return "".join(f"- {name}{': ' if meaning else ''}{escaped(' '.join(meaning.split()))}\n" for name, meaning in rows)


def _comment(path: tuple[int, ...], comments: Comments) -> Iterable[str]:
    return [f"{escaped(comments[path])}\n"] if path in comments else []


def _is_choice(field: FieldDescriptorProto) -> bool:
    return field.HasField("oneof_index") and not field.proto3_optional


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    if field.type_name in maps:
        key, value = maps[field.type_name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    scalar = f"`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
    shown = _link(field.type_name) if field.type_name else scalar
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {shown}"
    return f"optional {shown}" if field.proto3_optional else shown


def _link(type_name: str, text: str = "") -> str:
    name = type_name.removeprefix(".smq.v1.")
    return f"[{text or name}](#{name.lower()})"
