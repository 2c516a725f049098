# SPDX-License-Identifier: Apache-2.0
"""Every value a user can set, once: its recipe key, its variable, its flag here, its range, and vLLM's flag for it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .failure import Refusal

PREFIX = "DDTREE_"
TREE_MODES = ("ddtree", "unsafe-full-branch")
MODES = ("baseline", "dflash", *TREE_MODES)
ALIASES = {"ddtree-full": "unsafe-full-branch"}


def _integer(raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]+", raw.strip()):
        return int(raw)
    raise ValueError


def _number(raw: Any) -> float:
    if isinstance(raw, bool) or not math.isfinite(value := float(raw)):
        raise ValueError
    return value


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw.strip() or "\0" in raw:
        raise ValueError
    return raw


def _spine(raw: Any) -> int | str:
    return raw if raw in ("auto", "full", "none") else _integer(raw)


def read_switch(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    return {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}[
        str(raw).strip().lower()
    ]


@dataclass(frozen=True)
class Setting:
    """One value: recipe key `name`, flag `--name`, variable `DDTREE_NAME`.

    vllm_flag: what carries it to the server, None when it travels otherwise. low, high: the range, both included;
    above: a bound that is not. bare: a flag without a value, and the value it stands for.
    """

    name: str
    read: Callable[[Any], Any]
    what: str
    help: str
    default: Any = None
    vllm_flag: str | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    bare: tuple[str, str] | None = None

    @property
    def flag(self) -> str:
        return self.bare[0] if self.bare else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def parse(self, raw: Any, origin: str) -> Any:
        """The value of `raw`. Raises Refusal that names `origin` when it is not one, or out of range."""
        try:
            value = self.read(raw)
        except (ValueError, KeyError, TypeError, OverflowError):
            value = None
        if value is None or not self._in_range(value):
            raise Refusal(f"{origin}: {self.name} is {raw!r}, expected {self.what}; correct it or leave it out")
        return value

    def _in_range(self, value: Any) -> bool:
        if isinstance(value, str):
            return True
        return not (
            (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
            or (self.above is not None and value <= self.above)
        )


MODEL = "a folder, a package: reference or a Hugging Face id (org/name[@revision])"
COUNT = "a whole number, at least 1"
SECONDS = "a number of seconds, 0 for no limit"

# Of the server. Order: as they appear in the command.
SERVER = (
    Setting("model", _text, MODEL, "Target model.", vllm_flag="--model"),
    Setting("model_revision", _text, "a revision", "Revision of a model on the hub."),
    Setting("drafter", _text, MODEL, "DFlash drafter."),
    Setting("drafter_revision", _text, "a revision", "Revision of a drafter on the hub."),
    Setting("served_model_name", _text, "a name, or several", "Names in the API.", vllm_flag="--served-model-name"),
    Setting("host", _text, "an address", "Address to listen on.", "0.0.0.0", "--host"),
    Setting("port", _integer, "a port number, 0 to 65535", "Port to listen on.", 8000, "--port", 0, 65535),
    Setting("device", _text, "cpu, cuda or auto", "Where to run.", "auto"),
    Setting("dtype", _text, "a dtype that vLLM knows", "Data type.", "auto", "--dtype"),
    Setting("max_model_len", _integer, COUNT, "Longest context.", vllm_flag="--max-model-len", low=1),
    Setting("max_num_seqs", _integer, COUNT, "Requests in a batch.", vllm_flag="--max-num-seqs", low=1),
    Setting(
        "max_num_batched_tokens", _integer, COUNT, "Tokens in a step.", vllm_flag="--max-num-batched-tokens", low=1
    ),
    Setting(
        "gpu_memory_utilization",
        _number,
        "a number above 0, at most 1",
        "Share of the memory.",
        vllm_flag="--gpu-memory-utilization",
        above=0,
        high=1,
    ),
    Setting("tensor_parallel", _integer, COUNT, "Devices to split over.", vllm_flag="--tensor-parallel-size", low=1),
    Setting("prefix_caching", read_switch, "true or false", "Reuse prompts' state (never with trees).", False),
    Setting("horizon", _integer, COUNT, "Tokens drafted by the chain (mode dflash).", low=1),
)

# Of the watcher, which stays beside the server.
WATCH = (
    Setting("ready_timeout", _number, SECONDS, "Deadline for the first generation.", 3600.0, low=0),
    Setting("stall_after", _number, SECONDS, "Without a token for so long, the server is stalled.", 120.0, low=0),
    Setting(
        "exit_on_stall", read_switch, "true or false", "End a stalled server.", False, bare=("--exit-on-stall", "true")
    ),
    Setting("watch", read_switch, "true or false", "Start no watcher.", True, bare=("--no-watch", "false")),
)

# Of the tree: fields of aeon_ddtree.engine.options.DDTreeOptions, which judges them together.
TREE = (
    Setting("budget", _integer, "a whole number from 1 to 127", "Nodes of a tree, without its root.", low=1, high=127),
    Setting("top_k", _integer, COUNT, "Candidates per position.", low=1),
    Setting("spine", _spine, "auto, full, none or a whole number", "Rank-0 nodes placed first.", low=0),
    Setting("topology", _text, "best_first or root_leaves", "Shape of the tree."),
    Setting(
        "root_leaves", _integer, "a whole number, at least 0", "Leaves under the root (topology root_leaves).", low=0
    ),
    Setting("commit", _text, "flat or branch", "Commit policy."),
    Setting("ranking", _text, "greedy, coupled or mixed", "How candidates are ranked at T > 0."),
    Setting("tau", _number, "a number above 0, at most 1", "Sharpening of the coupled ranking.", above=0, high=1),
    Setting("mix", _number, "a number from 0 to 1", "Share of the coupled ranking (ranking mixed).", low=0, high=1),
    Setting("softness", _number, "a number above 0", "Softness of the mixed ranking.", above=0),
)

SERVER_BY_NAME = {setting.name: setting for setting in (*SERVER, *WATCH)}
TREE_BY_NAME = {setting.name: setting for setting in TREE}
BY_NAME = SERVER_BY_NAME | TREE_BY_NAME
# Given in a recipe at its top, not among `defaults`.
REFERENCES = ("model", "model_revision", "drafter", "drafter_revision")
