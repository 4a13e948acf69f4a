import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch._dynamo

import dualmcmc
from dualmcmc.config import Chain
from dualmcmc.engine import checkpoint
from dualmcmc.langevin import Trace, revise_x
from dualmcmc.nets import build
from dualmcmc.tasks import run as run_module
from dualmcmc.tasks.export import DTYPES
from dualmcmc.tasks.run import Run
from dualmcmc.utils.errors import UserError
from tests.conftest import assert_refused, compiled_only, tiny


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_loaded_run(run):
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


def test_methods_call_the_networks(run):
    x, z = run.sample(6), torch.randn(6, 4)
    with torch.no_grad():
        assert torch.equal(run.energy(x), run.trio.energy(x))
        assert torch.equal(run.generate(z), run.trio.generator(z))
        assert torch.equal(run.infer(x).mean, run.trio.inference(x).mean)
    assert torch.equal(run.reconstruct(x, steps=0), run.generate(run.infer(x).mean))
    chain = Chain(steps=3, step_size=0.125, temperature=4e-6)  # that of training, except for sampling.steps
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


def test_inference_mode_has_no_effect(run):
    plain = run.reconstruct(run.sample(4, rng=rng(1)), rng=rng(2))
    with torch.inference_mode():
        x = run.sample(4, rng=rng(1))
        assert torch.equal(run.reconstruct(x, rng=rng(2)), plain)
        assert run.energy(x).shape == (4,)


def test_seed_determines_samples(finished_run):
    first, second = (dualmcmc.load(finished_run, seed=3).sample(4) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, dualmcmc.load(finished_run, seed=4).sample(4))


@pytest.mark.parametrize("kind", ["simple", "resnet", "style"])
def test_result_does_not_depend_on_batch_size(kind):
    config = tiny(f"nets.kind={kind}", "sampling.batch=3")
    run = dualmcmc.Run(config, build(config), torch.device("cpu"), images=0)
    z, calls = torch.randn(7, 4), []
    run.trio.generator.register_forward_hook(lambda net, inputs, out: calls.append(len(out)))
    x = run.generate(z)
    assert calls == [3, 2, 2]  # of equal size, up to one
    with torch.no_grad():
        assert torch.allclose(x, run.trio.generator(z), atol=1e-6)
    assert torch.allclose(run.energy(x), torch.cat([run.energy(image[None]) for image in x]), atol=1e-6)
    assert run.reconstruct(x).shape == x.shape


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_batchnorm_statistics(statistics):
    config = tiny("nets.kind=resnet", f"sampling.batchnorm={statistics}")
    run = dualmcmc.Run(config, build(config), torch.device("cpu"), images=0)
    z = torch.randn(8, 4)
    assert torch.allclose(run.generate(z)[:1], run.generate(z[:1]), atol=1e-6) == (statistics == "running")


def test_with_and_without_ema(finished_run):
    averaged, live = dualmcmc.load(finished_run), dualmcmc.load(finished_run, ema=False)
    z = torch.randn(3, 4)
    assert not torch.equal(averaged.generate(z), live.generate(z))
    x = averaged.generate(z)
    assert torch.equal(averaged.energy(x), live.energy(x))  # ema.energy=false


def test_snapshot_file(finished_run, tmp_path):
    shutil.copy(finished_run / "snapshot.safetensors", tmp_path / "mine.safetensors")
    file, folder = dualmcmc.load(tmp_path / "mine.safetensors"), dualmcmc.load(finished_run)
    z = torch.randn(3, 4)
    assert torch.equal(file.generate(z), folder.generate(z))
    with pytest.raises(UserError, match="averaged weights only"):
        dualmcmc.load(tmp_path / "mine.safetensors", ema=False)


