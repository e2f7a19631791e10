"""How near to the link's limit pages move, layer by layer, permuted, from plan to last byte.

    python -m benchmarks.copy

The limit is one contiguous copy between registered memory of a tmpfs file and the device, in the
same run; for both ways at once, such copies both ways at once. Needs an
NVIDIA GPU; draws `results/copy.png` where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time

from benchmarks.gpu import PACKAGES, PAGES, Lane, Link, Rig, hardware
from benchmarks.report import RESULTS, Row, finish
from rayhicache.device.cuda.choice import CopyChoice
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.protocols import Direction

SHAPES = (
    ("GLM-5 pages, 73,728 + 8,448 B, 78 layers", (("kv", (73_728,)), ("index", (8_448,))), 78),
    ("GQA pages, 2 x 32 KiB, 32 layers", (("kv", (32_768, 32_768)),), 32),
    ("656-byte rows, 41,984 B, 78 layers", (("kv", (41_984,)),), 78),
    ("16 KiB pages, 78 layers", (("kv", (16_384,)),), 78),
)
BOUNDS = {  # must and aim, as fractions of the limit
    "GLM-5": (0.92, 0.985),
    "GQA": (0.91, 0.97),
    "656-byte": (0.80, 0.93),
    "16 KiB": (0.88, 0.93),
}
CURVE_KIB = (4, 8, 16, 24, 32, 64, 128, 256)
WAYS = {
    "copy engine": CopyChoice(load=(), store=()),
    "kernel": CopyChoice(load=((1 << 40, 1.0),), store=((1 << 40, 1.0),)),
    "chosen": CopyChoice(),
}


def main() -> int:
    """Measure, print, write and draw."""
    device = CudaDevice()
    link = Link()
    limits = {way: link.seconds_per_byte(way) for way in Direction}
    both = link.both()
    link.close()
    rows = [
        Row(
            name=f"{way.value} limit, one contiguous copy",
            value=1e-9 / limits[way],
            unit="GB/s",
            smaller_is_better=False,
        )
        for way in Direction
    ]
    for title, pools, layers in SHAPES:
        rig = Rig(device, pools, layers)
        must, aim = next(bound for name, bound in BOUNDS.items() if title.startswith(name))
        # Stores of rows and of small pages have no bound of their own in the plan.
        for way in Direction:
            bound = way is Direction.LOAD or title.startswith(("GLM-5", "GQA"))
            rows.append(
                Row(
                    name=f"{way.value} {title}",
                    value=limits[way] * rig.nbytes / rig.seconds(way),
                    unit="of limit",
                    limit=1.0,
                    must=must if bound else None,
                    aim=aim if bound else None,
                    smaller_is_better=False,
                )
            )
        if title.startswith("GLM-5"):
            rows += both_at_once(rig, both)
        rig.close()
    curves = {name: curve(choice, limits) for name, choice in WAYS.items()}
    for name, found in curves.items():
        rows += [
            Row(
                name=f"{way.value} {kib} KiB by {name}",
                value=value,
                unit="of limit",
                limit=1.0,
                smaller_is_better=False,
            )
            for (way, kib), value in found.items()
        ]
    draw(curves)
    gpu, driver = hardware()
    return finish("copy", rows, PACKAGES, hardware=gpu, driver=driver)


def both_at_once(rig: Rig, limits: dict[Direction, float], rounds: int = 6) -> list[Row]:
    """Loads and stores beside each other, each over a contiguous copy beside another one."""
    spent: dict[Direction, float] = {}

    def run(way: Direction) -> None:
        lane = Lane(rig, way)
        lane.move()
        ready.wait()
        start = time.perf_counter()
        for _ in range(rounds):
            lane.move()
        spent[way] = (time.perf_counter() - start) / rounds

    ready = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(way,)) for way in Direction]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        Row(
            name=f"{way.value} of GLM-5 pages while the other way runs too",
            value=rig.nbytes / spent[way] / limits[way],
            unit="of limit",
            limit=1.0,
            must=0.92,
            aim=0.97,
            smaller_is_better=False,
        )
        for way in Direction
    ]


def curve(choice: CopyChoice, limits: dict[Direction, float]) -> dict[tuple[Direction, int], float]:
    """Fractions of the limit by fragment size, one way of copying; 512 MiB or less each."""
    device = CudaDevice(choice=choice)
    found = {}
    for kib in CURVE_KIB:
        layers = max(min((1 << 29) // (kib << 10) // PAGES, 64), 2)
        rig = Rig(device, (("kv", (kib << 10,)),), layers)
        for way in Direction:
            found[way, kib] = limits[way] * rig.nbytes / rig.seconds(way, runs=3)
        rig.close()
    return found


def draw(curves: dict[str, dict[tuple[Direction, int], float]]) -> None:
    """`results/copy.png`: a line per way and direction."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib as plotting

    plotting.use("agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for plot, way in zip(plots, Direction, strict=True):
        for name, found in curves.items():
            values = [found[way, kib] for kib in CURVE_KIB]
            plot.plot(CURVE_KIB, values, marker="o", label=name)
        plot.axhline(1.0, color="grey", linewidth=0.8)
        plot.set_xscale("log", base=2)
        plot.set_title(way.value)
        plot.set_xlabel("fragment, KiB")
        plot.grid(visible=True, alpha=0.3)
    plots[0].set_ylabel("of one contiguous copy")
    plots[0].set_ylim(0, 1.05)
    plots[1].legend()
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "copy.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
