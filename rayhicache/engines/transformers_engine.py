"""An engine for models of transformers: batches of sequences, greedy, on a tier.

lookup ─ one call ─► load ─► the chunks that are left ─► store ─► decode, all together
                      └── layers arrive while the first chunk runs, or while others decode ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayhicache.client import TierClient
from rayhicache.config import EngineSpec
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Device
from rayhicache.engines.batch import Batch, BatchLimits
from rayhicache.engines.models import build_model, identity_of
from rayhicache.engines.request import Generation, OnLogits, Request, Run
from rayhicache.engines.room import Room
from rayhicache.engines.runner import ModelRunner
from rayhicache.errors import InvalidRequest, PromptTooLong
from rayhicache.memory.port import Port


class TransformersEngine:
    """A model, its pools and its way to the tier. One thread.

    Device blocks are one page each. Only pages made wholly by prefill are stored: decoded ones
    differ by rounding from prefilled ones, and an answer is prefilled by the next turn.

    Args:
        port: to the owner of this node's arena.
        device: where the pools are; by default the host. Closed by `close`.
        page_tokens: tokens a page.
        batch: how forwards are made up; by default a chunk of prefill is one page.

    Raises:
        LayoutMismatch, NoLocalPool: as `TierClient`.
        InvalidLayout: the model's layers keep state of different shapes.
    """

    def __init__(
        self,
        spec: EngineSpec,
        port: Port,
        *,
        device: Device | None = None,
        page_tokens: int = 64,
        limits: CopyLimits | None = None,
        batch: BatchLimits | None = None,
    ) -> None:
        limits = limits or CopyLimits()
        self.spec = spec
        self._page = page_tokens
        self._batch = batch or BatchLimits(
            chunk_tokens=page_tokens, copy_seconds=limits.copy_seconds
        )
        assert self._batch.chunk_tokens % page_tokens == 0, "a chunk is whole pages"
        self._device = device or CpuDevice(wait_seconds=limits.wait_seconds)
        at = self._device.torch_device
        self._runner = ModelRunner(
            build_model(spec, at),
            self._device,
            num_blocks=spec.num_blocks,
            block_tokens=page_tokens,
        )
        self.pools = self._runner.pools
        self.client = TierClient(
            port, self.pools, identity_of(spec, at), page_tokens=page_tokens, limits=limits
        )
        self._room = Room(self.pools, wait_seconds=limits.copy_seconds)

    def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        on_token: Callable[[int], None] | None = None,
        on_logits: OnLogits | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Answer one prompt: `generate_batch` of one `Request`, whose attributes these are.

        Raises:
            InvalidRequest, PromptTooLong, JobCancelled, QueueFull: as `generate_batch`.
        """
        request = Request(
            id=request_id,
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            on_token=on_token,
            on_logits=on_logits,
            cancelled=cancelled,
        )
        (made,) = self.generate_batch([request])
        return made

    def generate_batch(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer prompts together. Blocks until all answers are there; pages are stored meanwhile.

        A fault of the tier costs a recompute and never a request. Whatever happens, the requests'
        blocks are given back and their leases end. What is promised of bits: `Batch.run`.

        Returns:
            In the order of the requests.

        Raises:
            InvalidRequest: an empty prompt, no token asked for, or an id outside the vocabulary.
            PromptTooLong: prompt and answer don't fit the model or the device; nothing changed.
            JobCancelled: a request's `cancelled` said so; the others were answered.
            QueueFull: device blocks are held by copies that don't end.
        """
        with self.batch() as batch:
            runs = [self.submit(batch, request) for request in requests]
            batch.run()
        return [run.result() for run in runs]

    def batch(self) -> Batch:
        """An empty batch, for callers that add requests while others run; see `submit`."""
        return Batch(self._runner, self.client, self._room, self._batch)

    def submit(self, batch: Batch, request: Request) -> Run:
        """Check a request and queue it in one of this engine's batches.

        The caller then calls `batch.step()` until `run.done`, and `run.result()`.

        Raises:
            InvalidRequest, PromptTooLong: as `generate_batch`; nothing was queued.
        """
        self._check(request.tokens, request.max_new_tokens)
        return batch.submit(request)

    def settle(self, timeout: float = 30.0) -> bool:
        """Block until the stores so far have ended, at most `timeout` seconds; False if not."""
        return self._room.settle(timeout)

    def close(self, timeout: float = 30.0) -> bool:
        """Close the client and the device. Idempotent; as `TierClient.close`."""
        closed = self.client.close(timeout)
        if closed:
            self._device.close()
        return closed

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _check(self, tokens: Sequence[int], max_new_tokens: int) -> None:
        vocabulary = self._runner.vocab_size
        if not tokens or max_new_tokens < 1:
            raise InvalidRequest(
                asked=f"generate {max_new_tokens} tokens after {len(tokens)}",
                found="there must be at least one of each",
                remedy="pass a prompt, and ask for a token",
            )
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise InvalidRequest(
                asked=f"generate after token ids from {min(tokens)} to {max(tokens)}",
                found=f"the model has ids from 0 to {vocabulary - 1}",
                remedy="use the tokenizer that fits the model",
            )
        total, room = len(tokens) + max_new_tokens, self.pools.num_blocks * self._page
        if total > self.spec.max_positions or total - 1 > room:
            raise PromptTooLong(
                asked=f"generate {max_new_tokens} tokens after {len(tokens)}",
                found=f"the model takes {self.spec.max_positions} tokens and the device {room}",
                remedy="shorten the prompt, ask for fewer tokens, or raise the spec's limits",
            )
