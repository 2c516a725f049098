# SPDX-License-Identifier: Apache-2.0
"""Every value a user can set, once: its recipe key, its variable, its flag here, and vLLM's flag for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .failure import Refusal, nearest

PREFIX = "DDTREE_"
TREE_MODES = ("ddtree", "unsafe-full-branch")
MODES = ("baseline", "dflash", *TREE_MODES)
ALIASES = {"ddtree-full": "unsafe-full-branch"}


def _integer(text: Any) -> int:
    if isinstance(text, bool):
        raise ValueError
    return int(text)


def _spine(text: Any) -> int | str:
    return text if text in ("auto", "full", "none") else _integer(text)


def _switch(text: Any) -> bool:
    if isinstance(text, bool):
        return text
    return {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}[
        str(text).lower()
    ]


@dataclass(frozen=True)
class Setting:
    """One value: recipe key `name`, flag `--name`, variable `DDTREE_NAME`; vllm_flag None: it travels otherwise."""

    name: str
    read: Callable[[Any], Any]
    what: str
    help: str
    default: Any = None
    vllm_flag: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def parse(self, raw: Any, origin: str) -> Any:
        """The value of `raw`. Raises Refusal that names `origin` when it cannot be read as one."""
        try:
            return self.read(raw)
        except (ValueError, KeyError, TypeError):
            raise Refusal(
                f"{origin}: {self.name} is {raw!r}, expected {self.what}; correct it or leave it out"
            ) from None


# Of the server. Order: as they appear in the command.
SERVER = (
    Setting("model", str, "a folder, a package: reference or a Hugging Face id", "Target model.", vllm_flag="--model"),
    Setting("drafter", str, "a folder, a package: reference or a Hugging Face id", "DFlash drafter."),
    Setting("served_model_name", str, "a name", "Name in the API.", vllm_flag="--served-model-name"),
    Setting("host", str, "an address", "Address to listen on.", "0.0.0.0", "--host"),
    Setting("port", _integer, "a port number", "Port to listen on.", 8000, "--port"),
    Setting("device", str, "cpu, cuda or auto", "Where to run.", "auto"),
    Setting("dtype", str, "a dtype that vLLM knows", "Data type.", "auto", "--dtype"),
    Setting("max_model_len", _integer, "a whole number", "Longest context.", vllm_flag="--max-model-len"),
    Setting("max_num_seqs", _integer, "a whole number", "Requests in a batch.", vllm_flag="--max-num-seqs"),
    Setting(
        "max_num_batched_tokens", _integer, "a whole number", "Tokens in a step.", vllm_flag="--max-num-batched-tokens"
    ),
    Setting("gpu_memory_utilization", float, "a number", "Share of the memory.", vllm_flag="--gpu-memory-utilization"),
    Setting(
        "tensor_parallel", _integer, "a whole number", "Devices to split over.", vllm_flag="--tensor-parallel-size"
    ),
    Setting("prefix_caching", _switch, "true or false", "Reuse prompts' state (never with trees).", False),
    Setting("horizon", _integer, "a whole number", "Tokens drafted by the chain (mode dflash)."),
)

# Of the tree: fields of aeon_ddtree.engine.options.DDTreeOptions, which judges their values.
TREE = (
    Setting("budget", _integer, "a whole number from 1 to 127", "Nodes of a tree, without its root."),
    Setting("top_k", _integer, "a whole number, at least 1", "Candidates per position."),
    Setting("spine", _spine, "auto, full, none or a whole number", "Rank-0 nodes placed first."),
    Setting("topology", str, "best_first or root_leaves", "Shape of the tree."),
    Setting("root_leaves", _integer, "a whole number", "Leaves under the root (topology root_leaves)."),
    Setting("commit", str, "flat or branch", "Commit policy."),
    Setting("ranking", str, "greedy, coupled or mixed", "How candidates are ranked at T > 0."),
    Setting("tau", float, "a number", "Sharpening of the coupled ranking."),
    Setting("mix", float, "a number", "Share of the coupled ranking (ranking mixed)."),
    Setting("softness", float, "a number", "Softness of the mixed ranking."),
)

# Variables with the prefix that are not values of the tables above.
OTHER_VARIABLES = {
    "DDTREE_RECIPE": "recipe to use when --recipe is not given",
    "DDTREE_UNSAFE_FULL_BRANCH_RESEARCH": "must be 1 for unsafe-full-branch",
    "DDTREE_CHECK": "1: the kernels also check the values of parents, for debugging",
    "DDTREE_TRACE_FILE": "file to which the worker appends one JSON line per verified tree",
}

SERVER_BY_NAME = {setting.name: setting for setting in SERVER}
TREE_BY_NAME = {setting.name: setting for setting in TREE}
BY_NAME = SERVER_BY_NAME | TREE_BY_NAME


def known_variables() -> list[str]:
    return sorted([*(setting.variable for setting in (*SERVER, *TREE)), *OTHER_VARIABLES])


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values by setting name; empty variables count as absent. Raises Refusal on an unknown DDTREE_ variable."""
    known = known_variables()
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            raise Refusal(f"environment: unknown variable {variable}{nearest(variable, known)}; unset or correct it")
    settings = (*SERVER, *TREE)
    return {
        s.name: s.parse(environ[s.variable], f"environment {s.variable}") for s in settings if environ.get(s.variable)
    }
