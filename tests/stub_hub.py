"""A Hub on this machine: repositories with revisions, private ones behind a token, commits and downloads over HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import yaml

TOKEN = "hf_secret"


@dataclass
class Repository:
    """Files by commit; `heads` names the commit of every branch."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    heads: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.heads.get(revision, revision))

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        self.heads[revision] = sha
        return sha


class StubHub:
    """`with StubHub() as hub:` serves `hub.repositories` at `hub.endpoint`; `hub.requests` lists what was asked."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(_Handler):
            stub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> StubHub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    stub: StubHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, value, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def missing(self, code: str) -> None:
        self.answer(401 if code == "RepoNotFound" else 404, b"{}", X_Error_Code=code)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def allowed(self, name: str) -> Repository | None:
        repository = self.stub.repositories.get(name)
        hidden = repository is not None and repository.private
        return None if hidden and self.headers.get("Authorization") != f"Bearer {TOKEN}" else repository

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.stub.requests.append(f"{self.command} {path}")
        if path == "/api/whoami-v2":
            return self.json({"name": "me", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        repository = self.allowed(name)
        if repository is None:
            return self.missing("RepoNotFound")
        if parts[0] != "api":
            return self.download(repository, parts[3], "/".join(parts[4:]))
        revision = parts[5] if len(parts) > 5 else "main"
        files = repository.files(revision)
        if files is None:
            return self.missing("RevisionNotFound")
        if len(parts) > 4 and parts[4] == "tree":
            listed = [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in files.items()]
            return self.json(listed)
        siblings = [{"rfilename": one} for one in files]
        sha = repository.heads.get(revision, revision)
        return self.json({"id": name, "sha": sha, "siblings": siblings, "private": repository.private})

    def download(self, repository: Repository, revision: str, path: str) -> None:
        files = repository.files(revision)
        if files is None:
            return self.missing("RevisionNotFound")
        sha = repository.heads.get(revision, revision)
        if path not in files:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        etag = hashlib.sha1(files[path]).hexdigest()
        self.answer(200, files[path], ETag=f'"{etag}"', X_Repo_Commit=sha)

    def do_POST(self) -> None:
        path, content = unquote(urlparse(self.path).path), self.body()
        self.stub.requests.append(f"POST {path}")
        if path == "/api/validate-yaml":
            return self.validate(json.loads(content)["content"])
        if path == "/api/repos/create":
            return self.create(json.loads(content))
        parts = path.strip("/").split("/")
        repository = self.allowed("/".join(parts[2:4]))
        if repository is None:
            return self.missing("RepoNotFound")
        if parts[4] == "branch":
            repository.heads.setdefault(parts[5], repository.heads["main"])
            return self.json({})
        if parts[4] == "preupload":
            asked = json.loads(content)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            return self.json({"files": modes})
        files = dict(repository.files(parts[5]) or {})
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        sha = repository.commit(files, parts[5])
        self.json(
            {
                "commitOid": sha,
                "commitUrl": f"{self.stub.endpoint}/{'/'.join(parts[2:4])}/commit/{sha}",
                "success": True,
            }
        )

    def create(self, asked: dict) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        status = 409 if name in self.stub.repositories else 200
        private = bool(asked.get("private") or asked.get("visibility") == "private")
        self.stub.repositories.setdefault(name, Repository(private))
        self.json({"url": f"{self.stub.endpoint}/{name}", "id": name, "name": name}, status)

    def validate(self, text: str) -> None:
        """As the Hub does: the front matter must be YAML without null entries."""
        values = yaml.safe_load(text.split("---")[1])
        bad = [key for key, value in values.items() if value is None or (isinstance(value, list) and None in value)]
        errors = [{"message": f"{key} must not be null"} for key in bad]
        self.json({"errors": errors, "warnings": []}, 400 if errors else 200)
