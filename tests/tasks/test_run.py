import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch._dynamo

import dualmcmc
from dualmcmc import settings
from dualmcmc.config import Chain
from dualmcmc.errors import UserError
from dualmcmc.langevin import Trace, revise_x
from dualmcmc.nets import build
from dualmcmc.tasks.run import Run
from tests.conftest import nothing_plain, tiny


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_loaded_run_knows_itself(run):
    assert run.config == tiny()
    assert run.images == 128
    assert not any(p.requires_grad for p in run.trio.parameters())


def test_shapes(run):
    x = run.sample(5)
    assert x.shape == (5, 1, 8, 8)
    assert run.energy(x).shape == (5,)
    q = run.infer(x)
    assert q.mean.shape == q.log_var.shape == (5, 4)
    assert run.revise_z(q.mean, x).shape == (5, 4)
    assert run.reconstruct(x).shape == x.shape
    assert run.generate(q.mean).shape == x.shape
    assert not x.requires_grad


def test_each_method_is_the_network_behind_it(run):
    x, z = run.sample(6), torch.randn(6, 4)
    with torch.no_grad():
        assert torch.equal(run.energy(x), run.trio.energy(x))
        assert torch.equal(run.generate(z), run.trio.generator(z))
        assert torch.equal(run.infer(x).mean, run.trio.inference(x).mean)
    assert torch.equal(run.reconstruct(x, steps=0), run.generate(run.infer(x).mean))
    chain = Chain(steps=3, step_size=0.125, temperature=4e-6)  # training's, but for sampling.steps
    assert run.config.sampling_chain == chain
    assert torch.equal(run.revise_x(x, rng=rng()), revise_x(run.trio.energy, x, chain, rng()))


def test_steps_and_seeds(run):
    assert torch.equal(run.sample(4, rng=rng(1)), run.sample(4, rng=rng(1)))
    assert not torch.equal(run.sample(4, rng=rng(1)), run.sample(4, rng=rng(2)))
    start = run.sample(4, steps=0, rng=rng(1))
    assert torch.equal(start, run.generate(torch.randn(4, 4, generator=rng(1))))
    trace = Trace()
    run.revise_x(start, steps=9, trace=trace)
    assert len(trace.potential) == 10
    trace = Trace()
    run.revise_z(run.infer(start).mean, start, trace=trace)
    assert len(trace.mse) == run.config.teaching.z_chain.steps + 1
    with pytest.raises(UserError, match="at least 0"):
        run.sample(4, steps=-1)


def test_inference_mode_changes_nothing(run):
    plain = run.reconstruct(run.sample(4, rng=rng(1)), rng=rng(2))
    with torch.inference_mode():
        x = run.sample(4, rng=rng(1))
        assert torch.equal(run.reconstruct(x, rng=rng(2)), plain)
        assert run.energy(x).shape == (4,)


def test_a_loaded_run_repeats_itself(finished_run):
    first, second = (dualmcmc.load(finished_run, seed=3).sample(4) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, dualmcmc.load(finished_run, seed=4).sample(4))


@pytest.mark.parametrize("kind", ["simple", "resnet"])
def test_batches_do_not_show(kind):
    config = tiny(f"nets.kind={kind}", "sampling.batch=3")
    run = dualmcmc.Run(config, build(config), torch.device("cpu"), images=0)
    z, calls = torch.randn(7, 4), []
    run.trio.generator.register_forward_hook(lambda net, given, out: calls.append(len(out)))
    x = run.generate(z)
    assert calls == [3, 2, 2]  # even parts
    with torch.no_grad():
        assert torch.allclose(x, run.trio.generator(z), atol=1e-6)
    assert torch.allclose(run.energy(x), torch.cat([run.energy(image[None]) for image in x]), atol=1e-6)
    assert run.reconstruct(x).shape == x.shape


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_batchnorm_statistics_are_those_asked_for(statistics):
    config = tiny("nets.kind=resnet", f"sampling.batchnorm={statistics}")
    run = dualmcmc.Run(config, build(config), torch.device("cpu"), images=0)
    z = torch.randn(8, 4)
    assert torch.allclose(run.generate(z)[:1], run.generate(z[:1]), atol=1e-6) == (statistics == "running")


def test_averaged_or_not(finished_run):
    averaged, live = dualmcmc.load(finished_run), dualmcmc.load(finished_run, ema=False)
    z = torch.randn(3, 4)
    assert not torch.equal(averaged.generate(z), live.generate(z))
    x = averaged.generate(z)
    assert torch.equal(averaged.energy(x), live.energy(x))  # ema.energy is off in this run


def test_a_snapshot_alone_is_enough(finished_run, tmp_path):
    shutil.copy(finished_run / "snapshot.safetensors", tmp_path / "mine.safetensors")
    alone, whole = dualmcmc.load(tmp_path / "mine.safetensors"), dualmcmc.load(finished_run)
    z = torch.randn(3, 4)
    assert torch.equal(alone.generate(z), whole.generate(z))
    with pytest.raises(UserError, match="averaged weights only"):
        dualmcmc.load(tmp_path / "mine.safetensors", ema=False)


