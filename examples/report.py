"""What a training run shows and leaves behind: live progress, a JSONL of metrics, a plot of the loss, a sample."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor

BARS = "▁▂▃▄▅▆▇█"


class Report:
    """Use it as a context around the training loop. With `quiet` (all processes but one) it does nothing.

    baselines   bits per byte of other compressors, by name
    beside      folder of another run, drawn beside this one
    """

    def __init__(
        self,
        out: Path,
        *,
        steps: int,
        title: str,
        config: Any,
        baselines: Mapping[str, float],
        beside: Path | None = None,
        quiet: bool = False,
    ) -> None:
        self.out, self.steps, self.title, self.baselines, self.quiet = out, steps, title, baselines, quiet
        self.beside = None if beside is None else Beside.read(beside)
        self.shares: list[Tensor] = []
        self.records: list[dict[str, float]] = []
        self.evals: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self.final: float | None = None
        self.console = Console(quiet=quiet, highlight=False)
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            expand=True,
        )
        self.task = self.progress.add_task("", total=steps, left="")
        self.live = Live(self._view(), console=self.console, refresh_per_second=4, transient=False)
        if not quiet:
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
            (out / "metrics.jsonl").write_text("")

    def __enter__(self) -> Report:
        self.started = time.perf_counter()
        if self.console.is_terminal and not self.quiet:
            self.live.start()
        else:
            self.console.print(self.title)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live.is_started:
            self.live.update(self._view(), refresh=True)
            self.live.stop()
        if self.records and not self.quiet:
            self.plot()

    def note(self, text: str) -> None:
        """A line for the reader."""
        self.console.print(text)

    def step(self, step: int, *, tokens: int, seconds: float, **values: float) -> None:
        """A step is done: its number from 1, tokens, seconds, and what else is worth a line in metrics.jsonl."""
        self.seconds.append(seconds)
        record = {"step": step, **values, "tokens_per_second": tokens / seconds, "memory_bytes": memory()}
        self.records.append(record)
        self._write(record)
        self.progress.update(self.task, completed=step, left=f"{clock(self.left())} left")
        if self.live.is_started:
            self.live.update(self._view())
        elif step == 1 or step % max(1, self.steps // 20) == 0:
            shown = (
                f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  {gib(record['memory_bytes'])}"
            )
            self.console.print(f"step {step}/{self.steps}  {shown}  {clock(self.left())} left")

    def load(self, counts: Tensor) -> float:
        """Tokens that went to each expert in this step, "layers experts"; returns `max_load`."""
        self.shares.append(counts.cpu() / counts.cpu().sum(-1, keepdim=True))
        return max_load(counts)

    def held_out(self, step: int, bits_per_byte: float, final: bool = False) -> None:
        """Bits per byte of held-out files after a step: of some rows, or `final`, of all (unless stopped)."""
        if final:
            self.final = bits_per_byte
        else:
            self.evals.append({"step": step, "bits_per_byte": bits_per_byte})
        self._write({"step": step, "bits_per_byte": bits_per_byte, "final": final})
        if self.live.is_started:
            self.live.update(self._view())
        else:
            self.console.print(f"step {step}/{self.steps}  bits per byte {bits_per_byte:.4f}")

    def sample(self, text: str) -> None:
        """Text that the model wrote."""
        (self.out / "sample.py").write_text(text)
        self.console.print(Panel(Syntax(text, "python", word_wrap=True), title="sample"))

    def summary(self) -> None:
        """Bits per byte beside the baselines."""
        table = Table("held-out files", "bits per byte", box=None)
        assert self.final is not None, "held_out(…, final=True) comes before the summary"
        rows = sorted([*self.baselines.items(), ("this model", self.final)], key=lambda x: x[1])
        for name, value in rows:
            table.add_row(name, f"{value:.4f}", style="bold" if name == "this model" else "")
        self.console.print(table)
        self.console.print(f"{len(self.records)} steps, {clock(time.perf_counter() - self.started)}; see {self.out}/")

    def left(self) -> float:
        """Seconds to go, from the median of recent steps."""
        recent = sorted(self.seconds[-20:])
        return recent[len(recent) // 2] * (self.steps - len(self.seconds))

    def plot(self) -> None:
        """loss.png: training loss, and bits per byte of held-out files beside the baselines; and experts.png."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        if self.shares:
            figure = draw_experts(torch.stack(self.shares), self.beside, self.title)
            figure.savefig(self.out / "experts.png", dpi=120)
            plt.close(figure)
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        steps, losses = [r["step"] for r in self.records], [r["loss"] for r in self.records]
        left.plot(steps, losses, color="0.75", linewidth=0.8)
        left.plot(steps, smooth(losses), color="C0")
        if self.beside is not None:
            left.plot(smooth(self.beside.losses), "--", color="C7", label=self.beside.name)
            left.legend()
        left.set(xlabel="step", ylabel="training loss (nats a token)")
        steps, bits = [e["step"] for e in self.evals], [e["bits_per_byte"] for e in self.evals]
        right.plot(steps, bits, "o-", color="C0", label="model, on some rows")
        if self.final is not None:
            right.plot([len(self.records)], [self.final], "*", color="C3", markersize=12, label="model, at the end")
        if self.beside is not None and self.beside.bits is not None:
            right.axhline(self.beside.bits, linestyle="--", color="C7", label=f"{self.beside.name}, at the end")
        for i, (name, value) in enumerate(self.baselines.items()):
            right.axhline(value, linestyle="--", color=f"C{i + 1}", label=name)
        right.set(xlabel="step", ylabel="bits per byte of held-out files", ylim=(0, None))
        right.legend()
        figure.suptitle(self.title)
        figure.savefig(self.out / "loss.png", dpi=120)
        plt.close(figure)

    def _write(self, record: Mapping[str, float]) -> None:
        if not self.quiet:
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _view(self) -> Panel:
        grid = Table.grid(padding=(0, 3))
        if self.records:
            last = self.records[-1]
            known = self.final or (self.evals[-1]["bits_per_byte"] if self.evals else None)
            bits = "…" if known is None else f"{known:.3f}"
            others = ", ".join(f"{name} {value:.3f}" for name, value in self.baselines.items())
            speed = sum(r["tokens_per_second"] for r in self.records[-10:]) / len(self.records[-10:])
            grid.add_row(
                "loss",
                f"[bold]{smooth([r['loss'] for r in self.records])[-1]:.4f}[/]",
                sparkline([r["loss"] for r in self.records]),
            )
            grid.add_row("bits per byte", f"[bold]{bits}[/]", f"held-out files; {others}")
            grid.add_row(
                "tokens/s",
                f"{speed:,.0f}",
                f"memory {gib(last['memory_bytes'])}, gradient norm {last['grad_norm']:.2f}",
            )
        else:
            grid.add_row("tracing, differentiating, partitioning the step; then it runs …")
        return Panel(Group(grid, self.progress.get_renderable()), title=self.title)


