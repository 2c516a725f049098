# SPDX-License-Identifier: Apache-2.0
"""`qwen25-m2`: the proving ground with plain attention, and the untrained drafter that it is given."""

import json

import pytest
from safetensors import safe_open

from aeon_entrypoints import preflight, untrained
from aeon_entrypoints.failure import Refusal

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "hidden_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256,
    "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture
def model(pair, tmp_path, monkeypatch):
    """A made-up Qwen2.5 in a folder; the caches are the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (pair.target / "config.json").write_text(json.dumps(QWEN25))
    return pair.target


@pytest.fixture
def serve(dispatch, model):
    return lambda *arguments: dispatch(
        "qwen25-m2", "--model", model, "--device", "cpu", "--port", "0", "--max-model-len", "1024", *arguments
    )


def drafter_of(outcome):
    from pathlib import Path

    return Path(json.loads(outcome.flag("--speculative-config"))["model"])


def test_it_serves_a_tree_with_branches(serve, model):
    outcome = serve()
    assert outcome.started is not None, outcome.err
    assert outcome.options() == {"mode": "tree", "top_k": 8, "budget": 31, "commit": "branch"}
    assert outcome.flag("--model") == str(model)
    assert "proving ground" in outcome.err and "untrained" in outcome.err
    folder = drafter_of(outcome)
    assert list(preflight.drafter_fits(model, folder)) == [] and preflight.drafter_horizon(folder) == 15
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.get_slice("fc.weight").get_shape() == [128, 4 * 128]


def test_the_drafter_is_made_once_and_anew_for_another_target(serve, model):
    first = drafter_of(serve()) / "model.safetensors"
    written = first.stat().st_mtime_ns
    assert drafter_of(serve()) / "model.safetensors" == first and first.stat().st_mtime_ns == written
    (model / "config.json").write_text(json.dumps(QWEN25 | {"vocab_size": 600}))
    folder = drafter_of(serve())
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 600
    assert [child.name for child in folder.parent.iterdir()] == [folder.name]


def test_a_trained_drafter_takes_its_place(serve, pair):
    pair.configure("drafter", lambda config: config.update(vocab_size=512, hidden_size=128))
    pair.configure("drafter", lambda config: config["dflash_config"].update(mask_token_id=5, target_layer_ids=[0, 1]))
    pair.projection(128, 2 * 128)
    outcome = serve("--drafter", pair.drafter)
    assert drafter_of(outcome) == pair.drafter and "untrained" not in outcome.err


def test_another_architecture_is_served_flat(serve, model):
    (model / "config.json").write_text(json.dumps(QWEN25 | {"architectures": ["Qwen3_5ForConditionalGeneration"]}))
    outcome = serve()
    assert outcome.options()["commit"] == "flat"
    assert "Qwen2ForCausalLM" in outcome.err and "Qwen3_5ForConditionalGeneration" in outcome.err
    assert serve("--commit", "branch").code == 2


def test_other_modes(serve):
    assert serve("--mode", "baseline").options() == {"mode": "plain"}
    assert serve("--mode", "dflash").options() == {"mode": "chain"}


def test_a_dry_run_writes_nothing(dispatch, model, tmp_path):
    outcome = dispatch("qwen25-m2", "--dry-run")
    plan = json.loads(outcome.out)
    assert plan["argv"][4] == "Qwen/Qwen2.5-0.5B-Instruct" and plan["recipe"] == "qwen25-m2"
    assert "written at a start" in outcome.err and "would stop" not in outcome.err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_target_that_does_not_say_enough(name):
    with pytest.raises(Refusal, match=f"{name} is None"):
        untrained.configuration(QWEN25 | {name: None}, 15)


@pytest.mark.parametrize("layers", [1, 2, 3, 24, 64])
def test_layer_ids_fit_any_depth(layers):
    ids = untrained.configuration(QWEN25 | {"num_hidden_layers": layers}, 7)["dflash_config"]["target_layer_ids"]
    assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < layers


@pytest.mark.parametrize("reference", ["untrained:", "untrained:0", "untrained:x", "untrained:128"])
def test_a_horizon_that_is_none(serve, reference):
    outcome = serve("--drafter", reference)
    assert outcome.code == 2 and "untrained:HORIZON" in outcome.err
