# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub on this machine: as much of its interface as a download needs, over files held in memory."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """One repository at one commit. refuse: (status, X-Error-Code) for every request; requests: what was asked."""

    def __init__(self, repository: str, files: dict[str, bytes], token: str | None = None) -> None:
        self.repository, self.files, self.token = repository, files, token
        self.refuse: tuple[int, str] | None = None
        self.requests: list[str] = []
        self.url = ""

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.refuse is not None:
            return self.refuse[0], {"X-Error-Code": self.refuse[1]}, b"{}"
        if self.token is not None and authorization != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revisions = ("main", "v1", COMMIT)
        head, _, rest = path.removeprefix("/api/models/").partition("/revision/")
        if path.startswith("/api/models/"):
            if head != self.repository:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            if rest.partition("?")[0] not in ("", *revisions):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            siblings = [{"rfilename": name} for name in self.files]
            content = {"id": self.repository, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()
        _, _, rest = path.partition(f"{self.repository}/resolve/")
        revision, _, name = rest.partition("/")
        if revision not in revisions or name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = self.files[name]
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}, content


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The hub's address while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def respond(self, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def do_GET(self) -> None:
            self.respond(True)

        def do_HEAD(self) -> None:
            self.respond(False)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
