"""Every method runs on the engine: trained, resumed, compiled, by several processes, loaded and used."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import dualmcmc
from dualmcmc import UserError
from dualmcmc.config import NETWORKS, Teaching
from dualmcmc.engine import checkpoint, plan
from dualmcmc.engine.compilation import compile_for_training
from dualmcmc.engine.log import read_log
from dualmcmc.engine.plan import build_executors, resolve_plan
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.trainer import train
from dualmcmc.health import examine
from dualmcmc.methods import Optimizers, load_method, step
from dualmcmc.methods.memory import Memory
from dualmcmc.methods.rae import fitted_prior
from dualmcmc.nets import Prior, Trio
from dualmcmc.utils.reporter import Reporter
from tests.conftest import compiled_only, tiny

CPU = torch.device("cpu")
SHORT = (
    "train.images=64",
    "train.save_every=32",
    "train.log_every=1",
    "teaching.entropy_samples=3",
    "teaching.buffer_size=50",
)
METHODS = [*((name, ()) for name in NETWORKS), ("dual-mcmc", ("teaching.z_start=prior",))]
each_method = pytest.mark.parametrize(("method", "overrides"), METHODS, ids=[" ".join([m, *o]) for m, o in METHODS])


def config_of(method, overrides=()):
    return tiny(*SHORT, f"method={method}", *overrides)


def memory_of(state):
    return Memory(state.memory, torch.arange(6)) if state.memory else None


@each_method
def test_resume_is_exact(tmp_path, method, overrides):
    config = config_of(method, overrides)
    train(config, tmp_path / "whole", CPU)
    train(config, tmp_path / "parts", CPU, max_images=32)
    torch.manual_seed(999)
    result = train(resumed_config(tmp_path / "parts", []), tmp_path / "parts", CPU, resume=True)
    whole, parts = (load_file(RunFolder(tmp_path / name).latest_state()) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name
    assert set(result.parameters) == set(config.networks)
    assert {name.split(".")[1] for name in whole if name.startswith("nets.")} == set(config.networks)
    log = read_log(RunFolder(tmp_path / "whole").log)
    trained = [entry for entry in log if entry["kind"] == "train"]
    assert {name for name in trained[-1] if name.startswith("grad_norm_")} == {
        f"grad_norm_{n}" for n in config.networks
    }
    assert all(finding.level != "error" for finding in examine(log, config))


@each_method
def test_an_iteration_evaluates_only_what_was_compiled(monkeypatch, method, overrides):
    if load_method(method).second_order:
        pytest.skip("runs eagerly")
    monkeypatch.setattr(plan, "make_compiler", lambda *_: lambda layers: lambda *arguments: layers(*arguments))
    config = config_of(method, (*overrides, "engine.mode=compiled", "train.batch=6"))
    state = TrainState(config, CPU, images=20)
    executors = build_executors(state.trio, config, resolve_plan(config.engine, CPU))
    assert compile_for_training(executors, config, 6, CPU) is None
    x = torch.rand(6, 1, 8, 8) * 2 - 1
    with compiled_only(executors):
        stats = step(executors, state.optimizers, x, state.rng, config.teaching, method=method, memory=memory_of(state))
    assert all(value.isfinite() for value in stats.values())


@each_method
def test_executors_compute_the_same(method, overrides):
    """As modules and as functions of their weights."""
    config = config_of(method, (*overrides, "train.batch=6"))
    x = torch.rand(6, 1, 8, 8) * 2 - 1
    found = []
    for engine in (config.engine, replace(config.engine, micro_batch=100)):
        state = TrainState(config, CPU, images=20)
        nets = build_executors(state.trio, replace(config, engine=engine), resolve_plan(engine, CPU))
        memory = memory_of(state)
        found.append(step(nets, state.optimizers, x, state.rng, config.teaching, method=method, memory=memory))
    assert nets is not state.trio
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, rtol=1e-4, atol=1e-6), name


@each_method
def test_use_of_a_trained_run(tmp_path, method, overrides):
    """Each network is there or refused, and samples come from what there is."""
    train(config_of(method, overrides), tmp_path / "run", CPU)
    run = dualmcmc.load(tmp_path / "run", "cpu")
    assert {name for name in ("energy", "generator", "inference") if run.has(name)} == set(run.config.networks)
    x = run.sample(3)
    assert x.shape == (3, 1, 8, 8)
    assert x.isfinite().all()
    for network, use in (
        ("energy", lambda: run.energy(x)),
        ("energy", lambda: run.revise_x(x)),
        ("generator", lambda: run.generate(run.prior(3))),
        ("generator", lambda: run.revise_z(run.prior(3), x)),
        ("generator", lambda: run.reconstruct(x)),
        ("inference", lambda: run.infer(x).mean),
    ):
        if run.has(network):
            assert use().isfinite().all()
        else:
            with pytest.raises(UserError, match=rf"needs an? {network}.*, which method={method} does not train"):
                use()


def test_method_is_fixed(tmp_path):
    train(config_of("vae"), tmp_path / "run", CPU, max_images=32)
    with pytest.raises(UserError, match="a resumed run cannot change method from vae to wae"):
        resumed_config(tmp_path / "run", ["method=wae"])


def test_settings_of_other_methods():
    with pytest.raises(UserError, match=r"teaching\.z_start=prior is for method=dual-mcmc, not for method=vae"):
        config_of("vae", ["teaching.z_start=prior"])
    with pytest.raises(UserError, match=r"second_x_chain=true is for method=dual-mcmc, not for method=triangle"):
        config_of("triangle", ["teaching.second_x_chain=true"])
    for setting in ("steps=0", "metropolis=true", "grad_clip=1"):
        with pytest.raises(UserError, match="learns through the x-chain's last step"):
            config_of("improved-cd", [f"teaching.x_chain.{setting}"])
    with pytest.raises(UserError, match="method"):
        config_of("gan")


@pytest.mark.parametrize("method", ["dual-mcmc", "cooperative", "amortized", "short-run", "persistent"])
def test_acceptance_is_logged(tmp_path, method):
    chain = ["teaching.x_chain.metropolis=true", "teaching.x_chain.temperature=1", "train.images=32"]
    result = train(config_of(method, chain), tmp_path / "run", CPU)
    assert 0 <= result.stats["x_acceptance"] <= 1


def test_gradients_of_gradients_are_not_compiled(tmp_path):
    class Messages(Reporter):
        def message(self, text):
            said.append(text)

    said: list[str] = []
    config = config_of("improved-cd", ["engine.mode=compiled"])
    result = train(config, tmp_path / "run", CPU, max_images=32, reporter=Messages())
    assert result.engine == "eager, float32"
    assert "running eagerly: method=improved-cd needs gradients of gradients" in said


def test_memory_that_does_not_fit():
    config = config_of("persistent", ["teaching.buffer_size=1000000"])
    config = replace(config, data=replace(config.data, size=1024))
    with pytest.raises(
        UserError, match=r"method=persistent keeps 4\.19 TB in memory, .* are free: reduce teaching\.buffer_size"
    ):
        TrainState(config, CPU, networks=Trio(energy=torch.nn.Linear(1, 1)))


@pytest.mark.parametrize("method", ["persistent", "abp", "rae", "vae"])
def test_memory_size(method):
    config = config_of(method)
    kept = TrainState(config, CPU, images=20).memory
    size = load_method(method).memory_size(config.teaching, config.data.sample_shape, 20)
    assert size == sum(value.nbytes for value in kept.values())
    assert (size > 0) == (method != "vae")


def test_methods_by_name():
    with pytest.raises(UserError, match=r"unknown method 'vea': use dual-mcmc.* Did you mean 'vae'"):
        load_method("vea")
    for module in ("terms", "memory", "../engine"):
        with pytest.raises(UserError, match="unknown method"):
            load_method(module)
    with pytest.raises(UserError, match="pass memory"):
        step(Trio(), Optimizers(), torch.zeros(2, 1), None, Teaching(), method="abp")


def test_mirrored_images_have_no_persistent_latents():
    with pytest.raises(UserError, match=r"method=abp keeps a latent per image.*: set data\.flip=false"):
        config_of("abp", ["data.flip=true"])


def test_fitted_prior_is_part_of_the_weights(tmp_path):
    """Samples of the run, of its state and of exported weights come from the prior that training has fitted."""
    config = config_of("rae", ["ema.half_life=0", "teaching.latent_weight=0"])
    train(config, tmp_path / "run", CPU)
    state = load_file(RunFolder(tmp_path / "run").latest_state())
    run = dualmcmc.load(tmp_path / "run", "cpu")
    run.export(tmp_path / "weights.safetensors", "float32")
    noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    expected = Prior(*fitted_prior({name: state[f"memory.{name}"] for name in ("mean", "second_moment")}))
    assert not torch.allclose(expected.transform(noise), noise, atol=0.01)
    for path, ema in ((tmp_path / "run", True), (tmp_path / "run", False), (tmp_path / "weights.safetensors", True)):
        used = dualmcmc.load(path, "cpu", ema=ema)
        drawn = used.prior(5, torch.Generator().manual_seed(1))
        assert torch.allclose(drawn, expected.transform(noise), atol=1e-6)
    train(replace(config, train=replace(config.train, init=str(tmp_path / "run"))), tmp_path / "next", CPU)
    tensors, info, _ = checkpoint.load(RunFolder(tmp_path / "run").snapshot)
    for broken in ({}, {"prior.mean": torch.zeros(3)}, {"prior.scale": torch.full((4, 4), torch.nan)}):
        kept = {name: value for name, value in tensors.items() if broken or not name.startswith("prior.")}
        checkpoint.save(tmp_path / "broken.safetensors", kept | broken, info)
        with pytest.raises(UserError, match="its prior does not fit method=rae"):
            dualmcmc.load(tmp_path / "broken.safetensors", "cpu")
