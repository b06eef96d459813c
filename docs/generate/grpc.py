"""docs/reference/grpc.md from the .proto file: its calls, with the comments that stand there. Who needs the messages
and their fields generates stubs from that file, and has it open.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto

from docs.generate import ROOT, escaped

PROTO: Final = ROOT / "smq/clients/proto/smq/v1/smq.proto"
_HEAD: Final = """\
# The gRPC API

Generated from `smq/clients/proto/smq/v1/smq.proto` by `make docs`; do not edit.

The package is `smq.v1`, and every node serves it on its gRPC port, 7401 unless it is configured otherwise. The Python
clients ([clients.md](../clients.md)) and Spark use nothing else. For another language, generate stubs from
[smq.proto](../../smq/clients/proto/smq/v1/smq.proto), as `examples/grpc-go` does. That file has the messages
(`FetchRequest` and `FetchResponse` for `Fetch`), and what each field means.
"""
_FILE, _SERVICE, _METHOD = (12,), 6, 2  # numbers of descriptor.proto: `syntax`, the services of a file, their calls

Comments = dict[tuple[int, ...], str]


def render() -> str:
    file = described()
    comments = comments_of(file)
    _, _, rules = comments[_FILE].partition("\n\n")  # before them: what the file is
    lines = [_HEAD, f"{escaped(rules)}\n"]
    for i, service in enumerate(file.service):
        lines.append(f"## {service.name}\n")
        if (_SERVICE, i) in comments:
            lines.append(f"{escaped(comments[_SERVICE, i])}\n")
        lines.append("".join(_call(c, comments[_SERVICE, i, _METHOD, j]) for j, c in enumerate(service.method)))
    return "\n".join(lines)


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


def _call(call: MethodDescriptorProto, comment: str) -> str:
    sides = (("requests", call.client_streaming), ("answers", call.server_streaming))
    streams = [name for name, is_stream in sides if is_stream]
    shown = f" (a stream of {' and '.join(streams)})" if streams else ""
    return f"- `{call.name}`{shown}: {escaped(' '.join(comment.split()))}\n"
