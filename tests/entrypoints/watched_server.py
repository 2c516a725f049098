# SPDX-License-Identifier: Apache-2.0
"""A server for tests: `watched_server.py PORT FOLDER` does what FOLDER/behaviour.json says at each request.

Keys: open_after, seconds before the port opens; health, a status or "hang"; completions and chat, "ok", "empty", "hang"
or a status; key, the key that /v1 asks for; running, waiting, kv, what /metrics reports beside what was generated;
close_after, generations after which the port closes;
moving, whether tokens come by themselves; metrics, false for a server without them; load, what /load says;
child, whether there is a child process, deaf to SIGTERM. `watched_server.py begin PLAN` is the dispatcher's part: it
starts the watcher and becomes that server.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
tokens = {"prompt": 0, "generation": 0, "asked": 0}


class Handler(BaseHTTPRequestHandler):
    folder: Path

    def log_message(self, *_: Any) -> None:
        pass

    def behaviour(self) -> dict[str, Any]:
        return json.loads((self.folder / "behaviour.json").read_text())

    def answer(self, status: int, content: Any = "") -> None:
        body = content if isinstance(content, str) else json.dumps(content)
        with open(self.folder / "requests", "a") as log:
            log.write(f"{self.command} {self.path} {status}\n")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def serve(self, how: Any, content: Any) -> None:
        while how == "hang":
            time.sleep(0.05)
            how = self.behaviour()["health" if self.path == "/health" else self.kind()]
        self.answer(how, "told to") if isinstance(how, int) and how != 200 else self.answer(200, content)

    def kind(self) -> str:
        return "chat" if "chat" in self.path else "completions"

    def refused(self) -> bool:
        key = self.behaviour().get("key")
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return False
        self.answer(401, "Unauthorized")
        return True

    def do_GET(self) -> None:
        state = self.behaviour()
        if self.path == "/health":
            self.serve(state["health"], "")
        elif self.path == "/v1/models":
            self.refused() or self.answer(200, {"data": [{"id": "a/model"}, {"id": "another"}]})
        elif self.path == "/load":
            self.answer(200, {"server_load": state["load"]})
        elif not state["metrics"]:
            self.answer(200, "# TYPE python_info gauge\npython_info 1\n")
        else:
            tokens["generation"] += state["moving"]
            labels = '{engine="0",model_name="a/model"}'
            self.answer(
                200,
                "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"
                f"vllm:num_requests_running{labels} {state['running']}\n"
                f"vllm:num_requests_waiting{labels} {state['waiting']}\n"
                f"vllm:kv_cache_usage_perc{labels} {state['kv']}\n"
                f"vllm:prompt_tokens_total{labels} {tokens['prompt']}\n"
                f"vllm:generation_tokens_total{labels} {tokens['generation']}\n"
                f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} 1\n',
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = (
            body["model"] == "a/model"
            and 1 <= body["max_tokens"] <= 2
            and ("messages" in body) == ("chat" in self.path)
        )
        if not asked:
            self.answer(400, "not what a probe asks")
        elif not self.refused():
            how = self.behaviour()[self.kind()]
            count = 0 if how == "empty" else body["max_tokens"]
            self.serve(how, {"usage": {"completion_tokens": count}})
            tokens["asked"] += 1
            if tokens["asked"] == self.behaviour()["close_after"]:
                self.server.socket.close()
            tokens["prompt"], tokens["generation"] = tokens["prompt"] + 1, tokens["generation"] + count


def begin(plan: dict[str, Any]) -> None:
    from aeon_entrypoints import watch

    argv = [sys.executable, __file__, str(plan["port"]), plan.pop("server_folder"), *plan.pop("server_arguments")]
    watch.begin(argv, os.environ, host="127.0.0.1", **plan)
    os.execv(argv[0], argv)


def main() -> None:
    if sys.argv[1] == "begin":
        begin(json.loads(sys.argv[2]))
    Handler.folder = Path(sys.argv[2])
    start = json.loads((Handler.folder / "behaviour.json").read_text())
    if start["child"]:
        child = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        (Handler.folder / "child").write_text(str(child.pid))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # as vLLM's server: asked to end, it ends without an error
    time.sleep(start["open_after"])
    try:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    except (OSError, ValueError):  # of its closed socket
        time.sleep(600)


if __name__ == "__main__":
    main()
