"""Errors a user meets; each message names the thing, what was expected and what to try."""

from __future__ import annotations


class FmegError(Exception):
    """Base of the errors that fmeg raises on purpose."""


class TraceError(FmegError, ValueError):
    """A function cannot be traced: data-dependent control flow, closed-over tensors, hidden randomness."""


class ShardingError(FmegError, ValueError):
    """A placement that cannot be: wrong names, sizes that do not divide, conflicts under `strict`."""


class NoRuleError(ShardingError, NotImplementedError):
    """An operation has no sharding rule."""


class MeshError(FmegError, ValueError):
    """A mesh that does not fit its devices, or axes that it does not have."""
