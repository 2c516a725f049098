# SPDX-License-Identifier: Apache-2.0
"""Every row of a window gets what vLLM's own sampler gives plain decoding of the row's history."""

import random
from types import SimpleNamespace

import pytest
import torch

from aeon_ddtree.tree import DraftTree, root_tree
from aeon_ddtree.verify import RequestParams, adjust_logits, build_sampling_state, sample_rows

VOCAB = 37
FEATURES = {
    "repetition_penalty": lambda rng: {"repetition_penalty": rng.uniform(0.6, 2.0)},
    "frequency_penalty": lambda rng: {"frequency_penalty": rng.uniform(-2, 2)},
    "presence_penalty": lambda rng: {"presence_penalty": rng.uniform(-2, 2)},
    "logit_bias": lambda rng: {"logit_bias": {t: rng.uniform(-5, 5) for t in rng.sample(range(VOCAB), 6)}},
    "allowed_token_ids": lambda rng: {"allowed_token_ids": rng.sample(range(VOCAB), 20)},
    "min_tokens": lambda rng: {"min_tokens": rng.randint(1, 9), "stop_token_ids": rng.sample(range(VOCAB), 3)},
    "bad_words": lambda rng: {},  # needs the history: see requests_of
}


def requests_of(seed: int, names: list[str], outputs: list[list[int]]) -> list[RequestParams]:
    """One request per output; every second one uses the features in `names`."""
    rng = random.Random(seed)
    params = []
    for r, output in enumerate(outputs):
        fields: dict = {}
        if r % 2 == 0:
            for name in names:
                fields |= FEATURES[name](rng)
            if "bad_words" in names:
                ends = [output[len(output) - n :] for n in range(min(4, len(output) + 1))]
                fields["bad_words_token_ids"] = [[*end, rng.randrange(VOCAB)] for end in ends] + [[1, 2, 3]]
        prompt = [rng.randrange(VOCAB) for _ in range(7)]
        params.append(RequestParams(prompt_ids=prompt, output_ids=output, **fields))
    return params


