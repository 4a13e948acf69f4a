"""Loading from and pushing to a stand-in for the Hub on this machine, with the real client library."""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from PIL import Image

import dualmcmc
from dualmcmc import config_io, hub
from dualmcmc.engine import checkpoint
from dualmcmc.tasks import card as model_cards
from dualmcmc.utils.errors import UserError
from tests.conftest import assert_refused
from tests.custom import plane_config, plane_networks
from tests.hub_server import TOKEN, HubServer


@pytest.fixture
def home(tmp_path):
    return tmp_path / "hf"


@pytest.fixture
def server(monkeypatch, tmp_path, home):
    """A Hub without repositories; the library reads its variables on import, so its constants are set instead."""
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # LFS over HTTP
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    yield server
    server.close()


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, "cpu")


@pytest.fixture
def weights(run, tmp_path):
    """The content of an exported file."""
    path = tmp_path / "weights.safetensors"
    run.export(path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("hf://user/name", "user/name", None),
        ("hf://user/my-EBM_1.2@v1.0", "user/my-EBM_1.2", "v1.0"),
        ("hf://user/name@refs/pr/1", "user/name", "refs/pr/1"),
        (Path("hf://user/name@main"), "user/name", "main"),
    ],
)
def test_names(text, repo, revision):
    name = hub.parse_name(text)
    assert name == (repo, revision)
    assert str(name) == str(text).replace("hf:/u", "hf://u")
    assert str(name.folder) == repo + (f"@{revision.replace('/', '-')}" if revision else "")


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://name", "hf://a/b/c", "hf://../b", "hf://a/..", "hf://a/b@", "hf://a/b@../c", "hf://a/b@/x",
     "hf://a/b c", "hf://a/b@c d", f"hf://a/{'b' * 100}", "hf://a/b@\x1b[1m"],
)  # fmt: skip
def test_bad_names(text, call):
    with pytest.raises(UserError, match="use hf://USER/NAME"):
        hub.parse_name(text)
    assert_refused(call("sample", text), "use hf://USER/NAME")


def test_paths_are_not_names():
    assert hub.parse_name("runs/hf") is None
    assert hub.parse_name("user/name") is None


def test_push_and_load(server, token, run):
    made = run.push("user/tiny")
    files = server.repos["user/tiny"].files("main")
    assert hashlib.sha256(files[hub.FILE]).hexdigest() == made["sha256"]
    assert not server.repos["user/tiny"].private
    commit = server.repos["user/tiny"].branches["main"]
    assert made["name"] == f"hf://user/tiny@{commit}"
    assert commit in made["url"]
    loaded = dualmcmc.load("hf://user/tiny", "cpu")
    assert loaded.source == made["name"]
    assert loaded.sha256 == made["sha256"]
    assert loaded.images == run.images
    change = [(a - b).norm() / a.norm() for a, b in zip(run.trio.parameters(), loaded.trio.parameters(), strict=True)]
    assert 0 < max(change) < 1e-3  # float16
    downloads = {path.split("/")[-1] for path in server.requests if "/resolve/" in path and path.startswith("GET")}
    assert downloads == {hub.FILE}


def test_push_at_full_precision(server, token, run):
    assert run.push("hf://user/tiny", dtype="float32")["relative_change"] == 0
    loaded = dualmcmc.load("hf://user/tiny", "cpu")
    assert all(map(torch.equal, run.trio.parameters(), loaded.trio.parameters()))


def test_unknown_dtype(run):
    with pytest.raises(UserError, match="--dtype int8: use float16, bfloat16, float32"):
        run.push("user/tiny", dtype="int8")


def test_revisions(server, token, run):
    old = run.push("user/tiny")["name"]
    run.images += 1000
    new = run.push("user/tiny")["name"]
    branch = run.push("user/tiny", branch="try/it", dtype="bfloat16")["name"]
    assert len({old, new, branch}) == 3
    assert dualmcmc.load("hf://user/tiny", "cpu").source == new
    assert dualmcmc.load("hf://user/tiny@main", "cpu").source == new
    assert dualmcmc.load("hf://user/tiny@try/it", "cpu").source == branch
    before = dualmcmc.load(old, "cpu")
    assert (before.source, before.images) == (old, run.images - 1000)
    server.close()
    assert dualmcmc.load(old, "cpu").source == old  # a commit that is in the cache cannot have changed


