# SPDX-License-Identifier: Apache-2.0
"""Bad input: one line that names the place and the cure, exit code 2, and nothing is started."""

import os
import shutil
import socket

import pytest

UNSAFE = "DDTREE_UNSAFE_FULL_BRANCH_RESEARCH"


def assert_refused(outcome, *parts):
    assert outcome.code == 2, outcome.err
    assert outcome.started is None
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    for part in parts:
        assert str(part) in lines[0], outcome.err


def edit(*path, value):
    """A change to a nested map; value None removes the key."""

    def change(content):
        for key in path[:-1]:
            content = content.setdefault(key, {})
        if value is None:
            content.pop(path[-1])
        else:
            content[path[-1]] = value

    return change


RECIPES = [
    (edit("drafters", value="x"), ["unknown key drafters", "did you mean drafter?"]),
    (edit("defaults", "max_model_length", value=1), ["defaults.max_model_length", "did you mean max_model_len?"]),
    (edit("modes", "dflahs", value={}), ["modes.dflahs", "did you mean dflash?"]),
    (edit("modes", "ddtree", "promoted", value="x"), ["modes.ddtree.promoted", "did you mean promoted_by?"]),
    (edit("modes", "ddtree", "ddtree", "buget", value=3), ["unknown key buget", "did you mean budget?"]),
    (edit("modes", "ddtree", "defaults", value={"prot": 1}), ["modes.ddtree.defaults.prot", "did you mean port?"]),
    (edit("modes", "ddtree", "method", value="eagle"), ["modes.ddtree.method", "eagle", "dflash"]),
    (edit("recipe_version", value=2), ["recipe_version", "2"]),
    (edit("model", value=None), ["model is missing"]),
    (edit("defaults", "port", value=70000), ["defaults.port", "70000", "65535"]),
    (edit("vllm", "worker-cls", value="x"), ["worker-cls", "device"]),
    (edit("vllm", "max_model_len", value=3), ["max_model_len", "defaults.max_model_len"]),
    (edit("vllm", "additional_config", value={}), ["additional_config", "modes.MODE.ddtree"]),
    (edit("modes", "ddtree", "vllm", "enable-prefix-caching", value=True), ["enable-prefix-caching", "prefix_caching"]),
    (edit("defaults", "prefix_caching", value=True), ["prefix_caching", "not proven lossless"]),
    (edit("modes", "ddtree", "ddtree", "budget", value=0), ["modes.ddtree.ddtree", "budget", "0", "1 to 127"]),
    (edit("modes", "ddtree", "ddtree", "budget", value="many"), ["budget", "many", "1 to 127"]),
    (edit("modes", "ddtree", "ddtree", "ranking", value="gredy"), ["ranking", "gredy", "greedy"]),
    (edit("modes", "ddtree", value=None), ["no mode ddtree", "baseline, dflash, unsafe-full-branch"]),
    (edit("drafter", value=None), ["drafter is missing", "--drafter"]),
]


@pytest.mark.parametrize(("change", "parts"), RECIPES, ids=[parts[0] for _, parts in RECIPES])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["start", "dry-run"])
def test_recipe(pair, dispatch, change, parts, dry):
    change(pair.recipe)
    assert_refused(dispatch("ddtree", "--recipe", pair.recipe_file(), *dry), *parts)


def test_unreadable_recipes(pair, dispatch):
    file = pair.recipe_file()
    for text, part in (("a: [", "not YAML"), ("- 1", "expected a map"), ("", "expected a map")):
        file.write_text(text)
        assert_refused(dispatch("validate", file), file, part)
    assert_refused(dispatch("ddtree", "--recipe", pair.root / "absent.yaml"), "absent.yaml", "no such file")


@pytest.fixture
def stranger():
    """This process as a user who may enter no folder of mode 0700 that is root's, nor any of mode 0."""
    if os.geteuid() != 0:
        yield os.geteuid()
        return
    os.setresuid(12345, 12345, 0)
    try:
        yield 12345
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["start", "dry-run"])
def test_paths_that_this_user_cannot_reach(pair, dispatch, dry, request):
    file, locked = pair.recipe_file(), pair.root / "locked"
    (locked / "target").mkdir(parents=True)
    dispatch("ddtree", "--recipe", file)  # what is imported when needed lies behind such folders, too
    for folder in (pair.root, *pair.root.parents):
        if folder.name.startswith(("test_", "popen-", "pytest-")):
            folder.chmod(0o755)
    locked.chmod(0)
    request.addfinalizer(lambda: locked.chmod(0o755))
    user = request.getfixturevalue("stranger")
    outcome = dispatch("ddtree", "--recipe", locked / "r.yaml", *dry)
    assert_refused(outcome, "r.yaml", f"no such file that user {user} can reach")
    outcome = dispatch("baseline", "--recipe", file, "--model", locked / "target", *dry)
    if dry:
        assert outcome.code == 0 and f"user {user} cannot reach" in outcome.err
    else:
        assert_refused(outcome, "command line --model", f"user {user} cannot reach")


