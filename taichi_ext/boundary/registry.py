"""User rules: derivatives given for a ``ti.func`` or a marked subexpression, and the table of these rules."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import types
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError, InvalidRuleError

RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Any])


@dataclass(eq=False)
class GradientRule:
    """One registered rule.

    Attributes:
        name: its name in the registry.
        target: its ``Func``, or the name of its mark.
        target_name: the same as text.
        function: the rule itself, Taichi code.
        parameters: the names of its parameters.
        place: file and line of its definition.
        is_enabled: whether it is applied.
        uses: how many times it has been traced into a kernel.
    """

    name: str
    target: Any
    target_name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    place: str
    is_enabled: bool = True
    uses: int = field(default=0, compare=False)

    @property
    def taken(self) -> set[str]:
        """The arguments whose tangents the rule takes."""
        return {p[2:] for p in self.parameters if p.startswith("d_")}


class _Contexts(threading.local):
    """The contexts that are open in a thread: names of rules, None for all, and whether they are applied."""

    overrides: tuple[tuple[frozenset[str] | None, bool], ...] = ()


class Registry:
    """The table of rules: prints as a table; rules can be disabled, enabled and removed by name.

    A kernel is rebuilt only if a rule changes that it uses or could use.

    Example:
        >>> from taichi_ext import registry
        >>> registry.clear()
        >>> print(registry)
        no rules are registered
    """

    def __init__(self) -> None:
        self._rules: dict[str, GradientRule] = {}
        self._lock = threading.RLock()
        self._version = 0
        self._contexts = _Contexts()
        self._marks: set[str] = set()  # the names of marks that were seen in kernels
        self._warned: set[str] = set()
        self._messages: list[str] = []  # warnings about functions that were defined again

    def note_mark(self, name: str) -> None:
        """Remember that a kernel has a mark of this name."""
        self._marks.add(name)

    def warnings(self) -> list[str]:
        """Warnings about functions defined again, and rules for marks that no kernel has had so far; each once."""
        messages, self._messages = self._messages, []
        for rule in self:
            is_unused = isinstance(rule.target, str) and rule.target not in self._marks
            if is_unused and self.is_enabled(rule) and rule.name not in self._warned:
                self._warned.add(rule.name)
                seen = ", ".join(repr(m) for m in sorted(self._marks)) or "none"
                messages.append(
                    f"The rule {rule.name!r} ({rule.place}) is for mark({rule.target!r}, ...), which no kernel has had "
                    f"so far; marks seen: {seen}."
                )
        return messages

    @property
    def version(self) -> Hashable:
        """A value that changes when any rule does, and is another one within contexts of this thread."""
        overrides = self._contexts.overrides
        return (self._version, *overrides) if overrides else self._version

    def _changed(self) -> None:
        self._version += 1

    def add(self, rule: GradientRule) -> None:
        """Register a rule, in place of itself if its cell or module is run again."""
        with self._lock:
            known = self._rules.get(rule.name)
            if known is not None and _is_defined_again(rule.function, known.function):
                del self._rules[rule.name]
            elif known is not None:
                raise InvalidArgumentError(
                    f"A rule named {rule.name!r} is already registered ({known.place}); remove it "
                    f"with registry.remove({rule.name!r}) or give the new one another name=."
                )
            self._rules[rule.name] = rule
            self._changed()

    def rule_for(self, target: object) -> GradientRule | None:
        """The enabled rule of a function or mark; if there are several, the one registered last.

        A function that is defined again, as its cell of a notebook is run again, keeps its rule.
        """
        with self._lock:
            enabled = [r for r in self._rules.values() if self.is_enabled(r)]
            found = [r for r in enabled if _same(r.target, target)]
            if not found and not isinstance(target, str):
                found = [r for r in enabled if _is_function_again(target, r.target)]
                for rule in found[-1:]:
                    self._follow(rule, target)
        return found[-1] if found else None

    def _follow(self, rule: GradientRule, func: Any) -> None:
        """Check a rule for a function that was defined again; warn once if the function has changed."""
        _check_parameters(rule.function, rule.parameters, [a.name for a in backend.arguments(func)], rule.target_name)
        code, before = func.func.__code__, rule.target.func.__code__
        text = f"{rule.target_name} ({code.co_filename}:{code.co_firstlineno})"
        if _content(code) != _content(before) and text not in self._warned:
            self._warned.add(text)
            self._changed()
            self._messages.append(
                f"{text} was defined again with another body, and keeps the rule {rule.name!r} ({rule.place}). Run the "
                f"cell of the rule again if it still holds; otherwise registry.remove({rule.name!r})."
            )

    def remove(self, name: str) -> None:
        """Remove a rule."""
        with self._lock:
            del self._rules[self._get(name).name]
            self._changed()

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            for name in list(self._rules):
                self.remove(name)

    def enable(self, *names: str) -> None:
        """Apply these rules again; without a name, all rules."""
        self._set(names, True)

    def disable(self, *names: str) -> None:
        """Use autodiff instead of these rules; without a name, instead of all rules."""
        self._set(names, False)

    def disabled(self, *names: str) -> contextlib.AbstractContextManager[None]:
        """A context in which these rules are not applied in this thread; without a name, all rules."""
        return self._within(names, False)

    def enabled(self, *names: str) -> contextlib.AbstractContextManager[None]:
        """A context in which these rules are applied in this thread; without a name, all rules."""
        return self._within(names, True)

    @contextlib.contextmanager
    def _within(self, names: tuple[str, ...], state: bool) -> Generator[None, None, None]:
        override = (frozenset(self._get(name).name for name in names) if names else None, state)
        outer = self._contexts.overrides
        self._contexts.overrides = (*outer, override)
        try:
            yield
        finally:
            self._contexts.overrides = outer

    def is_enabled(self, rule: GradientRule) -> bool:
        """Whether a rule is applied: this thread's innermost context for it decides, otherwise its own setting."""
        for names, state in reversed(self._contexts.overrides):
            if names is None or rule.name in names:
                return state
        return rule.is_enabled

    def _set(self, names: tuple[str, ...], state: bool) -> None:
        with self._lock:
            for rule in [self._get(name) for name in names] or list(self._rules.values()):
                rule.is_enabled = state
            self._changed()

    def _get(self, name: object) -> GradientRule:
        if not isinstance(name, str) or name not in self._rules:
            known = ", ".join(repr(n) for n in self._rules) or "none"
            raise InvalidArgumentError(f"No rule is named {name!r}; registered are: {known}.")
        return self._rules[name]

    def __dir__(self) -> list[str]:  # for completion: what users call
        return ["clear", "disable", "disabled", "enable", "enabled", "remove"]

    def __getitem__(self, name: str) -> GradientRule:
        return self._get(name)

    def __iter__(self) -> Iterator[GradientRule]:
        return iter(list(self._rules.values()))

    def __len__(self) -> int:
        return len(self._rules)

    def __contains__(self, name: object) -> bool:
        return name in self._rules

    def __repr__(self) -> str:
        if not self._rules:
            return "no rules are registered"
        rows = [("name", "target", "defined at", "enabled", "uses")]
        rows += [
            (r.name, r.target_name, r.place, "yes" if self.is_enabled(r) else "no", str(r.uses))
            for r in self._rules.values()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


class RulesInUse:
    """The rules of the registry that one kernel asks for, noted as it asks.

    Attributes:
        found: the rules, or None, by function or name of a mark.
        version: of the registry, at which they were the ones in use.
    """

    def __init__(self, *, takes_derivative: bool) -> None:
        self.takes_derivative = takes_derivative
        self.found: dict[object, GradientRule | None] = {}
        self.version = registry.version

    def are_current(self) -> bool:
        """Whether the registry has these rules now."""
        version = registry.version
        if version != self.version:
            if any(registry.rule_for(target) is not rule for target, rule in self.found.items()):
                return False
            self.version = version
        return True

    def rule_for(self, target: object) -> GradientRule | None:
        """The enabled rule of a function or mark."""
        if not self.takes_derivative:
            return None
        rule = self.found[target] = registry.rule_for(target)
        return rule

    def note_mark(self, name: str) -> None:
        """The kernel has a mark of this name."""
        registry.note_mark(name)

    def count_uses(self) -> None:
        """The kernel is built: each of its rules is used once more."""
        for rule in {rule for rule in self.found.values() if rule is not None}:
            rule.uses += 1


def _same(a: object, b: object) -> bool:
    return a == b if isinstance(a, str) and isinstance(b, str) else a is b


def _is_function_again(func: Any, known: Any) -> bool:
    return not isinstance(known, str) and _is_defined_again(func.func, known.func)


def _is_defined_again(new: Any, old: Any) -> bool:
    """Whether a function has taken the place of another one, as its cell of a notebook or its module was run again."""
    a, b = new.__code__, old.__code__
    if (new.__module__, new.__qualname__) != (old.__module__, old.__qualname__) or "<locals>" in new.__qualname__:
        return False
    if a.co_filename == b.co_filename:
        return a is not b and a.co_firstlineno == b.co_firstlineno
    return not os.path.exists(a.co_filename) and not os.path.exists(b.co_filename)  # cells: one file for each text


def _content(code: types.CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars


registry = Registry()


def boundary_gradient(
    target: str | Callable[..., object], name: str | None = None
) -> Callable[[RuleFunction], RuleFunction]:
    """Give the derivative of a ``ti.func`` or of a marked subexpression; autodiff does everything else.

    The decorated function is Taichi code.  It selects its inputs by the names of its parameters:

    * the arguments of the function, or the further values of ``mark``, by their names;
    * ``d_<argument>``, the tangent of an argument;
    * ``out``, the primal result;
    * ``auto``, the tangent from autodiff.

    It returns the tangent of the result and must be linear in the tangents.  If it does not take ``d_x``, the argument
    ``x`` keeps its tangent from autodiff.  A rule that takes ``auto`` decides about all arguments.  If a rule calls its
    own function, it gets the value without a tangent.

    Args:
        target: a ``ti.func``, a method of a data-oriented class, a function of another package such as
            ``ti.math.mix``; or the name of a mark.
        name: the name of the rule in the registry; by default the name of the target.

    Returns:
        A decorator that registers the rule and returns the function unchanged.

    Raises:
        InvalidArgumentError: the target is neither a ``ti.func`` nor a name, a parameter of the rule is unknown, or the
            name is taken.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import boundary_gradient, registry
        >>> @ti.func
        ... def heaviside(x):
        ...     return ti.select(x > 0, 1.0, 0.0)
        >>> @boundary_gradient(heaviside)
        ... def _(x, d_x):
        ...     return ti.exp(-x * x) * d_x
        >>> "heaviside" in registry
        True
        >>> registry.remove("heaviside")
    """

    def register(function: RuleFunction) -> RuleFunction:
        declared = backend.taichi_func(function)
        given: Any = getattr(declared, "func", function)
        if not inspect.isfunction(given) or given.__name__ == "<lambda>":
            raise InvalidArgumentError(f"A rule is a function defined with def; {function!r} is not one.")
        parameters = tuple(inspect.signature(given).parameters)
        func: Any = None
        if isinstance(target, str):
            target_name = target
        else:
            func = backend.taichi_func(target)
            if func is None:
                raise InvalidArgumentError(
                    f"boundary_gradient takes a @ti.func or the name of a mark; {target!r} is neither."
                )
            target_name = func.func.__qualname__.split("<locals>.")[-1]
            _check_parameters(given, parameters, [a.name for a in backend.arguments(func)], target_name)
        code = given.__code__
        place = f"{code.co_filename}:{code.co_firstlineno}"
        rule = GradientRule(
            name or target_name, target if func is None else func, target_name, given, parameters, place
        )
        registry.add(rule)
        return function

    return register


def _check_parameters(function: Any, parameters: tuple[str, ...], arguments: list[str], target: str) -> None:
    allowed = {*arguments, *(f"d_{a}" for a in arguments), "out", "auto"}
    for parameter in parameters:
        if parameter not in allowed:
            raise InvalidRuleError(
                f"The rule {function.__qualname__!r} for {target!r} has a parameter {parameter!r}; it can take "
                f"{', '.join(sorted(allowed))}."
            )