def test_what_is_no_run(tmp_path, finished_run):
    for path, words in [
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "absent.safetensors", "no file"),
        (tmp_path, "not a run folder"),
    ]:
        with pytest.raises(UserError, match=words):
            dualmcmc.load(path)
    shutil.copy(finished_run / "config.yaml", tmp_path / "config.yaml")
    with pytest.raises(UserError, match="holds no snapshot"):
        dualmcmc.load(tmp_path)
    with pytest.raises(UserError, match="full training state"):
        dualmcmc.load(max((finished_run / "states").iterdir()))
    with pytest.raises(UserError, match="at least 0"):
        dualmcmc.load(finished_run, seed=-1)
    (tmp_path / "snapshot.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="is broken"):
        dualmcmc.load(tmp_path)


def broken(*given):
    raise RuntimeError("no compiler")


def compiled(folder, *changes):
    return dualmcmc.load(folder, device="cpu", overrides=["engine.mode=compiled", *changes])


def test_many_chains_are_compiled_and_give_the_same(finished_run, quick_compiler):
    plain, fast = dualmcmc.load(finished_run, device="cpu"), compiled(finished_run)
    assert (plain.engine, fast.engine) == ("eager, float32", "eager, float32")  # nothing was asked for yet
    for run_ in (plain, fast):
        run_.expect(6)
    assert (plain.engine, fast.engine) == ("eager, float32", "compiled, float32")
    x = plain.sample(6, rng=rng())
    assert torch.allclose(fast.sample(6, rng=rng()), x, atol=1e-5)
    assert torch.allclose(
        fast.revise_z(plain.infer(x).mean, x, rng=rng()), plain.revise_z(plain.infer(x).mean, x, rng=rng()), atol=1e-4
    )
    assert not torch.equal(x, plain.sample(6, steps=0, rng=rng()))


def test_few_are_not_worth_a_compiler(finished_run, quick_compiler, monkeypatch):
    monkeypatch.setattr("dualmcmc.tasks.run.COMPILE_FROM", 50)
    run = dualmcmc.load(finished_run, device="cpu")
    monkeypatch.setattr("dualmcmc.tasks.run.choose", lambda cfg, _: replace(run.means, compiled=cfg.mode == "auto"))
    run.sample(49)
    assert run.engine == "eager, float32"
    run.sample(50)
    assert run.engine == "compiled, float32"


def test_batches_of_a_compiled_run_do_not_show(finished_run, quick_compiler):
    z = torch.randn(7, 4, generator=rng())
    whole, parts = compiled(finished_run), compiled(finished_run, "sampling.batch=3")
    for run in (whole, parts):
        run.expect(7)
    assert torch.allclose(whole.generate(z), parts.generate(z), atol=1e-5)


def test_a_run_that_cannot_be_compiled_goes_on(finished_run, monkeypatch, capsys):
    monkeypatch.setattr("dualmcmc.engine.accelerate._compiler", lambda *_: lambda layers: broken)
    run = compiled(finished_run)
    assert run.sample(3).shape == (3, 1, 8, 8)
    assert capsys.readouterr().err == "not compiled (RuntimeError: no compiler): going on eagerly\n"
    run.sample(3)
    assert capsys.readouterr().err == ""
    assert run.engine == "eager, float32"


def test_batch_statistics_in_a_compiled_run(quick_compiler):
    widths = [f"nets.{name}_width=4" for name in ("energy", "generator", "inference")]
    use = ["sampling.batchnorm=batch", "sampling.steps=2", "engine.mode=compiled"]
    config = settings.load_config("cifar10-resnet", [*widths, "teaching.latent_dim=4", *use])
    run = Run(config, build(config), torch.device("cpu"), images=0)
    z = torch.randn(6, 4, generator=rng())
    plain = run.generate(z)
    run.expect(6)
    assert torch.allclose(run.generate(z), plain, atol=1e-5)


def test_a_run_says_the_precision_it_has(finished_run):
    plain = dualmcmc.load(finished_run, device="cpu")
    coarse = dualmcmc.load(finished_run, device="cpu", overrides=["engine.precision=bfloat16"])
    assert (plain.engine, coarse.engine) == ("eager, float32", "eager, bfloat16")
    z = torch.randn(5, 4, generator=rng())
    assert not torch.equal(plain.generate(z), coarse.generate(z))
    assert torch.allclose(plain.generate(z), coarse.generate(z), atol=0.02)


@pytest.mark.parametrize(("n", "batch"), [(40, 20), (41, 20), (7, 20)])
def test_what_is_to_come_is_compiled_ahead(finished_run, quick_compiler, n, batch):
    run, shown = compiled(finished_run, f"sampling.batch={batch}"), []

    @contextmanager
    def watch(text, total, unit):
        shown.append((text, total))
        yield lambda count: None

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    run.expect(n, watch)
    before = graphs()
    with nothing_plain(run._nets):
        x = run.sample(n)
    assert graphs() == before
    run.expect(n, watch)
    sizes = 2 if n == 41 else 1
    assert shown == [("compiling", 2 * sizes)]
    run.expect(n, watch, z_chain=True)
    assert shown[1:] == [("compiling", sizes)]  # the generator's own images were ready
    before = graphs()
    with nothing_plain(run._nets):
        run.reconstruct(x)
    run.generate(run.prior(5))  # another number: nobody said so
    assert graphs() == before


def test_a_compiler_that_fails_later(finished_run, quick_compiler, monkeypatch, capsys):
    run = compiled(finished_run)
    run.expect(6)
    monkeypatch.setattr(run._nets.generator, "_chain", broken)
    run.expect(6, z_chain=True)
    assert capsys.readouterr().err == "not compiled (RuntimeError: no compiler): going on eagerly\n"
    assert run.engine == "eager, float32"
    run.reconstruct(run.sample(6))
    assert capsys.readouterr().err == ""
