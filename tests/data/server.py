"""A file server for download tests."""

import http.server
import threading

from tests.data import makers
from tests.data.makers import pixels

TRAIN, TEST = pixels(6, 28, 1), pixels(3, 28, 1, seed=1)


class Server:
    """Serves `files` over HTTP on this machine; can drop the connection, ignore ranges, or return errors."""

    def __init__(self):
        self.files, self.requests = {}, []
        self.break_after, self.ranges, self.errors, self.shift = None, True, [], 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def answer(self, request):
        name, wanted = request.path.lstrip("/"), request.headers.get("Range")
        self.requests.append((name, wanted))
        if self.errors:
            return request.send_error(self.errors.pop(0))
        if name not in self.files:
            return request.send_error(404)
        content, start = self.files[name], 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{len(content)}")
                request.send_header("Content-Length", "0")
                return request.end_headers()
            start, self.shift = start + self.shift, 0
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        stop, self.break_after = self.break_after, None
        request.wfile.write(content[start : len(content) if stop is None else start + stop])
        request.close_connection = True
        return None

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def files_in(folder):
    """The files under a folder, except the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(str(path.relative_to(folder)) for path in files)


def publish(server, tmp_path, train=TRAIN, test=TEST):
    """Serve MNIST's official files with these images."""
    folder = makers.mnist(tmp_path / "published", train, test)
    server.files = {file.name: file.read_bytes() for file in folder.iterdir()}
