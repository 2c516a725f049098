# SPDX-License-Identifier: Apache-2.0
"""The model runner: vLLM's own with trees in verification, per-row sampling, commit and drafting.

One mixin serves the GPU and the CPU runner. A step passes through it in this order:

    _update_states                        request slots
    _prepare_inputs                       tokens and positions of the window
    _build_attention_metadata             the layers learn the step
    (forward)
    _sample                               every row is sampled, walk, plan
    _update_states_after_model_execute    commit
    propose_draft_token_ids               drafter context, next trees
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from aeon_ddtree.commit.plan import CommitPlan
from aeon_ddtree.commit.policies import plan_for
from aeon_ddtree.engine.capture import Capture
from aeon_ddtree.engine.commit import commit_step
from aeon_ddtree.engine.metrics import export
from aeon_ddtree.engine.options import DDTreeOptions
from aeon_ddtree.engine.sampling import path_logprobs, sampling_state
from aeon_ddtree.engine.settings import horizon_of, options_of
from aeon_ddtree.engine.stats import Stats
from aeon_ddtree.engine.step import Step, make_step
from aeon_ddtree.engine.trace import Trace
from aeon_ddtree.engine.trees import TreeStore
from aeon_ddtree.kernels.dispatch import describe as describe_kernels
from aeon_ddtree.tree.building import build_tree_from, draft_candidates, root_tree
from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.verify.rows import sample_rows
from aeon_ddtree.verify.state import SamplingState
from aeon_ddtree.verify.walk import walk

logger = init_logger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What sampling found in a step, for commit and drafting.

    plan        of the whole batch; requests without a tree accept nothing and emit their sample
    state       the batch's sampling parameters
    base_index  [R] output index of the token sampled at the root
    """

    plan: CommitPlan
    state: SamplingState
    base_index: Tensor


