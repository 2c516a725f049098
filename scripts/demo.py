# SPDX-License-Identifier: Apache-2.0
"""`make demo`: plain decoding and the tree side by side on the embedded pair, over HTTP, compared token by token.

Exits 0 only if every completion is identical and a branch off the spine was accepted at least once.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

import aeon_ddtree.proving_ground

PROMPTS = Path(next(iter(aeon_ddtree.proving_ground.__path__))) / "prompts.jsonl"
SAMPLING = {"T = 0": {"temperature": 0.0}, "T = 1, seed 7": {"temperature": 1.0, "seed": 7}}
MODES = ("baseline", "ddtree")
READY_SECONDS = 420
METRIC = "vllm:ddtree_"


class Server:
    """One server in a process group of its own, started through the dispatcher; its output goes to a file."""

    def __init__(self, mode: str, recipe: str, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.mode, self.log, self.trace = mode, folder / f"{mode}.log", folder / f"{mode}.trees.jsonl"
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "aeon_entrypoints", mode, "--recipe", recipe]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"DDTREE_TRACE_FILE": str(self.trace)},
            )

    def generates(self) -> bool:
        """Whether a real token comes out: /health answers long before that. RuntimeError when the server says no."""
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=30)
        except httpx.TransportError:
            return False
        if answer.status_code != 200:
            raise RuntimeError(f"{self.mode} answered {answer.status_code}:\n{self.last_lines(40)}")
        return answer.json()["usage"]["completion_tokens"] == 1

    def last_lines(self, count: int) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def phase(self) -> str:
        """What the server logged last, without time and place."""
        said = [
            line.split("] ", 1)[-1].strip()
            for line in self.log.read_text(errors="replace").splitlines()
            if "INFO" in line
        ]
        return said[-1][:70] if said else "starting Python"

    def complete(self, prompt: str, max_tokens: int, sampling: dict[str, float]) -> tuple[list[int], str]:
        """One streamed completion: its token ids and its text."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "return_token_ids": True, **sampling}
        tokens: list[int] = []
        text = ""
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
            if answer.status_code != 200:
                answer.read()
                raise RuntimeError(f"{self.mode} answered {answer.status_code}: {answer.text}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RuntimeError(f"{self.mode} broke off: {chunk['error']}")
                    for choice in chunk["choices"]:
                        tokens += choice.get("token_ids") or []
                        text += choice["text"]
        return tokens, text

    def words(self, tokens: list[int]) -> list[str]:
        """The text of each token alone."""
        with httpx.Client(timeout=30) as client:
            answers = [client.post(f"{self.url}/detokenize", json={"tokens": [token]}) for token in tokens]
        return [answer.raise_for_status().json()["prompt"] for answer in answers]

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def leftovers(self) -> list[int]:
        """Processes of the server's session that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found


def stop(servers: list[Server]) -> None:
    """Ends all servers and whatever they started: first politely, then not."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        deadline = time.monotonic() + patience
        for server in servers:
            server.signal(number)
        while any(server.process.poll() is None or server.leftovers() for server in servers):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)


def wait_until_ready(servers: list[Server]) -> None:
    """Returns when each server has generated a token; prints progress. Raises RuntimeError with the log's end."""
    start, waiting = time.monotonic(), list(servers)
    told: dict[str, str] = {}
    told_at = 0.0
    while waiting:
        elapsed = time.monotonic() - start
        for server in list(waiting):
            if server.process.poll() is not None:
                raise RuntimeError(f"{server.mode} ended with {server.process.returncode}:\n{server.last_lines(30)}")
            if server.generates():
                print(f"  {elapsed:4.0f} s  {server.mode}: generates", flush=True)
                waiting.remove(server)
        if elapsed > READY_SECONDS:
            raise RuntimeError(
                f"{waiting[0].mode} generated nothing in {READY_SECONDS} s:\n{waiting[0].last_lines(30)}"
            )
        for server in waiting:
            phase = server.phase()
            if phase != told.get(server.mode) or elapsed - told_at >= 10:
                print(f"  {elapsed:4.0f} s  {server.mode}: {phase}", flush=True)
                told[server.mode], told_at = phase, elapsed
        time.sleep(0.5)


def first_prompts(file: Path) -> dict[str, str]:
    """The first prompt of each category of a file of held-out prompts."""
    first: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        first.setdefault(row["category"], row["prompt"])
    return first


def off_spine(tree: dict[str, Any]) -> list[int]:
    """Rows of the accepted path off the rank-0 path, which is the longest prefix of rows that is a chain."""
    spine = 0
    while spine + 1 < len(tree["parent"]) and tree["parent"][spine + 1] == spine:
        spine += 1
    return [row for row in tree["path"] if row > spine]


def fetch_tree(trace: Path) -> dict[str, Any] | None:
    """The most telling tree that the worker wrote to DDTREE_TRACE_FILE: most branches taken, then the longest path."""
    if not trace.exists():
        return None
    trees = [json.loads(line) for line in trace.read_text().splitlines()]
    return max(trees, key=lambda tree: (len(off_spine(tree)), len(tree["path"])), default=None)


