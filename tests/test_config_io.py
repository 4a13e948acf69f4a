import dataclasses
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dualmcmc import config_io
from dualmcmc.config import Adam, Chain, Config, Data, Teaching, Train
from dualmcmc.utils.errors import UserError

EXPECTED = {
    "digits", "mnist", "fashion-mnist", "cifar10-simple", "cifar10-simple-authors", "cifar10-resnet",
    "cifar10-resnet-128", "cifar10-resnet-256", "cifar10-resnet-1024", "celeba64", "celebahq256", "church64",
    "laptop32", "vectors",
}  # fmt: skip


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        config_io.load_config("digits", overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_presets_are_valid():
    names = config_io.preset_names()
    assert names[0] == "digits"
    assert set(names) == EXPECTED
    for name in names:
        assert config_io.load_config(name).description


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_rendered_config_reads_back(name):
    config = config_io.load_config(name)
    text = config_io.render(config)
    assert config_io.from_tree(yaml.safe_load(text)) == config
    for line in text.splitlines():
        assert not line or "  # " in line, f"no comment: {line}"


def test_variant_changes_its_widths_only():
    base, variant = config_io.load_config("cifar10-resnet"), config_io.load_config("cifar10-resnet-256")
    assert variant.nets.energy_width == variant.nets.generator_width == 256
    changed = dataclasses.replace(
        variant,
        preset=base.preset,
        description=base.description,
        nets=dataclasses.replace(variant.nets, energy_width=512, generator_width=512),
    )
    assert changed == base


@pytest.mark.parametrize("preset", ["cifar10-resnet", "cifar10-simple-authors"])
def test_authors_settings(preset):
    """The settings in the authors' released code."""
    c = config_io.load_config(preset)
    t = c.teaching
    assert (c.train.batch, c.train.images, t.latent_dim, t.sigma) == (100, 301 * 50_000, 128, 0.3)
    assert (t.x_chain.steps, t.x_chain.step_size) == (30, 0.5**2 / 2)
    assert t.x_chain.noise_std == pytest.approx(0.001)
    assert (t.z_chain.steps, t.z_chain.step_size) == (10, pytest.approx(0.1**2 / 2))
    assert t.z_chain.noise_std == pytest.approx(0.1)
    assert (c.sampling_chain.steps, c.sampling_chain.step_size) == (70, pytest.approx(0.4**2 / 2))
    assert c.sampling_chain.noise_std == pytest.approx(0.001)
    assert (t.generator_data_weight, t.generator_sample_weight) == (1, 50)
    assert (t.inference_data_weight, t.inference_sample_weight) == (1, 0.1)
    assert [a.lr for a in (c.optim.energy, c.optim.generator, c.optim.inference)] == [1e-4, 3e-4, 1e-4]
    assert [a.weight_decay for a in (c.optim.energy, c.optim.generator, c.optim.inference)] == [0, 5e-4, 5e-4]
    assert all(a.betas == (0, 0.9) and a.lr_decay == 0.998 for a in (c.optim.energy, c.optim.generator))
    assert not t.second_x_chain
    assert t.energy_l2 == t.energy_consistency == c.optim.warmup == c.optim.cooldown == 0


def test_authors_settings_for_faces():
    celeba = config_io.load_config("celeba64")
    assert celeba.teaching.x_chain.step_size == pytest.approx(0.3**2 / 2)
    assert celeba.teaching.x_chain.noise_std == pytest.approx(0.001, rel=1e-4)
    assert celeba.teaching.generator_sample_weight == 70


def test_overrides():
    changes = [
        "train.images=1e6", "optim.energy.lr=3e-4", "optim.energy.betas=[0.5, 0.99]",
        "teaching.generator_data_weight=null", "ema.energy=true", "teaching.x_chain.clamp=1",
    ]  # fmt: skip
    c = config_io.load_config("digits", changes)
    assert c.train.images == 1_000_000
    assert c.optim.energy.lr == 3e-4
    assert c.optim.energy.betas == (0.5, 0.99)
    assert c.teaching.generator_data_weight is None
    assert c.ema.energy is True
    assert c.teaching.x_chain.clamp == 1.0
    assert isinstance(c.teaching.x_chain.clamp, float)


@pytest.mark.parametrize("path", ["a b.zip", "a #b", "007", "2024-01-01", "yes", "[x]", "a: b", "~/x", "'q'"])
def test_paths_are_not_parsed_as_yaml(path):
    assert config_io.load_config("mnist", [f"data.path={path}"]).data.path == path
    assert config_io.load_config("mnist", ["data.path=null"]).data.path is None


def test_sampling_chain_defaults_to_training():
    c = config_io.load_config(
        "digits", ["teaching.x_chain.step_size=0.3", "teaching.x_chain.clamp=1", "sampling.steps=9"]
    )
    assert c.sampling_chain == dataclasses.replace(c.teaching.x_chain, steps=9)
    assert (c.sampling_chain.step_size, c.sampling_chain.clamp) == (0.3, 1.0)
    assert config_io.load_config("digits", ["sampling.temperature=0"]).sampling_chain.temperature == 0


def test_override_changes_one_setting_of_a_group():
    plain = config_io.from_tree({})
    tree = config_io.apply_overrides({}, ["teaching.z_chain.step_size=0.1", "optim.generator.lr=0.1"])
    changed = config_io.from_tree(tree)
    assert changed.teaching.z_chain == dataclasses.replace(plain.teaching.z_chain, step_size=0.1)
    assert changed.teaching.z_chain.steps == 10
    assert changed.optim.generator == dataclasses.replace(plain.optim.generator, lr=0.1)
    assert changed.optim.generator.weight_decay == 5e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.bach=3", "Did you mean 'train.batch'?"),
        ("lr=3", "Did you mean 'optim.energy.lr'?"),
        ("optim=3", "It is a group with optim.cooldown, optim.energy.betas"),
        ("train.batch", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("train.batch=many", "train.batch must be an integer, not 'many'"),
        ("train.batch=2.5", "train.batch must be an integer"),
        ("train.batch=true", "train.batch must be an integer"),
        ("train.batch=0", "train.batch must be at least 1"),
        ("train.batch=null", "train.batch must be an integer"),
        ("ema.energy=1", "ema.energy must be true or false"),
        ("nets.kind=resent", "nets.kind must be simple, resnet, style or custom"),
        ("optim.energy.lr=nan", "optim.energy.lr must be a number"),
        ("optim.energy.lr=-1", "optim.energy.lr must be greater than 0"),
        ("optim.energy.betas=[0.5]", "a list of 2 numbers"),
        ("optim.energy.betas=[0.5, 1]", "less than 1"),
        ("optim.energy.lr=[", "invalid value in"),
        ("data.holdout=1", "less than 1"),
        ("data.channels=2", "data.channels must be 1 or 3"),
        ("data.channels=true", "data.channels must be 1 or 3"),
        ("data.size=30", "the networks do not support data.size=30"),
        ("data.path=a.zip", "data.source=digits is built in"),
        ("teaching.sigma=1e-200", "teaching.sigma must be at least 0.0001"),
        ("seed=-1", "seed must be at least 0"),
        ("train.trackers=[wand]", "must be tensorboard, wandb or mlflow, not 'wand'. Did you mean 'wandb'?"),
        (
            "train.trackers=wandbb",
            "train.trackers must be tensorboard, wandb or mlflow, not 'wandbb'. Did you mean 'wandb'",
        ),
        ("train.trackers=7", "train.trackers must be a list of tensorboard, wandb or mlflow, not 7"),
    ],
)
def test_invalid_override(override, message):
    assert message in refused(override)