def test_invalid_runs(tmp_path, finished_run):
    for path, words in [
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "absent.safetensors", "does not exist"),
        (tmp_path, "not a run folder"),
    ]:
        with pytest.raises(UserError, match=words):
            dualmcmc.load(path)
    shutil.copy(finished_run / "config.yaml", tmp_path / "config.yaml")
    with pytest.raises(UserError, match="has no snapshot"):
        dualmcmc.load(tmp_path)
    with pytest.raises(UserError, match="full training state"):
        dualmcmc.load(max((finished_run / "states").iterdir()))
    with pytest.raises(UserError, match="at least 0"):
        dualmcmc.load(finished_run, seed=-1)
    (tmp_path / "snapshot.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="is damaged"):
        dualmcmc.load(tmp_path)


def test_overrides(finished_run):
    run = dualmcmc.load(finished_run, "cpu", overrides=["sampling.steps=7", "teaching.z_chain.steps=4"])
    assert run.config.sampling_chain.steps == 7
    assert run.config.teaching.z_chain.steps == 4
    with pytest.raises(UserError, match=r"'train.batch=3' cannot be changed .* only sampling\.\*, .* data\.crop"):
        dualmcmc.load(finished_run, "cpu", overrides=["train.batch=3"])
    with pytest.raises(UserError, match=r"unknown setting 'sampling.stpes'.* Did you mean 'sampling.steps'"):
        dualmcmc.load(finished_run, "cpu", overrides=["sampling.stpes=3"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_exported_run_is_the_same_up_to_rounding(run, tmp_path, dtype):
    numbers = run.export(tmp_path / "w.safetensors", dtype)
    again = dualmcmc.load(tmp_path / "w.safetensors", device="cpu")
    assert again.images == run.images
    assert all(p.dtype == torch.float32 for p in again.trio.parameters())
    precision = torch.finfo(DTYPES[dtype]).eps / 2
    for name, value in run.trio.state_dict().items():
        rounded = again.trio.state_dict()[name]
        assert torch.allclose(rounded, value, rtol=precision, atol=1e-7), name
        assert torch.equal(rounded, value) == (dtype == "float32" or value.ndim < 2 or not value.any()), name
    assert (numbers["relative_change"] == 0) == (dtype == "float32")
    assert numbers["relative_change"] < precision
    stored, *_ = checkpoint.load(tmp_path / "w.safetensors")
    assert {value.dtype for value in stored.values() if value.ndim > 1} == {DTYPES[dtype]}


def test_export_contains_no_paths(run, tmp_path):
    paths = {"path": "/home/me/secret", "test_path": "/home/me/test"}
    run.trained_data = replace(run.trained_data, source="folder", holdout=0.0, **paths)
    run.export(tmp_path / "w.safetensors")
    assert b"/home/me" not in (tmp_path / "w.safetensors").read_bytes()
    assert dualmcmc.load(tmp_path / "w.safetensors", device="cpu").sample(2).shape == (2, 1, 8, 8)


def test_export_refuses_overflow(run, tmp_path):
    run.trio.generator.layers[-1].weight.data[0, 0, 0, 0] = 1e5
    with pytest.raises(UserError, match=r"generator.* has values beyond the range of float16"):
        run.export(tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
    run.export(tmp_path / "w.safetensors", "bfloat16")


def test_export_command(call, finished_run, tmp_path):
    target = tmp_path / "w.safetensors"
    done = call("export", finished_run, "--out", target, "--dtype", "bfloat16")
    assert done.code == 0
    assert f"{target}, 0.0 MB, bfloat16" in done.out
    before = target.read_bytes()
    assert_refused(call("export", finished_run, "--out", target), "already exists")
    assert target.read_bytes() == before
    assert_refused(call("export", finished_run, "--out", tmp_path / "w.pt"), "must end in .safetensors")
    other = tmp_path / "v.safetensors"
    assert_refused(call("export", finished_run, "--out", other, "--dtype", "int8"), "float16, bfloat16, float32")
    assert_refused(call("export", tmp_path / "none", "--out", other), "does not exist")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert call("export", finished_run, "--out", other, "--json").json["dtype"] == "float16"


def test_precision(finished_run):
    exact = dualmcmc.load(finished_run, device="cpu")
    coarse = dualmcmc.load(finished_run, device="cpu", overrides=["engine.precision=bfloat16"])
    assert (exact.engine, coarse.engine) == ("eager, float32", "eager, bfloat16")
    z = torch.randn(5, 4, generator=rng())
    assert not torch.equal(exact.generate(z), coarse.generate(z))
    assert torch.allclose(exact.generate(z), coarse.generate(z), atol=0.02)


def test_compiled_chains(finished_run, quick_compiler):
    """Compiled ahead for batches of 4 and 3, with the results of the eager run."""
    eager, run = (
        dualmcmc.load(finished_run, "cpu", overrides=[f"engine.mode={mode}", "sampling.batch=4"])
        for mode in ("eager", "compiled")
    )
    shown = []

    @contextmanager
    def progress(task, total, unit):
        shown.append((task, total))
        yield lambda count: None

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert run.engine == "eager, float32"  # until chains are requested
    run.prepare(7, progress)
    assert run.engine == "compiled, float32"
    before = graphs()
    with compiled_only(run._executors):
        x = run.sample(7, rng=rng())
    assert graphs() == before
    assert torch.allclose(x, eager.sample(7, rng=rng()), atol=1e-5)
    assert not torch.equal(x, eager.sample(7, steps=0, rng=rng()))
    run.prepare(7, progress)
    assert shown == [("compiling", 4)]  # generator and x-chain
    run.prepare(7, progress, z_chain=True)
    assert shown[1:] == [("compiling", 2)]  # the generator was ready
    before, z = graphs(), eager.infer(x).mean
    with compiled_only(run._executors):
        revised = run.revise_z(z, x, rng=rng())
    assert torch.allclose(revised, eager.revise_z(z, x, rng=rng()), atol=1e-4)
    run.generate(run.prior(2))  # another batch size runs eagerly
    assert graphs() == before


def test_compiled_batch_statistics(quick_compiler):
    config = tiny("nets.kind=resnet", "sampling.batchnorm=batch", "engine.mode=compiled")
    run = Run(config, build(config), torch.device("cpu"), images=0)
    z = torch.randn(6, 4, generator=rng())
    eager = run.generate(z)
    run.prepare(6)
    with compiled_only(run._executors):
        assert torch.allclose(run.generate(z), eager, atol=1e-5)


def test_few_images_are_not_compiled(run, monkeypatch):
    compiled = []
    monkeypatch.setattr(run_module, "COMPILE_MIN_IMAGES", 50)
    monkeypatch.setattr(run_module, "compile_for_sampling", lambda *args: compiled.append(args[2]))
    monkeypatch.setattr(run_module, "resolve_plan", lambda cfg, _: replace(run.plan, compiled=cfg.mode == "auto"))
    run.prepare(49)
    assert (run.engine, compiled) == ("eager, float32", [])
    run.prepare(50)
    assert (run.engine, compiled) == ("compiled, float32", [[50]])


def test_run_that_cannot_be_compiled(finished_run, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("dualmcmc.engine.plan.make_compiler", lambda *_: lambda layers: broken)
    run = dualmcmc.load(finished_run, device="cpu", overrides=["engine.mode=compiled"])
    assert run.sample(3).shape == (3, 1, 8, 8)
    assert capsys.readouterr().err == "running eagerly: compilation failed (RuntimeError: no compiler)\n"
    run.sample(3)
    assert capsys.readouterr().err == ""
    assert run.engine == "eager, float32"


def test_compilation_that_fails_later(run, monkeypatch, capsys):
    """The x-chain compiled, the z-chain does not."""
    run.config = replace(run.config, engine=replace(run.config.engine, mode="compiled"))
    monkeypatch.setattr(run_module, "compile_for_sampling", lambda *args: "no z-chain" if args[3] else None)
    run.prepare(6)
    assert run.engine == "compiled, float32"
    run.prepare(6, z_chain=True)
    assert capsys.readouterr().err == "running eagerly: compilation failed (no z-chain)\n"
    assert run.engine == "eager, float32"
    run.reconstruct(run.sample(6))
    assert capsys.readouterr().err == ""


def test_images_in_any_form(run):
    x = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    floats = x[:, None] / 127.5 - 1
    assert torch.allclose(run.energy(x.numpy()), run.energy(floats))
    assert torch.allclose(run.infer(x.numpy()).mean, run.infer(floats).mean)
    assert torch.allclose(run.reconstruct(x), run.reconstruct(floats))
    assert torch.allclose(run.revise_x(x, rng=rng()), run.revise_x(floats, rng=rng()))


def test_energy_is_differentiable(run):
    x = run.sample(5).requires_grad_()
    (gradient,) = torch.autograd.grad(run.energy(x).sum(), x)
    (expected,) = torch.autograd.grad(run.trio.energy(x).sum(), x)
    assert torch.equal(gradient, expected)
    assert gradient.abs().sum() > 0
    with torch.no_grad():
        assert not run.energy(x).requires_grad
    assert not run.energy(x.detach()).requires_grad


def test_chains_as_iterators(run):
    x, z = run.sample(4, steps=0), run.prior(4)
    states = list(run.x_chain(x, rng=rng()))
    assert len(states) == 1 + run.config.sampling_chain.steps
    assert torch.equal(states[0], x)
    assert torch.equal(states[-1], run.revise_x(x, rng=rng()))
    states = list(run.z_chain(z, x, steps=5, rng=rng(), temperature=0.5))
    assert len(states) == 6
    assert torch.equal(states[-1], run.revise_z(z, x, 5, rng(), temperature=0.5))
    with pytest.raises(UserError, match="latents of shape"):
        run.z_chain(z[:3], x)  # at once, not at the first state
    with pytest.raises(UserError, match="these have shape"):
        run.x_chain(z)
    observed = torch.rand(4, 1, 8, 8) < 0.5
    *_, last = run.x_chain(x, rng=rng(), observed=observed)
    assert torch.equal(last[observed], x[observed])


def test_chain_with_an_accept_reject_step_as_iterator(finished_run):
    run = dualmcmc.load(finished_run, "cpu", overrides=["sampling.metropolis=true", "sampling.temperature=1e-3"])
    x = run.sample(4, steps=0)
    *_, last = run.x_chain(x, rng=rng())
    assert torch.equal(last, run.revise_x(x, rng=rng()))


def test_repr(run):
    assert repr(run) == "Run(digits: 1x8x8 images, 5.8k parameters, trained on 128 images, on cpu)"


def test_latents_of_another_shape_are_refused(run):
    with pytest.raises(UserError, match=r"latents of shape \(2, 3\) given, expected \(2, 4\)"):
        run.generate(torch.zeros(2, 3))
    with pytest.raises(UserError, match=r"latents of shape \(2, 4\) given, expected \(3, 4\)"):
        run.revise_z(torch.zeros(2, 4), run.sample(3))


def test_picture(run, tmp_path):
    x = run.sample(4)
    picture = run.picture(x, run.revise_x(x), captions=["samples", "revised"])
    assert picture._repr_png_().startswith(b"\x89PNG")  # what Jupyter shows
    picture.save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == picture._repr_png_()
    assert repr(picture) == f"Picture({picture.pixels.shape[2]}x{picture.pixels.shape[1]})"
    assert run.picture(x, columns=4).pixels.shape[2] > run.picture(x).pixels.shape[2]
    for captions in (["one"], ["one", "two", "three"]):
        with pytest.raises(UserError, match="captions for 2 sets of images"):
            run.picture(x, x, captions=captions)


def test_tasks_take_images_in_any_form(run):
    x = (255 * torch.rand(5, 8, 8)).byte()
    results = [dualmcmc.inpaint(run, images, "M20").completed for images in (x.numpy(), x[:, None] / 127.5 - 1)]
    assert results[0] == results[1]
    numbers = dualmcmc.outliers(run, x.numpy(), {"noise": torch.rand(6, 1, 8, 8)}, ["energy"]).numbers
    assert 0 <= numbers["noise"]["energy"]["auroc"] <= 1
