# SPDX-License-Identifier: Apache-2.0
"""What the tests install inside the engine's process: a recorder of every step. See also `step_guide`, `step_faults`.

Functions here run there through `Decoder.rpc` and take the worker first. Nothing they record is computed by the code
under test: places in the caches are found from the block tables alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Probe:
    """One per engine process: hooks around the runner's steps, undone by `remove`."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.records: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._step: list[dict[str, Any]] = []
        self._first: int | None = None

    def request(self, req_id: str) -> int:
        """Which request of this run: 0, 1, … in the order of their arrival."""
        if self._first is None:
            self._first = min(_serial(other) for other in self.runner.input_batch.req_ids)
        return _serial(req_id) - self._first

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by make(original) until `remove`."""
        original = getattr(owner, name)
        own = name in vars(owner)
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    # -- recording

    def record(self, what: tuple[str, ...]) -> None:
        """Hook the runner; `what` out of "logits" (of every sampled row), "prompt_logits" (of every row), "state"."""
        runner = self.runner

        def forward(original: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self._hidden = original(*args, **kwargs)
                return self._hidden

            return wrapped

        def sample(original: Any) -> Any:
            def wrapped(logits: Tensor, metadata: Any) -> Any:
                seen = logits.clone()
                result = original(logits, metadata)
                self._sampled(seen, "logits" in what)
                if "prompt_logits" in what:
                    self._all_rows()
                return result

            return wrapped

        def committed(original: Any) -> Any:
            def wrapped(*args: Any) -> None:
                original(*args)
                if "state" in what:
                    self._target_state()

            return wrapped

        self.replace(runner, "_model_forward", forward)
        self.replace(runner, "_sample", sample)
        self.replace(runner, "_update_states_after_model_execute", committed)
        if runner.speculative_config is None:
            return

        def drafted(original: Any) -> Any:
            def wrapped(bonus: Tensor, context: Tensor, block_table: Tensor) -> Tensor:
                logits = original(bonus, context, block_table)
                for index, entry in enumerate(self._step):
                    entry["draft_logits"] = _numpy(logits[index])
                    entry["draft_context"] = int(context[index])
                return logits

            return wrapped

        def propose(original: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Tensor:
                result = original(*args, **kwargs)
                if "state" in what:
                    self._drafter_state()
                return result

            return wrapped

        def put(original: Any) -> Any:
            def wrapped(req_ids: list[str], tree: Any) -> None:
                for index, entry in enumerate(self._step):
                    entry["drafted"] = _tree(tree, index)
                original(req_ids, tree)

            return wrapped

        self.replace(runner.drafter, "draft_logits", drafted)
        self.replace(runner, "propose_draft_token_ids", propose)
        self.replace(runner.trees, "put", put)

    def _sampled(self, logits: Tensor, keep_logits: bool) -> None:
        runner = self.runner
        step, plan = runner._step, runner._verdict.plan
        req_ids = runner.input_batch.req_ids
        start = np.concatenate(([0], np.cumsum(step.num_rows)))
        first = 0
        self._step = []
        for index, req_id in enumerate(req_ids):
            rows = int(step.num_rows[index])
            has_tree = index in step.tree_reqs
            sampled = rows if has_tree else 1
            length = int(plan.num_accepted[index]) + 1
            entry = {
                "request": self.request(req_id),
                "rows": rows,
                "before": int(runner.num_computed_tokens[index]),
                "ends_prompt": not bool(runner.discard_request_mask.gpu[index]),
                "row_tokens": runner.input_ids.gpu[start[index] : start[index + 1]].tolist(),
                "tree": None,
                "path": plan.path[index, :length].tolist() if has_tree else None,
                "emitted": plan.emitted[index, :length].tolist(),
            }
            if has_tree:
                entry["tree"] = _tree(step.tree, step.tree_reqs.index(index))
            if keep_logits:
                entry["logits"] = _numpy(logits[first : first + sampled])
            first += sampled
            self._step.append(entry)
        self.records.extend(self._step)

    def _all_rows(self) -> None:
        hidden = self._hidden[0] if isinstance(self._hidden, tuple) else self._hidden
        logits = self.runner.model.compute_logits(hidden)
        end = 0
        for entry in self._step:
            entry["prompt_logits"] = _numpy(logits[end : end + entry["rows"]])
            end += entry["rows"]

    # -- caches

    def _target_state(self) -> None:
        runner = self.runner
        layers = runner.compilation_config.static_forward_context
        drafting = runner.drafter._draft_attn_layer_names if runner.speculative_config is not None else ()
        for index, entry in enumerate(self._step):
            entry["after"] = entry["before"] + (len(entry["path"]) if entry["path"] else entry["rows"])
            entry |= {"kv": {}, "conv": {}, "recurrent": {}}
            for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
                blocks = runner.input_batch.block_table[gid].get_device_tensor(runner.input_batch.num_reqs)[index]
                for name in group.layer_names:
                    if name in drafting:
                        continue
                    if name.endswith("linear_attn"):
                        conv, recurrent = layers[name].states()
                        entry["conv"][_layer(name)] = _numpy(conv[int(blocks[0])])
                        entry["recurrent"][_layer(name)] = _numpy(recurrent[int(blocks[0])])
                    else:
                        entry["kv"][_layer(name)] = _entries(layers[name].kv_cache, blocks, entry["after"])

    def _drafter_state(self) -> None:
        runner = self.runner
        layers = runner.compilation_config.static_forward_context
        names = runner.drafter._draft_attn_layer_names
        for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            for name in set(group.layer_names) & set(names):
                for index, entry in enumerate(self._step):
                    table = runner.input_batch.block_table[gid].get_device_tensor(runner.input_batch.num_reqs)
                    entry.setdefault("drafter_kv", {})[_layer(name)] = _entries(
                        layers[name].kv_cache, table[index], entry["after"]
                    )


def _entries(cache: Tensor, blocks: Tensor, length: int) -> np.ndarray:
    """[2, length, kv heads, head size]: K and V of token indices 0 … length - 1 of a request."""
    size = cache.shape[2]
    position = torch.arange(length)
    return _numpy(cache[blocks.long()[position // size], :, position % size].transpose(0, 1))


def _tree(tree: Any, index: int) -> dict[str, Any]:
    rows = int(tree.num_nodes[index]) + 1
    return {name: getattr(tree, name)[index, :rows].tolist() for name in ("token", "parent", "depth")}


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().to("cpu", torch.float32).numpy().copy()


def _serial(req_id: str) -> int:
    found = re.match(r"r(\d+)\b", req_id)
    assert found is not None, f"request id {req_id!r}: expected the decoder's r1, r2, …"
    return int(found.group(1))


def _layer(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    assert found is not None, f"layer name {name!r} holds no index"
    return int(found.group(1))


# -- entry points for Decoder.rpc


def start(worker: Any, what: tuple[str, ...], guide: dict[str, Any] | None, fault: str | None) -> None:
    """Hook the engine. The fault goes in last, so that the recorder sees what the engine believes it is doing."""
    import step_faults
    import step_guide

    stop(worker)
    probe = Probe(worker.model_runner)
    worker.model_runner._probe = probe
    probe.record(what)
    if guide is not None:
        step_guide.guide(probe, **guide)
    if fault is not None:
        step_faults.PLANTS[fault](probe)


def stop(worker: Any) -> list[dict[str, Any]]:
    """Remove all hooks and hand over what was recorded."""
    probe = vars(worker.model_runner).pop("_probe", None)
    if probe is None:
        return []
    probe.remove()
    return probe.records
