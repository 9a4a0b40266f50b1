"""Names that a test uses without defining them: of the solution, and of modules."""

import ast
import builtins
import functools
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}


@dataclass(frozen=True)
class UsedNames:
    names: list[str]
    """What the solution has to define."""
    modules: dict[str, str]
    """Modules that the tests import, under these names. The solution could change its own."""


@functools.lru_cache(maxsize=256)  # the completions of a prompt have the same tests
def used_names(test: str) -> UsedNames:
    """Return the names that the test uses. Raises SyntaxError or ValueError for other text."""
    tree = ast.parse(test)
    top = symtable.symtable(test, "test.py", "exec")
    used, defined = set(), set()
    for table in _tables(top):
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                if symbol.is_referenced():
                    used.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    defined.add(symbol.get_name())
    free = {name for name in used - defined if not name.startswith("__")}
    modules = {name: ALIASES.get(name, name) for name in free if _is_module(name, tree)}
    names = free - set(dir(builtins)) - set(modules)
    # A solution that could replace any built-in function would change what the tests check. A test
    # that uses only one calls the solution: `assert sum(10, 15) == 6`.
    if not names and len(functions := free & set(dir(builtins))) == 1:
        names = functions
    return UsedNames(sorted(names), modules)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _is_module(name: str, tree: ast.Module) -> bool:
    """Return whether the name is that of a module and used as `math.pi`, not as `bisect()`."""
    if name not in ALIASES and name not in sys.stdlib_module_names:
        return False
    uses = {id(node) for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name}
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return uses <= bases