def test_arguments_from_the_environment_that_are_no_flags(pair, dispatch, monkeypatch):
    for words in ("other-model --seed 1", "-- --seed 1", "--seed 1 --"):
        monkeypatch.setenv("EXTRA_VLLM_ARGS", words)
        assert_refused(dispatch("ddtree", "--recipe", pair.recipe_file()), "EXTRA_VLLM_ARGS", "is no flag")


COMMANDS = [
    ([""], ["unknown command ''"]),
    ([" ddtree"], ["unknown command ' ddtree'", "did you mean ddtree?"]),
    (["ddtree", "--recipe", "proving-grond"], ["unknown recipe proving-grond", "did you mean proving-ground?"]),
    (["ddtre"], ["unknown command ddtre", "did you mean ddtree?", "no program"]),
    (["run"], ["RECIPE"]),
    (["run", "proving-grond"], ["unknown recipe proving-grond"]),
    (["run", "proving-ground", "--mode", "tree"], ["--mode", "tree", "ddtree"]),
    (["show", "--port", "1"], ["--port", "--resolved"]),
    (["ddtree", "--bugdet", "3"], ["--bugdet", "--budget"]),
    (["ddtree", "--port", "http"], ["--port", "http", "port number"]),
    (["baseline", "--budget", "3"], ["--budget", "baseline"]),
    (["dflash", "--spine", "full"], ["--spine", "dflash"]),
    (["ddtree", "--horizon", "7"], ["--horizon", "ddtree"]),
]


