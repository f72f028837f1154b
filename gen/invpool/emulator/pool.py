"""Both kernels of a spec under given plans, on the emulator, without a package: for tests, tools and experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from invpool.abi import DIRECTIONS, Direction, argument_names, written
from invpool.algorithms import Choice
from invpool.emulator.build import Build
from invpool.emulator.kernel import EmulatedKernel, Launched, Output
from invpool.render import render_kernel
from invpool.spec import PoolSpec


class EmulatedPool:
    """Forward and backward of ``choice`` for ``spec``.

    Attributes:
        spec, choice, build, portable_switch: as given; see :class:`EmulatedKernel` for the last two.
        sources: the .cu text of each direction.
        kernels: what runs, by direction; built when first asked for.
    """

    def __init__(self, spec: PoolSpec, choice: Choice, build: Build = "plain", portable_switch: bool = False) -> None:
        self.spec, self.choice, self.build, self.portable_switch = spec, choice, build, portable_switch
        self.sources = {d: render_kernel(choice.algorithm, spec, choice.plan(d)) for d in DIRECTIONS}
        self._kernels: dict[Direction, EmulatedKernel] = {}

    def kernel(self, direction: Direction) -> EmulatedKernel:
        """The built kernel of a direction."""
        if direction not in self._kernels:
            self._kernels[direction] = EmulatedKernel(
                self.sources[direction], build=self.build, portable_switch=self.portable_switch
            )
        return self._kernels[direction]

    def run(
        self, direction: Direction, tensors: Mapping[str, Tensor | None], **options: Any
    ) -> tuple[dict[str, Tensor], Launched]:
        """Launches one kernel over the batch of x.

        Args:
            direction: which one.
            tensors: by ABI name, contiguous: x; mask of a masked spec (uint8); scale, or none for 1/sqrt(K);
                backward also g and what forward gave.
            options: see :meth:`EmulatedKernel.launch`.

        Returns:
            What the kernel wrote, by ABI name, and the launch.
        """
        spec, algorithm = self.spec, self.choice.algorithm
        launch = algorithm.launch(spec, self.choice.plan(direction))
        x = tensors["x"]
        assert x is not None
        batch = x.shape[0]
        types = {False: getattr(torch, spec.dtype), True: getattr(torch, spec.scalar)}
        shapes = written(direction, algorithm.state(spec), batch, spec.H, spec.K, spec.layout)
        outputs = {name: Output(shape, types[is_scalar]) for name, (shape, is_scalar) in shapes.items()}
        scale = torch.tensor(1 / math.sqrt(spec.K), dtype=types[True])
        given: dict[str, Any] = {"B": batch, "scale": scale, **tensors}
        if direction == "backward" and "out_acc" in algorithm.state(spec):
            given["out"] = given["out_acc"]  # backward reads out as it was before it was rounded
        names = argument_names(direction, algorithm.state(spec))
        arguments = [outputs.get(name, given.get(name)) for name in names]
        launched = self.kernel(direction).launch(
            launch.blocks(batch), launch.threads, launch.shared_bytes, arguments, **options
        )
        filled = [name for name in names if name in outputs]
        return dict(zip(filled, launched.outputs, strict=True)), launched

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        """What the forward kernel writes for x: out and the state, by ABI name."""
        return self.run("forward", {"x": x, "mask": mask}, **options)[0]

    def backward(
        self, x: Tensor, g: Tensor, state: Mapping[str, Tensor], mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The dx that the backward kernel writes for upstream g[B,H], given what forward wrote."""
        return self.run("backward", {**state, "x": x, "g": g, "mask": mask}, **options)[0]["dx"]
