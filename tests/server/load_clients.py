"""Clients in a process of their own, so that they do not share the server's interpreter lock.

python load_clients.py health PORT SECONDS          prints the latencies of /health, in seconds, as a JSON array
python load_clients.py idle                         serves /health and does nothing else; prints its port
python load_clients.py post PORT SECONDS FILE ...   posts the body in each file over and over, on its own connection
"""

import json
import socket
import sys
import threading
import time
from pathlib import Path


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """Read one answer with a length."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = sock.recv(65536)
        if not part:
            raise ConnectionError
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
    while len(body) < length:
        part = sock.recv(1 << 20)
        if not part:
            raise ConnectionError
        body += part
    return int(head.split()[1]), body


def health(port: int, seconds: float) -> list[float]:
    found, end = [], time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while time.monotonic() < end:
            begun = time.perf_counter()
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer(sock)[0] == 200
            found.append(time.perf_counter() - begun)
            time.sleep(0.005)
    return found


def post(port: int, seconds: float, path: str, body: bytes, counts: dict[int, int]) -> None:
    end = time.monotonic() + seconds
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    while time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.settimeout(max(0.5, end - time.monotonic()))
                while time.monotonic() < end:
                    sock.sendall(head.encode() + b"\r\n\r\n" + body)
                    status, _ = answer(sock)
                    counts[status] = counts.get(status, 0) + 1
        except OSError:  # also a timeout: it leaves before its answer
            counts[0] = counts.get(0, 0) + 1


def serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            sock, _ = listener.accept()
            with sock:
                while sock.recv(65536):
                    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def main() -> None:
    if sys.argv[1] == "idle":
        serve()
    kind, port, seconds, *files = sys.argv[1:]
    if kind == "health":
        print(json.dumps(health(int(port), float(seconds))))
        return
    counts: dict[int, int] = {}
    threads = [
        threading.Thread(target=post, args=(int(port), float(seconds), "/v1/completions", Path(f).read_bytes(), counts))
        for f in files
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
