"""The checks of an exported module, as text: its arguments must be those that its kernel was made for."""

from __future__ import annotations

import textwrap

from taichi_ext.backend import RUNTIME

IMPORTS = f"""\
import contextlib as _contextlib
import math as _math
import numbers as _numbers
import weakref as _weakref
from math import inf, nan

import numpy as _np
{RUNTIME.header}
"""

CHECKS = textwrap.dedent('''\
    _NUMPY = {"u1": "bool", "f16": "float16", "f32": "float32", "f64": "float64"}
    _NUMPY.update({f"{k}{n}": f"{text}{n}" for k, text in (("i", "int"), ("u", "uint")) for n in (8, 16, 32, 64)})


    def _kind(given):
        kinds = {ti.Field: "a field", ti.Ndarray: "a ti.ndarray", _np.ndarray: "a NumPy array"}
        name = "a torch tensor" if _is_tensor(given) else f"of type {type(given).__name__}"
        return next((text for kind, text in kinds.items() if isinstance(given, kind)), name)


    def _is_tensor(given):
        return type(given).__module__.split(".")[0] == "torch" and hasattr(given, "data_ptr")


    def _threads(most):
        """Raise where more threads add up tangents than the kernel was made for."""
        count = ti.cfg.cpu_max_num_threads
        if count > most:
            advice = f"use ti.init(cpu_max_num_threads={most}), or export it in a program like this one"
            raise ValueError(f"Taichi has {count} threads; the kernel was made for {most}: {advice}.")


    def _compare(name, what, own, expected):
        if own != expected:
            raise ValueError(f"{name} has the {what} {own}; the kernel was made for {expected}.")


    def _field(name, given, dtype, shape, element_shape, first, layout):
        """Raise unless a field has this type, shape, shape of entries, first index and kind of layout."""
        if not isinstance(given, (ti.ScalarField, ti.MatrixField)):
            raise TypeError(f"{name} is {_kind(given)}; pass a field of numbers, vectors or matrices.")
        element = (given.n, given.m)[: given.ndim] if isinstance(given, ti.MatrixField) else ()
        _compare(name, "shape", tuple(given.shape), shape)
        _compare(name, "entries of shape", element, element_shape)
        _compare(name, "type", _type_name(given.dtype), dtype)
        _compare(name, "first index", tuple(given.vars[0].ptr.snode().offset), first)
        _compare(name, "layout", _layout(given.vars[0].ptr.snode()), layout)


    def _layout(node):
        kinds = ti._lib.core.SNodeType
        while node is not None and node.type in (kinds.root, kinds.dense, kinds.place):
            node = node.parent
        return "dense" if node is None else "sparse"


    def _array(name, given, dtype, shape, element_shape):
        """Raise unless an array has this type, shape and shape of entries."""
        if isinstance(given, ti.Ndarray):
            _compare(name, "shape", tuple(given.shape), shape)
            _compare(name, "entries of shape", tuple(given.element_shape), element_shape)
            _compare(name, "type", _type_name(given.dtype), dtype)
        elif isinstance(given, _np.ndarray) or _is_tensor(given):
            _compare(name, "shape", tuple(given.shape), (*shape, *element_shape))
            _compare(name, "type", str(given.dtype).removeprefix("torch."), _NUMPY[dtype])
            if not (given.is_contiguous() if _is_tensor(given) else given.flags.c_contiguous):
                raise ValueError(f"{name} is not contiguous in memory; pass an array in C order.")
        else:
            raise TypeError(f"{name} is {_kind(given)}; pass a NumPy array, a ti.ndarray or a torch tensor.")


    def _type_name(dtype):
        return next((name for name in _NUMPY if getattr(ti, name) == dtype), str(dtype))


    def _number(name, given, is_real):
        if not isinstance(given, _numbers.Real if is_real else (_numbers.Integral, _np.bool_)):
            raise TypeError(f"{name} is {_kind(given)}; expected {'a real number' if is_real else 'an integer'}.")


    def _vector(name, given, shape):
        _compare(name, "shape", _np.shape(given.to_numpy() if isinstance(given, ti.Matrix) else given), shape)


    def _distinct(fields):
        """Raise where one field is given for two."""
        names = {}
        for name, field in fields.items():
            other = names.setdefault(id(field), name)
            if other != name:
                raise ValueError(f"{other} and {name} are one field; the kernel was made for two.")


    def _apart(arrays, others):
        """Raise where an array shares memory with another one."""
        seen = dict(others)
        for name, array in arrays.items():
            for other, known in seen.items():
                if other != name and _share_memory(array, known):
                    raise ValueError(f"{name} shares memory with {other}; pass an array of its own.")
            seen[name] = array


    def _share_memory(a, b):
        if isinstance(a, ti.Ndarray) or isinstance(b, ti.Ndarray):
            return a is b
        (start, size), (other, count) = _span(a), _span(b)
        return start < other + count and other < start + size


    def _span(array):
        if _is_tensor(array):
            return array.data_ptr(), array.numel() * array.element_size()
        return array.__array_interface__["data"][0], array.nbytes


    def _jacobian(name, array, dtype, shape, is_flat):
        """The array of J as the kernel takes it: with one axis, if it is ``is_flat``."""
        _array(name, array, dtype, shape, ())
        if isinstance(array, ti.Ndarray):
            if is_flat:
                raise TypeError(f"{name} is a ti.ndarray; pass a NumPy array or a torch tensor for this J.")
            return array
        if _is_tensor(array):
            array = array.detach()
            array = array.numpy() if array.device.type == "cpu" else array
        elif not array.flags.writeable:
            raise ValueError(f"{name} is read-only; pass an array that can be written to.")
        else:
            array = _np.asarray(array)
        return array.reshape(-1)


    def _check_not_ended(program):
        if program() is None or ti.lang.impl.get_runtime().prog is not program():
            raise RuntimeError("ti.init or ti.reset was called since bind, which ended all fields; call bind again.")


    def _check_exist(fields):
        """Raise for a field or a node of a layout whose tree was destroyed: Taichi would use freed memory."""
        nodes, expressions = _living()
        for name, given in fields.items():
            if isinstance(given, ti.Field):
                is_there = all(v.ptr.get_underlying_ptr_address() in expressions for v in getattr(given, "vars", ()))
            else:
                is_there = not isinstance(given, ti.SNode) or any(given.ptr is node for node in nodes)
            if not is_there:
                reason = "its tree was destroyed, or ti.init was called since it was made"
                raise ValueError(f"{name} no longer exists: {reason}; create it again.")


    def _living():
        """All nodes of the trees that exist, and the addresses of the expressions of fields.

        Taichi puts no mark on a tree that was destroyed, but gives its number to the next one. So empty trees take all
        free numbers, and are destroyed last to first, which leaves the numbers in their order for the next time.
        """
        ti.lang.impl.get_runtime().materialize()
        core, program, taken = ti._lib.core, ti.lang.impl.get_runtime().prog, []
        count, registry = program.get_snode_tree_size(), core.SNodeRegistry()
        free_last = {n for n in range(count) if not program.get_snode_root(n).get_num_ch()} | {count}
        while not taken or taken[-1].id() not in free_last:
            root = registry.create_root(program)
            taken.append(core.finalize_snode_tree(registry, root, program, False))
        nodes, expressions = [program.get_snode_root(n) for n in range(count)], set()
        for node in nodes:  # which grows
            nodes += [node.get_ch(n) for n in range(node.get_num_ch())]
            if node.is_place():
                expressions.add(node.get_expr().get_underlying_ptr_address())
        for tree in reversed(taken):
            tree.destroy_snode_tree(program)
        return nodes, expressions


    def _seed(array, first, stride, count):
        for n in range(count):
            array[first + n * stride] = 1
''')
