"""A turn encoder in two halves: lower layers that are frozen, upper layers that are trained.

What the lower half makes of a turn never changes, so it can be computed once and kept; a training
step then costs the upper half alone. The halves are cut by hooks on the layers of the transformer,
so that its own code makes masks, positions and whatever else its layers are given.

Letters: `B` turns, `L` tokens, `E` width of a vector, `S` layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dcl.errors import ConfigError
from dcl.learning.turn_encoder import TurnEncoder, find_layers

TOLERANCE = 1e-4
"""Most by which an entry of a vector may differ when the halves are run one after the other."""


class SplitEncoder(nn.Module):
    """A turn encoder whose upper layers alone are trained.

    Attributes:
        width: Size of a turn vector and of a hidden state.
        first: Layers below the cut; 0 where all are trained.
        bf16: Whether `forward` runs the layers in bfloat16, as autocast does; at first not.

    Args:
        encoder: Its parameters are frozen, except those of the upper layers.
        top: Layers to train, counted from the top; > 0.
        dropout: Use the encoder's own dropout in training, in the upper layers.

    Raises:
        ConfigError: If the transformer has fewer layers, or cannot be cut there.
    """

    def __init__(self, encoder: TurnEncoder, top: int, *, dropout: bool = False) -> None:
        super().__init__()
        layers = tuple(find_layers(encoder))
        if top > len(layers):
            raise ConfigError(f"layers: expected at most {len(layers)}, got {top}")
        self.encoder = encoder
        self.width: int = encoder.m.config.hidden_size
        self.first = len(layers) - top
        self.bf16 = False
        self._dropout = dropout
        self._layers = layers  # a tuple, as they are modules of the encoder already
        self._outputs: int | None = None  # that a layer returns in a tuple; None: it has one only
        self.requires_grad_(False)
        for layer in self.upper:
            layer.requires_grad_(True)
        self.eval()
        if self.first:
            self._check()

    @property
    def upper(self) -> tuple[nn.Module, ...]:
        """The layers that are trained, lowest first."""
        return self._layers[self.first :]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def train(self, mode: bool = True) -> SplitEncoder:
        """Switch dropout in the upper layers; what is frozen never drops anything."""
        super().train(False)
        for layer in self.upper if self._dropout else ():
            layer.train(mode)
        return self

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Encode turns, from the start or from the cut.

        Args:
            states: `(B, L)` int64 token ids, or `(B, L, E)` float, what `lower` gave for them.
            mask: `(B, L)` int64, 1 where there is a token; padded on the right.

        Returns:
            `(B, E)` float32, unit norm.
        """
        transformer = self.encoder.m
        with torch.autocast(states.device.type, torch.bfloat16, enabled=self.bf16):
            if states.is_floating_point():
                with self._resumed(states.float()):
                    # Only their shape counts: the cut replaces what is made of them.
                    out = transformer(input_ids=torch.zeros_like(mask), attention_mask=mask)
            else:
                out = transformer(input_ids=states, attention_mask=mask)
        return self.encoder.pool(out.last_hidden_state.float(), mask)

    @torch.no_grad()
    def lower(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states at the cut, in float32, as they are kept.

        Args:
            ids: `(B, L)` int64, padded on the right.
            mask: `(B, L)` int64, 1 where there is a token.

        Returns:
            `(B, L, E)` float32; those of padding mean nothing.
        """

        def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _ReachedCut(args[0] if args else kwargs["hidden_states"])

        handle = self._layers[self.first].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.encoder.m(input_ids=ids, attention_mask=mask)
        except _ReachedCut as reached:
            return reached.states
        finally:
            handle.remove()
        raise ConfigError("encoder: expected a transformer that calls its layers one by one")

    @contextmanager
    def _resumed(self, states: Tensor) -> Iterator[None]:
        """Layers below the cut hand on what they get; the first one above it gets `states`."""

        def put(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, name: states})

        def hand_on(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs[name]
            return hidden if self._outputs is None else (hidden, *[None] * (self._outputs - 1))

        name = "hidden_states"
        below = {layer: layer.__dict__.get("forward") for layer in self._layers[: self.first]}
        handle = self._layers[self.first].register_forward_pre_hook(put, with_kwargs=True)
        try:
            for layer in below:
                layer.__dict__["forward"] = hand_on
            yield
        finally:
            for layer, own in below.items():
                layer.__dict__["forward"] = own
                if own is None:  # the one of its class
                    del layer.__dict__["forward"]
            handle.remove()

    @torch.no_grad()
    def _check(self) -> None:
        """Learn what a layer returns, and compare the halves with the whole on a few tokens.

        Raises:
            ConfigError: If they differ, or cannot be run.
        """

        def note(layer: nn.Module, args: object, output: object) -> None:
            self._outputs = len(output) if isinstance(output, tuple) else None

        handle = self._layers[0].register_forward_hook(note)
        ids = torch.arange(12).reshape(2, 6) + 5
        mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
        try:
            whole = self(ids, mask)
            difference = float((self(self.lower(ids, mask), mask) - whole).abs().max())
            problem = f"their vectors differ by {difference:.2g}"
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            difference, problem = float("nan"), " ".join(str(error).split())[:200]
        finally:
            handle.remove()
        if not difference <= TOLERANCE:
            raise ConfigError(
                f"layers: the halves of this transformer cannot be run apart: {problem}; "
                f"train all of its layers: {len(self._layers)}"
            )


class _ReachedCut(Exception):  # noqa: N818  no error: it ends a pass half-way
    """Carries the hidden states out of the middle of a transformer."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states