@pytest.mark.parametrize(("arguments", "parts"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_command_line(dispatch, arguments, parts):
    assert_refused(dispatch(*arguments), *parts)


OPTIONS = [
    (["--budget", "0"], ["command line --budget", "1 to 127"]),
    (["--budget", "128"], ["command line --budget", "128", "1 to 127"]),
    (["--budget", "-1"], ["command line --budget", "-1"]),
    (["--top-k", "0"], ["command line --top-k", "at least 1"]),
    (["--spine", "half"], ["command line --spine", "half"]),
    (["--spine", "40"], ["command line --spine", "40", "0 to 15"]),
    (["--spine", "99"], ["command line --spine", "99", "0 to 15"]),
    (["--spine", "-1"], ["command line --spine", "-1"]),
    (["--topology", "root_leaves", "--root-leaves", "3"], ["budget=31", "root_leaves=3", "horizon is 15"]),
    (["--profile", "production"], ["command line --profile", "production", "none"]),
    (["--topology", "star"], ["topology", "star", "best_first"]),
    (["--tau", "7"], ["tau", "7"]),
    (["--commit", "branch"], ["command line --commit", "expected flat", "unsafe-full-branch"]),
    (["--device", "tpu"], ["command line --device", "tpu", "cpu, cuda or auto"]),
    (["--host", "256.0.0.1"], ["256.0.0.1", "--host"]),
    (["--", "--additional-config", "{}"], ["--additional-config", "after --"]),
    (["other-recipe"], ["'other-recipe'", "--recipe NAME"]),
    (["--", "--enable_prefix_caching"], ["--enable_prefix_caching", "after --"]),
    (["--", "--speculative-config={}"], ["--speculative-config", "after --"]),
    (["--", "--speculative-config.num_speculative_tokens", "3"], ["--speculative-config", "after --"]),
    (["--", "--spec", "{}"], ["--spec ", "--speculative-config"]),
    (["--", "-sc", "{}"], ["-sc", "--speculative-config"]),
    (["--", "--no-enable-prefix-caching"], ["--no-enable-prefix-caching", "prefix_caching"]),
    (["--", "--config", "x.yaml"], ["--config", "recipe"]),
    (["--", "--port", "1"], ["--port", "before the --"]),
    (["--", "--seed", "1", "--", "--max-num-seqs", "1"], ["'--' is no flag", "after --"]),
]


@pytest.mark.parametrize(("arguments", "parts"), OPTIONS, ids=[" ".join(arguments) for arguments, _ in OPTIONS])
def test_options(pair, dispatch, arguments, parts):
    assert_refused(dispatch("ddtree", "--recipe", pair.recipe_file(), *arguments), *parts)


VARIABLES = [
    ({"DDTREE_BUGDET": "3"}, ["unknown variable DDTREE_BUGDET", "did you mean DDTREE_BUDGET?"]),
    ({"DDTREE_BUDGET": "0"}, ["environment DDTREE_BUDGET", "1 to 127"]),
    ({"DDTREE_BUDGET": "lots"}, ["environment DDTREE_BUDGET", "lots"]),
    ({"DDTREE_TOP_K": "0"}, ["environment DDTREE_TOP_K", "at least 1"]),
    ({"DDTREE_COMMIT": "branch"}, ["environment DDTREE_COMMIT", "expected flat"]),
    ({"DDTREE_PREFIX_CACHING": "1"}, ["environment DDTREE_PREFIX_CACHING", "not proven lossless"]),
]


@pytest.mark.parametrize(
    ("variables", "parts"), VARIABLES, ids=[next(iter(v)) + "=" + next(iter(v.values())) for v, _ in VARIABLES]
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["start", "dry-run"])
def test_environment(pair, dispatch, monkeypatch, variables, parts, dry):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_refused(dispatch("ddtree", "--recipe", pair.recipe_file(), *dry), *parts)


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
@pytest.mark.parametrize("name", ["unsafe-full-branch", "ddtree-full"])
def test_unsafe_mode_needs_its_variable(pair, dispatch, monkeypatch, value, name):
    if value is not None:
        monkeypatch.setenv(UNSAFE, value)
    for dry in ([], ["--dry-run"]):
        assert_refused(dispatch(name, "--recipe", pair.recipe_file(), *dry), UNSAFE, "is " + (value or "not set"))


def _remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _empty(path):
    for file in path.iterdir():
        file.unlink()


def _shards(path):
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    (path / "model.safetensors.index.json").write_text(index)


FOLDERS = [
    (_remove, "does not exist"),
    (_empty, "which is empty"),
    (lambda path: (path / "config.json").unlink(), "config.json is missing"),
    (lambda path: (path / "model.safetensors").unlink(), "weights is missing"),
    (_shards, "model-2.safetensors is missing"),
    (lambda path: (path / "config.json").write_text("{"), "not readable as JSON"),
]


@pytest.mark.parametrize("model", ["target", "drafter"])
@pytest.mark.parametrize(("damage", "part"), FOLDERS, ids=[part for _, part in FOLDERS])
def test_model_folders(pair, dispatch, model, damage, part):
    damage(pair.root / model)
    assert_refused(dispatch("ddtree", "--recipe", pair.recipe_file()), pair.root / model, part)


def test_a_dry_run_tells_of_models_that_are_not_there_yet(pair, dispatch):
    _remove(pair.target)
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file(), "--dry-run")
    assert outcome.code == 0
    assert "a real start would stop here" in outcome.err and str(pair.target) in outcome.err


MISFITS = [
    (edit("vocab_size", value=3072), ["vocab_size", "3072", "4096 as in the target"]),
    (edit("hidden_size", value=128), ["hidden_size", "128", "256 as in the target"]),
    (edit("target_hidden_size", value=128), ["target_hidden_size", "128", "256"]),
    (edit("dflash_config", "target_layer_ids", value=[1, 8]), ["target_layer_ids", "[1, 8]", "from 0 to 7"]),
    (edit("dflash_config", "target_layer_ids", value=[-1, 3]), ["target_layer_ids", "[-1, 3]"]),
    (edit("dflash_config", "target_layer_ids", value=[3, 3]), ["target_layer_ids", "different layers"]),
    (edit("dflash_config", "target_layer_ids", value=[]), ["target_layer_ids", "a list of layer numbers"]),
    (edit("dflash_config", "mask_token_id", value=4096), ["mask_token_id", "4096", "from 0 to 4095"]),
    (edit("dflash_config", "mask_token_id", value=-1), ["mask_token_id", "-1"]),
    (edit("dflash_config", "mask_token_id", value=None), ["mask_token_id", "None"]),
    (edit("dflash_config", value=None), ["dflash_config is missing", "DFlash"]),
    (edit("block_size", value=1), ["block_size", "at least 2"]),
]


@pytest.mark.parametrize(("change", "parts"), MISFITS, ids=[f"{parts[0]} {parts[1]}" for _, parts in MISFITS])
@pytest.mark.parametrize("mode", ["ddtree", "dflash"])
def test_drafter_that_does_not_fit(pair, dispatch, change, parts, mode):
    pair.configure("drafter", change)
    assert_refused(
        dispatch(mode, "--recipe", pair.recipe_file(), *(["--horizon", "7"] if mode == "dflash" else [])),
        pair.drafter / "config.json",
        *parts,
    )


def test_target_size_named_apart_is_what_counts(pair, dispatch):
    pair.configure("drafter", lambda config: config.update(hidden_size=128, target_hidden_size=256))
    pair.projection(128, 4 * 256)
    assert dispatch("ddtree", "--recipe", pair.recipe_file()).started is not None


@pytest.mark.parametrize(("horizon", "expected"), [("0", "at least 1"), ("16", "1 to 15")])
def test_horizon_beyond_the_block(pair, dispatch, horizon, expected):
    assert_refused(
        dispatch("dflash", "--recipe", pair.recipe_file(), "--horizon", horizon), "--horizon", horizon, expected
    )


@pytest.mark.parametrize("mode", ["baseline", "dflash", "ddtree"])
def test_port_in_use(pair, dispatch, mode):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(
            dispatch(mode, "--recipe", pair.recipe_file(), "--port", port), "command line --port", port, "--port"
        )
        assert dispatch(mode, "--recipe", pair.recipe_file(), "--port", port, "--dry-run").code == 0
    assert dispatch(mode, "--recipe", pair.recipe_file(), "--port", port).started is not None


def test_an_unknown_package_reference(pair, dispatch):
    pair.recipe["model"] = "package:no_such_package/weights"
    assert_refused(
        dispatch("baseline", "--recipe", pair.recipe_file()), "package:no_such_package/weights", "installed package"
    )