def test_unknown_preset():
    with pytest.raises(UserError, match="Did you mean 'digits'"):
        config_io.load_config("digit")


def test_config_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\ntrain: {batch: 7}\n")
    assert config_io.load_config(str(path)).train.batch == 7
    assert config_io.load_config(str(path)).data.source == "digits"
    for text, message in [
        ("train: {bach: 7}", "unknown setting 'train.bach'"),
        ("train: 7", "train must contain key: value pairs"),
        ("- 1", "must contain key: value pairs"),
        ("a: [", "not valid YAML"),
        ("extends: digit", "not a preset. Did you mean 'digits'"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ]:
        path.write_text(text)
        with pytest.raises(UserError) as error:
            config_io.load_config(str(path))
        assert message in str(error.value)
        assert "mine.yaml" in str(error.value)
    with pytest.raises(UserError, match="cannot read config file"):
        config_io.load_config(str(tmp_path / "absent.yaml"))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot read config file"):
        config_io.load_config(str(path))


@given(
    st.lists(
        st.one_of(
            st.text(max_size=30),
            st.builds("{}={}".format, st.sampled_from(sorted(config_io.setting_names())), st.text(max_size=20)),
        ),
        max_size=3,
    )
)
def test_any_override_is_accepted_or_refused(overrides):
    try:
        assert isinstance(config_io.from_tree(config_io.apply_overrides({}, overrides)), Config)
    except UserError as error:
        assert str(error)


def test_stored_tree_of_an_earlier_version():
    """Guard settings have been renamed; a run stored before still loads, a new file must use the new names."""
    old = config_io.to_tree(config_io.load_config("digits"))
    old["guard"] = {
        "energy_gap": 5.0, "x_moved": 6.0, "z_moved": 7.0, "on_divergence": "rollback", "rollbacks": 8, "lower": 0.25,
    }  # fmt: skip
    guard = config_io.from_stored_tree(old, "'state'").guard
    assert (guard.max_energy_gap, guard.max_x_displacement, guard.max_z_displacement) == (5, 6, 7)
    assert (guard.on_divergence, guard.max_rollbacks, guard.backoff) == ("rollback", 8, 0.25)
    assert "energy_gap" in old["guard"]  # the caller's tree is not changed
    config = config_io.load_config("digits")
    assert config_io.from_stored_tree(config_io.to_tree(config), "'state'") == config
    with pytest.raises(UserError, match=r"unknown setting 'guard.energy_gap'"):
        config_io.from_tree(old)
    for tree in (None, [], {"guard": 3}, {"guard": {"x_moved": -1}}):
        with pytest.raises(UserError, match="'state'"):
            config_io.from_stored_tree(tree, "'state'")


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("optim.energy.lr=1e300", "at most 1e+38"),
        ("teaching.x_chain.step_size=1e300", "at most 1e+38"),
        ("teaching.z_chain.steps=1000000000000", "at most 1e+06"),
        ("sampling.steps=1000000000000", "at most 1e+06"),
        ("sampling.batch=1000000000000", "at most 1e+06"),
        ("train.images=1e20", "at most 1e+15"),
        ("optim.energy.betas=[0,1]", "less than 1"),
        (f"seed={2**63}", "less than"),
    ],
)
def test_every_number_has_an_upper_limit(override, limit):
    with pytest.raises(UserError, match=re.escape(f"{override.split('=')[0]} must be {limit}")):
        config_io.load_config("digits", [override])


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n"])
def test_empty_config_file_is_refused(tmp_path, content):
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(UserError, match=r"mine\.yaml' is empty"):
        config_io.load_config(str(tmp_path / "mine.yaml"))


