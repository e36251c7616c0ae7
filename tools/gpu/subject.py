"""What a part of gpu-report measures, and where it writes what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.dev import bench
from train_gpt import Run

RANKS = 8  # whose shapes are measured


class Report:
    """Verdicts of one part, also as lines of JSON in a file that gpu-report reads."""

    def __init__(self, path: Path | None, part: str = "", preset: str = "") -> None:
        self.path = path
        self.part = part
        self.preset = preset
        self.rows: list[dict[str, Any]] = []

    def send(self, **event: Any) -> None:
        """Tells gpu-report something."""
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def say(self, verdict: str, text: str, **figures: Any) -> None:
        """Adds a verdict: ok, FAULT, SLOW, set or note."""
        row = dict(part=self.part, preset=self.preset, verdict=verdict, text=text, figures=figures)
        self.rows.append(row)
        self.send(**row)


class Subject(NamedTuple):
    """What is measured: a preset at the size of one rank of eight."""

    trainer: ModuleType
    report: Report
    settings: dict[str, str]  # constants that differ from the preset's
    toy: bool

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function as compiled steps run it; at toy size without building anything."""
        back_end = "aot_eager" if self.toy else "inductor"
        return torch.compile(function, dynamic=False, fullgraph=True, backend=back_end)

    def assemble(self) -> Run:
        """A Run with data, model and a rank's share of the optimizer, nothing compiled, all weights zero."""
        cfg = self.trainer.load_config(os.environ | self.settings)
        return bench.assemble(cfg, self.trainer, RANKS)