def test_cache_is_used_when_the_hub_is_unreachable(server, token, run):
    made = run.push("user/tiny")
    loaded = dualmcmc.load("hf://user/tiny", "cpu")
    server.status = 503
    assert dualmcmc.load("hf://user/tiny", "cpu").source == made["name"]
    server.close()
    again = dualmcmc.load("hf://user/tiny", "cpu")
    assert torch.equal(again.sample(2), loaded.sample(2))
    with pytest.raises(UserError, match=r"cannot load hf://user/other: http://127.* cannot be reached .*in the cache"):
        dualmcmc.load("hf://user/other", "cpu")


def test_offline_in_a_new_process(server, home, weights):
    commit = server.repo("user/tiny", {hub.FILE: weights})
    dualmcmc.load("hf://user/tiny", "cpu")
    count = len(server.requests)
    program = """if True:
        import dualmcmc
        print(dualmcmc.load("hf://user/tiny", "cpu").source)
        try:
            dualmcmc.load("hf://user/other", "cpu")
        except dualmcmc.UserError as error:
            print(error)
    """
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "HF_ENDPOINT": server.url}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"hf://user/tiny@{commit}",
        "cannot load hf://user/other: HF_HUB_OFFLINE is set and it is not in the cache.",
    ]
    assert len(server.requests) == count


def test_commands_record_the_commit(server, call, tmp_path, weights):
    commit = server.repo("user/tiny", {hub.FILE: weights})
    assert call("sample", "hf://user/tiny@main", "-n", 4, "--device", "cpu").code == 0
    folder = tmp_path / "pretrained" / "user" / "tiny@main"
    assert (folder / "sample.png").exists()
    (record,) = (folder / "results").glob("*.json")
    facts = json.loads(record.read_text())["run"]
    assert facts["file"] == f"hf://user/tiny@{commit}"
    assert facts["sha256"] == hashlib.sha256(weights).hexdigest()
    assert call("export", "hf://user/tiny", "--out", tmp_path / "copy.safetensors").code == 0
    assert_refused(call("sample", "hf://user/tiny", "--no-ema"), "averaged weights only")


def test_training_starts_from_the_hub(server, call, tmp_path, weights, finished_run):
    commit = server.repo("user/tiny", {hub.FILE: weights})
    config = tmp_path / "tiny.yaml"
    config.write_text((finished_run / "config.yaml").read_text())
    words = ("--init", "hf://user/tiny", "train.images=32", "--device", "cpu", "--out", tmp_path / "new")
    assert call("train", config, *words).code == 0
    start = json.loads((tmp_path / "new" / "log.jsonl").read_text().splitlines()[0])
    assert start["init"]["file"] == f"hf://user/tiny@{commit}"
    assert yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())["train"]["init"] == "hf://user/tiny"
    assert call("export", tmp_path / "new", "--out", tmp_path / "new.safetensors").code == 0
    stored = checkpoint.load_info(tmp_path / "new.safetensors")["config"]
    assert stored["train"]["init"] == "hf://user/tiny"  # not a path of this machine


def refused(call, *words, target="hf://user/tiny"):
    answer = call("sample", target, "-n", 4, "--device", "cpu")
    assert_refused(answer, *words)
    assert not Path("pretrained").exists()


def test_missing_and_private(server, call, weights, monkeypatch):
    refused(call, "cannot load hf://user/tiny", "does not exist, or is private", "hf auth login")
    server.repo("user/tiny", {hub.FILE: weights}, private=True)
    refused(call, "does not exist, or is private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert dualmcmc.load("hf://user/tiny", "cpu").images
    refused(call, "has no revision 'v2'", target="hf://user/tiny@v2")
    refused(call, "hf://user/none", "does not exist", target="hf://user/none")
    server.repo("user/tiny", {"other.bin": b""})
    refused(call, f"has no {hub.FILE}", "dualmcmc push")
    server.repo("user/tiny", {hub.FILE: weights}, gated=True)
    refused(call, "accept its conditions at", "/user/tiny")


@pytest.mark.parametrize(("status", "words"), [(401, "the token"), (403, "the token"), (500, "answers 500")])
def test_refusals(server, call, status, words):
    server.status = status
    refused(call, "cannot load hf://user/tiny", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-7], "damaged"),
        (lambda data: data[:-7] + bytes(7), "wrong checksum"),
        (lambda data: b"PK\x03\x04" + data, "not a checkpoint"),
        (lambda data: b"", "not a checkpoint"),
    ],
)
def test_damaged_files(server, call, weights, change, words):
    server.repo("user/tiny", {hub.FILE: change(weights)})
    refused(call, words, "models--user--tiny")