def draw(tree: dict[str, Any], words: list[str], bonus: str) -> Iterator[str]:
    """Lines of a picture: a node a line, children under their parent, the accepted path marked."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(tree["parent"]):
        children.setdefault(parent, []).append(row)
    path, branches = set(tree["path"]), set(off_spine(tree))

    def walk(row: int, indent: str, last: bool) -> Iterator[str]:
        joint = "" if row == 0 else ("└─" if last else "├─")
        word = repr(words[row])
        note = (
            "  root"
            if row == 0
            else "  accepted, off the spine"
            if row in branches
            else "  accepted"
            if row in path
            else ""
        )
        yield f"  {row:3} {indent}{joint}{'●' if row in path else '○'} {word}{note}"
        deeper = indent + ("" if row == 0 else "  " if last else "│ ")
        for child in children.get(row, []):
            yield from walk(child, deeper, child == children[row][-1])

    yield from walk(0, "", True)
    yield f"      the target continues with {bonus!r}"


def metrics(server: Server) -> tuple[dict[str, float], dict[int, float], dict[str, float]]:
    """(sums by metric name, accepted by depth, fallbacks by reason), of DDTree's metrics."""
    sums: dict[str, float] = {}
    depths: dict[int, float] = {}
    reasons: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30).text):
        for sample in family.samples:
            if not sample.name.startswith(METRIC):
                continue
            name = sample.name.removeprefix(METRIC)
            sums[name] = sums.get(name, 0.0) + sample.value
            if name == "accepted_at_depth_total":
                depth = int(sample.labels["depth"])
                depths[depth] = depths.get(depth, 0.0) + sample.value
            if name == "fallbacks_total":
                reasons[sample.labels["reason"]] = reasons.get(sample.labels["reason"], 0.0) + sample.value
    return sums, depths, reasons


def compare(plain: Server, tree: Server, prompts: dict[str, str], max_tokens: int) -> bool:
    """Streams every completion from both, prints a line for each; whether all are identical."""
    same = True
    for name, sampling in SAMPLING.items():
        print(f"\n{name}, {max_tokens} tokens at most")
        for category, prompt in prompts.items():
            results = [server.complete(prompt, max_tokens, sampling) for server in (plain, tree)]
            identical = results[0] == results[1] and len(results[0][0]) > 0
            same &= identical
            shown = " ".join(results[1][1].split())[:48]
            verdict = f"identical to plain decoding: {'yes' if identical else 'no'}"
            print(f"  {category:10} {len(results[1][0]):3} tokens  {shown:48}  {verdict}", flush=True)
            if not identical:
                print(f"    plain: {results[0]}\n    tree:  {results[1]}")
    return same


def report(tree: Server) -> float:
    """Draws a tree, prints the metrics; returns the number of off-spine acceptances."""
    shown = fetch_tree(tree.trace)
    if shown is not None:
        print("\nOne verified tree (row, token; ● the accepted path):")
        words = tree.words([*shown["token"], shown["bonus"]])
        print("\n".join(draw(shown, words[:-1], words[-1])))
    sums, depths, reasons = metrics(tree)
    steps = sums.get("steps_total", 0.0)
    print(f"\n{steps:.0f} verified trees of {sums.get('tree_nodes_total', 0.0) / max(steps, 1):.1f} nodes in the mean")
    print(f"tokens per step: {sums.get('emitted_tokens_total', 0.0) / max(steps, 1):.2f} (plain decoding: 1)")
    print("accepted at depth: " + "  ".join(f"{d}: {depths[d] / max(steps, 1):.0%}" for d in sorted(depths)))
    print(f"off-spine acceptances: {sums.get('off_spine_accepted_total', 0.0):.0f}")
    print("fallbacks to a chain: " + (", ".join(f"{r} {n:.0f}" for r, n in reasons.items() if n) or "none"))
    return sums.get("off_spine_accepted_total", 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="proving-ground")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, prompts = time.monotonic(), first_prompts(arguments.prompts)
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="ddtree-demo-") as folder:
        try:
            print("Starting a plain and a ddtree server on the embedded pair:", flush=True)
            servers += [Server(mode, arguments.recipe, Path(folder)) for mode in MODES]
            wait_until_ready(servers)
            same = compare(servers[0], servers[1], prompts, arguments.max_tokens)
            branches = report(servers[1])
        except (RuntimeError, httpx.HTTPError) as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ndemo: interrupted", file=sys.stderr)
            return 130
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            stop(servers)
    left = [pid for server in servers for pid in server.leftovers()]
    print(f"\nprocesses left: {len(left)}; {time.monotonic() - began:.0f} s in all")
    verdict = same and branches > 0 and not left
    print(
        "All completions are identical to plain decoding." if same else "Some completions DIFFER from plain decoding."
    )
    if branches == 0:
        print("No branch off the spine was accepted, so this run shows nothing about trees.")
    return 0 if verdict else 1


if __name__ == "__main__":
    sys.exit(main())
