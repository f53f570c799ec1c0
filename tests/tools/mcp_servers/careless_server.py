"""A server that answers with what no server should write, as its argument says."""

import json
import os
import sys


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()


def send(identifier: object, result: object) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": identifier, "result": result}).encode())


def answer(identifier: object, kind: str) -> None:
    if kind == "crash":
        os._exit(3)
    if kind == "no json":
        write(b"a line of a log\n{not json")
    if kind == "endless line":
        for _ in range(40):
            sys.stdout.buffer.write(b"x" * (1 << 20))
        write(b"")
    if kind == "huge":
        send(identifier, {"content": [{"type": "text", "text": "x" * (20 << 20)}]})
    if kind == "unknown id":
        send(99999, {"content": []})
    if kind == "no utf-8":
        content = b'{"content":[{"type":"text","text":"caf\xe9"}]}'
        write(b'{"jsonrpc":"2.0","id":' + str(identifier).encode() + b',"result":' + content + b"}")
    else:
        send(identifier, {"content": [{"type": "text", "text": "fine"}]})


for line in sys.stdin.buffer:
    message = json.loads(line)
    if "id" not in message:
        continue
    identifier, method = message["id"], message["method"]
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        about = {"name": "careless", "version": "1"}
        send(identifier, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"kind": {"type": "string"}}}
        send(identifier, {"tools": [{"name": "answer", "description": "Answer.", "inputSchema": schema}]})
    elif method == "tools/call":
        answer(identifier, message["params"]["arguments"]["kind"])
    else:
        write(json.dumps({"jsonrpc": "2.0", "id": identifier, "error": {"code": -32601, "message": "no"}}).encode())
