"""A mode in which waiting for the device is an error: reading a tensor's values, copying from pageable memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result's shape or value must be known on the host.
_WAITING = ("_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "_unique2", "unique_consecutive",
            "unique_dim", "is_nonzero", "equal", "repeat_interleave")  # fmt: skip
# Methods that copy values out without an operator that a mode could see.
_METHODS = ("tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


# What makes a tensor of Python values: on a GPU the host waits for the copy, except in the one module that pins it.
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.from_numpy)
_PINNED_BY = "draftsmith.eval.decoder.transfer"
# What makes a tensor on the host unless it is told of a device: that is one copy further from the GPU's tensors.
_FACTORIES = (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint,
              torch.randn, torch.randperm, torch.zeros, torch.tril_indices, torch.triu_indices)  # fmt: skip

_ALLOWED = [False]
_WAITS: list[str] = []


class Waited(AssertionError):
    """Something waited for the device."""


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "repeat_interleave" and func._overloadname == "self_int":
            name = "repeat_interleave_by_an_int"  # its shape is known
        if not _ALLOWED[0]:
            if name in _WAITING:
                raise Waited(f"{name} waits for the device")
            if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
                masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
                if masks:
                    raise Waited(f"{name} by a boolean mask waits for the device")
        return func(*args, **(kwargs or {}))


class _Factories(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _ALLOWED[0]:
            caller = sys._getframe(1).f_globals.get("__name__")
            if func in _FROM_VALUES and caller != _PINNED_BY:
                raise Waited(f"{func.__name__} in {caller} copies from pageable memory")
            if func in _FACTORIES and kwargs.get("device") is None:
                raise Waited(f"{func.__name__} in {caller} without a device makes a tensor on the host")
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raise `Waited` for anything in the body that would wait for a device, on CPU tensors, too.

    Tensors that are made on the host are refused as well: on a GPU they would have to be copied there.
    """
    kept = {name: getattr(torch.Tensor, name) for name in _METHODS}

    def guarded(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _ALLOWED[0]:
                raise Waited(f"Tensor.{name} waits for the device")
            _WAITS.append(name)
            with torch._C.DisableTorchFunction():  # a function mode would look the method up again by its name
                return kept[name](self, *args, **kwargs)

        return method

    try:
        for name in _METHODS:
            setattr(torch.Tensor, name, guarded(name))
        with _Factories(), _Operators():
            yield
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


@contextlib.contextmanager
def waiting_allowed() -> Iterator[list[str]]:
    """Lift the ban for the body; what waited is in the list that it yields."""
    _ALLOWED[0] = True
    _WAITS.clear()
    try:
        yield _WAITS
    finally:
        _ALLOWED[0] = False
