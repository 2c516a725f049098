# SPDX-License-Identifier: Apache-2.0
"""Takes the place of vLLM's server module in tests of the demo: same URLs, tokens from a formula.

STAND_IN: words out of `differ` (the tree server gives another last token), `chain` (no branch was accepted), `die` (the
tree server ends at its first request), `slow` (completions never come), `stubborn` (SIGTERM is ignored).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TREE = {"req_id": "r", "token": [5, 6, 7], "parent": [-1, 0, 0], "depth": [0, 1, 1], "path": [0, 2], "bonus": 8}
METRICS = """# TYPE vllm:ddtree_steps counter
vllm:ddtree_steps_total{engine="0"} 10
# TYPE vllm:ddtree_emitted_tokens counter
vllm:ddtree_emitted_tokens_total{engine="0"} 25
# TYPE vllm:ddtree_tree_nodes counter
vllm:ddtree_tree_nodes_total{engine="0"} 310
# TYPE vllm:ddtree_accepted_at_depth counter
vllm:ddtree_accepted_at_depth_total{engine="0",depth="1"} 9
vllm:ddtree_accepted_at_depth_total{engine="0",depth="2"} 6
# TYPE vllm:ddtree_fallbacks counter
vllm:ddtree_fallbacks_total{engine="0",reason="grammar"} 2
# TYPE vllm:ddtree_off_spine_accepted counter
vllm:ddtree_off_spine_accepted_total{engine="0"} OFF
"""

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--additional-config", type=json.loads)
arguments, _ = parser.parse_known_args()
behaviour = os.environ.get("STAND_IN", "").split()
is_tree = arguments.additional_config["ddtree"]["mode"] == "tree"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content.encode())

    def do_GET(self) -> None:
        self.answer(METRICS.replace("OFF", "0" if "chain" in behaviour else "3"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "die" in behaviour and is_tree:
            print("a fault of the engine", flush=True)
            os._exit(3)
        if self.path == "/detokenize":
            self.answer(json.dumps({"prompt": f"w{body['tokens'][0]}"}))
        elif not body.get("stream"):
            self.answer(json.dumps({"usage": {"completion_tokens": body["max_tokens"]}}))
        else:
            time.sleep(600 if "slow" in behaviour else 0)
            tokens = [len(body["prompt"]) + i + body.get("seed", 0) for i in range(body["max_tokens"])]
            tokens[-1] += "differ" in behaviour and is_tree
            choices = [{"choices": [{"text": f" {token}", "token_ids": [token]}]} for token in tokens]
            self.answer("".join(f"data: {json.dumps(choice)}\n\n" for choice in choices) + "data: [DONE]\n\n")


if is_tree:
    with open(os.environ["DDTREE_TRACE_FILE"], "a") as trace:
        trace.write(json.dumps(TREE) + "\n")
if "stubborn" in behaviour:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, *sys.argv[1:]])
ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
