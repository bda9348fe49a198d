"""Where in the user's code an operation comes from."""

from __future__ import annotations

import os
import sys
from types import FrameType, ModuleType
from typing import Any

import optree
import torch

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = (os.path.dirname(os.path.abspath(torch.__file__)), os.path.dirname(os.path.abspath(optree.__file__)))
_USER_PARTS = tuple(os.path.join(_HERE, d) for d in ("models", "optim", "rl"))

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _is_user(filename: str) -> bool:
    if filename.startswith(_USER_PARTS):
        return True
    return not (filename.startswith((_HERE, *_LIBRARY, "<frozen")) or "/lib/python3" in filename)


def user_frame(skip: int = 1) -> FrameType | None:
    """The innermost frame that is neither this library's machinery nor torch's."""
    frame: FrameType | None = sys._getframe(skip)
    while frame is not None and not _is_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """`file.py:12 function` of the user's line that runs now (in a notebook `In[3]:12 function`), "" if there is
    none."""
    frame = user_frame(2)
    if frame is None:
        return ""
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def _shown(filename: str) -> str:
    """The name of a file, or of a notebook's cell as its tracebacks give it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell.compile.format_code_name(filename) if shell else None
    return cell[1] if cell else os.path.basename(filename)


def variable_name(tensor: Any) -> str:
    """How the user calls a tensor: by a name in a calling frame, closure or global, or by an attribute or key of
    one."""
    frame: FrameType | None = user_frame(2)
    while frame is not None:
        if _is_user(frame.f_code.co_filename):
            for scope in (frame.f_locals, frame.f_globals):
                for name, obj in list(scope.items()):
                    if (found := _inside(name, obj, tensor)) is not None:
                        return f"the tensor `{found}`"
        frame = frame.f_back
    return "a tensor"


def _inside(name: str, obj: Any, tensor: Any) -> str | None:
    """`name` if it is the tensor, `name.attribute` or `name['key']` if that is."""
    if obj is tensor:
        return name
    if isinstance(obj, torch.nn.Module):
        members = {f".{k}": v for k, v in (*obj.named_parameters(), *obj.named_buffers())}
    elif isinstance(obj, dict):
        members = {f"[{k!r}]": v for k, v in obj.items()}
    elif isinstance(obj, (tuple, list)):
        members = {f"[{i}]": v for i, v in enumerate(obj)}
    elif not isinstance(obj, (type, ModuleType)):
        members = {f".{k}": v for k, v in getattr(obj, "__dict__", {}).items()}
    else:
        members = {}
    return next((name + k for k, v in members.items() if v is tensor), None)


def custom_function() -> str:
    """The `torch.autograd.Function` whose forward runs now, or "" if none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return getattr(frame.f_locals.get("cls"), "__name__", "torch.autograd.Function")
        frame = frame.f_back
    return ""
