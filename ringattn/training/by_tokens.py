"""by_tokens(): modules that compute every token by itself, such as norms and MLPs, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
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

        def function(piece: Tensor) -> Tensor:
            y = whole(piece, *args, **kwargs)
            if not isinstance(y, Tensor):
                raise TypeError(
                    f"{type(module).__name__} returned an object of type {type(y).__name__}; by_tokens() "
                    "takes modules that return one tensor"
                )
            return y

        parts = [Part(tokens, function) for tokens in chunks(x.shape[1], chunk)]
        return run_in_parts(x, parts, parameters_of([("", module)]))

    module.forward = forward


def chunks(tokens: int, chunk: int) -> list[slice]:
    """Return slices of ``chunk`` tokens, the last one shorter."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def refuse_dropout(module: nn.Module, what: str) -> None:
    """Raise ValueError if a module has dropout: what is computed twice would differ."""
    dropouts = [name for name, m in module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p]
    if dropouts:
        raise ValueError(
            f"{type(module).__name__} has dropout ({', '.join(dropouts)}), and {what}() computes it twice; set its "
            "probability to 0"
        )
