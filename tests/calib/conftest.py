"""A model hub on loopback, as far as data sets go: it answers what huggingface_hub asks for files that a test makes."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest


class HubServer(ThreadingHTTPServer):
    """A server that keeps what it was asked: (method, path) of each request, and how many bytes of files it sent."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.clear()

    def clear(self):
        self.files.clear()
        self.gated: set[str] = set()  # data sets that everybody may see and nobody read
        self.asked: list[tuple[str, str]] = []
        self.sent = 0

    def add(self, repo, files, revision="main"):
        self.files[repo, revision] = files
        return self.sha(repo, revision)

    def sha(self, repo, revision):
        content = repr(
            sorted((name, hashlib.sha1(data).hexdigest()) for name, data in self.files[repo, revision].items())
        )
        return hashlib.sha1(f"{repo} {revision} {content}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self):
        parts = urlsplit(self.path).path.strip("/").split("/")
        self.server.asked.append((self.command, unquote(self.path)))
        if parts[:2] == ["api", "datasets"]:
            self.api("/".join(parts[2:4]), [unquote(part) for part in parts[4:]])
        elif parts[0] == "datasets" and parts[3] == "resolve":
            self.file("/".join(parts[1:3]), unquote(parts[4]), unquote("/".join(parts[5:])))
        else:
            self.missing("RepoNotFound")

    def find(self, repo, revision):
        """The files of a revision by its name or its commit, and the commit."""
        for (name, branch), files in self.server.files.items():
            sha = self.server.sha(name, branch)
            if name == repo and revision in (branch, sha):
                return files, sha
        self.missing("RevisionNotFound" if any(name == repo for name, _ in self.server.files) else "RepoNotFound")
        return None, ""

    def api(self, repo, rest):
        what, revision, *path = rest or ["revision", "main"]
        files, sha = self.find(repo, revision)
        if files is None:
            return
        infos = {
            name: {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        }
        if what == "revision":
            self.json({"id": repo, "sha": sha, "siblings": [{"rfilename": name} for name in files]})
        elif what == "tree":
            folder = "".join(f"{part}/" for part in path)
            found = {}
            for name, info in infos.items():
                if name.startswith(folder):
                    inside, _, deeper = name[len(folder) :].partition("/")
                    child = folder + inside
                    found[child] = {"type": "directory", "path": child, "oid": sha} if deeper else info
            self.json(list(found.values())) if found else self.missing("EntryNotFound")
        else:
            asked = json.loads(self.body)["paths"]
            self.json([infos[name] for name in ([asked] if isinstance(asked, str) else asked) if name in infos])

    def file(self, repo, revision, name):
        files, sha = self.find(repo, revision)
        if files is None:
            return
        if repo in self.server.gated:
            self.missing("GatedRepo", status=403)
            return
        if name not in files:
            self.missing("EntryNotFound", {"X-Repo-Commit": sha})
            return
        content = files[name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        status = 200
        if wanted := self.headers.get("Range"):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            last = min(int(end or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            status, content = 206, content[int(start) : last + 1]
        self.send(status, content, headers)
        if self.command == "GET":
            self.server.sent += len(content)

    def json(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def missing(self, code, headers=None, status=404):
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code} | (headers or {}))

    def send(self, status, content, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture(scope="session")
def hub_server():
    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(hub_server, tmp_path, monkeypatch):
    """The server, empty, as the hub of huggingface_hub in this process, and an empty cache."""
    import huggingface_hub
    from huggingface_hub import constants

    hub_server.clear()
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    return hub_server