def test_other_safetensors(server, call):
    from safetensors.torch import save

    server.repo("user/tiny", {hub.FILE: save({"a": torch.zeros(2)})})
    refused(call, "was not written by dualmcmc")


def test_size_is_limited(server, call, weights):
    server.repo("user/tiny", {hub.FILE: weights})
    server.claimed_size = 10**13
    refused(call, "10,000,000,000,000 bytes, more than the limit")
    assert not any(request.startswith("GET") for request in server.requests)


def test_card(server, token, call, run_folder):
    call("evaluate", run_folder, "--metrics", "mse", "-n", 20, "--device", "cpu")
    call("sample", run_folder, "-n", 4, "--device", "cpu")
    run = dualmcmc.load(run_folder, "cpu")
    made = run.push("user/tiny", license="apache-2.0")
    assert made["card"]
    card = server.repos["user/tiny"].files("main")["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "dualmcmc"
    assert front["pipeline_tag"] == "unconditional-image-generation"
    assert front["license"] == "apache-2.0"
    assert "energy-based-model" in front["tags"]
    for words in (
        'dualmcmc.load("hf://user/tiny")',
        "images of shape 1x8x8",
        made["sha256"],
        f"{run.images:,}, in batches of 16",
        "| data | digits",
        "`reconstruction.inference.mse`",
        "before they were rounded to float16",
    ):
        assert words in card, words
    assert "x_displacement" not in card  # samples are no measurement of the model
    assert str(run_folder) not in card
    assert "license" not in card.split("---\n")[2]


def test_results_of_other_weights_are_not_in_the_card(server, token, call, run_folder):
    call("evaluate", run_folder, "--metrics", "mse", "-n", 20, "--device", "cpu")
    run = dualmcmc.load(run_folder, "cpu", ema=False)  # other weights, same folder
    run.push("user/tiny")
    assert "Results" not in server.repos["user/tiny"].files("main")["README.md"].decode()


@pytest.mark.parametrize(
    ("method", "present", "absent"),
    [
        ("vae", ("widths G 4, I 4", "z-chain"), ("E 4", "x-chain")),
        ("short-run", ("widths E 4 ", "x-chain in training", "x-chain of samples"), ("G 4", "z-chain")),
    ],
)
def test_card_is_of_the_networks_of_the_method(method, present, absent):
    widths = [f"nets.{name}_width=4" for name in ("energy", "generator", "inference")]
    config = config_io.load_config("digits", [f"method={method}", *widths])
    file = {"dtype": "float16", "bytes": 1, "sha256": "0"}
    card = model_cards.model_card("user/tiny", config, {}, 1, file, [], None)
    assert all(words in card for words in present)
    assert not any(words in card for words in absent)


def test_card_of_custom_networks_is_plain(server, token):
    config = plane_config("nets.kind=custom", "data.source=custom", "data.shape=[2]")
    run = dualmcmc.Run(config, plane_networks(), torch.device("cpu"), images=10)
    run.push("user/plane")
    card = server.repos["user/plane"].files("main")["README.md"].decode()
    assert "pipeline_tag" not in card
    assert "license" not in card
    assert "networks=networks" in card
    assert "data passed in Python" in card


def test_edited_card_is_kept(server, token, run):
    run.push("user/tiny")
    repo = server.repos["user/tiny"]
    repo.commit("main", {"README.md": b"my words", hub.FILE: b"other weights"})
    assert not run.push("user/tiny")["card"]
    assert repo.files("main")["README.md"] == b"my words"
    assert repo.files("main")[hub.FILE] != b"other weights"
    assert run.push("user/tiny", replace_card=True)["card"]
    assert repo.files("main")["README.md"].startswith(b"---\n")


def test_next_push_updates_the_generated_part(server, token, call, run_folder):
    """What a person wrote around it stays; what is false by now does not."""
    run = dualmcmc.load(run_folder, "cpu")
    run.push("user/tiny")
    repo = server.repos["user/tiny"]
    card = (
        repo.files("main")["README.md"].decode().replace("<!-- What", "Toys.\n\n<!-- What").replace("float16", "int8")
    )
    repo.commit("main", {"README.md": card.encode()})
    made = run.push("user/tiny", "float32")
    assert made["card"]
    updated = repo.files("main")["README.md"].decode()
    assert "Toys." in updated
    assert "int8" not in updated
    assert made["sha256"] in updated
    with pytest.raises(UserError, match="has a model card that states another licence, or none"):
        run.push("user/tiny", license="mit")


def test_same_weights_give_the_same_file(server, token, run, tmp_path):
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for file in files:
        run.export(file)
    assert len({file.read_bytes() for file in files}) == 1


def test_names_of_files_are_not_shared(server, token, call, run_folder, tmp_path):
    secret = tmp_path / "secret-clinic"
    secret.mkdir()
    pixels = torch.randint(0, 256, (8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    for number in range(3):
        Image.fromarray(pixels).save(secret / f"{number}.png")
    assert call("outliers", run_folder, "--against", secret, "-n", 3, "--device", "cpu").code == 0
    run = dualmcmc.load(run_folder, "cpu")
    run.trained_data = replace(run.trained_data, source="folder", path=str(secret))
    data = replace(run.config.data, source="folder", path=str(secret))
    run.config = replace(run.config, data=data, description="digits on other images: secret-clinic")
    run.push("user/tiny")
    card = server.repos["user/tiny"].files("main")["README.md"].decode()
    assert "other-images-1.energy.auroc" in card
    assert all(b"secret" not in content for content in server.repos["user/tiny"].files("main").values())


def test_card_shows_the_newest_of_each_number():
    def result(day, **numbers):
        return {"task": "evaluate", "time": f"2026-01-0{day}T", "numbers": {"ebm": numbers}, "samples": 10 * day}

    text = "\n".join(model_cards._measurements([result(1, fid=9.0, kid=0.5), result(2, fid=8.0, seconds=3)], "float32"))
    assert re.findall(r"`ebm\.(\w+)` \| (\S+)", text) == [("fid", "8"), ("kid", "0.5")]


@pytest.mark.parametrize("license", ["Apache 2", "", "a\nb"])
def test_wrong_licence(run, license):
    with pytest.raises(UserError, match="--license"):
        run.push("user/tiny", license=license)


@pytest.mark.parametrize("branch", ["", "a b", "../x"])
def test_wrong_branch(run, branch):
    with pytest.raises(UserError, match="is not the name of a branch"):
        run.push("user/tiny", branch=branch)


def test_push_command(server, token, call, run_folder):
    answer = call("push", run_folder, "user/tiny", "--private", "--branch", "b", "--message", "Longer", "--json")
    assert answer.code == 0, answer
    assert server.repos["user/tiny"].private
    assert answer.json["name"] == f"hf://user/tiny@{server.repos['user/tiny'].branches['b']}"
    assert answer.json["card"]
    assert hub.FILE not in server.repos["user/tiny"].files("main")
    text = call("push", run_folder, "user/tiny", "--dtype", "float32").out
    assert re.search(r"weights: hf://user/tiny@[0-9a-f]{40}, .* float32, SHA-256 [0-9a-f]{64}\n", text)


def test_refused_pushes(server, call, run_folder, weights, monkeypatch):
    assert_refused(call("push", run_folder, "user/tiny"), "cannot write hf://user/tiny", "hf auth login")
    assert_refused(call("push", run_folder, "tiny"), "use USER/NAME")
    assert_refused(call("push", run_folder, "user/tiny", "--dtype", "int8"), "--dtype int8")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.repo("user/tiny", {hub.FILE: weights})
    assert_refused(call("push", run_folder, "user/tiny", "--private"), "is public")
    server.close()
    assert_refused(call("push", run_folder, "user/tiny"), "cannot write hf://user/tiny", "cannot be reached")


def test_without_the_library(call, monkeypatch, run_folder):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert_refused(call("sample", "hf://user/tiny"), "pip install 'dualmcmc[hub]'")
    assert_refused(call("push", run_folder, "user/tiny"), "pip install 'dualmcmc[hub]'")
