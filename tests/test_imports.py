"""Imports point one way: nets, langevin -> methods -> engine -> tasks -> report, health, bench, paper -> cli.

Read from the source, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
from pathlib import Path

import pytest

import dualmcmc

PACKAGE = Path(dualmcmc.__file__).parent
BASE = {"config", "rng", "utils"}
ENGINE = BASE | {"config_io", "data", "hub", "nets", "langevin", "methods", "pretrained"}
TASKS = ENGINE | {"engine", "metrics"}
ALLOWED = {  # what each part may import besides itself
    "utils": set(),
    "rng": {"utils"},
    "config": {"utils"},
    "config_io": {"config", "utils"},
    "hub": {"utils"},
    "pretrained": {"data", "hub", "utils"},
    "metrics": {"utils"},
    "data": BASE,
    "nets": BASE,
    "langevin": BASE | {"nets", "metrics"},
    "methods": BASE | {"nets", "langevin"},
    "engine": ENGINE,
    "tasks": TASKS,
    "bench": TASKS | {"tasks"},
    "health": {"config", "utils"},
    "report": TASKS | {"tasks", "health"},
    "paper": TASKS | {"tasks", "health"},
    "cli": TASKS | {"tasks", "bench", "health", "report", "paper"},
    "__main__": {"cli"},
    "": TASKS | {"tasks", "report"},  # dualmcmc/__init__.py: the public API
}


def module_name(path: Path) -> str:
    """The name within the package: engine.step; the package itself is the empty string."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(module: str) -> set[str]:
    """The modules of the package that a module imports, anywhere in its source. All may import `__version__`."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {module or 'dualmcmc'}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, _, inner = name.partition(".")
            if root == "dualmcmc" and inner != "__version__":
                found.add(inner if inner in MODULES else inner.rpartition(".")[0])
    return found - {module}


IMPORTS = {module: imports_of(module) for module in MODULES}


def test_every_part_has_a_rule():
    assert {part_of(module) for module in MODULES} == ALLOWED.keys()


def test_imports_exist():
    assert set().union(*IMPORTS.values()) <= MODULES.keys()
    assert IMPORTS["methods.dual_mcmc"] >= {"langevin", "methods", "methods.terms", "nets", "rng"}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part):
    forbidden = [
        f"{module} imports {target or 'dualmcmc'}"
        for module, targets in IMPORTS.items()
        for target in sorted(targets)
        if part_of(module) == part and part_of(target) not in ALLOWED[part] | {part}
    ]
    assert not forbidden


def test_reference_shares_no_code():
    assert IMPORTS["bench.reference"] == set()


def test_no_cycles():
    cycles = [" -> ".join(cycle) for cycle in find_cycles(IMPORTS)]
    assert not cycles


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The cycle that each back edge of a depth-first search closes; empty if the graph has none."""
    cycles, done = [], set()

    def visit(node: str, path: list[str]) -> None:
        if node in path:
            cycles.append([*path[path.index(node) :], node])
        elif node not in done:
            for target in sorted(graph[node]):
                visit(target, [*path, node])
            done.add(node)

    for node in graph:
        visit(node, [])
    return cycles


def test_find_cycles():
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]
