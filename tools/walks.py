"""Count how far one walks to follow a value through the code: ``walks.py [ROOT]``.

From imports, calls and annotations alone; nothing is imported:

- climbs: calls that hand on the job or its holder, from `simulate` on in the order of
  the source, each function once; a return to a higher floor is a climb. A part of the
  job, as in `f(job.seed)`, is not the job.
- names of a task, an update and epsilon's cap, and the classes that hold one. Keys of
  files (fields of a `...Spec`) are named for their readers, and are listed apart.
"""

import ast
import gc
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FLOORS = {"federation": 0, "privacy": 1, "cloud_adapters": 1, "clients": 2}
FLOORS |= {"aggregator": 2, "monitoring": 2, "deploy": 3, "crossfed": 4}
JOB = re.compile(r"self|_?(job|federation)")  # A federation holds its job.
KINDS = {"a task": "(Round|Secure)?Task", "an update": "(Site|Masked|Weighted)Update"}
CAP = re.compile(r"(max|target|largest|total|most)_epsilon|epsilon_(cap|bound|limit)")
Place = tuple[str, str]  # Module, and a function or a class and its method.


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the product by its dotted name."""
    found = {}
    for path in sorted(p for room in FLOORS for p in (root / room).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


class Walk:
    """The way of the job: how often it climbs, and the modules that it passes."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        """Index functions and imports."""
        self.climbs, self.passed = 0, set[str]()
        self._bodies: dict[Place, ast.AST] = {}
        self._imports: dict[str, dict[str, str]] = {}
        self._seen: set[Place] = set()
        for module, tree in trees.items():
            for name, body in itertools.chain(*map(_functions, tree.body)):
                self._bodies[module, name] = body
            self._imports[module] = {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in _without_expressions(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }

    def follow(self, module: str, name: str) -> None:
        """Walk through a function, and through what it hands the job to."""
        self._seen.add((module, name))
        self.passed.add(module)
        calls = [
            n for n in ast.walk(self._bodies[module, name]) if isinstance(n, ast.Call)
        ]
        for call in sorted(calls, key=lambda n: (n.end_lineno, n.end_col_offset)):
            target = self._target(module, name.partition(".")[0], call.func)
            if target is None or target in self._seen:
                continue
            given = [*call.args, *(word.value for word in call.keywords)]
            if isinstance(call.func, ast.Attribute):
                given.append(call.func.value)
            last = [ast.unparse(value).rpartition(".")[2] for value in given]
            if any(map(JOB.fullmatch, last)):
                self.follow(*target)
                self.climbs += _floor(target[0]) < _floor(module)  # It returns.

    def _target(self, module: str, owner: str, called: ast.expr) -> Place | None:
        head, dot, rest = ast.unparse(called).partition(".")
        if head in {"self", "cls"}:
            head = owner
        text, path = f"{head}{dot}{rest}", self._imports[module].get(head)
        if path is not None:
            parts = f"{path}{dot}{rest}".split(".")
            cuts = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
            module = next((cut for cut in cuts if cut in self._imports), "")
            text = ".".join(parts)[len(module) + 1 :]
        both = ((module, text), (module, f"{text}.__init__"))
        return next((found for found in both if found in self._bodies), None)


def _floor(module: str) -> int:
    return FLOORS[module.partition(".")[0]]


def _functions(top: ast.stmt, owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    if isinstance(top, ast.FunctionDef):
        yield owner + top.name, top
    elif isinstance(top, ast.ClassDef):
        for inner in top.body:
            yield from _functions(inner, f"{top.name}.")


def holders(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, annotation and class of all that is annotated."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.arg | ast.AnnAssign):
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            words = _union(node.annotation)
            field = owner if isinstance(node, ast.AnnAssign) else ""
            yield name.rpartition(".")[2].strip("_"), words, field
        yield from holders(node, node.name if isinstance(node, ast.ClassDef) else owner)


def _without_expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, but for expressions and what is in them."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from _without_expressions(node)


def _union(annotation: ast.expr | None) -> str:
    """Text of a name or of a union of such; empty for all that holds one of them."""
    if not isinstance(annotation, ast.Name | ast.BinOp):
        return ""
    return ast.unparse(annotation)


def main(root: Path) -> None:
    """Print the figures."""
    gc.disable()  # The trees stay to the end, and looking through them takes as long.
    trees = modules(root)
    walk, held = Walk(trees), [h for tree in trees.values() for h in holders(tree)]
    walk.follow(*next(p for p in walk._bodies if p[1] == "simulate"))  # noqa: SLF001
    print(f"the job climbs {walk.climbs} times, through {len(walk.passed)} modules")
    for kind, is_one in KINDS.items():
        found = [h for h in held if re.fullmatch(rf"({is_one}( \| )?)+", h[1])]
        called, classes = {h[0] for h in found}, {h[2] for h in found} - {""}
        print(f"{kind} has {len(called)} names: {', '.join(sorted(called))}")
        print(f"  and is held by {len(classes)} classes: {', '.join(sorted(classes))}")
    caps = [h for h in held if CAP.fullmatch(h[0])]
    keys = {h[0] for h in caps if h[2].endswith("Spec")}
    called = {h[0] for h in caps if not h[2].endswith("Spec")}
    print(f"epsilon's cap has {len(called)} names: {', '.join(sorted(called))}")
    print(f"  and the keys of files are: {', '.join(sorted(keys))}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent))
