"""What transformers' code of a model reads and computes. Its source is read; nothing of it is imported or run.

transformers copies code from model to model, so two families that compute alike have functions that are equal word for
word. A family without a declaration of its own is compared with the declared ones: by the keys of config.json that its
code reads, and by its functions.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CONFIGURATIONS = ("config", "text_config")
"""Names by which modelling code calls its configuration."""
_OUTER = "PreTrainedModel"
"""End of the name of a class that initialises and loads weights, and computes nothing."""


@dataclass(frozen=True)
class ModellingCode:
    """What the classes of a language model read and compute.

    Attributes:
        keys: of config.json, and of mappings in it, that the code reads.
        functions: "Attention.forward" (the family's name is cut from the class's) -> what it computes, comparable by
            equality: without comments, annotations, docstrings and casts. Constructors are left out, since what they
            make shows in tensors and keys.
        turns_pairs: positions rotate features that lie side by side, not half a head apart.
        turns_some_layers: whether a layer has positions is decided in the code.
    """

    keys: frozenset[str]
    functions: Mapping[str, str]
    turns_pairs: bool = False
    turns_some_layers: bool = False


@functools.cache
def modelling_code(model_type: str) -> ModellingCode | None:
    """The code of ``model_type``; None where transformers has none of a language model."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    places = getattr(importlib.util.find_spec("transformers"), "submodule_search_locations", None)
    if not isinstance(name, str) or not places:
        return None
    module = model_type_to_module_name(model_type)
    try:
        source = (Path(places[0]) / "models" / module / f"modeling_{module}.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return read_code(source, name)


def read_code(source: str, model: str) -> ModellingCode:
    """The code of the class ``model`` of a module, with all that it refers to in it.

    Args:
        model: such as "LlamaForCausalLM".
    """
    definitions = {node.name: node for node in ast.parse(source).body if isinstance(node, _DEFINITIONS)}
    result, waiting = dict[str, ast.ClassDef | ast.FunctionDef](), [model]
    while waiting:
        name = waiting.pop()
        if name in definitions and name not in result and not name.endswith(_OUTER):
            result[name] = definitions[name]
            waiting += [node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)]
    keys = {key for node in result.values() for key in _keys(node)}
    prefix = model.partition("For")[0]
    plain = _Plain(prefix)
    functions = {name: plain.visit(node) for top in result.values() for name, node in _functions(top, prefix)}
    return ModellingCode(
        frozenset(keys),
        {name: ast.dump(node) for name, node in functions.items()},
        any(_turns_pairs(node) for node in functions.values()),
        any(_turns_some_layers(node) for node in functions.values()),
    )


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)


def _keys(node: ast.AST) -> Iterator[str]:
    """Keys of the configuration that the code reads: ``config.key``, ``getattr(config, "key")``, and those of mappings
    in it."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and _is_configuration(each.value):
            yield each.attr
        elif isinstance(each, ast.Subscript) and _is_within(each.value):
            yield from _texts(each.slice)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and _is_within(each.func.value):
            yield from _texts(*each.args[:1])
        elif (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and each.func.id in ("getattr", "hasattr")
            and (_is_configuration(each.args[0]) or _is_within(each.args[0]))
        ):
            yield from _texts(each.args[1])


def _is_configuration(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in _CONFIGURATIONS


def _is_within(node: ast.expr) -> bool:
    """Whether it is a value of the configuration: ``config.rope_parameters``."""
    if isinstance(node, ast.Name):
        return node.id in ("rope_parameters", "rope_params", "rope_scaling")
    return isinstance(node, ast.Attribute) and (_is_configuration(node.value) or node.attr == "rope_parameters")


def _texts(*nodes: ast.expr) -> Iterator[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _functions(node: ast.ClassDef | ast.FunctionDef, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    if isinstance(node, ast.FunctionDef):
        yield node.name, node
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef) and each.name not in _SILENT:
            yield f"{node.name.removeprefix(prefix)}.{each.name}", each


_SILENT = ("__init__", "extra_repr", "get_input_embeddings", "set_input_embeddings")
"""Methods that compute nothing of a token."""


def _turns_pairs(function: ast.FunctionDef) -> bool:
    """Whether it rotates every other feature: ``x[..., 0::2]``."""
    return function.name == "rotate_half" and any(
        isinstance(node, ast.Slice) and node.step is not None for node in ast.walk(function)
    )


def _turns_some_layers(function: ast.FunctionDef) -> bool:
    """Whether it calls apply_rotary_pos_emb behind an ``if``, with no other call where that does not hold."""
    return any(
        isinstance(node, ast.If) and sum(map(_rotates, node.body)) and not sum(map(_rotates, node.orelse))
        for node in ast.walk(function)
    )


def _rotates(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id.startswith("apply_rotary") for node in ast.walk(statement))


class _Plain(ast.NodeTransformer):
    """Without what says nothing of the computation."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns, node.decorator_list = None, []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.generic_visit(ast.Assign([node.target], node.value))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Without a cast: in float32, in which models are compared, it changes nothing."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "float", "type_as"):
            return self.visit(node.func.value)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = node.id.removeprefix(self._prefix)
        return node
