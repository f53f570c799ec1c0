"""What a configuration chooses by name: built-in functions and classes, and anybody's own.

    policy_losses: Registry[TokenLoss] = Registry("algorithm.policy_loss", takes=("inputs",))

    @policy_losses.register("clip")
    def clip(inputs, *, clip_ratio_low=0.2, clip_ratio_high=0.28): ...

    loss = policy_losses.bind(config.policy_loss, config.policy_loss_kwargs, settings=config)
    loss(inputs)

A setting names a built-in, ``package.module:object`` or ``path/to/file.py:object``. The object's keyword parameters are
its own settings: they are filled from the setting's keyword arguments (``<key>_kwargs``), else from the section's
settings of the same name, else they keep their defaults. What an object needs of the run (a critic, a reference policy,
…) it declares by ``needs``, and the rooms that provide it ask for nothing else.

Everything that can be wrong with a target is an ``ExtensionError``, one message that names the key, the object and the
cure. Standard library only: every room may import this one.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from megatron_retool.errors import InputError

T = TypeVar("T", bound=Callable[..., Any])

_MODULE_PREFIX = "megatron_retool_extension_"


class ExtensionError(InputError):
    """A setting names an object that cannot be loaded, called as it is meant to be, or used for what it returns."""


class Need(StrEnum):
    """What an object needs of the run."""

    GROUPS = "groups"
    """Several responses to each prompt: rollout.train.n of at least 2."""
    CRITIC = "critic"
    """A value model, whose ``values`` come with the batch."""
    REFERENCE = "reference"
    """A frozen copy of the initial policy, whose ``ref_log_probs`` come with the batch."""
    ENTROPY = "entropy"
    """The entropy of the policy at every token, with a gradient."""


def needs(*what: Need | str) -> Callable[[T], T]:
    """Declare on a function or class what it needs of the run; for objects that no ``register`` knows.

    Raises:
        ValueError: ``what`` is none of ``Need``.
    """
    declared = frozenset(Need(each) for each in what)

    def mark(target: T) -> T:
        target.needs = declared  # type: ignore[attr-defined]
        return target

    return mark


@dataclass(frozen=True)
class Extension[T: Callable[..., Any]]:
    """A resolved setting: call it like the object, without the keyword arguments that it has already.

    Attributes:
        key: the setting's dotted key.
        target: its value.
        object: what it names.
        kwargs: keyword arguments of every call.
        needs: what it needs of the run.
    """

    key: str
    target: str
    object: T
    kwargs: Mapping[str, Any]
    needs: frozenset[Need]

    @property
    def label(self) -> str:
        """``key=target``, for messages."""
        return f"{self.key}={self.target}"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the object with its keyword arguments; those given here come first."""
        return self.object(*arguments, **{**self.kwargs, **keywords})

    def attempt(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the object; what it raises becomes one message.

        Raises:
            ExtensionError: it names the key, the object, what was raised, and the line of the object's file.
        """
        try:
            return self(*arguments, **keywords)
        except Exception as error:
            raise ExtensionError(f"{self.label}: {self.raised(error)}") from error

    def raised(self, error: BaseException) -> str:
        """What to say of an error that a call raised, with the line of the object's own file."""
        try:
            file = inspect.getsourcefile(inspect.unwrap(self.object)) or ""
        except TypeError:
            file = ""
        line = _line_of(error, file) if file else ""
        return f"{_name_of(self.object)} raised {type(error).__name__}{line}: {error}"


class Registry[T: Callable[..., Any]]:
    """The built-in objects of one setting, and the way to others.

    Args:
        key: the setting's dotted key, such as algorithm.policy_loss.
        takes: names of the arguments that every object is called with by position.
        optional: keyword arguments that the caller gives to objects that have a parameter of that name.
        built_in: name -> "package.module:object", for objects that are imported when they are chosen.
        declared: what the objects that ``register`` is going to add need of the run, by name, for readers who do not
            import the module that adds them.
        kwargs_key: dotted key of the keyword arguments, for messages; None: ``<key>_kwargs``.
    """

    def __init__(
        self,
        key: str,
        takes: Sequence[str],
        optional: Collection[str] = (),
        built_in: Mapping[str, str] | None = None,
        kwargs_key: str | None = None,
        declared: Mapping[str, Collection[Need]] | None = None,
    ) -> None:
        self.key = key
        self.kwargs_key = kwargs_key or f"{key}_kwargs"
        self.takes = tuple(takes)
        self.optional = frozenset(optional)
        self._objects: dict[str, T] = {}
        self._built_in = dict(built_in or {})
        self._declared = dict(declared or {})

    def register(self, name: str, *what: Need | str) -> Callable[[T], T]:
        """Make a built-in of the decorated object, which needs ``what`` of the run besides what is declared for it."""
        wanted = {*what, *self._declared.get(name, ())}

        def add(target: T) -> T:
            if name in self.names:
                raise InputError(f"{self.key}: there is a built-in {name!r} already")
            self._objects[name] = needs(*wanted)(target) if wanted else target
            return target

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """The built-in names."""
        return (*self._objects, *self._built_in)

    def load(self, target: str) -> T:
        """The object that ``target`` names.

        Raises:
            ExtensionError: it is unknown, cannot be imported, or cannot be called.
        """
        if target in self._objects:
            return self._objects[target]
        result: T = load_object(self.key, self._built_in.get(target, target), known=self.names)
        if not callable(result):
            raise ExtensionError(
                f"{self.key}={target}: {_name_of(result)} cannot be called: name a function or a class"
            )
        return result

    def bind(self, target: str, kwargs: Mapping[str, Any] | None = None, settings: Any = None) -> Extension[T]:
        """The object that ``target`` names, with its keyword arguments.

        Args:
            kwargs: of the configuration (``<key>_kwargs``).
            settings: the section of the configuration that the key belongs to.

        Raises:
            ExtensionError: as ``load``; or it cannot be called with what ``takes`` lists and these keyword arguments.
        """
        result = self.load(target)
        given = dict(kwargs or {})
        filled = self._fill(target, result, given, settings)
        return Extension(self.key, target, result, filled, frozenset(getattr(result, "needs", ())))

    def wants(self, extension: Extension[T], name: str) -> bool:
        """Whether the object has a parameter ``name`` of ``optional``."""
        return name in inspect.signature(extension.object).parameters

    def _fill(self, target: str, found: T, given: dict[str, Any], settings: Any) -> dict[str, Any]:
        label = f"{self.key}={target}"
        try:
            parameters = inspect.signature(found).parameters
        except (TypeError, ValueError) as error:
            raise ExtensionError(f"{label}: its parameters cannot be read ({error}): wrap it in a function") from error
        own = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        any_position = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        if len(positional) < len(self.takes) and not any_position:
            raise ExtensionError(
                f"{label}: {_name_of(found)} takes {len(positional)} argument(s) by position, and is called with "
                f"{len(self.takes)}: {', '.join(self.takes)}. Define it as {_short_name(target)}"
                f"({', '.join(self.takes)}, …)"
            )
        for name in positional[: len(self.takes)]:
            own.pop(name, None)
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = sorted(set(given) - set(own) - self.optional)
        if unknown and not any_keyword:
            raise ExtensionError(
                f"{self.kwargs_key}.{unknown[0]}: {_name_of(found)} has no parameter of that name; its own are "
                f"{', '.join(sorted(set(own) - self.optional)) or 'none'}"
            )
        for name in own:
            if name not in given and name not in self.optional and settings is not None and hasattr(settings, name):
                given[name] = getattr(settings, name)
        missing = [n for n, p in own.items() if p.default is p.empty and n not in given and n not in self.optional]
        if missing:
            raise ExtensionError(
                f"{label}: {_name_of(found)} needs {', '.join(missing)}: set "
                f"{self.kwargs_key}={{{', '.join(f'{name}: …' for name in missing)}}}, or give it a default"
            )
        return given


def check_methods(label: str, made: object, protocol: type, *names: str) -> None:
    """Raise ExtensionError, its message begun with ``label``, where ``made`` lacks a method of ``protocol``."""
    for name in names:
        if not callable(getattr(made, name, None)):
            raise ExtensionError(
                f"{label}: {type(made).__name__} has no method {name}: see {protocol.__name__} in {protocol.__module__}"
            )


def load_object(key: str, target: str, known: Collection[str] = ()) -> Any:
    """What ``package.module:object`` or ``path/to/file.py:object`` names.

    Args:
        key: the setting's dotted key, for messages.
        known: names that are built in, for the message about a target that is none of them and of neither form.

    Raises:
        ExtensionError: the form is wrong, or the file, module or object does not exist or cannot be imported.
    """
    place, separator, attribute = target.rpartition(":")
    if not separator or not place or not attribute:
        nearest = difflib.get_close_matches(target, known, n=1)
        raise ExtensionError(
            f"{key}={target!r} is not one of {', '.join(known) or 'the built-in names (there are none)'}, and not of "
            "the form package.module:object or path/to/file.py:object"
            + (f"; the nearest is {nearest[0]}" if nearest else "")
        )
    module = _load_module(key, target, place)
    result: Any = module
    for part in attribute.split("."):
        if not hasattr(result, part):
            names = [name for name in vars(module) if not name.startswith("_")]
            nearest = difflib.get_close_matches(part, names, n=1)
            raise ExtensionError(
                f"{key}={target}: {place} has no {attribute!r}" + (f"; did you mean {nearest[0]}?" if nearest else "")
            )
        result = getattr(result, part)
    return result


def _load_module(key: str, target: str, place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ExtensionError(f"{key}={target}: there is no file {path}: correct the path (relative ones are looked "
                                 "up beside the configuration file, then in the working directory)")  # fmt: skip
        # One module for one file, under a name that is the same in every process: its classes can be pickled.
        name = f"{_MODULE_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        load = functools.partial(_load_file, name, path)
    else:
        load = functools.partial(importlib.import_module, place)
    try:
        return load()
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and place.split(".")[0] == error.name:
            raise ExtensionError(
                f"{key}={target}: there is no module {place}: install it, put its directory on PYTHONPATH, or name the "
                "file itself (path/to/file.py:object)"
            ) from error
        raise ExtensionError(
            f"{key}={target}: importing {place} failed{_line_of(error, place)}: {type(error).__name__}: {error}"
        ) from error


class _OwnFile(importlib.machinery.SourceFileLoader):
    """Leaves no compiled file beside the user's."""

    def set_data(self, *_: Any, **__: Any) -> None:
        """Write nothing."""


def _load_file(name: str, path: Path) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_OwnFile(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _line_of(error: BaseException, place: str) -> str:
    """at line N of the file, where the error was raised below one."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f" at line {error.lineno}"
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(place.rpartition("/")[2]):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" at line {line}"


def _name_of(found: Any) -> str:
    name = getattr(found, "__qualname__", None)
    return f"{name}" if name else f"the {type(found).__name__} {str(found)[:40]!r}"


def _short_name(target: str) -> str:
    return target.rpartition(":")[2] or target
