"""The tier under an engine of your own: ten lines around `TierClient`, with plain torch.

    python examples/own_engine.py

The model here is a stand-in: each layer adds up the rows of all tokens so far. What matters is
where the rows live and who waits for what: `reading` binds the blocks of a forward, and every
read inside it waits until its layer has landed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rayhicache.client import TierClient
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.gate import Gate
from rayhicache.memory.arena import Arena
from rayhicache.memory.local import LocalPort
from rayhicache.memory.owner import ArenaOwner
from rayhicache.pools.attention import MLAPool
from rayhicache.pools.base import PoolSet
from rayhicache.requests import Load, ModelIdentity

PAGE, LAYERS, WIDTH = 64, range(4), 16


class OwnEngine:
    """Pools, a client, and a loop."""

    def __init__(self, owner: ArenaOwner) -> None:
        device, gate = CpuDevice(), Gate()
        self.rows = MLAPool(
            device,
            gate,
            layer_ids=LAYERS,
            num_blocks=32,
            block_tokens=PAGE,
            latent_dim=WIDTH,
            row_dim=WIDTH,
            dtype=torch.float32,
        )
        self.pools = PoolSet(device, gate, [self.rows])
        self.client = TierClient(
            LocalPort(owner), self.pools, ModelIdentity(model="sums"), page_tokens=PAGE
        )

    def answer(self, name: str, tokens: Sequence[int]) -> tuple[torch.Tensor, int]:
        """The loop. What the last token's layers say, and how many tokens were restored."""
        blocks = self.pools.allocate(-(-len(tokens) // PAGE))
        assert blocks is not None, "no room for this prompt"
        prompt = self.client.prompt(tokens)
        found = self.client.lookup(prompt)
        if found.tokens:
            restored = blocks[: found.tokens // PAGE]
            self.client.load([Load(id=name, found=found, blocks=restored)])
        for start in range(found.tokens, len(tokens), PAGE):
            so_far = blocks[: start // PAGE + 1]
            with self.pools.reading(so_far, writes=so_far[-1:]):
                hidden = self.forward(tokens[start : start + PAGE], start, so_far)
        whole = len(tokens) // PAGE * PAGE
        fresh = blocks[found.tokens // PAGE : whole // PAGE]
        stored = self.client.store(name, prompt, fresh, start=found.tokens, stop=whole)
        self.pools.free(blocks)  # reused only when the copies that read them have passed
        stored.result()  # only so that the next prompt of this example surely finds it
        return hidden[-1], found.tokens

    def forward(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> torch.Tensor:
        """A stand-in for a model: write the chunk's rows, read all rows through the gate."""
        at = torch.arange(start + len(tokens))
        slots = torch.tensor(blocks)[at // PAGE] * PAGE + at % PAGE
        hidden = torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH)
        for layer in LAYERS:
            rows = torch.sin(hidden + layer)[:, None]
            self.rows.set_kv_buffer(layer, slots[start:], rows, rows[..., :0])
            seen = self.rows.get_key_buffer(layer)[slots]  # waits for this layer, not for all
            hidden = seen[:, 0].cumsum(0)[start:]
        return hidden

    def close(self) -> None:
        """End the session and the device's threads."""
        self.client.close()
        self.pools.device.close()


def main() -> None:
    """Answer two prompts that share a prefix, cold and then restored, and compare."""
    question = list(range(200))
    longer = [*question[:128], *range(1000, 1100)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        owner = ArenaOwner(Arena.create_or_adopt(Path(folder), "example", "seat-0", 16 << 20))
        engine = OwnEngine(owner)
        cold: dict[str, torch.Tensor] = {}
        for name, tokens in (("a", question), ("b", longer), ("a", question), ("b", longer)):
            answer, restored = engine.answer(name, tokens)
            same = torch.equal(answer, cold.setdefault(name, answer))
            print(f"{name}: {restored} of {len(tokens)} tokens restored, same answer: {same}")
            assert same
        engine.close()
        owner.close(unlink=True)


if __name__ == "__main__":
    main()
