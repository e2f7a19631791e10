"""`GpuWorker`: the actor that runs an engine, one prompt at a time.

The class is plain; `rayhicache.actors.remote` makes the actor of it. What the engine needs is
imported where it runs: it takes seconds, which a controller or a command line needn't wait.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import ray

from rayhicache.actors.link import RayPort
from rayhicache.actors.messages import PartResult, WorkerReady
from rayhicache.actors.naming import NAMESPACE, controller_name
from rayhicache.actors.settings import WorkerSettings
from rayhicache.core.jobs import Assignment, PartReport
from rayhicache.errors import DeviceFull, PoolUnreachable, RayHiCacheError
from rayhicache.logs import name_process
from rayhicache.wire.codec import decode, encode

if TYPE_CHECKING:
    from rayhicache.device.protocols import Device
    from rayhicache.engines.transformers_engine import TransformersEngine

log = logging.getLogger(__name__)

TELL_SECONDS = 0.05


class GpuWorker:
    """One engine on one node. Ray restarts it, and its node's pool still has what it stored.

    The constructor never fails, so that Ray doesn't restart a worker that can't come up: `ready`
    raises what went wrong, and tries again when it is called again.
    """

    def __init__(self, settings: bytes) -> None:
        self._settings = decode(settings, WorkerSettings)
        self._engine: TransformersEngine | None = None
        self._device_name = ""
        self._cancelled: set[tuple[str, int, int]] = set()
        name_process(tier=self._settings.cluster, node=self._settings.seat, epoch=0)
        import torch

        # One thread: workers share the node's cores, and equal runs then give equal bits.
        torch.set_num_threads(1)
        try:
            self._engine = self._started()
        except RayHiCacheError as fault:
            log.error("worker %s can't start: %s", self._settings.name, fault)

    def ready(self) -> bytes:
        """The worker's registration, a `WorkerReady`, once its engine is up.

        Raises:
            NoLocalPool, LayoutMismatch, UnknownModel, PoolUnreachable, DeviceNotFound,
                DeviceFull, InvalidConfig: why it isn't.
        """
        if self._engine is None:
            self._engine = self._started()
        settings = self._settings
        engine = settings.engine
        ready = WorkerReady(
            name=settings.name,
            seat=settings.seat,
            pid=os.getpid(),
            seed=self._engine.client.seed(),
            longest=min(engine.max_positions, engine.num_blocks * settings.page_tokens),
            device=self._device_name,
        )
        return encode(ready)

    def run(self, assignment: bytes) -> bytes:
        """Answer one prompt; a `PartResult`. Tokens are told to the controller on the way.

        Raises:
            JobCancelled: `cancel` came for this run.
            InvalidRequest, PromptTooLong: the prompt can't be served here or elsewhere.
            RayHiCacheError: another worker may do better.
        """
        run = decode(assignment, Assignment)
        mine = (run.job, run.part, run.attempt)
        engine = self._running()
        teller = _Teller(self._settings.cluster, assignment)
        try:
            made = engine.generate(
                f"{run.job}/{run.part}",
                run.prompt,
                run.max_new_tokens,
                on_token=teller.token,
                cancelled=lambda: mine in self._cancelled,
            )
        finally:
            # Whoever was cancelled had this worker, and it runs one at a time.
            self._cancelled.clear()
        report = PartReport(
            prompt_tokens=made.prompt_tokens,
            restored_local_tokens=made.restored_local_tokens,
            restored_remote_tokens=made.restored_remote_tokens,
            recomputed_tokens=made.recomputed_tokens,
            ttft_seconds=made.ttft_seconds,
            worker=self._settings.name,
        )
        return encode(PartResult(tokens=made.tokens, report=report))

    def cancel(self, job: str, part: int, attempt: int) -> None:
        """End a run at its next forward. One that isn't running is passed over."""
        self._cancelled.add((job, part, attempt))

    def settle(self, timeout: float) -> bool:
        """Wait until what was stored so far is committed; False on time-out."""
        return self._engine is None or self._engine.settle(timeout)

    def close(self) -> None:
        """End the session with the pool. Idempotent."""
        if self._engine is not None:
            self._engine.close(self._settings.copy_seconds)

    def _started(self) -> TransformersEngine:
        import torch

        from rayhicache.device.limits import CopyLimits
        from rayhicache.device.opening import describe
        from rayhicache.engines.transformers_engine import TransformersEngine

        settings = self._settings
        port = RayPort(
            settings.cluster,
            settings.seat,
            client=settings.name,
            call_seconds=settings.call_seconds,
            pull_seconds=settings.pull_seconds,
        )
        device = self._device()
        self._device_name = describe(device)
        try:
            return TransformersEngine(
                settings.engine,
                port,
                device=device,
                page_tokens=settings.page_tokens,
                limits=CopyLimits(
                    wait_seconds=settings.wait_seconds, copy_seconds=settings.copy_seconds
                ),
            )
        except RayHiCacheError:
            device.close()
            raise
        except torch.OutOfMemoryError as fault:
            device.close()
            raise DeviceFull(
                asked=f"put model {settings.engine.model!r} and {settings.engine.num_blocks} "
                f"blocks of {settings.page_tokens} tokens on {self._device_name}",
                found=str(fault).splitlines()[0],
                remedy="choose fewer num_blocks or a smaller model, or let fewer workers share a "
                "GPU (gpus_per_worker)",
            ) from fault

    def _device(self) -> Device:
        """Where the engine's pools are; the engine closes it."""
        from rayhicache.device.opening import open_device

        settings = self._settings
        return open_device(
            settings.device,
            has_gpu=bool(ray.get_runtime_context().get_accelerator_ids().get("GPU")),
            copy_table=settings.copy_table,
            wait_seconds=settings.wait_seconds,
        )

    def _running(self) -> TransformersEngine:
        if self._engine is None:
            raise PoolUnreachable(
                asked=f"run a prompt on {self._settings.name!r}",
                found="its engine isn't up",
                remedy="wait until it has registered",
            )
        return self._engine


class _Teller:
    """Tells the controller of tokens: the first at once, then some at a time."""

    def __init__(self, cluster: str, assignment: bytes) -> None:
        self._controller: Any = ray.get_actor(controller_name(cluster), namespace=NAMESPACE)
        self._assignment = assignment
        self._start = 0
        self._tokens: list[int] = []
        self._told = 0.0

    def token(self, token: int) -> None:
        """A token was made. What isn't told here is in the run's result."""
        self._tokens.append(token)
        now = time.monotonic()
        if now - self._told < TELL_SECONDS:
            return
        self._controller.tokens.options(concurrency_group="workers").remote(
            self._assignment, self._start, list(self._tokens)
        )
        self._start += len(self._tokens)
        self._tokens.clear()
        self._told = now
