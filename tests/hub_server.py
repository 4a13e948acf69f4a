"""A stand-in for the Hugging Face Hub that speaks as much of its protocol as one file and a card need."""

import base64
import hashlib
import http.server
import json
import re
import threading
from dataclasses import dataclass, field
from urllib.parse import unquote

TOKEN = "hf_test"


@dataclass
class Repo:
    """Branches and commits; a commit is all files by path."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        files = self.files(branch) | files
        names = json.dumps([len(self.commits), sorted((path, len(data)) for path, data in files.items())])
        oid = hashlib.sha1(names.encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        return oid

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits.get(self.branches.get(revision, revision), {})


class HubServer:
    """Repositories by name; `requests` are the calls so far. `TOKEN` may do everything, others only read."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.status: int | None = None  # answer everything with this
        self.claimed_size: int | None = None  # of every file
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def repo(self, name: str, files: dict[str, bytes], **facts: bool) -> str:
        """Make a repository with these files; returns the commit."""
        self.repos[name] = Repo(**facts)
        return self.repos[name].commit("main", files)

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = unquote(request.path.partition("?")[0])
        self.requests.append(f"{request.command} {path}")
        authorized = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        status, headers, content = self._answer(request.command, path, body, authorized)
        if isinstance(content, dict):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        request.send_response(status)
        for name, value in ({"Content-Length": len(content)} | headers).items():
            request.send_header(name, str(value))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _answer(self, method: str, path: str, body: bytes, authorized: bool) -> tuple[int, dict, bytes | dict]:
        if self.status is not None:
            return self.status, {}, b""
        if path.startswith("/lfs/"):
            self.uploads[path.removeprefix("/lfs/")] = body
            return 200, {}, b""
        if path == "/api/validate-yaml":
            return 200, {}, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body), authorized)
        for pattern, call in (
            (r"/api/models/(\w+/[\w.-]+)(?:/revision/(.+))?", self._info),
            (r"/api/models/(\w+/[\w.-]+)/(branch|preupload|commit)/(.+)", self._write),
            (r"/(\w+/[\w.-]+)\.git/info/lfs/(objects)/(batch)", self._write),
            (r"/(\w+/[\w.-]+)/resolve/(.+)/([\w.]+)", self._resolve),
        ):
            if found := re.fullmatch(pattern, path):
                name, *words = found.groups()
                repo = self.repos.get(name)
                if repo is None or (repo.private and not authorized):
                    return (404 if authorized else 401), {"X-Error-Code": "RepoNotFound"}, b""
                if call == self._write and not authorized:
                    return 403, {}, b""
                return call(name, repo, words, body)
        return 404, {}, b""

    def _create(self, wanted: dict, authorized: bool) -> tuple[int, dict, bytes | dict]:
        if not authorized:
            return 401, {}, b""
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.repos:
            return 409, {}, {"url": f"{self.url}/{name}"}
        private = wanted.get("private") or wanted.get("visibility") == "private"  # versions 1 and 2 of the library
        self.repo(name, {".gitattributes": b""}, private=bool(private))
        return 200, {}, {"url": f"{self.url}/{name}"}

    def _info(self, name: str, repo: Repo, words: list, body: bytes) -> tuple[int, dict, bytes | dict]:
        sha = repo.branches.get(words[0] or "main")
        return 200, {}, {"id": name, "private": repo.private, "sha": sha, "siblings": []}

    def _write(self, name: str, repo: Repo, words: list, body: bytes) -> tuple[int, dict, bytes | dict]:
        kind, revision = words
        if kind == "branch":
            if revision in repo.branches:
                return 409, {}, b""
            repo.branches[revision] = repo.branches["main"]
            return 201, {}, b""
        if kind == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            files = [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]
            return 200, {}, {"files": files}
        if kind == "objects":
            objects = [
                item | {"actions": {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return 200, {}, {"transfer": "basic", "objects": objects}
        files = {}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.uploads[line["value"]["oid"]]
        oid = repo.commit(revision, files)
        return 200, {}, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "commitMessage": ""}

    def _resolve(self, name: str, repo: Repo, words: list, body: bytes) -> tuple[int, dict, bytes | dict]:
        revision, path = words
        if repo.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path not in repo.commits[commit]:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        content = repo.commits[commit][path]
        size = len(content) if self.claimed_size is None else self.claimed_size
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "X-Linked-Size": size}, content
