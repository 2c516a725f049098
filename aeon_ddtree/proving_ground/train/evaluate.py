# SPDX-License-Identifier: Apache-2.0
"""Measure the pair on held-out text and prompts.

`python -m aeon_ddtree.proving_ground.train.evaluate --target DIR --drafter DIR --corpus DIR --json FILE`


Weights as shipped (bf16 values), fp32 arithmetic, held-out prompts. Trees by prefix (see prefix_trees).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train import checkpoint
from aeon_ddtree.proving_ground.train.decoding import generate
from aeon_ddtree.proving_ground.train.drafter import Drafter
from aeon_ddtree.proving_ground.train.ngram import KneserNey
from aeon_ddtree.proving_ground.train.prefix_trees import Draft, Walk, chain_accepts, simulate, tree_accepts
from aeon_ddtree.proving_ground.train.target import Target

CATEGORIES = ["coding", "math", "reasoning", "prose", "language", "json"]
TREES = {"chain": (15, 15), "b15_none": (15, 0), "b31_full": (31, 15), "b31_none": (31, 0), "b63_none": (63, 0)}
TOP = 8


def loops(tokens: np.ndarray, period: int = 24, span: int = 48) -> bool:
    """True where some stretch of `span` tokens repeats with a period of at most `period`."""
    for p in range(1, period + 1):
        same = np.concatenate([[0], (tokens[p:] == tokens[:-p]).astype(int), [0]])
        edges = np.flatnonzero(np.diff(same))
        if len(edges) and (edges[1::2] - edges[::2]).max() + p >= span:
            return True
    return False


def distinct4(rows: list[np.ndarray]) -> float:
    """Share of different 4-grams among all 4-grams of `rows`, pooled."""
    grams = [tuple(r[i : i + 4]) for r in rows for i in range(len(r) - 3)]
    return len(set(grams)) / max(1, len(grams))


@torch.no_grad()
def drafts_for(
    target: Target, drafter: Drafter, tokens: torch.Tensor, lengths: torch.Tensor, new: int
) -> list[list[Draft]]:
    """For each row, a draft at every root lengths[r] … lengths[r] + new - 1 (drafts[r][i]: root is new token i)."""
    rows, embedding = [], target.embed_tokens.weight
    for start in range(0, len(tokens), 16):
        part, length = tokens[start : start + 16], lengths[start : start + 16]
        kept = target(part, features=True)[1]
        anchors = length[:, None] + torch.arange(new, device=tokens.device)
        hidden = drafter(part, kept, anchors, embedding)
        logp = F.linear(hidden, embedding).float().log_softmax(-1)
        value, index = (t.cpu().numpy() for t in logp.topk(TOP, -1))
        rows += [[Draft(index[r, i], value[r, i]) for i in range(new)] for r in range(len(part))]
    return rows


def continuations(
    target: Target, rows: list[dict[str, str]], tokenizer: Tokenizer, new: int, sampled: bool, seed: int
) -> Any:
    """Prompts continued by `new` tokens: (tokens [N, L], lengths [N])."""
    ids = [tokenizer.encode(r["prompt"]).ids for r in rows]
    lengths = torch.tensor([len(i) for i in ids])
    prompts = torch.zeros(len(ids), int(lengths.max()), dtype=torch.long)
    for row, i in zip(prompts, ids, strict=True):
        row[: len(i)] = torch.tensor(i)
    device = target.embed_tokens.weight.device
    torch.manual_seed(seed)
    flag = torch.full((len(ids),), sampled, device=device)
    # 16 more, so that the last roots have a full block to draft.
    return generate(target, prompts.to(device), lengths.to(device), new + 16, flag), lengths.to(device)


def _share(ranks: list[int]) -> float | None:
    return round(float(np.mean([1 <= r <= 3 for r in ranks])), 3) if ranks else None


def speculation(walks: dict[str, dict[str, Walk]]) -> dict[str, Any]:
    """Tables of tokens/step and first-miss ranks from walks[category][tree]."""
    out: dict[str, Any] = {name: {} for name in TREES}
    for category, by_tree in walks.items():
        for name, walk in by_tree.items():
            out[name][category] = round(walk.tokens_per_step, 3)
    for name in TREES:
        out[name]["mean"] = round(float(np.mean([out[name][c] for c in CATEGORIES if c in out[name]])), 3)
    ranks = [r for c in walks for r in walks[c]["chain"].miss_ranks]
    by_category = {c: _share(walks[c]["chain"].miss_ranks) for c in walks}
    out["first_miss_rank_1_to_3"] = {"pooled": _share(ranks), **by_category}
    for name in ("b31_full", "b31_none"):
        out[f"{name}_over_chain"] = {c: round(out[name][c] / out["chain"][c], 3) for c in out["chain"]}
    return out


def speculate(
    target: Target,
    drafter: Drafter,
    rows: list[dict[str, str]],
    tokenizer: Tokenizer,
    spans: list[int],
    sampled: bool,
    seed: int,
) -> dict[int, dict[str, Any]]:
    """Everything measured at one temperature, for the first `span` tokens of each continuation, span in `spans`."""
    tokens, lengths = continuations(target, rows, tokenizer, max(spans), sampled, seed)
    drafts = drafts_for(target, drafter, tokens, lengths, max(spans))
    lines = tokens.cpu().numpy()
    return {span: _measure(rows, lines, lengths.tolist(), drafts, span) for span in spans}


def _measure(
    rows: list[dict[str, str]], lines: np.ndarray, lengths: list[int], drafts: list[list[Draft]], new: int
) -> dict[str, Any]:
    texts: dict[str, list[np.ndarray]] = defaultdict(list)
    walks: dict[str, dict[str, Walk]] = defaultdict(lambda: {n: Walk() for n in TREES})
    steady: dict[str, dict[str, Walk]] = defaultdict(lambda: {n: Walk() for n in TREES})
    looping: dict[str, list[bool]] = defaultdict(list)
    for row, length, line, made in zip(rows, lengths, lines, drafts, strict=True):
        text = line[length : length + new]
        ends = np.flatnonzero((text == arch.END_OF_TEXT) | (text == arch.IM_END))
        text = text[: ends[0] + 1] if len(ends) else text
        category, circles = row["category"], loops(text)
        texts[category].append(text)
        looping[category].append(circles)
        for name, (budget, spine) in TREES.items():
            accepts = chain_accepts if name == "chain" else lambda d, c, b=budget, s=spine: tree_accepts(d, c, b, s)
            walk = simulate(text, made, accepts)
            walks[category][name].add(walk)
            if not circles:
                steady[category][name].add(walk)
    return {
        "all_text": speculation(walks),
        "non_looping_text": speculation(steady),
        "non_looping_share": {c: round(1 - float(np.mean(v)), 3) for c, v in looping.items()},
        "distinct_4": {c: round(distinct4(v), 3) for c, v in texts.items()},
        "mean_length": {c: round(float(np.mean([len(t) for t in v])), 1) for c, v in texts.items()},
    }


@torch.no_grad()
def bits_per_byte(target: Target, corpus: Path, widths: np.ndarray, limit: int, baseline: bool) -> dict[str, Any]:
    """Target against the 5-gram on the same held-out tokens, bits per UTF-8 byte; the 5-gram is the better of two."""
    data = {c: np.load(corpus / f"{c}.npz") for c in CATEGORIES}
    pooled = KneserNey(np.concatenate([data[c]["train"] for c in CATEGORIES]), arch.VOCAB_SIZE) if baseline else None
    out: dict[str, Any] = {}
    for category in CATEGORIES:
        held = data[category]["held_out"][:limit].astype(np.int64)
        count = len(held) // 512
        grid = torch.from_numpy(held[: count * 512]).view(count, 512).to(target.embed_tokens.weight.device)
        bits, size = 0.0, 0
        for start in range(0, count, 16):
            part = grid[start : start + 16]
            logp = target.logits(target(part)[0])[:, 3:-1].log_softmax(-1)
            bits -= logp.gather(-1, part[:, 4:, None]).sum().item() / np.log(2)
            size += int(widths[part[:, 4:].cpu().numpy()].sum())
        out[category] = {"target": round(bits / size, 4), "bytes": size}
        if pooled is not None:
            own = KneserNey(data[category]["train"], arch.VOCAB_SIZE)
            lines = grid.cpu().numpy()
            for name, model in (("five_gram_pooled", pooled), ("five_gram_own", own)):
                total = -sum(model.log2_probabilities(line).sum() for line in lines)
                out[category][name] = round(float(total) / size, 4)
            out[category]["five_gram"] = min(out[category]["five_gram_pooled"], out[category]["five_gram_own"])
    total = sum(v["bytes"] for v in out.values())
    for name in ("target", *(["five_gram"] if baseline else [])):
        out.setdefault("all", {})[name] = round(sum(out[c][name] * out[c]["bytes"] for c in CATEGORIES) / total, 4)
    return out


def token_widths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of each token id (a byte-level vocabulary writes one character a byte); special tokens count 0."""
    return np.array([len(tokenizer.id_to_token(i)) if i < arch.FIRST_SPECIAL else 0 for i in range(arch.VOCAB_SIZE)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "corpus", "json"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="default: prompts.jsonl of the corpus folder")
    parser.add_argument("--per-category", type=int, default=40)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--bpb-tokens", type=int, default=100_000)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--no-speculation", action="store_true")
    parser.add_argument("--no-bpb", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    started = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, drafter = (
        checkpoint.load_target(options.target).to(device),
        checkpoint.load_drafter(options.drafter).to(device),
    )
    tokenizer = Tokenizer.from_file(str(options.corpus / "tokenizer.json"))
    lines = (options.prompts or options.corpus / "prompts.jsonl").read_text().splitlines()
    taken: dict[str, int] = defaultdict(int)
    rows = []
    for row in map(json.loads, lines):
        taken[row["category"]] += 1
        if taken[row["category"]] <= options.per_category:
            rows.append(row)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report: dict[str, Any] = {
        "what": "proving pair: held-out quality and speculation by prefix", "command": " ".join(sys.argv),
        "commit": commit,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})",
        "dtype": "float32", "torch": torch.__version__, "python": platform.python_version(), "seed": options.seed,
        "prompts_per_category": options.per_category,
        "trees": {k: {"budget": b, "spine": s} for k, (b, s) in TREES.items()},
    }  # fmt: skip
    for sampled in () if options.no_speculation else (False, True):
        for new, found in speculate(target, drafter, rows, tokenizer, options.tokens, sampled, options.seed).items():
            key = f"{new}_tokens_T{int(sampled)}"
            report[key], text = found, found["all_text"]
            print(
                key,
                json.dumps({n: text[n] for n in ("chain", "b31_full", "b31_none", "first_miss_rank_1_to_3")}),
                flush=True,
            )
            print(key, json.dumps({n: found[n] for n in ("non_looping_share", "distinct_4")}), flush=True)
            print(key, "non-looping chain", json.dumps(found["non_looping_text"]["chain"]), flush=True)
    print(f"speculation {time.time() - started:.0f} s", flush=True)
    if not options.no_bpb:
        report["bits_per_byte"] = bits_per_byte(
            target, options.corpus, token_widths(tokenizer), options.bpb_tokens, not options.no_baseline
        )
        print(json.dumps(report["bits_per_byte"]), flush=True)
    report["seconds"] = round(time.time() - started, 1)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