class DDTreeRunner:
    """Mixin over vLLM's V1 runner. Plain and chain decoding take the same way with narrower trees."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.options = options_of(vllm_config)
        self.horizon = horizon_of(vllm_config)
        self.policy = self.options.policy(self.horizon) if self.horizon else None
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.trees = TreeStore(self.max_num_reqs, 1 + self.num_spec_tokens, self.device)
        self.stats = Stats(self.horizon, self.device)
        self.trace = Trace.from_environment()
        self.capture = Capture.from_environment(get_tensor_model_parallel_rank())
        if get_tensor_model_parallel_rank() == 0:
            export(self.stats, self.model_config.served_model_name or self.model_config.model)
        logger.info(
            "DDTree: mode %s%s; kernels: %s",
            self.options.mode,
            f", commit {self.options.commit}, {self.policy}" if self.policy else "",
            describe_kernels(self.device),
        )
        self._reasons = bool(vllm_config.structured_outputs_config.reasoning_parser)
        self._step: Step | None = None
        self._verdict: Verdict | None = None
        self._drafted: set[str] = set()  # requests whose next step should verify the tree that was drafted for it
        # Stock hybrids wait here for accepted counts every step, to pick one of many states; we keep one.
        self.num_accepted_tokens_event = None
        # The drafter has buffers of its own and clamps positions, so it runs up to the very end of the context:
        # skipping it for a batch would also lose the drafter's context of every other request.
        self.effective_drafter_max_model_len = sys.maxsize

    def configure(self, values: dict[str, Any]) -> None:
        """Change options that leave every buffer as it is; takes effect from the next drafted tree on."""
        options = DDTreeOptions.from_mapping(self.options.to_mapping() | values)
        if (options.mode, options.budget) != (self.options.mode, self.options.budget):
            raise ValueError("mode and budget size the engine's buffers: start another engine to change them")
        self.options = options
        self.policy = options.policy(self.horizon) if self.horizon else None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.speculative_config is not None and self.device.type == "cpu":
            # The CPU runner's own load_model never asks the target for auxiliary hidden states.
            self.model.set_aux_hidden_state_layers(self.drafter.aux_layers())

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        return self.drafter.aux_layers() if self.speculative_config is not None else None

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: Tensor) -> Tensor:
        """Memory profiling: noise over a full window of every request, which is this runner's peak.

        vLLM's own would warm up samplers that never run here, and on the CPU compile them with a C++ compiler first.
        """
        rows = min(hidden_states.shape[0] * (1 + self.num_spec_tokens), self.max_num_tokens)
        logits = self.model.compute_logits(torch.rand_like(hidden_states[:1])).expand(rows, -1)
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.device)
        state = SamplingState(temperature=torch.ones(rows, device=self.device), seed=zeros)
        return sample_rows(logits[:, None].to(torch.float32), state, root_tree(zeros), base_index=zeros)

    # -- before the forward

    def _update_states(self, scheduler_output: Any) -> Any:
        for gone in (scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ()):
            self.trees.slots.free(gone)
            self._drafted.difference_update(gone)
        corrections = super()._update_states(scheduler_output)  # type: ignore[misc]
        self.trees.open(self.input_batch.req_ids)
        # Noise is keyed, nothing reads these; vLLM rewinds them for chunked prompts, which the CPU cannot.
        self.input_batch.generators.clear()
        return corrections

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        req_ids = self.input_batch.req_ids
        drafts = scheduler_output.scheduled_spec_decode_tokens
        tree_reqs = [index for index, req_id in enumerate(req_ids) if drafts.get(req_id)]
        for index in tree_reqs:
            if num_scheduled_tokens[index] != 1 + len(drafts[req_ids[index]]):
                raise RuntimeError(
                    f"request {req_ids[index]}: {num_scheduled_tokens[index]} rows scheduled for a window of 1 + "
                    f"{len(drafts[req_ids[index]])}; vLLM's scheduler changed under the plugin"
                )
        # Also those that got the root's row alone, or lost every draft to their grammar, do without their tree.
        for index, req_id in enumerate(req_ids):
            if req_id in self._drafted:
                self._count_fallback(req_id, index, int(num_scheduled_tokens[index]))
        self._drafted.difference_update(req_ids)
        tree = self._window(req_ids, tree_reqs, num_scheduled_tokens) if tree_reqs else None
        self._step = make_step(num_scheduled_tokens, tree_reqs, tree, self.num_computed_tokens[: len(req_ids)])
        if tree is not None:
            self._write_window(self._step, tree)
            self._step.recording = self.capture.of(self._step)
        return result

    def _window(self, req_ids: list[str], tree_reqs: list[int], num_scheduled: np.ndarray) -> DraftTree:
        """The stored trees of this step's tree requests, shortened to the rows that the scheduler granted."""
        rows = num_scheduled[tree_reqs].astype(np.int64)
        tree = self.trees.pop([req_ids[index] for index in tree_reqs])
        return tree.truncate(torch.from_numpy(rows).to(self.device, non_blocking=True))

    def _count_fallback(self, req_id: str, index: int, granted: int) -> None:
        if self._has_grammar(req_id):
            self.stats.fallback("grammar")
        elif granted < 1 + self.num_spec_tokens:
            left = self.max_model_len - 1 - int(self.input_batch.num_computed_tokens_cpu[index])
            self.stats.fallback("model_length" if granted >= left else "token_budget")

    def _has_grammar(self, req_id: str) -> bool:
        return self.requests[req_id].sampling_params.structured_outputs is not None

    def _write_window(self, step: Step, tree: DraftTree) -> None:
        """Tokens and positions of the drafted rows, in place: captured graphs read these buffers by address."""
        group = step.tree_group
        assert group is not None
        row = torch.arange(group.rows.shape[1], device=self.device).expand_as(group.depth)
        ids = self.input_ids.gpu
        token = torch.where(row == 0, group.take(ids).to(torch.int64), tree.token[:, : row.shape[1]])
        group.put(ids, token)
        # vLLM counted positions by row: root position + row -> root position + depth.
        shift = (group.depth - row).flatten()[group.cells]
        self.positions[group.packed] += shift
        if self.uses_mrope:
            self.mrope_positions.gpu[:, group.packed] += shift

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, drafter_metadata = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        for group in metadata.values():
            group.step = self._step
        return metadata, drafter_metadata

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        self._step = None
        return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]

    # -- after the forward

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        step = self._step
        assert logits is not None and step is not None
        self.input_batch.update_async_output_token_ids()
        requests = [self.requests[req_id] for req_id in self.input_batch.req_ids]
        prompt = torch.from_numpy(self.input_batch.num_prompt_tokens[: len(requests)].astype(np.int64))
        base_index = (step.root_position() + 1 - prompt.to(self.device, non_blocking=True)).clamp(min=0)
        state = sampling_state(requests, logits.shape[-1], base_index, self.model_config.seed)
        tree, rows = step.sampled_trees()
        window = logits[rows].to(torch.float32)
        sampled = sample_rows(window, state, tree, base_index=base_index)
        # A step without drafts emits one column, which vLLM reads as plain decoding.
        found = walk(tree, sampled, self.horizon + 1 if spec_decode_metadata is not None else 1)
        plan = plan_for(self.options.commit, tree, sampled, found)
        if self._reasons and tree.width > 1:
            # vLLM decides once per window whether a grammar applies yet: past the end of the reasoning the other rows
            # would be unmasked. One token per step is what plain decoding does.
            free = [plan.max_len if not self._has_grammar(r.req_id) else 1 for r in requests]
            plan = plan.cut(torch.tensor(free).to(self.device, non_blocking=True))
        self._verdict = Verdict(plan, state, base_index)
        self.stats.add(tree, found, plan, (base_index > 0) & ~self.discard_request_mask.gpu[: len(requests)])
        self.trace.write(self.input_batch.req_ids, step.tree_reqs, tree, found)
        step.walked(tree, sampled, found)
        logprobs = None
        count = self.input_batch.sampling_metadata.max_num_logprobs
        if count is not None:
            logprobs = path_logprobs(self.sampler, window, plan, count)
        return SamplerOutput(sampled_token_ids=plan.emitted.to(torch.int32), logprobs_tensors=logprobs)

    def _update_states_after_model_execute(self, output_token_ids: Tensor, scheduler_output: Any) -> None:
        assert self._step is not None and self._verdict is not None
        drafting = self.drafter._draft_attn_layer_names if self.speculative_config is not None else ()
        groups = []
        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups):
            names = [name for name in group.layer_names if name not in drafting]
            if isinstance(group.kv_cache_spec, AttentionSpec) and names:
                table = self.input_batch.block_table[gid].get_device_tensor(self.input_batch.num_reqs)
                groups.append((names, table))
        commit_step(self._step, self._verdict.plan, self.compilation_config.static_forward_context, groups)

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Tensor,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Tensor:
        """Store the committed rows as drafter context, draft, build and store the next trees: [R, B] token ids."""
        step, verdict = self._step, self._verdict
        assert step is not None and verdict is not None and self.policy is not None and aux_hidden_states is not None
        bonus, count = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        self._copy_valid_sampled_token_count(bonus, count)

        rows, reqs, positions, context = step.drafter_context(verdict.plan.path)
        block_table = common_attn_metadata.block_table_tensor
        hidden = torch.cat([layer[rows] for layer in aux_hidden_states], dim=-1)
        self.drafter.store_context(hidden, positions, self.drafter.context_slots(block_table, reqs, positions))

        logits = self.drafter.draft_logits(bonus, context, block_table)
        req_ids = self.input_batch.req_ids
        greedy = torch.zeros(len(req_ids), device=self.device)
        candidates = draft_candidates(
            logits.to(torch.float32),
            self.policy,
            temperature=greedy if verdict.state.temperature is None else verdict.state.temperature,
            seed=greedy.to(torch.int64) if verdict.state.seed is None else verdict.state.seed,
            index=verdict.base_index + verdict.plan.num_emitted,
        )
        # vLLM checks the grammar of drafts as if they were a chain, so such requests get one.
        chain_only = torch.tensor([self._has_grammar(req_id) for req_id in req_ids]).to(self.device, non_blocking=True)
        tree = build_tree_from(
            candidates,
            bonus.to(torch.int64),
            self.policy,
            carried=verdict.plan.carried,
            num_carried=verdict.plan.num_carried,
            chain_only=chain_only,
        )
        self.trees.put(req_ids, tree)
        in_prompt = self.discard_request_mask.np[: len(req_ids)]
        self._drafted.update(req_id for req_id, discarded in zip(req_ids, in_prompt) if not discarded)
        return tree.token[:, 1:].to(torch.int32)


class DDTreeCPURunner(DDTreeRunner, CPUModelRunner):
    """vLLM's CPU runner with trees."""


class DDTreeGPURunner(DDTreeRunner, GPUModelRunner):
    """vLLM's GPU runner with trees."""