def test_description_of_a_preset_is_of_its_own_images(tmp_path):
    own = config_io.load_config("cifar10-simple").description
    assert config_io.load_config("cifar10-simple", ["train.batch=50", "data.path=/x/c10.pack"]).description == own
    other = config_io.load_config("cifar10-simple", ["data.source=folder", "data.path=/x/photos.zip"])
    assert other.description == "cifar10-simple on other images: photos.zip"
    assert config_io.load_config("cifar10-simple", ["data.source=svhn"]).description.endswith("other images: svhn")
    chosen = config_io.load_config("cifar10-simple", ["data.source=svhn", "description=mine"])
    assert chosen.description == "mine"
    for description, expected in (("", other.description), ("description: mine", "mine")):
        file = tmp_path / "file.yaml"
        file.write_text(f"extends: cifar10-simple\n{description}\ndata: {{source: folder, path: /x/photos.zip}}\n")
        assert config_io.load_config(str(file)).description == expected


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Chain(steps=-1), "Chain: steps must be at least 0, not -1"),
        (lambda: Chain(steps=2.5), "Chain: steps must be an integer, not 2.5"),
        (lambda: Chain(steps=True), "Chain: steps must be an integer, not True"),
        (lambda: Chain(step_size=float("nan")), "Chain: step_size must be greater than 0, not nan"),
        (lambda: Chain(step_size=1e300), "Chain: step_size must be at most 1e\\+38"),
        (lambda: Chain(clamp="1"), "Chain: clamp must be a number or None, not '1'"),
        (lambda: Chain(metropolis=1), "Chain: metropolis must be True or False, not 1"),
        (lambda: Teaching(x_chain=30), "Teaching: x_chain must be a Chain, not 30"),
        (lambda: Adam(betas=(0.0, 1.0)), "Adam: betas must be less than 1, not 1.0"),
        (lambda: Adam(betas=(0.0,)), "Adam: betas must be a tuple of 2 numbers"),
        (lambda: Train(trackers=("wand",)), "must be a tuple of 'tensorboard' or 'wandb' or 'mlflow', not 'wand'"),
        (lambda: Data(channels=2), "Data: channels must be 1 or 3, not 2"),
        (lambda: replace(Chain(), temperature=-1), "Chain: temperature must be at least 0"),
    ],
)
def test_settings_built_in_python_are_checked(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_numpy_numbers_become_pythons_own():
    """So that the settings can be written and read back."""
    chain = Chain(steps=np.int64(3), step_size=np.float32(0.5), clamp=1)
    assert [type(value) for value in (chain.steps, chain.step_size, chain.clamp)] == [int, float, float]
    adam = Adam(betas=(np.float64(0.5), 0))
    assert [type(value) for value in adam.betas] == [float, float]
    config = replace(Config(), teaching=Teaching(x_chain=chain))
    assert config_io.from_tree(yaml.safe_load(config_io.render(config))) == config


def test_one_name_is_a_list_of_one():
    assert config_io.load_config("digits", ["train.trackers=mlflow"]).train.trackers == ("mlflow",)