@dataclass(frozen=True)
class Beside:
    """What is read of another run's metrics.jsonl."""

    name: str
    losses: list[float]
    loads: list[float]
    bits: float | None

    @classmethod
    def read(cls, folder: Path) -> Beside:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        of = lambda key: [r[key] for r in records if key in r]
        final = [r["bits_per_byte"] for r in records if r.get("final")]
        return cls(folder.name, of("loss"), of("max_load"), final[-1] if final else None)


def max_load(counts: Tensor) -> float:
    """Tokens of the busiest expert over those of an average one, the mean over layers: 1 is balance.

    counts   "layers experts"
    """
    return float((counts.amax(-1) * counts.shape[-1] / counts.sum(-1)).mean())


def draw_experts(shares: Tensor, beside: Beside | None, title: str) -> Any:
    """Shares of tokens, "steps layers experts", as a picture for each layer; below, how busy the busiest expert is."""
    from matplotlib import pyplot as plt

    steps, layers, experts = shares.shape
    figure, axes = plt.subplot_mosaic(
        [[f"layer {i}" for i in range(layers)], ["load"] * layers],
        figsize=(max(8, 3.2 * layers), 6),
        layout="constrained",
    )
    for i in range(layers):
        image = axes[f"layer {i}"].imshow(
            (experts * shares[:, i].T).numpy(), aspect="auto", vmin=0, vmax=2, cmap="RdBu_r", interpolation="nearest"
        )
        axes[f"layer {i}"].set(title=f"layer {i}", xlabel="step", ylabel="expert" if i == 0 else "")
    figure.colorbar(image, ax=axes[f"layer {layers - 1}"], label="share of tokens / even share")
    loads = [max_load(s) for s in shares]
    axes["load"].plot(range(1, steps + 1), loads, color="C0", label="this run")
    if beside is not None and beside.loads:
        axes["load"].plot(range(1, len(beside.loads) + 1), beside.loads, "--", color="C7", label=beside.name)
    axes["load"].axhline(1, color="0.8", linewidth=0.8)
    axes["load"].set(xlabel="step", ylabel="busiest / even share", ylim=(0, None))
    axes["load"].legend()
    figure.suptitle(title)
    return figure


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential moving average, without the bias of its start."""
    out, total, weight = [], 0.0, 0.0
    for v in values:
        total, weight = keep * total + (1 - keep) * v, keep * weight + 1 - keep
        out.append(total / weight)
    return out


def sparkline(values: list[float], width: int = 48) -> str:
    """A line of bars: values between their least and largest."""
    n = min(width, len(values))
    means = [
        sum(part) / len(part) for part in (values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n))
    ]
    low, high = min(means), max(means)
    return "".join(BARS[int((v - low) / (high - low + 1e-12) * (len(BARS) - 1))] for v in means)


def memory() -> int:
    """The most memory this process has held, in bytes: of the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def gib(n: float) -> str:
    return f"{n / 2**30:.2f} GiB"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