def vllm_metadata(params: list[RequestParams], outputs: list[list[int]]):
    """SamplingMetadata of a batch in which every history is a request of its own."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(params)))
    device = torch.device("cpu")
    processors = [
        kind(config, device, False)
        for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    ]
    added = []
    for i, (p, output) in enumerate(zip(params, outputs)):
        wanted = SamplingParams(
            temperature=p.temperature,
            min_p=p.min_p,
            min_tokens=p.min_tokens,
            max_tokens=100,
            stop_token_ids=list(p.stop_token_ids),
            logit_bias=dict(p.logit_bias) or None,
        )
        added.append((i, wanted, list(p.prompt_ids), output))
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=len(params), removed=[], added=added, moved=[]))
    forbidden = torch.zeros(len(params), VOCAB, dtype=torch.bool)
    for i, p in enumerate(params):
        if p.allowed_token_ids is not None:
            forbidden[i] = True
            forbidden[i, list(p.allowed_token_ids)] = False

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=torch.float32)

    return SamplingMetadata(
        temperature=column("temperature"),
        all_greedy=False,
        all_random=True,
        top_p=column("top_p") if any(p.top_p < 1 for p in params) else None,
        top_k=torch.tensor([p.top_k or VOCAB for p in params]) if any(p.top_k for p in params) else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=not any(p.uses_penalties for p in params),
        prompt_token_ids=torch.tensor([list(p.prompt_ids) for p in params]),
        frequency_penalties=column("frequency_penalty"),
        presence_penalties=column("presence_penalty"),
        repetition_penalties=column("repetition_penalty"),
        output_token_ids=outputs,
        allowed_token_ids_mask=forbidden if forbidden.any() else None,
        bad_words_token_ids={
            i: [list(w) for w in p.bad_words_token_ids] for i, p in enumerate(params) if p.bad_words_token_ids
        },
        logitsprocs=LogitsProcessors(processors),
    )


def vllm_adjusted(logits: torch.Tensor, params: list[RequestParams], outputs: list[list[int]]) -> torch.Tensor:
    from vllm.v1.sample.sampler import Sampler

    return Sampler().apply_logits_processors(logits.clone(), vllm_metadata(params, outputs), False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("names", [[n] for n in FEATURES] + [list(FEATURES)], ids=[*FEATURES, "all"])
def test_width_1_is_plain_decoding(names, seed):
    rng = random.Random(seed)
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 8))] for _ in range(8)]
    params = requests_of(seed, names, outputs)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    last = torch.tensor([(list(p.prompt_ids) + out)[-1] for p, out in zip(params, outputs)])
    got = adjust_logits(logits[:, None], build_sampling_state(params, VOCAB), root_tree(last))
    expected = vllm_adjusted(logits, params, outputs)
    assert not torch.equal(expected, logits)
    assert torch.equal(got[:, 0], expected)


#      0 - 1 - 3 - 6        rows by number; token 5 stands twice on the path 0, 1, 3, 6, and once elsewhere
#      |   4 \ 7
#      2 - 5
PARENT = [-1, 0, 0, 1, 1, 2, 3, 3]
TOKEN = [5, 6, 5, 7, 5, 8, 5, 6]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("names", [[n] for n in FEATURES] + [list(FEATURES)], ids=[*FEATURES, "all"])
def test_every_row_is_plain_decoding_of_its_path(names, seed):
    rng = random.Random(seed)
    requests, width = 4, len(PARENT)
    outputs = [[rng.randrange(4, 9) for _ in range(rng.randint(0, 5))] + [TOKEN[0]] for _ in range(requests)]
    params = requests_of(seed, names, outputs)
    depth = [0]
    for row in range(1, width):
        depth.append(depth[PARENT[row]] + 1)
    tree = DraftTree(
        *(torch.tensor([column] * requests) for column in (TOKEN, PARENT, depth)), torch.tensor([width - 1] * requests)
    )
    tree.validate(VOCAB)
    logits = torch.randn(requests, width, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    got = adjust_logits(logits, build_sampling_state(params, VOCAB), tree)
    histories = []
    for output in outputs:
        for row in range(width):
            path, at = [], row
            while at > 0:
                path.append(TOKEN[at])
                at = PARENT[at]
            histories.append(output + path[::-1])
    per_row = [p for p in params for _ in range(width)]
    expected = vllm_adjusted(logits.flatten(0, 1), per_row, histories)
    assert torch.equal(got.flatten(0, 1), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.02},
        {"top_k": 1},
        {"top_p": 1e-3},
    ],
)
def test_the_drawn_tokens_are_vllms_allowed_set(fields):
    """With 4000 draws every allowed token of noticeable probability comes up, and no other one ever does."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.sample.sampler import Sampler

    draws = 4000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    one = RequestParams(temperature=0.8, prompt_ids=[1], seed=0, **fields)
    metadata = vllm_metadata([one], [[]])
    scaled = Sampler.apply_temperature(logits.clone(), metadata.temperature, True)
    for processor in metadata.logitsprocs.argmax_invariant:
        scaled = processor.apply(scaled)
    probability = apply_top_k_top_p_pytorch(scaled, metadata.top_k, metadata.top_p).softmax(1)[0]
    state = build_sampling_state(
        [RequestParams(temperature=0.8, prompt_ids=[1], seed=n, **fields) for n in range(draws)], VOCAB
    )
    tree = root_tree(torch.ones(draws, dtype=torch.int64))
    index = torch.zeros(draws, dtype=torch.int64)
    drawn = sample_rows(logits.expand(draws, 1, VOCAB), state, tree, base_index=index).unique()
    assert (probability[drawn] > 0).all()
    # A token of probability 20 / draws is missed by all draws less than once in 10^8.
    assert set((probability > 20 / draws).nonzero().flatten().tolist()) <= set(drawn.tolist())


def test_greedy_takes_vllms_token():
    from vllm.v1.sample.sampler import Sampler

    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(2)).round()  # many ties
    tree = root_tree(torch.zeros(64, dtype=torch.int64))
    params = [RequestParams(temperature=[0.0, 0.9][r % 2], seed=r) for r in range(64)]
    got = sample_rows(
        logits[:, None], build_sampling_state(params, VOCAB), tree, base_index=torch.zeros(64, dtype=torch.int64)
    )
    assert torch.equal(got[::2, 0], Sampler.greedy_sample(logits)[::2])
