"""The documentation matches the code: links, commands, options, settings and file names exist."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

from dualmcmc import Optimizers, config_io, step
from dualmcmc.cli import app
from dualmcmc.config import NETWORKS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("weights/*.md")])
OLD_NAMES = {"CHANGELOG.md", "docs/lab/README.md"}  # their tables list old spellings
CALL = re.compile(r"(?:^|[\s`(\[/])dualmcmc ((?:[^`#\n\\]|\\\n)+)")
SETTING = re.compile(r"\b((?:data|nets|teaching|optim|ema|sampling|train|guard|engine)(?:\.[a-z_]+)+)=")
SOURCE_FILE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)`")


def name(page):
    return str(page.relative_to(ROOT))


def fences(text, language=r"\w*"):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def inline_code(text):
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


GROUPS = ("data", "paper")  # commands with commands of their own


def commands():
    """Every command by its words, such as ("data", "fetch"), with its option names."""
    tree = {(word,): command for word, command in typer.main.get_command(app).commands.items()}
    for group in GROUPS:
        tree |= {(group, word): command for word, command in tree.pop((group,)).commands.items()}
    return {
        path: {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        for path, command in tree.items()
    }


COMMANDS = commands()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        linked = page if not target else (page.parent / target).resolve()
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in OLD_NAMES], ids=name)
def test_commands_and_options_exist(page):
    text = page.read_text()
    calls = [call for block in fences(text, "sh") for call in CALL.findall(block)]
    calls += [match[1] for code in inline_code(text) if (match := re.match("dualmcmc (.+)", code))]
    for call in calls:
        words = call.replace("\\\n", " ").split()
        if words[0].startswith("-") or words[0] in ("COMMAND", "…"):
            continue
        path = tuple(words[:2]) if words[0] in GROUPS else (words[0],)
        assert path in COMMANDS, call
        known = COMMANDS[path] | {"-h", "--help"}
        for word in words:
            if re.match(r"--?[a-z]", word.lstrip("[")):
                assert word.strip("[],.;)").split("=")[0] in known, call


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in OLD_NAMES], ids=name)
def test_settings_exist(page):
    text = page.read_text()
    known = set(config_io.setting_names())
    for code in (*fences(text), *inline_code(text)):
        for key in SETTING.findall(code):
            assert key in known, key


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_source_files_exist(page):
    text = page.read_text()
    bases = [
        ROOT,
        ROOT / "src" / "dualmcmc",
        *(ROOT / "src" / "dualmcmc" / folder for folder in ("data", "methods")),
        ROOT / "benchmarks",
    ]
    files = [*SOURCE_FILE.findall(text), *re.findall(r"(?:tests|benchmarks|examples)/[\w/]+\.py", text)]
    for file in files:
        assert any((base / file).exists() for base in bases), file


def test_example_of_a_method(monkeypatch):
    """The method in add-a-method.md passes the test there, and takes a step."""
    text = (ROOT / "docs" / "add-a-method.md").read_text()
    code = {kind: re.search(rf"<!-- {kind} -->\n```python\n(.*?)```", text, re.S)[1] for kind in ("method", "test")}
    module = ModuleType("dualmcmc.methods.contrastive_divergence")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code["method"], module.__dict__)
    namespace: dict = {}
    exec(code["test"], namespace)
    namespace["test_chains_start_at_the_data"]()
    trio, (x, _) = namespace["make_trio"]("energy"), namespace["make_batch"]()
    optimizers = Optimizers(energy=torch.optim.SGD(trio.energy.parameters(), lr=0.1))
    stats = step(trio, optimizers, x, None, namespace["PAPER"], method=namespace["METHOD"])
    assert stats["grad_norm_energy"] > 0


@pytest.mark.parametrize("method", NETWORKS)
def test_methods_are_described(method):
    assert f"| `{method}` |" in (ROOT / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_reference_lists_every_option(path):
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    title, common = " ".join(path), re.search(r"## Common options\n(.*?)\n## ", text, re.S)[1]
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", text, re.S | re.M)
    assert section, f"command-line.md has no section '{title}'"
    for option in COMMANDS[path] - {"--help", "-h"}:
        if option.startswith("-"):
            assert f"`{option}" in section[1] + common, option
