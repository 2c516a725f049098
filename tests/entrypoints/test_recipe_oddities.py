# SPDX-License-Identifier: Apache-2.0
"""Recipes that YAML reads without complaint and nobody can have meant: refused in one line, before anything starts."""

import jsonschema
import pytest
import yaml

from aeon_entrypoints import recipe, schema

HEAD = "recipe_version: 1\nname: odd\ndescription: odd\nmodel: /m\ndrafter: /d\n"
MODES = "modes: {baseline: {}, ddtree: {}}\n"

# rest of the recipe, what the line says, whether its JSON Schema can say it too
ODD = [
    ("modes: {}\n", ["modes names none"], True),
    ("modes: {ddtree: null}\n", ["modes names none"], False),
    (MODES + "name: other\n", ["the key name is there twice"], False),
    ("modes: {ddtree: {}, ddtree: {ddtree: {budget: 3}}}\n", ["the key ddtree is there twice"], False),
    (MODES + "defaults: {port: true}\n", ["defaults.port is True", "integer"], True),
    (MODES + "defaults: {port: '8000'}\n", ["defaults.port is '8000'", "integer"], True),
    (MODES + "defaults: {prefix_caching: 'no'}\n", ["defaults.prefix_caching is 'no'"], True),
    (MODES + "vllm: {foo: null}\n", ["foo has no value"], True),
    (MODES + "vllm: {foo: .nan}\n", ["foo cannot be passed on"], False),
    (MODES + "vllm: {foo: [2026-01-01]}\n", ["foo cannot be passed on", "date"], False),
    (MODES + "vllm: {foo: {a: !!binary aGVsbG8=}}\n", ["foo cannot be passed on", "bytes"], False),
    (MODES + "vllm: {foo: &loop [*loop]}\n", ["foo cannot be passed on", "Circular"], False),
    (MODES + "vllm: {foo bar: 1}\n", ["'foo bar' is no flag"], True),
    (MODES + "vllm: {foo=bar: 1}\n", ["'foo=bar' is no flag"], True),
    (MODES + "vllm: {no-foo: true}\n", ["write foo: false"], True),
    (MODES + "vllm: {foo-bar: true, foo_bar: false}\n", ["with dashes and with underscores"], False),
    (MODES + "vllm: {config: /x.yaml}\n", ["config is written by the dispatcher"], True),
    # vLLM's parser takes these for the flags that the dispatcher writes
    (MODES + "vllm: {speculative-config.model: /x}\n", ["(as speculative-config)", "set drafter"], True),
    (MODES + "vllm: {enable-prefix-cach: true}\n", ["(as enable-prefix-caching)", "set prefix_caching"], False),
    (MODES + "vllm: {no_enable_prefix_caching: true}\n", ["(as enable-prefix-caching)"], True),
    (MODES + 'env: {"A=B": x}\n', ["'A=B' is no variable"], True),
    (MODES + 'env: {A: "x\\0y"}\n', ["'A' is no variable"], False),
]


@pytest.mark.parametrize(("rest", "parts", "in_schema"), ODD, ids=[rest.strip() for rest, _, _ in ODD])
def test_refused(dispatch, tmp_path, rest, parts, in_schema):
    file = tmp_path / "odd.yaml"
    file.write_text(HEAD + rest)
    for arguments in (("validate", file), ("run", file, "--dry-run")):
        outcome = dispatch(*arguments)
        assert outcome.code == 2 and outcome.out == "", outcome
        assert len(outcome.err.strip().splitlines()) == 1
        for part in (str(file), *parts):
            assert part in outcome.err
    if in_schema:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema.schema()).validate(yaml.safe_load(HEAD + rest))


def test_aliases_merges_and_parts_of_flags_are_meant(tmp_path):
    file = tmp_path / "fine.yaml"
    file.write_text(
        HEAD + "vllm: {compilation-config.mode: 3, hf-overrides: {a: [1, 2.5, true, x]}, enforce_eager: true}\n"
        "profiles: {a: &a {port: 1}, b: {<<: *a, port: 2, max_num_seqs: 3}}\n"
        "modes: {baseline: &m {profile: b}, dflash: *m}\n"
    )
    found = recipe.load_recipe(file)
    assert found.profiles["b"].port == 2 and found.mode_names() == ["baseline", "dflash"]
    jsonschema.Draft202012Validator(schema.schema()).validate(yaml.safe_load(file.read_text()))


def test_no_flag_of_vllm_is_taken_for_one_of_ours():
    """A whole flag of vLLM's own that begins one of ours would be refused without need."""
    args = pytest.importorskip("vllm.entrypoints.openai.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = args.make_arg_parser(FlexibleArgumentParser())
    flags = {flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    own = recipe.own_flags()
    assert set(own) <= flags and "disable-access-log-for-endpoints" in flags
    taken = {flag: recipe.owned_by(flag, own) for flag in flags if not flag.startswith("no-") and flag not in own}
    assert not any(taken.values()), {flag: owned for flag, owned in taken.items() if owned}
