"""Who is who: roles, role ranks, and which FFN rank owns which expert. Knows nothing of the transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["attention", "ffn"]


def contiguous_experts(num_experts: int, ffn_size: int) -> tuple[tuple[int, int], ...]:
    """The default expert map: blocks of ceil(num_experts / ffn_size); the last may be short, a rank may own none."""
    block = -(-num_experts // ffn_size)
    return tuple(divmod(expert, block) for expert in range(num_experts))


@dataclass(frozen=True)
class Topology:
    """Ranks and experts. World ranks are attention-first: attention i is i, ffn j is attention_size + j.

    Args:
        attention_size, ffn_size: ranks of each role, any numbers >= 1.
        num_experts: logical experts.
        expert_map: per logical expert its (ffn rank, local expert); every FFN rank's local experts must be
            0 .. n-1. Contiguous blocks if left out.

    Raises:
        ValueError: naming the field.
    """

    attention_size: int
    ffn_size: int
    num_experts: int
    expert_map: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for field in ("attention_size", "ffn_size", "num_experts"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, expected at least 1")
        if not self.expert_map:
            object.__setattr__(self, "expert_map", contiguous_experts(self.num_experts, self.ffn_size))
        if len(self.expert_map) != self.num_experts:
            raise ValueError(
                f"expert_map has {len(self.expert_map)} entries, expected num_experts = {self.num_experts}"
            )
        for expert, (rank, local) in enumerate(self.expert_map):
            if not 0 <= rank < self.ffn_size:
                raise ValueError(f"expert_map[{expert}] names ffn rank {rank}, but ffn_size is {self.ffn_size}")
            if local < 0:
                raise ValueError(f"expert_map[{expert}] names local expert {local}, expected at least 0")
        for rank in range(self.ffn_size):
            owned = sorted(index for owner, index in self.expert_map if owner == rank)
            if owned != list(range(len(owned))):
                raise ValueError(
                    f"expert_map gives ffn rank {rank} the local experts {owned}, expected 0 .. n-1 once each"
                )

    @property
    def world_size(self) -> int:
        return self.attention_size + self.ffn_size

    @property
    def local_experts(self) -> int:
        """The most experts any FFN rank owns."""
        return 1 + max(local for _, local in self.expert_map)

    def role(self, world_rank: int) -> Role:
        """Of a world rank, "attention" or "ffn": attention ranks come first. Raises ValueError outside the world."""
        if not 0 <= world_rank < self.world_size:
            raise ValueError(f"world rank is {world_rank}, expected 0 to {self.world_size - 1}")
        return "attention" if world_rank < self.attention_size else "ffn"

    def role_rank(self, world_rank: int) -> int:
        return world_rank if self.role(world_rank) == "attention" else world_rank - self.attention_size

    def world_rank(self, role: Role, role_rank: int) -> int:
        size = self.attention_size if role == "attention" else self.ffn_size
        if not 0 <= role_rank < size:
            raise ValueError(f"{role} rank is {role_rank}, expected 0 to {size - 1}")
        return role_rank if role == "attention" else self.attention_size + role_rank

    def peers(self, world_rank: int) -> range:
        """World ranks of the opposite role, in role-rank order: the regions of this rank's window."""
        if self.role(world_rank) == "attention":
            return range(self.attention_size, self.world_size)
        return range(self.attention_size)

    def experts_of(self, ffn_rank: int) -> list[int]:
        """Logical experts of an FFN rank, in local order. Raises ValueError if there is no such rank."""
        self.world_rank("ffn", ffn_rank)
        owned = [(local, expert) for expert, (rank, local) in enumerate(self.expert_map) if rank == ffn_rank]
        return [expert for _, expert in sorted(owned)]

    def describe(self, world_rank: int) -> str:
        return f"rank {world_rank} ({self.role(world_rank)} {self.role_rank(world_rank)})"
