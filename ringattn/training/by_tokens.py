"""by_tokens(): modules that compute every token by itself, such as norms and MLPs, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .parts import Part, parameters_of, run_in_parts


def by_tokens(module: nn.Module, chunk: int) -> None:
    """Let ``module`` compute ``chunk`` tokens at a time, in the forward and again in the backward, so that only its
    input is kept, and what it makes of one chunk is in memory at once.

    Results are those of all tokens at once, but for the order of sums in products of other shapes. Gradients of its
    parameters are summed over the chunks in float32.

    Args:
        module: maps (batch, tokens, ...) to one tensor (batch, tokens, ...), each token by itself, in which it must not
            differ from one time to the next. Wrappers such as FSDP2 may follow.
        chunk: tokens.

    Raises:
        ValueError: chunk is not positive, or the module has dropout.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} tokens; it must be at least 1")
    refuse_dropout(module, "by_tokens")
    whole: Callable[..., Any] = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[1] <= chunk and not torch.is_grad_enabled():
            return whole(x, *args, **kwargs)

        def function(piece: Tensor, tokens: slice) -> Tensor:
            y = whole(piece, *args, **kwargs)
            if not isinstance(y, Tensor):
                raise TypeError(
                    f"{type(module).__name__} returned an object of type {type(y).__name__}; by_tokens() "
                    "takes modules that return one tensor"
                )
            return y

        return run_by_tokens(function, x, chunk, parameters_of([("", module)]))

    module.forward = forward


def run_by_tokens(function: Callable[..., Tensor], x: Tensor, chunk: int, parameters: Sequence[Tensor]) -> Tensor:
    """Return what ``function(x[:, tokens], tokens=tokens)`` makes of ``chunk`` tokens at a time, in their order; if
    these are scalars, their sum.

    Args:
        x: (batch, tokens, ...); without tokens it is one empty chunk.
        parameters: all that the function uses and that may have gradients, see :func:`.parts.run_in_parts`.
    """
    starts = range(0, max(x.shape[1], 1), chunk)
    chunks = [slice(start, min(start + chunk, x.shape[1])) for start in starts]
    return run_in_parts(x, [Part(tokens, partial(function, tokens=tokens)) for tokens in chunks], parameters)


def refuse_dropout(module: nn.Module, what: str) -> None:
    """Raise ValueError if a module has dropout: what is computed twice would differ."""
    dropouts = [name for name, m in module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p]
    if dropouts:
        raise ValueError(
            f"{type(module).__name__} has dropout ({', '.join(dropouts)}), and {what}() computes it twice; set its "
            "probability to 0"
        )
